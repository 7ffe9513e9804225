"""Faithfulness of several methods on one prompt, with what costs nothing beside them.

A method that does not beat a random order, the distance to the end or the rarity of the words has shown nothing. So the
same table holds controls: 20 random orders (their mean, and the range of the middle 95 %), recency (late first) and
token frequency (rare first).

A metric replaces items. A method that was itself made by the same replacement (single-token effects of deletion,
judged by deletion) is flagged `circular`: it is close to the metric by construction and not to be ranked against
others there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attndiag.errors import ShapeError
from attndiag.stats import faithfulness as metrics
from attndiag.stats.faithfulness import FRACTIONS, Direction, Faithfulness
from attndiag.stats.masked import Array, MaskedValues, top_masks
from attndiag.stats.order_bounds import BEAM, OrderBounds, order_bounds

RANDOM_ORDERS = 20
# rows of the table that are no method
CONTROLS = RANDOM, RECENCY, TOKEN_FREQUENCY = ("random", "recency", "token_frequency")
# all that are computed unless asked otherwise; the order bounds of NAOPC cost most
METRICS = (
    "aopc_comprehensiveness",
    "aopc_sufficiency",
    "aopc_paper_comprehensiveness",
    "aopc_paper_sufficiency",
    "naopc_comprehensiveness",
    "naopc_sufficiency",
    "deletion_auc",
    "insertion_auc",
    "effect_tau",
    "faithfulness_correlation",
    "lds",
)


@dataclass(frozen=True)
class Ranking:
    """Scores of one method over the admissible items of one prompt.

    Parameters
    ----------
    name : of the method.
    scores : [item], larger is ranked first.
    signed : whether its signs say who helps and who hurts.
    replacement : the replacement that made the scores, None for methods that replace nothing.
    control : True for random orders, recency and the like.
    """

    name: str
    scores: Array
    signed: bool = False
    replacement: str | None = None
    control: bool = False


@dataclass(frozen=True)
class FaithfulnessRow:
    """One cell of the table: a method, a metric.

    Parameters
    ----------
    metric : with the replacement in its name.
    low, high : middle 95 % of the random orders; nan for single rankings.
    circular : the method shares its replacement with the metric.
    """

    method: str
    metric: str
    value: float
    direction: Direction
    unit: Literal["m", "1"]
    control: bool
    circular: bool
    undefined: str
    low: float = float("nan")
    high: float = float("nan")
    details: Mapping[str, Any] = field(default_factory=dict)


def control_rankings(
    positions: NDArray[np.floating],
    frequencies: NDArray[np.floating] | None = None,
    *,
    random_orders: int = RANDOM_ORDERS,
    seed: int = 0,
) -> tuple[Ranking, ...]:
    """Rankings that know nothing of the model: `random_0` ..., `recency` (late first), `token_frequency` (rare first).

    Parameters
    ----------
    positions : [item] in the prompt.
    frequencies : [item] how often each token occurs in general, or any numbers in that order; no such control when
        None.

    Raises
    ------
    ShapeError : not one frequency for each position.
    """
    place = np.asarray(positions, dtype=np.float64)
    rng = np.random.default_rng(seed)
    found = [
        Ranking(f"{RANDOM}_{index}", rng.permutation(len(place)).astype(np.float64), control=True)
        for index in range(random_orders)
    ]
    found.append(Ranking(RECENCY, place, control=True))
    if frequencies is not None:
        often = np.asarray(frequencies, dtype=np.float64)
        if often.shape != place.shape:
            raise ShapeError(f"{often.shape} frequencies for {place.shape} positions; expected one for each")
        found.append(Ranking(TOKEN_FREQUENCY, -often, control=True))
    return tuple(found)


def faithfulness_table(
    rankings: Sequence[Ranking],
    values: MaskedValues,
    *,
    wanted: Sequence[str] = METRICS,
    fractions: Sequence[float] = FRACTIONS,
    floor: float = 0.0,
    beam: int = BEAM,
    masks: int = 64,
    seed: int = 0,
) -> tuple[FaithfulnessRow, ...]:
    """Every wanted metric of every ranking on one prompt; the random orders are one row, their mean with its range.

    Parameters
    ----------
    rankings : methods and controls, over the same items as `values`.
    wanted : names out of `faithfulness.DIRECTIONS` (not the single-fraction ones).
    floor : noise floor of m.
    beam, masks : of NAOPC above 8 items, and of LDS.

    Raises
    ------
    ValueError : two rankings of one name, an unknown metric, nan scores.
    ShapeError : scores that do not fit.
    """
    names = [ranking.name for ranking in rankings]
    if len(set(names)) < len(names):
        raise ValueError(f"rankings are named {names}; expected each name once")
    unknown = sorted(set(wanted) - set(METRICS))
    if unknown:
        raise ValueError(f"unknown metrics {unknown}; there are {', '.join(METRICS)}")
    how = {"fractions": fractions, "floor": floor, "masks": masks, "seed": seed}
    # one question with every mask that is known beforehand: batches are then full
    values(_needed(rankings, values.n_items, wanted, fractions, masks, seed))
    rows: list[FaithfulnessRow] = []
    for metric in wanted:
        bounds = _shared_bounds(metric, rankings, values, beam, seed)
        drawn: list[Faithfulness] = []
        for ranking in rankings:
            found = _measure(metric, ranking, values, bounds, **how)
            if ranking.control and ranking.name.startswith(f"{RANDOM}_"):
                drawn.append(found)
            else:
                rows.append(_row(ranking, found))
        if drawn:
            rows.append(_random_row(drawn))
    return tuple(rows)


def _needed(
    rankings: Sequence[Ranking], n_items: int, wanted: Sequence[str], fractions: Sequence[float], masks: int, seed: int
) -> NDArray[np.bool_]:
    """Keep masks [mask, item] that the wanted metrics ask for, all but those of the order bounds."""
    found = [np.ones((1, n_items), dtype=bool)]
    some = metrics.sizes(n_items, fractions)
    # metric -> sizes of the top sets, whether they are replaced, whether they are kept
    asked = {
        "deletion_auc": (range(n_items + 1), True, False),
        "insertion_auc": (range(n_items + 1), False, True),
    }
    for kind, replaced in (("comprehensiveness", True), ("sufficiency", False)):
        for name, sizes in (("aopc_", some), ("aopc_paper_", some), ("naopc_", range(1, n_items + 1))):
            asked[f"{name}{kind}"] = (sizes, replaced, not replaced)
    ranked = [one.scores for one in rankings if not (one.scores == one.scores[0]).all()]
    for metric in wanted:
        sizes, replaced, kept = asked.get(metric, ((), False, False))
        for scores in ranked:
            tops = [top_masks(scores, k, seed=seed) for k in sizes]
            found += [~top for top in tops if replaced] + [top for top in tops if kept]
    if "effect_tau" in wanted:
        found.append(~np.eye(n_items, dtype=bool))
    if "lds" in wanted:
        found.append(metrics.keep_masks(n_items, masks=masks, seed=seed))
    if "faithfulness_correlation" in wanted:
        (k,) = metrics.sizes(n_items, (0.2,))
        found.append(~metrics.random_sets(n_items, k, seed=seed))
    return np.concatenate(found)


def _shared_bounds(
    metric: str, rankings: Sequence[Ranking], values: MaskedValues, beam: int, seed: int
) -> OrderBounds | None:
    """Bounds that hold every ranking of the table, so that all are normalised by the same numbers."""
    if not metric.startswith("naopc_"):
        return None
    kind = "comprehensiveness" if metric.endswith("comprehensiveness") else "sufficiency"
    ranked = [one for one in rankings if not (one.scores == one.scores[0]).all()]
    seen = [metrics.full_aopc(one.scores, values, kind, seed=seed) for one in ranked]
    return order_bounds(values, kind, seen=seen, beam=beam)


def _measure(
    metric: str,
    ranking: Ranking,
    values: MaskedValues,
    bounds: OrderBounds | None,
    *,
    fractions: Sequence[float],
    floor: float,
    masks: int,
    seed: int,
) -> Faithfulness:
    scores = ranking.scores
    kind = "comprehensiveness" if metric.endswith("comprehensiveness") else "sufficiency"
    if metric.startswith("naopc_"):
        return metrics.naopc(scores, values, kind, bounds=bounds, floor=floor, seed=seed)
    if metric.startswith("aopc_"):
        convention = "paper" if metric.startswith("aopc_paper_") else "code"
        return metrics.aopc(scores, values, kind, fractions=fractions, convention=convention, seed=seed)
    if metric in ("deletion_auc", "insertion_auc"):
        curve = metrics.deletion_auc if metric == "deletion_auc" else metrics.insertion_auc
        return curve(scores, values, floor=floor, seed=seed)
    if metric == "effect_tau":
        return metrics.effect_tau(scores, values, signed=ranking.signed)
    if metric == "lds":
        return metrics.lds(scores, values, masks=masks, seed=seed)
    return metrics.faithfulness_correlation(scores, values, seed=seed)


def _row(ranking: Ranking, found: Faithfulness) -> FaithfulnessRow:
    return FaithfulnessRow(
        method=ranking.name,
        metric=found.name,
        value=found.value,
        direction=found.direction,
        unit=found.unit,
        control=ranking.control,
        circular=ranking.replacement is not None and ranking.replacement == found.replacement,
        undefined=found.undefined,
        details=found.details,
    )


def _random_row(drawn: Sequence[Faithfulness]) -> FaithfulnessRow:
    """Mean and middle 95 % of the random orders that have a value."""
    first = drawn[0]
    numbers = np.array([one.value for one in drawn if not one.undefined])
    some = len(numbers) > 0
    low, high = np.quantile(numbers, [0.025, 0.975]) if some else (np.nan, np.nan)
    return FaithfulnessRow(
        method=RANDOM,
        metric=first.name,
        value=float(numbers.mean()) if some else float("nan"),
        direction=first.direction,
        unit=first.unit,
        control=True,
        circular=False,
        undefined="" if some else first.undefined,
        low=float(low),
        high=float(high),
        details={"orders": len(drawn), "undefined_orders": len(drawn) - len(numbers)},
    )

"""Does a ranking follow what the model uses: metrics that replace items and look at m, and their controls.

A ranking is by descending score. Each metric names the replacement it was measured with: `comprehensiveness[pair]` and
`comprehensiveness[delete]` are different numbers. Functions take scores and a `MaskedValues`, never a model.

| metric | formula | better |
|---|---|---|
| comprehensiveness | m(x) - m(x with the top k replaced) | higher |
| sufficiency | m(x) - m(x with all but the top k replaced) | lower |
| aopc_* | mean of the above over k = ceil(q n), q in {.01, .05, .1, .2, .5} | as above |
| aopc_paper_* | the same sum over (number of bins + 1): the empty bin counts as 0 | as above |
| naopc_* | (AOPC over k = 1..n - worst order) / (best - worst), in the metric's own direction | higher |
| deletion_auc | area under (m - m_empty) / (m_full - m_empty), top items replaced first | lower |
| insertion_auc | the same, everything replaced and top items put back first | higher |
| effect_tau | tau-b with the effects of single items | higher |
| faithfulness_correlation | Pearson of summed scores of random sets with the drop of m | higher |
| lds | Spearman of summed scores of kept items with m over random keep masks | higher |

Sources: DeYoung 2020 (ERASER, arXiv 1911.03429), Edin 2025 (arXiv 2408.08137), Petsiuk 2018 (arXiv 1806.07421), Bhatt
2020 (arXiv 2005.00631), Cohen-Wang 2024 (ContextCite, arXiv 2409.00729).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attndiag.errors import ShapeError
from attndiag.stats.agreement import centred, centred_ranks, tau_b
from attndiag.stats.masked import Array, MaskedValues, top_masks
from attndiag.stats.order_bounds import BEAM, Kind, OrderBounds, drops, order_bounds

FRACTIONS = (0.01, 0.05, 0.1, 0.2, 0.5)
# bootstrap draws of the intervals over random masks
INTERVAL_DRAWS = 500
RANDOM_SETS = 100
Direction = Literal["higher", "lower"]

DIRECTIONS: dict[str, Direction] = {
    "comprehensiveness": "higher",
    "sufficiency": "lower",
    "aopc_comprehensiveness": "higher",
    "aopc_sufficiency": "lower",
    "aopc_paper_comprehensiveness": "higher",
    "aopc_paper_sufficiency": "lower",
    "naopc_comprehensiveness": "higher",
    "naopc_sufficiency": "higher",
    "deletion_auc": "lower",
    "insertion_auc": "higher",
    "effect_tau": "higher",
    "faithfulness_correlation": "higher",
    "lds": "higher",
}


@dataclass(frozen=True)
class Faithfulness:
    """One metric of one ranking on one prompt.

    Parameters
    ----------
    metric : name of the metric, a key of `DIRECTIONS`.
    replacement : what replaced the items.
    value : nan where undefined.
    unit : `"m"` (the unit of the target) or `"1"` (a ratio or correlation).
    undefined : why there is no value; empty where there is one.
    details : what the number needs beside it: bins, m of LDS, seeds, intervals, bounds.
    """

    metric: str
    replacement: str
    value: float
    unit: Literal["m", "1"]
    undefined: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Metric with its replacement, as tables show it."""
        return f"{self.metric}[{self.replacement}]"

    @property
    def direction(self) -> Direction:
        """Whether higher or lower is better."""
        return DIRECTIONS[self.metric]

    @property
    def header(self) -> str:
        """Name with an arrow that points to better."""
        return f"{self.name} {'↑' if self.direction == 'higher' else '↓'}"


def sizes(n_items: int, fractions: Sequence[float] = FRACTIONS) -> tuple[int, ...]:
    """k = ceil(q n) of each fraction, each k once: short prompts put several fractions into one bin.

    Raises
    ------
    ValueError : no fractions, or one not in (0, 1].
    """
    if not fractions or not all(0 < q <= 1 for q in fractions):
        raise ValueError(f"fractions are {tuple(fractions)}; expected numbers above 0 and up to 1")
    # 1e-9: .2 * 5 must give 1 item, not 2, whatever the rounding
    return tuple(sorted({max(1, ceil(q * n_items - 1e-9)) for q in fractions}))


def top_drop(scores: NDArray[np.floating], values: MaskedValues, k: int, kind: Kind, *, seed: int = 0) -> float:
    """Comprehensiveness or sufficiency for the top k: m(x) minus m with them replaced, or with all others replaced.

    In the unit of m. Comprehensiveness: higher is better; sufficiency: lower is better. Ties across the k-th place are
    averaged over.

    Raises
    ------
    ShapeError, ValueError : scores that do not fit, nan, k out of range.
    """
    _check_scores(scores, values)
    return float(drops(values, top_masks(scores, k, seed=seed), kind).mean())


def comprehensiveness(
    scores: NDArray[np.floating], values: MaskedValues, fraction: float = 0.2, *, seed: int = 0
) -> Faithfulness:
    """m(x) - m(x with the top ceil(q n) replaced). Higher is better; random orders give the mean over sets of k."""
    return _at_fraction(scores, values, fraction, "comprehensiveness", seed)


def sufficiency(
    scores: NDArray[np.floating], values: MaskedValues, fraction: float = 0.2, *, seed: int = 0
) -> Faithfulness:
    """m(x) - m(x with all but the top ceil(q n) replaced). Lower is better; below 0 where the rest hurt."""
    return _at_fraction(scores, values, fraction, "sufficiency", seed)


def _at_fraction(
    scores: NDArray[np.floating], values: MaskedValues, fraction: float, kind: Kind, seed: int
) -> Faithfulness:
    (k,) = sizes(values.n_items, (fraction,))
    reason = _no_ranking(scores, values)
    value = float("nan") if reason else top_drop(scores, values, k, kind, seed=seed)
    return Faithfulness(kind, values.replacement, value, "m", reason, {"fraction": fraction, "k": k})


def aopc(
    scores: NDArray[np.floating],
    values: MaskedValues,
    kind: Kind = "comprehensiveness",
    *,
    fractions: Sequence[float] = FRACTIONS,
    convention: Literal["code", "paper"] = "code",
    seed: int = 0,
) -> Faithfulness:
    """Area over the perturbation curve: the mean drop over the bins.

    Parameters
    ----------
    convention : `"code"`, the plain mean over the bins, as the code of ERASER computes; `"paper"`, their sum over
        (number of bins + 1), as its paper writes, the bin of no items counting as 0. Bins of equal k count once.

    Raises
    ------
    ShapeError, ValueError : scores that do not fit, nan, bad fractions.
    """
    ks = sizes(values.n_items, fractions)
    reason = _no_ranking(scores, values)
    value = float("nan")
    if not reason:
        total = sum(top_drop(scores, values, k, kind, seed=seed) for k in ks)
        value = total / (len(ks) + (convention == "paper"))
    name = f"aopc_{'paper_' if convention == 'paper' else ''}{kind}"
    return Faithfulness(name, values.replacement, value, "m", reason, {"k": ks, "fractions": tuple(fractions)})


def full_aopc(scores: NDArray[np.floating], values: MaskedValues, kind: Kind, *, seed: int = 0) -> float:
    """AOPC over every k = 1..n, what `naopc` normalises."""
    n = values.n_items
    return sum(top_drop(scores, values, k, kind, seed=seed) for k in range(1, n + 1)) / n


def naopc(
    scores: NDArray[np.floating],
    values: MaskedValues,
    kind: Kind = "comprehensiveness",
    *,
    bounds: OrderBounds | None = None,
    floor: float = 0.0,
    beam: int = BEAM,
    seed: int = 0,
) -> Faithfulness:
    """Normalised AOPC over k = 1..n: 0 for the worst order of this prompt, 1 for the best. Higher is better.

    For sufficiency the worst order has the largest AOPC, so that 1 is the best there too.

    Parameters
    ----------
    bounds : from `order_bounds`, to share between methods; found here when None.
    floor : noise floor of m; undefined when no order differs by more.

    Raises
    ------
    ShapeError, ValueError : scores that do not fit, nan.
    """
    reason = _no_ranking(scores, values)
    if reason:
        return Faithfulness(f"naopc_{kind}", values.replacement, float("nan"), "1", reason)
    own = full_aopc(scores, values, kind, seed=seed)
    if bounds is None:
        bounds = order_bounds(values, kind, seen=[own], beam=beam)
    details = {"aopc": own, "lowest": bounds.lowest, "highest": bounds.highest, "bounds": bounds.how}
    width = bounds.highest - bounds.lowest
    if width <= max(floor, 1e-12 * max(1.0, abs(values.full))):
        reason = f"best and worst order differ by {width:.3g}, the noise floor is {floor:.3g}"
        return Faithfulness(f"naopc_{kind}", values.replacement, float("nan"), "1", reason, details)
    share = (own - bounds.lowest) / width
    value = share if kind == "comprehensiveness" else 1 - share
    return Faithfulness(f"naopc_{kind}", values.replacement, value, "1", "", details)


def deletion_auc(
    scores: NDArray[np.floating], values: MaskedValues, *, floor: float = 0.0, seed: int = 0
) -> Faithfulness:
    """Area under the normalised m as the top items are replaced one after the other. Lower is better.

    Trapezoids over k / n, k = 0..n, of (m - m_empty) / (m_full - m_empty), which runs from 1 to 0. Undefined when
    m_full - m_empty is at most the noise floor; below 0 it would also turn the direction round, so that the best order
    looked like the worst.
    """
    return _curve(scores, values, "deletion_auc", floor, seed)


def insertion_auc(
    scores: NDArray[np.floating], values: MaskedValues, *, floor: float = 0.0, seed: int = 0
) -> Faithfulness:
    """Area under the normalised m as the top items are put back into an emptied prompt. Higher is better.

    As `deletion_auc`, the curve running from 0 to 1.
    """
    return _curve(scores, values, "insertion_auc", floor, seed)


def _curve(scores: NDArray[np.floating], values: MaskedValues, metric: str, floor: float, seed: int) -> Faithfulness:
    reason = _no_ranking(scores, values)
    span = values.full - values.empty
    details = {"full": values.full, "empty": values.empty}
    if not reason and span <= max(floor, 1e-12 * max(1.0, abs(values.full))):
        reason = f"m_full - m_empty is {span:.3g}, at most the noise floor {floor:.3g}"
    if reason:
        return Faithfulness(metric, values.replacement, float("nan"), "1", reason, details)
    curve: list[float] = []
    for k in range(values.n_items + 1):
        top = top_masks(scores, k, seed=seed)
        curve.append(float(values(~top if metric == "deletion_auc" else top).mean()))
    heights = (np.array(curve) - values.empty) / span
    area = float((heights[1:] + heights[:-1]).sum() / (2 * values.n_items))
    return Faithfulness(metric, values.replacement, area, "1", "", {**details, "curve": heights.tolist()})


def effect_tau(scores: NDArray[np.floating], values: MaskedValues, *, signed: bool) -> Faithfulness:
    """tau-b of the scores with the effects of single items; a method without a sign is held against their sizes.

    Range -1 to 1, higher is better, 0 for unrelated scores. Undefined for constant scores or effects.
    """
    reason = _no_ranking(scores, values)
    effects = values.single_effects()
    value = float("nan") if reason else tau_b(np.asarray(scores), effects if signed else np.abs(effects))
    if not reason and np.isnan(value):
        reason = "the effects of single items are constant, or there are fewer than 3 items"
    against = "effect" if signed else "|effect|"
    return Faithfulness("effect_tau", values.replacement, value, "1", reason, {"against": against})


def faithfulness_correlation(
    scores: NDArray[np.floating],
    values: MaskedValues,
    *,
    fraction: float = 0.2,
    sets: int = RANDOM_SETS,
    level: float = 0.95,
    seed: int = 0,
) -> Faithfulness:
    """Pearson correlation of the summed scores of random sets of ceil(q n) items with the drop when they are replaced.

    Range -1 to 1, higher is better, 0 for unrelated scores. With an interval by bootstrap over the sets. (Bhatt 2020,
    arXiv 2005.00631.) Undefined for constant scores: every set has the same sum.
    """
    (k,) = sizes(values.n_items, (fraction,))
    chosen = random_sets(values.n_items, k, sets=sets, seed=seed)
    details = {"sets": sets, "k": k, "fraction": fraction, "seed": seed}
    reason = _no_ranking(scores, values)
    if reason:
        return Faithfulness("faithfulness_correlation", values.replacement, float("nan"), "1", reason, details)
    sums, drop = chosen @ np.asarray(scores, dtype=np.float64), drops(values, chosen, "comprehensiveness")
    return _correlated("faithfulness_correlation", values, sums, drop, details, level, seed)


def random_sets(n_items: int, k: int, *, sets: int = RANDOM_SETS, seed: int = 0) -> NDArray[np.bool_]:
    """[set, item], True for the k items of each random set, as `faithfulness_correlation` draws them."""
    return np.random.default_rng(seed).permuted(np.tile(np.arange(n_items) < k, (sets, 1)), axis=1)


def keep_masks(n_items: int, *, masks: int = 64, keep: float = 0.5, seed: int = 0) -> NDArray[np.bool_]:
    """[mask, item], True for the items that a random mask keeps, as `lds` draws them."""
    return np.random.default_rng(seed).random((masks, n_items)) < keep


def lds(
    scores: NDArray[np.floating],
    values: MaskedValues,
    *,
    masks: int = 64,
    keep: float = 0.5,
    level: float = 0.95,
    seed: int = 0,
) -> Faithfulness:
    """Linear datamodelling score: Spearman of the summed scores of kept items with m, over random keep masks.

    Range -1 to 1, higher is better; 1 for the coefficients of an additive m. The number of masks, the probability to
    keep an item, the seed and a bootstrap interval over the masks stand in `details`; without them it means little.

    Raises
    ------
    ValueError : fewer than 3 masks, or a probability not in (0, 1).
    """
    if masks < 3 or not 0 < keep < 1:
        raise ValueError(f"masks is {masks} and keep {keep}; expected at least 3 masks and a probability in (0, 1)")
    kept = keep_masks(values.n_items, masks=masks, keep=keep, seed=seed)
    details = {"masks": masks, "keep": keep, "seed": seed}
    reason = _no_ranking(scores, values)
    if reason:
        return Faithfulness("lds", values.replacement, float("nan"), "1", reason, details)
    return _correlated("lds", values, kept @ np.asarray(scores, dtype=np.float64), values(kept), details, level, seed)


def _correlated(
    metric: str, values: MaskedValues, x: Array, y: Array, details: dict[str, Any], level: float, seed: int
) -> Faithfulness:
    """Correlation of two vectors over random masks (of ranks for LDS) with its bootstrap interval."""
    prepare = centred_ranks if metric == "lds" else centred
    # sums of the same parts differ by rounding; ranks must not see that
    x, y = (np.round(z / max(float(np.abs(z).max()), 1e-300), 9) for z in (x, y))
    value = float(prepare(x) @ prepare(y))
    rows = np.random.default_rng([seed, 1]).integers(0, len(x), (INTERVAL_DRAWS, len(x)))
    drawn = (prepare(x[rows]) * prepare(y[rows])).sum(axis=1)
    drawn = drawn[np.isfinite(drawn)]
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2]) if len(drawn) else (np.nan, np.nan)
    reason = "" if np.isfinite(value) else "m, or the summed scores, did not change over the random masks"
    interval = {"low": float(low), "high": float(high), "level": level}
    return Faithfulness(metric, values.replacement, value, "1", reason, {**details, **interval})


def _check_scores(scores: NDArray[np.floating], values: MaskedValues) -> None:
    shape = np.shape(scores)
    if shape != (values.n_items,):
        raise ShapeError(f"scores have shape {shape}; expected one for each of the {values.n_items} items")


def _no_ranking(scores: NDArray[np.floating], values: MaskedValues) -> str:
    """Why the scores rank nothing; empty where they do."""
    _check_scores(scores, values)
    array = np.asarray(scores, dtype=np.float64)
    if np.isnan(array).any():
        raise ValueError("a score is nan and has no place in a ranking; leave the item out")
    return "constant scores rank nothing" if (array == array[0]).all() else ""

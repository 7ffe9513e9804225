"""From verdicts on items to one on a method, and to cases that a reader can look at.

`method_verdict` asks whether a method tells where the effects are, over all rows of a prompt set, better than its own
claims would when shuffled within their rows. `catalogues` lists weights without effect and effects without weight, the
strongest first, and beside them as many cases in which the method was right, drawn by seed: without those a reader
sees only failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attndiag.errors import ShapeError
from attndiag.stats.evidence import ABSENT, PRESENT
from attndiag.stats.inference import Estimate
from attndiag.stats.rates import rate_over_clusters
from attndiag.stats.verdicts import AGREE, DISAGREE, HIGH, INCONCLUSIVE, LOW, UNDEFINED, Verdicts

CHANCE_DRAWS = 2000
# draws times rows at most: bounds time and memory, at least 200 draws are taken
_WORK = 4_000_000


@dataclass(frozen=True)
class MethodVerdict:
    """Whether a method tells where the effects are.

    Parameters
    ----------
    verdict : `agree`: most of what it marks or should mark is right (lower end of the interval above one half), and
        better than chance. `disagree`: most is wrong (upper end below one half). Else `inconclusive`; `undefined`
        without a single decided item.
    hit_rate : right ones among the items that matter: claimed high, or with a present effect, and decided. Items that
        are low and absent are many and easy, and left out. Interval over clusters, see
        `stats.rates.rate_over_clusters`.
    p_chance : chance of as many right minus wrong verdicts when the claims of each row are shuffled.
    hits, weights_without_effect, effects_without_weight : counts behind the rate.
    draws : shuffles behind p.
    """

    verdict: Literal["agree", "disagree", "inconclusive", "undefined"]
    hit_rate: Estimate
    p_chance: float
    hits: int
    weights_without_effect: int
    effects_without_weight: int
    draws: int


def method_verdict(
    verdicts: Verdicts, clusters: Sequence[Any] | None = None, *, draws: int = CHANCE_DRAWS, seed: int = 0
) -> MethodVerdict:
    """One verdict on a method over all rows.

    Parameters
    ----------
    clusters : [row] labels of rows that are not independent (prompts of one template); each row its own when None.

    Raises
    ------
    ShapeError : not one cluster for each row.
    """
    n_rows = len(verdicts.verdict)
    labels = list(range(n_rows)) if clusters is None else list(clusters)
    if len(labels) != n_rows:
        raise ShapeError(f"{len(labels)} clusters for {n_rows} rows; expected one for each")
    hit = verdicts.where(HIGH, PRESENT)
    idle, missed = verdicts.where(HIGH, ABSENT), verdicts.where(LOW, PRESENT)
    matters = hit | idle | missed
    row, item = np.nonzero(matters)
    level = verdicts.thresholds.level
    # not the bootstrap: of cases that are nearly all alike it makes an interval of nearly no width, however few
    found = rate_over_clusters(hit[row, item].tolist(), [labels[index] for index in row], level=1 - level)
    rate = Estimate(found.share, found.low, found.high, 1 - level, 0, len(row), found.clusters, 0)
    p, taken = _chance(verdicts, draws, seed)
    verdict: Literal["agree", "disagree", "inconclusive", "undefined"] = INCONCLUSIVE
    if not matters.any():
        decided = np.isin(verdicts.verdict, (AGREE, DISAGREE)).any()
        verdict = INCONCLUSIVE if decided else UNDEFINED
    elif p <= level and rate.low > 0.5:
        verdict = AGREE
    elif rate.high < 0.5:
        verdict = DISAGREE
    return MethodVerdict(verdict, rate, p, int(hit.sum()), int(idle.sum()), int(missed.sum()), taken)


def _chance(verdicts: Verdicts, draws: int, seed: int) -> tuple[float, int]:
    """p of right minus wrong verdicts under shuffled claims, by counts: only how claims meet states matters."""
    judged = np.isin(verdicts.verdict, (AGREE, DISAGREE, INCONCLUSIVE))
    claim, state = verdicts.claim, verdicts.shown.state
    high, low, present, absent, n = (
        (x & judged).sum(axis=1)
        for x in (claim == HIGH, claim == LOW, state == PRESENT, state == ABSENT, np.ones(judged.shape, dtype=bool))
    )
    # rows in which a shuffle can change nothing
    some = ((high + low) > 0) & ((present + absent) > 0)
    high, low, present, absent, n = (x[some] for x in (high, low, present, absent, n))
    if not len(n):
        return float("nan"), 0
    sign = np.where(claim == HIGH, 1, np.where(claim == LOW, -1, 0)) * np.where(
        state == PRESENT, 1, np.where(state == ABSENT, -1, 0)
    )
    observed = int((sign * judged).sum())
    taken = max(200, min(draws, _WORK // len(n)))
    rng = np.random.default_rng(seed)
    reached = 0
    for start in range(0, taken, 100):
        shape = (min(100, taken - start), len(n))
        # which states the high claims fall on, then the low ones on what is left
        high_present = rng.hypergeometric(present, n - present, high, shape)
        high_absent = rng.hypergeometric(absent, n - present - absent, high - high_present)
        left_present, left_absent = present - high_present, absent - high_absent
        left = n - high
        low_present = rng.hypergeometric(left_present, left - left_present, low)
        low_absent = rng.hypergeometric(left_absent, left - left_present - left_absent, low - low_present)
        total = (high_present - high_absent - low_present + low_absent).sum(axis=1)
        reached += int((total >= observed).sum())
    return (1 + reached) / (1 + taken), taken


@dataclass(frozen=True, eq=False)
class Catalogues:
    """Cases to look at, each an array [case, 2] of (row, item).

    Parameters
    ----------
    weights_without_effect : high claim, absent effect; the largest share first.
    effects_without_weight : low claim, present effect; the largest effect, in margins, first.
    agreeing_high : high and present, as many as `weights_without_effect` where there are as many, drawn by seed.
    agreeing_low : low and absent, as many as `effects_without_weight`.
    totals : how many there are of each, listed or not.
    seed : of the drawing.
    """

    weights_without_effect: NDArray[np.int64]
    effects_without_weight: NDArray[np.int64]
    agreeing_high: NDArray[np.int64]
    agreeing_low: NDArray[np.int64]
    totals: dict[str, int]
    seed: int


def catalogues(verdicts: Verdicts, *, limit: int = 20, seed: int = 0) -> Catalogues:
    """The strongest disagreements of both kinds, and as many agreeing cases with the same claim.

    Parameters
    ----------
    limit : most cases in each catalogue.

    Raises
    ------
    ValueError : limit below 1.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit}; expected at least 1")
    kinds = {
        "weights_without_effect": verdicts.where(HIGH, ABSENT),
        "effects_without_weight": verdicts.where(LOW, PRESENT),
        "agreeing_high": verdicts.where(HIGH, PRESENT),
        "agreeing_low": verdicts.where(LOW, ABSENT),
    }
    in_margins = np.abs(verdicts.effect) / np.maximum(verdicts.shown.present_from, 1e-300)[:, None]
    idle = _strongest(kinds["weights_without_effect"], verdicts.share, limit)
    missed = _strongest(kinds["effects_without_weight"], in_margins, limit)
    rng = np.random.default_rng(seed)
    return Catalogues(
        weights_without_effect=idle,
        effects_without_weight=missed,
        agreeing_high=_drawn(kinds["agreeing_high"], len(idle), rng),
        agreeing_low=_drawn(kinds["agreeing_low"], len(missed), rng),
        totals={name: int(found.sum()) for name, found in kinds.items()},
        seed=seed,
    )


def _strongest(found: NDArray[np.bool_], strength: NDArray[np.float64], limit: int) -> NDArray[np.int64]:
    cases = np.argwhere(found)
    return cases[np.argsort(-strength[found], kind="stable")[:limit]]


def _drawn(found: NDArray[np.bool_], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    cases = np.argwhere(found)
    chosen = rng.choice(len(cases), min(count, len(cases)), replace=False) if len(cases) else []
    return cases[np.sort(np.asarray(chosen, dtype=np.int64))]

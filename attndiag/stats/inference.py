"""From numbers per prompt to a statement: intervals, tests, corrections, and what is too small to count.

Prompts written from one template resemble each other, so everything is resampled and flipped by cluster (the
template), never by prompt. The unit of every test is the paired difference of two methods on the same prompt. Several
declared comparisons are corrected by Holm; many edges or heads by Benjamini & Hochberg. p-values are never averaged
and "significant prompts" never counted.

Glossary. Cluster: prompts that are not independent of each other. Noise floor: how much m moves when only the batching
changes; smaller effects are 0. Undefined: a prompt without a number (nan); counted, left out, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attndiag.errors import ShapeError
from attndiag.stats.agreement import LEAST_ITEMS, centred_ranks
from attndiag.stats.lists import Array, as_pair

BOOTSTRAP_DRAWS = 2000
FLIP_DRAWS = 10_000
# all 2^c sign patterns up to this many clusters
EXACT_FLIPS_UP_TO = 14
# below 12 clusters the smallest reachable p leaves nothing for a correction: .031 with 6
LEAST_CLUSTERS = 12
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Estimate:
    """A number over prompts with its interval.

    Parameters
    ----------
    value : over the defined prompts; nan when there is none.
    low, high : percentile interval of the clustered bootstrap, of rates of verdicts the one of `stats.rates`; nan with
        fewer than 2 clusters.
    level : of the interval, for example .95.
    draws : bootstrap draws behind it; 0 for another interval.
    n_prompts, n_clusters : that have a value.
    n_undefined : prompts without one.
    """

    value: float
    low: float
    high: float
    level: float
    draws: int
    n_prompts: int
    n_clusters: int
    n_undefined: int

    @property
    def undefined_share(self) -> float:
        """Share of prompts without a value, 0 to 1."""
        return self.n_undefined / (self.n_prompts + self.n_undefined)


@dataclass(frozen=True)
class FlipTest:
    """Result of a sign-flip permutation test.

    Parameters
    ----------
    p : two-sided, in (0, 1]; nan when every prompt is undefined.
    smallest_p : the smallest p that this number of clusters can give.
    kind : `"exact"` (all sign patterns) or `"permutation"` (seeded draws).
    n_clusters : that were flipped.
    """

    p: float
    smallest_p: float
    kind: Literal["exact", "permutation"]
    n_clusters: int


@dataclass(frozen=True)
class Comparison:
    """Method `first` minus method `second` by one metric, paired by prompt.

    Parameters
    ----------
    difference : mean difference with its interval.
    test : sign-flip test of "no difference".
    p_holm : corrected over the declared comparisons; equals `test.p` for a single one.
    primary : True for the comparison that was declared as the main one.
    enough_clusters : at least 12; below, even a clear difference may not reach the level after correction.
    """

    first: str
    second: str
    difference: Estimate
    test: FlipTest
    p_holm: float
    primary: bool
    enough_clusters: bool


def clustered_bootstrap(
    values: NDArray[np.floating],
    clusters: Sequence[Any],
    *,
    statistic: Callable[[Array], float] | None = None,
    draws: int = BOOTSTRAP_DRAWS,
    level: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Percentile interval of a statistic of the prompts' values, whole clusters being drawn with replacement.

    Parameters
    ----------
    values : [prompt], nan where undefined.
    clusters : [prompt] labels; prompts of one label are drawn together.
    statistic : of a vector of values; their mean when None.

    Raises
    ------
    ShapeError : not one cluster for each value.
    ValueError : level not in (0, 1), or fewer than 1 draw.
    """
    if not 0 < level < 1 or draws < 1:
        raise ValueError(f"level is {level} and draws {draws}; expected a level between 0 and 1 and at least 1 draw")
    groups, undefined = _by_cluster(values, clusters)
    n_values = sum(len(group) for group in groups)
    if not groups:
        return Estimate(float("nan"), float("nan"), float("nan"), level, draws, 0, 0, undefined)
    everything = np.concatenate(groups)
    value = float(everything.mean()) if statistic is None else float(statistic(everything))
    if len(groups) < 2:
        return Estimate(value, float("nan"), float("nan"), level, draws, n_values, len(groups), undefined)
    chosen = np.random.default_rng(seed).integers(0, len(groups), (draws, len(groups)))
    if statistic is None:
        sums, sizes = np.array([group.sum() for group in groups]), np.array([len(group) for group in groups])
        drawn = sums[chosen].sum(axis=1) / sizes[chosen].sum(axis=1)
    else:
        drawn = np.array([statistic(np.concatenate([groups[index] for index in row])) for row in chosen])
    outside = (1 - level) / 2
    low, high = np.quantile(drawn[np.isfinite(drawn)], [outside, 1 - outside])
    return Estimate(value, float(low), float(high), level, draws, n_values, len(groups), undefined)


def _by_cluster(values: NDArray[np.floating], clusters: Sequence[Any]) -> tuple[list[Array], int]:
    """The defined values of each cluster, in an order that depends on the values alone; and how many are undefined."""
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or len(numbers) != len(clusters):
        raise ShapeError(f"{numbers.shape} values and {len(clusters)} clusters; expected one cluster for each value")
    groups: dict[Any, list[float]] = {}
    for number, cluster in zip(numbers.tolist(), clusters, strict=True):
        if not np.isnan(number):
            groups.setdefault(cluster, []).append(number)
    ordered = sorted(sorted(group) for group in groups.values())
    return [np.array(group) for group in ordered], int(np.isnan(numbers).sum())


def sign_flip(
    differences: NDArray[np.floating], clusters: Sequence[Any], *, draws: int = FLIP_DRAWS, seed: int = 0
) -> FlipTest:
    """Two-sided sign-flip permutation test of a mean difference of 0; a cluster flips as a whole.

    All 2^c patterns up to 14 clusters, seeded draws above with p = (1 + as extreme) / (1 + draws). Assumes that
    without a difference the signs are symmetric, nothing about the shape.

    Raises
    ------
    ShapeError : not one cluster for each difference.
    """
    groups, _ = _by_cluster(differences, clusters)
    n = len(groups)
    if not n:
        return FlipTest(float("nan"), float("nan"), "exact", 0)
    sums = np.array([group.sum() for group in groups])
    exact = n <= EXACT_FLIPS_UP_TO
    if exact:
        signs = 1.0 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    else:
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], (draws, n))
    # prompts and sizes do not change under flips, so sums stand for means
    reached = np.abs(signs @ sums) >= abs(sums.sum()) - _ROUNDING * max(1.0, float(np.abs(sums).sum()))
    count = int(reached.sum())
    p = count / len(signs) if exact else (1 + count) / (1 + draws)
    smallest = min(1.0, 2.0 / 2**n) if exact else 1 / (1 + draws)
    return FlipTest(p, smallest, "exact" if exact else "permutation", n)


# ---------------------------------------------------------------------------------------------------- corrections
def holm(p_values: NDArray[np.floating]) -> Array:
    """Holm's adjusted p-values: chance of any false rejection at most the level, whatever the dependence.

    Range 0 to 1; undefined entries (nan) stay nan and do not count as comparisons. (Holm 1979.)

    Raises
    ------
    ValueError : an entry outside 0..1.
    """
    p, defined, order = _sorted_p(p_values)
    steps = np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1))
    return _scatter(np.minimum(steps, 1.0), order, defined)


def benjamini_hochberg(p_values: NDArray[np.floating]) -> Array:
    """Benjamini & Hochberg's adjusted p-values: expected share of false ones among those found at most the level.

    Range 0 to 1; nan stays nan and does not count. For independent or positively dependent tests. (1995.)

    Raises
    ------
    ValueError : an entry outside 0..1.
    """
    p, defined, order = _sorted_p(p_values)
    n = len(order)
    steps = p[order] * n / np.arange(1, n + 1)
    return _scatter(np.minimum(np.minimum.accumulate(steps[::-1])[::-1], 1.0), order, defined)


def _sorted_p(p_values: NDArray[np.floating]) -> tuple[Array, NDArray[np.bool_], NDArray[np.int64]]:
    p = np.asarray(p_values, dtype=np.float64)
    if p.ndim != 1:
        raise ShapeError(f"p-values have shape {p.shape}; expected [comparison]")
    defined = ~np.isnan(p)
    if ((p[defined] < 0) | (p[defined] > 1)).any():
        raise ValueError(f"p-values lie between {p[defined].min()} and {p[defined].max()}; expected 0 to 1")
    return p, defined, np.flatnonzero(defined)[np.argsort(p[defined], kind="stable")]


def _scatter(adjusted: Array, order: NDArray[np.int64], defined: NDArray[np.bool_]) -> Array:
    result = np.full(len(defined), np.nan)
    result[order] = adjusted
    return result


# ---------------------------------------------------------------------------------------------------- noise floor
def noise_floor(repeats: NDArray[np.floating]) -> Array:
    """Spread of m under batch reshuffling: largest minus smallest value over the repeats.

    Parameters
    ----------
    repeats : [repeat, prompt], the same m measured with other batch companions.

    Returns
    -------
    [prompt], not negative, in the unit of m.

    Raises
    ------
    ShapeError : fewer than 2 repeats: their spread would be 0 by construction.
    """
    values = np.asarray(repeats, dtype=np.float64)
    if values.ndim != 2 or len(values) < 2:
        raise ShapeError(f"repeats have shape {values.shape}; expected [repeat, prompt] with at least 2 repeats")
    return values.max(axis=0) - values.min(axis=0)


def measure_noise_floor(
    measure: Callable[[NDArray[np.int64]], NDArray[np.floating]], n_prompts: int, *, repeats: int = 5, seed: int = 0
) -> Array:
    """`noise_floor` of a measurement that is called with prompts in shuffled orders.

    Parameters
    ----------
    measure : from prompt numbers, in the order in which they shall be batched, to m of each in that order.

    Returns
    -------
    [prompt], in the original order.

    Raises
    ------
    ShapeError : `measure` returns another number of values than it got prompts; fewer than 2 repeats.
    """
    rng = np.random.default_rng(seed)
    found = np.empty((repeats, n_prompts))
    for repeat in range(repeats):
        order = rng.permutation(n_prompts)
        values = np.asarray(measure(order), dtype=np.float64)
        if values.shape != (n_prompts,):
            raise ShapeError(f"measure returned {values.shape} for {n_prompts} prompts; expected one value for each")
        found[repeat, order] = values
    return noise_floor(found)


def above_floor(effects: NDArray[np.floating], floor: NDArray[np.floating] | float) -> Array:
    """Effects with those of at most the noise floor set to 0; nan stays nan."""
    values = np.asarray(effects, dtype=np.float64)
    return np.where(np.abs(values) <= floor, 0.0, values)


# ---------------------------------------------------------------------------------------------------- comparisons
def compare_pairs(
    values: Mapping[str, NDArray[np.floating]],
    clusters: Sequence[Any],
    *,
    declared: Sequence[tuple[str, str]],
    primary: tuple[str, str] | None = None,
    draws: int = BOOTSTRAP_DRAWS,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[Comparison, ...]:
    """Declared comparisons of methods by one metric: paired differences, intervals, sign-flip p, Holm.

    Parameters
    ----------
    values : method -> [prompt] metric, nan where undefined; the same prompts in the same order for all.
    declared : pairs (first, second) chosen before looking; the correction is over these.
    primary : which of them is the main one; the first when None.

    Returns
    -------
    In the declared order. A prompt that is undefined for either method is undefined for the difference.

    Raises
    ------
    ValueError : nothing declared, a pair twice, an unknown method, a primary comparison that was not declared.
    ShapeError : not one cluster for each prompt.
    """
    if not declared or len({frozenset(pair) for pair in declared}) < len(declared):
        raise ValueError(f"declared is {list(declared)}; expected at least one pair of methods, each pair once")
    unknown = sorted({name for pair in declared for name in pair} - set(values))
    if unknown:
        raise ValueError(f"unknown methods {unknown}; there are {sorted(values)}")
    main = declared[0] if primary is None else primary
    if main not in declared:
        raise ValueError(f"the primary comparison {main} is not among the declared ones {list(declared)}")
    rows: list[tuple[Estimate, FlipTest]] = []
    for first, second in declared:
        a, b = (np.asarray(values[name], dtype=np.float64) for name in (first, second))
        if a.shape != b.shape:
            raise ShapeError(f"{first} has {a.shape} values and {second} {b.shape}; expected the same prompts")
        estimate = clustered_bootstrap(a - b, clusters, draws=draws, level=level, seed=seed)
        rows.append((estimate, sign_flip(a - b, clusters, seed=seed)))
    corrected = holm(np.array([test.p for _, test in rows]))
    return tuple(
        Comparison(*pair, estimate, test, float(p), pair == main, estimate.n_clusters >= LEAST_CLUSTERS)
        for pair, (estimate, test), p in zip(declared, rows, corrected, strict=True)
    )


def position_partialled(
    a: NDArray[np.floating], b: NDArray[np.floating], position: NDArray[np.floating] | None = None
) -> float:
    """Spearman correlation of a and b with the rank of the position taken out of both by least squares.

    Many methods favour late (or early) tokens, which alone correlates them. Range -1 to 1, higher is more alike; nan
    with fewer than 4 items, a constant vector, or one that is an order of the positions.

    Raises
    ------
    ShapeError, ValueError : unequal vectors, nan.
    """
    one, two = as_pair(a, b)
    one, place = as_pair(one, np.arange(len(one), dtype=np.float64) if position is None else position)
    if len(one) <= LEAST_ITEMS:
        return float("nan")
    by_place = centred_ranks(place)
    rests = [ranks - by_place * (by_place @ ranks) for ranks in (centred_ranks(one), centred_ranks(two))]
    lengths = [float(np.sqrt(rest @ rest)) for rest in rests]
    # nan (a constant vector) compares as False as well
    if not min(lengths) > 1e-6:
        return float("nan")
    return float(rests[0] @ rests[1] / (lengths[0] * lengths[1]))

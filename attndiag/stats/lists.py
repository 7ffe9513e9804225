"""Do two methods put the same items on top: overlap and Jaccard of the top k, and rank-biased overlap.

All three go by the order of the scores alone, largest first. Tied items are never put in order by where they stand:
every order within a tie is equally likely, independently in the two lists, and the measure is its expectation. So two
equal vectors with a tie across the k-th place have an overlap below 1: what is above the cut is not decided.

Rank-biased overlap of two orders of the same n items, extrapolated from the n places seen (Webber et al. 2010):
RBO_ext = p^n X_n / n + (1 - p) / p sum_{d=1..n} p^d X_d / d, with X_d the number of items in both top-d lists. With
ties X_d is the expectation, the variant RBO^a of Corsi & Urbano 2024 (arXiv 2406.07121).
"""

from __future__ import annotations

from math import comb

import numpy as np
from numpy.typing import NDArray

from attndiag.errors import ShapeError

Array = NDArray[np.float64]


def as_pair(a: NDArray[np.floating], b: NDArray[np.floating]) -> tuple[Array, Array]:
    """Both as float64 vectors of one length.

    Raises
    ------
    ShapeError : not vectors, or of different length.
    ValueError : an entry is nan or infinite.
    """
    one, two = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if one.ndim != 1 or one.shape != two.shape:
        raise ShapeError(f"a {one.shape} and b {two.shape} must be two vectors over the same items")
    if not (np.isfinite(one).all() and np.isfinite(two).all()):
        raise ValueError("an entry is nan or infinite; leave items without a score out before comparing")
    return one, two


def inclusion(scores: NDArray[np.floating], k: int) -> Array:
    """Chance of each item to be among the k largest, all orders of tied items being equally likely.

    Returns
    -------
    [item] in [0, 1], sums to k.

    Raises
    ------
    ValueError : k is not in 0..n.
    """
    values = np.asarray(scores, dtype=np.float64)
    if not 0 <= k <= len(values):
        raise ValueError(f"k is {k}; expected 0 to {len(values)}, the number of items")
    if k == 0:
        return np.zeros(len(values))
    cut = np.sort(values)[-k]
    above, tied = values > cut, values == cut
    return above + tied * ((k - above.sum()) / tied.sum())


def top_k_overlap(a: NDArray[np.floating], b: NDArray[np.floating], k: int) -> float:
    """E|A_k n B_k| / k, the expected share of the top k that two methods have in common.

    Range 0 to 1, higher is more alike; k / n for unrelated vectors.

    Raises
    ------
    ShapeError, ValueError : unequal vectors, nan, k not in 1..n.
    """
    one, two = as_pair(a, b)
    _check_k(k, len(one))
    return float(inclusion(one, k) @ inclusion(two, k) / k)


def top_k_jaccard(a: NDArray[np.floating], b: NDArray[np.floating], k: int) -> float:
    """E[|A_k n B_k| / |A_k u B_k|], exact over every way to break ties at the k-th place.

    Range 0 to 1, higher is more alike.

    Raises
    ------
    ShapeError, ValueError : as `top_k_overlap`.
    """
    one, two = as_pair(a, b)
    _check_k(k, len(one))
    return jaccard_of(meetings(one, two[None], k)[0], k)


def meetings(a: Array, b: Array, k: int) -> NDArray[np.int64]:
    """How the top k of `a` meets that of each row of `b` [row, item].

    Returns
    -------
    [row, 8] counts of items: above the cut in a, tied at it in a, above in b, tied in b, above in both, tied in a and
    above in b, above in a and tied in b, tied in both.
    """
    sure_a, tied_a = _above_and_tied(a[None], k)
    sure_b, tied_b = _above_and_tied(b, k)
    sets = (sure_a, tied_a, sure_b, tied_b, sure_a & sure_b, tied_a & sure_b, sure_a & tied_b, tied_a & tied_b)
    return np.stack([np.broadcast_to(x.sum(axis=1), len(b)) for x in sets], axis=1)


def jaccard_of(met: NDArray[np.int64], k: int) -> float:
    """Expected Jaccard index from one row of `meetings`."""
    common = np.arange(k + 1, dtype=np.float64)
    return float((_chance_of_common(k, *met.tolist()) * common / (2 * k - common)).sum())


def _chance_of_common(
    k: int, sure_a: int, tied_a: int, sure_b: int, tied_b: int, always: int, a_to_sure: int, b_to_sure: int, both: int
) -> Array:
    """Chance of each size of the common part; the tied places are filled at random, independently in a and b."""
    chance = np.zeros(k + 1)
    for hits_a, of_both_a, p_a in _picks(k - sure_a, a_to_sure, both, tied_a - a_to_sure - both):
        for hits_b, of_both_b, p_b in _picks(k - sure_b, b_to_sure, both, tied_b - b_to_sure - both):
            for met in range(max(0, of_both_a + of_both_b - both), min(of_both_a, of_both_b) + 1):
                p_met = comb(of_both_a, met) * comb(both - of_both_a, of_both_b - met) / comb(both, of_both_b)
                chance[always + hits_a + hits_b + met] += p_a * p_b * p_met
    return chance


def _above_and_tied(rows: Array, k: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    cut = np.sort(rows, axis=1)[:, -k, None]
    return rows > cut, rows == cut


def _picks(drawn: int, sure: int, both: int, rest: int) -> list[tuple[int, int, float]]:
    """(items out of `sure`, items out of `both`, chance) when `drawn` are taken at random out of the three."""
    ways = comb(sure + both + rest, drawn)
    return [
        (i, j, comb(sure, i) * comb(both, j) * comb(rest, drawn - i - j) / ways)
        for i in range(min(sure, drawn) + 1)
        for j in range(min(both, drawn - i) + 1)
        if drawn - i - j <= rest
    ]


def rbo_ext(a: NDArray[np.floating], b: NDArray[np.floating], p: float = 0.9) -> float:
    """Rank-biased overlap, extrapolated; p is the weight that passes on from one place to the next.

    Range 0 to 1, higher is more alike, 1 for equal orders without ties. Not centred: a reversed list of 5 still has
    .74 at p = .9. Read `rbo_adjusted` or the null beside it.

    Raises
    ------
    ShapeError, ValueError : unequal vectors, nan, p not in (0, 1).
    """
    one, two = as_pair(a, b)
    return float(np.trace(rbo_terms(one, two, p)))


def rbo_chance(n_items: int, p: float = 0.9) -> float:
    """Expected RBO_ext of two unrelated orders of n items, tied or not: X_d / d is d / n."""
    weights = _rbo_weights(n_items, p)
    depth = np.arange(1, n_items + 1)
    return float((weights * depth * depth / n_items).sum())


def rbo_adjusted(a: NDArray[np.floating], b: NDArray[np.floating], p: float = 0.9) -> float:
    """(RBO_ext - chance) / (1 - chance): 0 for unrelated orders, 1 for equal ones, below 0 for less than chance.

    Raises
    ------
    ShapeError, ValueError : as `rbo_ext`; fewer than 2 items, where every order is the same.
    """
    if len(np.asarray(a)) < 2:
        raise ValueError(f"{len(np.asarray(a))} items have one order only; expected at least 2")
    chance = rbo_chance(len(np.asarray(a)), p)
    return (rbo_ext(a, b, p) - chance) / (1 - chance)


def rbo_terms(a: Array, b: Array, p: float) -> Array:
    """[item of a, item of b]: what an item at these two places adds to RBO_ext; RBO_ext is the trace."""
    weights = _rbo_weights(len(a), p)
    in_a, in_b = (np.stack([inclusion(x, d) for d in range(1, len(a) + 1)]) for x in (a, b))
    return (in_a * weights[:, None]).T @ in_b


def _rbo_weights(n_items: int, p: float) -> Array:
    """What one common item adds at each depth: (1 - p) p^(d - 1) / d, and the extrapolated rest p^n / n at the end."""
    if not 0 < p < 1:
        raise ValueError(f"p is {p}; expected a number between 0 and 1")
    depth = np.arange(1, n_items + 1, dtype=np.float64)
    weights = (1 - p) * p ** (depth - 1) / depth
    if n_items:
        weights[-1] += p**n_items / n_items
    return weights


def _check_k(k: int, n_items: int) -> None:
    if not 1 <= k <= n_items:
        raise ValueError(f"k is {k}; expected 1 to {n_items}, the number of items")

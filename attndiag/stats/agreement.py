"""Do two methods rank the same items alike: tau-b, Spearman and partial tau, each with what chance gives.

tau-b = (C - D) / sqrt((P - T_a)(P - T_b)) over all P pairs of items: C concordant, D discordant, T_a and T_b the pairs
tied in the one or the other (Kendall 1945). It is 1 for the same order, -1 for the reversed one, about 0 for unrelated
rows, and undefined for a constant row.

Mask before ranking. Positions that both rows must leave empty (the future, padding) or that nearly always win (a sink)
would decide the number: two unrelated vectors that share 12 masked zeros beside 12 live entries have tau .69.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from attndiag.errors import ShapeError
from attndiag.stats.lists import Array, as_pair
from attndiag.stats.nulls import DRAWS, Null, null_from_draws, pair_sum_null, shuffles

# below this many items every ordering is too easily reached by chance to call it an order at all
LEAST_ITEMS = 3
# rows longer than this go through scipy's n log n one by one; pairs of shorter ones are compared all at once
PAIRWISE_UP_TO = 96
_PAIRS_IN_WORK = 2**21


def kendall_tau_b(a: NDArray[np.floating], b: NDArray[np.floating], keep: NDArray[np.bool_]) -> NDArray[np.float64]:
    """tau-b of each row of `a` with the same row of `b`, over the items kept in that row.

    Parameters
    ----------
    a, b : [row, item]. Equal entries are ties; nothing is rounded.
    keep : [row, item], True for the items that are ranked.

    Returns
    -------
    [row] in [-1, 1]; nan where it is undefined: fewer than 3 items, or all of them tied in `a` or in `b`.

    Raises
    ------
    ShapeError : the three differ in shape.
    ValueError : a kept entry is nan, which has no rank.
    """
    if a.ndim != 2 or a.shape != b.shape or a.shape != keep.shape:
        raise ShapeError(f"a {a.shape}, b {b.shape} and keep {keep.shape} must be one shape [row, item]")
    if np.isnan(a[keep]).any() or np.isnan(b[keep]).any():
        raise ValueError("a kept entry is nan and has no rank; leave it out with keep")
    n_rows, n_items = a.shape
    tau = np.full(n_rows, np.nan)
    if n_items > PAIRWISE_UP_TO:
        for row in range(n_rows):
            tau[row] = _one_tau_b(a[row, keep[row]], b[row, keep[row]])
        return tau
    first, second = np.triu_indices(n_items, k=1)
    block = max(1, _PAIRS_IN_WORK // max(1, len(first)))
    for start in range(0, n_rows, block):
        rows = slice(start, start + block)
        both = keep[rows][:, first] & keep[rows][:, second]
        of_a = np.where(both, np.sign(a[rows][:, first] - a[rows][:, second]), 0).astype(np.float32)
        of_b = np.where(both, np.sign(b[rows][:, first] - b[rows][:, second]), 0).astype(np.float32)
        # counts up to 96 * 95 / 2 are exact in float32
        agree = np.einsum("rp,rp->r", of_a, of_b).astype(np.float64)
        untied_a, untied_b = (np.einsum("rp,rp->r", s, s).astype(np.float64) for s in (of_a, of_b))
        divisor = np.sqrt(untied_a * untied_b)
        defined = (divisor > 0) & (keep[rows].sum(axis=1) >= LEAST_ITEMS)
        tau[rows] = np.divide(agree, divisor, out=np.full(len(agree), np.nan), where=defined)
    return tau


def _one_tau_b(a: NDArray[np.floating], b: NDArray[np.floating]) -> float:
    from scipy.stats import kendalltau

    if len(a) < LEAST_ITEMS or (a == a[0]).all() or (b == b[0]).all():
        return float("nan")
    # the p-value is not used; the asymptotic one costs least
    return float(kendalltau(a, b, variant="b", method="asymptotic").statistic)


@cache
def tau_needed(n_items: int, level: float = 0.05) -> float:
    """The smallest |tau| that two unrelated orders of `n_items` reach with probability at most `level`, without ties.

    From the exact distribution of inversions: .643 for 8 items, .455 for 12, .192 for 50. nan where even equal orders
    are that likely by chance (4 items or fewer at .05).
    """
    pairs = n_items * (n_items - 1) // 2
    chance = inversion_chances(n_items)
    # both tails: at most d inversions, or at least pairs - d
    tails = 2 * np.cumsum(chance)[: (pairs + 1) // 2]
    reached = np.flatnonzero(tails <= level)
    return 1 - 2 * int(reached[-1]) / pairs if len(reached) else float("nan")


def inversion_chances(n_items: int) -> Array:
    """Chance of 0, 1, ... n(n-1)/2 inversions in a random order of `n_items`."""
    chance = np.ones(1)
    # one item after the other: the next one passes 0 .. size - 1 of those before it
    for size in range(2, n_items + 1):
        chance = np.convolve(chance, np.full(size, 1 / size))
    return chance


# ------------------------------------------------------------------------------------------------- single numbers
def tau_b(a: NDArray[np.floating], b: NDArray[np.floating]) -> float:
    """Kendall's tau-b of two vectors, by scipy.

    Range -1 to 1, higher is more alike; nan with fewer than 3 items or a constant vector.

    Raises
    ------
    ShapeError, ValueError : unequal vectors, nan.
    """
    return _one_tau_b(*as_pair(a, b))


def spearman(a: NDArray[np.floating], b: NDArray[np.floating]) -> float:
    """Pearson correlation of mid-ranks (tied items share the mean of their places).

    Range -1 to 1, higher is more alike; nan with fewer than 3 items or a constant vector.

    Raises
    ------
    ShapeError, ValueError : unequal vectors, nan.
    """
    one, two = as_pair(a, b)
    if len(one) < LEAST_ITEMS:
        return float("nan")
    return float(np.trace(_spearman_terms(one, two)))


def centred_ranks(values: NDArray[np.floating]) -> Array:
    """Mid-ranks along the last axis minus their mean, scaled to length 1; nan where all are tied."""
    from scipy.stats import rankdata

    return centred(rankdata(values, axis=-1))


def centred(values: NDArray[np.floating]) -> Array:
    """Values along the last axis minus their mean, scaled to length 1; nan where all are equal."""
    rest = values - values.mean(axis=-1, keepdims=True)
    length = np.sqrt((rest**2).sum(axis=-1, keepdims=True))
    # a constant row keeps a rest of rounding size
    some = length > 1e-12 * np.abs(values).max(axis=-1, keepdims=True, initial=0.0)
    return np.divide(rest, length, out=np.full(rest.shape, np.nan), where=some)


def _spearman_terms(a: Array, b: Array) -> Array:
    return np.outer(centred_ranks(a), centred_ranks(b))


def partial_tau(a: NDArray[np.floating], b: NDArray[np.floating], given: NDArray[np.floating]) -> float:
    """tau-b of a and b with what both share with a third vector (the position) taken out.

    (t_ab - t_ac t_bc) / sqrt((1 - t_ac^2) (1 - t_bc^2)) (Kendall 1942). Range -1 to 1, higher is more alike. nan when
    one of the three is constant, or when a or b is itself an order of `given`: then nothing is left to compare.

    Raises
    ------
    ShapeError, ValueError : unequal vectors, nan.
    """
    one, two = as_pair(a, b)
    one, three = as_pair(one, given)
    rows = np.stack([one, one, two]), np.stack([two, three, three])
    return float(_partial(*(np.array([t]) for t in kendall_tau_b(*rows, np.ones(rows[0].shape, dtype=bool))))[0])


def _partial(ab: Array, ac: Array, bc: Array) -> Array:
    left = (1 - ac**2) * (1 - bc**2)
    return np.divide(ab - ac * bc, np.sqrt(left), out=np.full(ab.shape, np.nan), where=left > 1e-12)


# ---------------------------------------------------------------------------------------------------------- nulls
def tau_null(a: Array, b: Array, *, draws: int = DRAWS, seed: int = 0) -> Null:
    """Null of tau-b: the distribution of inversions without ties, else shuffles of b."""
    n = len(a)
    observed = _one_tau_b(a, b)
    if len(np.unique(a)) == n == len(np.unique(b)):
        chance = inversion_chances(n)
        values = 1 - 2 * np.arange(len(chance)) / (len(chance) - 1)
        below = np.cumsum(chance)
        # values fall from 1 to -1 and the distribution is symmetric
        high = float(values[int(np.searchsorted(below, 0.025 + 1e-12))])
        p = float(chance[np.abs(values) >= abs(observed) - 1e-9].sum())
        return Null(-high, high, 0.0, min(p, 1.0), "both", "exact", 0)
    orders, exact = shuffles(n, draws, seed)
    rows = np.broadcast_to(a, orders.shape)
    drawn = kendall_tau_b(rows, b[orders], np.ones(orders.shape, dtype=bool))
    return null_from_draws(observed, drawn, tail="both", exact=exact)


def spearman_null(a: Array, b: Array, *, draws: int = DRAWS, seed: int = 0) -> Null:
    """Null of Spearman's correlation: shuffles of b."""
    return pair_sum_null(_spearman_terms(a, b), tail="both", draws=draws, seed=seed)


def partial_tau_null(a: Array, b: Array, given: Array, *, draws: int = DRAWS, seed: int = 0) -> Null:
    """Null of the partial tau: b keeps its dependence on position and loses every other order.

    The ranks of b are split into a line in the ranks of `given` and a rest, and the rest is shuffled (Freedman & Lane
    1983). Approximate: exact only if the dependence on position is that line.
    """
    place, rank = centred_ranks(given), centred_ranks(b)
    line = place * (place @ rank)
    orders, exact = shuffles(len(a), draws, seed)
    drawn_b = line + (rank - line)[orders]
    everything = np.ones(orders.shape, dtype=bool)
    rows_a, rows_c = np.broadcast_to(a, orders.shape), np.broadcast_to(given, orders.shape)
    taus = [kendall_tau_b(x, y, everything) for x, y in ((rows_a, drawn_b), (rows_a, rows_c), (drawn_b, rows_c))]
    return null_from_draws(partial_tau(a, b, given), _partial(*taus), tail="both", exact=exact)

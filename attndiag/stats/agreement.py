"""Do two methods rank the same items alike: Kendall's tau-b for many rows at once, and what chance would give.

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
    # chance of each number of inversions in a random order, one item after the other
    chance = np.ones(1)
    for size in range(2, n_items + 1):
        chance = np.convolve(chance, np.full(size, 1 / size))
    # both tails: at most d inversions, or at least pairs - d
    tails = 2 * np.cumsum(chance)[: (pairs + 1) // 2]
    reached = np.flatnonzero(tails <= level)
    return 1 - 2 * int(reached[-1]) / pairs if len(reached) else float("nan")

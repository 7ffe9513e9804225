"""The best and the worst order of a prompt's items: what AOPC could be at most and at least.

AOPC is not comparable between models or prompts, because how much any order can reach depends on them. Normalised AOPC
= (AOPC - worst) / (best - worst) is (Edin et al. 2025, arXiv 2408.08137). Here AOPC is the mean over k = 1..n.

An order adds one item after the other, and its AOPC is a sum over the sets it passes through. So the best order is a
longest path through the lattice of subsets: exact by dynamic programming over 2^n sets, without listing n! orders. Up
to 8 items that is done; above, a beam search keeps the most promising sets of each size, and the orders of the compared
methods join the search, so that no method falls outside the bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from attndiag.stats.masked import Array, MaskedValues

Kind = Literal["comprehensiveness", "sufficiency"]

EXACT_ITEMS = 8
BEAM = 5


@dataclass(frozen=True)
class OrderBounds:
    """Smallest and largest AOPC (mean over k = 1..n) that any order has.

    Parameters
    ----------
    lowest, highest : AOPC in the unit of m.
    how : `"exact"`, or `"beam search"`: then true bounds may lie further out.
    sets : subsets looked at.
    """

    lowest: float
    highest: float
    how: Literal["exact", "beam search"]
    sets: int


def order_bounds(
    values: MaskedValues, kind: Kind, *, seen: Sequence[float] = (), beam: int = BEAM, exact_items: int = EXACT_ITEMS
) -> OrderBounds:
    """Bounds of AOPC over all orders.

    Parameters
    ----------
    kind : whether the top items are replaced (`comprehensiveness`) or kept (`sufficiency`).
    seen : AOPCs of orders that were measured already; they widen the bounds of a beam search.
    beam : sets of each size that a beam search keeps.
    exact_items : up to this many items the bounds are exact, at 2^n forwards.

    Raises
    ------
    ValueError : beam below 1.
    """
    if beam < 1:
        raise ValueError(f"beam is {beam}; expected at least 1")
    if values.n_items <= exact_items:
        low, high = _exact(values, kind)
        return OrderBounds(low, high, "exact", 2**values.n_items)
    found = [_beam(values, kind, beam, sign) for sign in (-1.0, 1.0)]
    low, high = min([found[0][0], *seen]), max([found[1][0], *seen])
    return OrderBounds(low, high, "beam search", found[0][1] + found[1][1])


def drops(values: MaskedValues, chosen: NDArray[np.bool_], kind: Kind) -> Array:
    """m(x) - m(x without the chosen items), or - m(x with nothing but them)."""
    return values.full - values(~chosen if kind == "comprehensiveness" else chosen)


def _exact(values: MaskedValues, kind: Kind) -> tuple[float, float]:
    n = values.n_items
    numbers = np.arange(2**n)
    sets = ((numbers[:, None] >> np.arange(n)) & 1).astype(bool)
    gain = drops(values, sets, kind)
    gain[0] = 0.0
    low, high = np.zeros(2**n), np.zeros(2**n)
    # a number is larger than that of each of its subsets, so one pass in counting order suffices
    for number in range(1, 2**n):
        before = [number ^ (1 << item) for item in range(n) if number >> item & 1]
        low[number] = gain[number] + low[before].min()
        high[number] = gain[number] + high[before].max()
    return float(low[-1]) / n, float(high[-1]) / n


def _beam(values: MaskedValues, kind: Kind, beam: int, sign: float) -> tuple[float, int]:
    """Highest (sign 1) or lowest (-1) AOPC found, and how many sets were looked at."""
    n = values.n_items
    chosen, totals = np.zeros((1, n), dtype=bool), np.zeros(1)
    looked = 0
    for _ in range(n):
        grown: dict[bytes, tuple[NDArray[np.bool_], float]] = {}
        for row, total in zip(chosen, totals, strict=True):
            for item in np.flatnonzero(~row):
                larger = row.copy()
                larger[item] = True
                key = larger.tobytes()
                # several orders lead to one set; the better one goes on
                if key not in grown or sign * total > sign * grown[key][1]:
                    grown[key] = (larger, float(total))
        sets = np.array([larger for larger, _ in grown.values()])
        reached = np.array([total for _, total in grown.values()]) + drops(values, sets, kind)
        looked += len(sets)
        best = np.argsort(-sign * reached, kind="stable")[:beam]
        chosen, totals = sets[best], reached[best]
    return float(totals[0]) / n, looked

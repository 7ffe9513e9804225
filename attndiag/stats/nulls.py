"""What chance gives: the null distribution of an agreement when one of the two vectors is shuffled.

Most measures here are sums over items of a term that depends on the two entries alone, S = sum_i M[i, i], where
M[i, j] is the term of entry i of `a` beside entry j of `b`. Shuffling `b` by a permutation pi gives
sum_i M[i, pi(i)], so one matrix serves every shuffle. With few items all n! shuffles are taken and the null is exact;
with more, seeded draws, and p = (1 + as extreme) / (1 + draws), which can never be 0 (Phipson & Smyth 2010).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from math import factorial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from attndiag.errors import ShapeError

Array = NDArray[np.float64]
Tail = Literal["both", "high", "low"]

DRAWS = 2000
# all n! orders up to this many items: 5040 for 7
EXACT_UP_TO = 7
# values that differ by rounding alone count as equal
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Null:
    """Where a number lies in what chance gives.

    Parameters
    ----------
    low, high : the middle 95 % of the null lies between them, ends included.
    mean : of the null.
    p : chance of a value at least as extreme, in (0, 1].
    tail : which values are extreme: both sides of the null's mean, high ones or low ones.
    kind : `"exact"` (all orders, or a known distribution) or `"permutation"` (seeded draws).
    draws : number of orders behind it.
    """

    low: float
    high: float
    mean: float
    p: float
    tail: Tail
    kind: Literal["exact", "permutation"]
    draws: int

    def covers(self, value: float) -> bool:
        """True when the value lies in the band of chance."""
        return self.low - _ROUNDING <= value <= self.high + _ROUNDING


def shuffles(n_items: int, draws: int = DRAWS, seed: int = 0) -> tuple[NDArray[np.int64], bool]:
    """[draw, item] permutations, and whether they are all n! of them."""
    if n_items <= EXACT_UP_TO:
        return _every_order(n_items), True
    rng = np.random.default_rng(seed)
    return rng.permuted(np.tile(np.arange(n_items), (draws, 1)), axis=1), False


@lru_cache(maxsize=EXACT_UP_TO + 1)
def _every_order(n_items: int) -> NDArray[np.int64]:
    orders = np.array(list(permutations(range(n_items))), dtype=np.int64).reshape(factorial(n_items), n_items)
    orders.setflags(write=False)
    return orders


def pair_sum_null(
    terms: NDArray[np.floating],
    *,
    tail: Tail,
    finish: Callable[[Array], Array] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Null:
    """Null of a measure that is a sum over items of a term of the two entries.

    Parameters
    ----------
    terms : [item of a, item of b]; the measure is the sum of its diagonal.
    tail : which values are extreme.
    finish : from the sum to the measure (a root, a ratio, ...); the sum itself when None.

    Raises
    ------
    ShapeError : `terms` is not square.
    """
    if terms.ndim != 2 or terms.shape[0] != terms.shape[1]:
        raise ShapeError(f"terms have shape {terms.shape}; expected [item, item]")
    orders, exact = shuffles(len(terms), draws, seed)
    sums = np.zeros(len(orders))
    # item by item: memory stays at one number a draw
    for item in range(len(terms)):
        sums += terms[item, orders[:, item]]
    observed = float(np.trace(terms))
    finish = finish or (lambda values: values)
    return null_from_draws(float(finish(np.array([observed]))[0]), finish(sums), tail=tail, exact=exact)


def null_from_draws(observed: float, drawn: NDArray[np.floating], *, tail: Tail, exact: bool) -> Null:
    """Place `observed` in drawn (or fully listed) values of the null; undefined draws (nan) are left out.

    Raises
    ------
    ValueError : every draw is undefined.
    """
    values = drawn[np.isfinite(drawn)]
    if not len(values):
        raise ValueError("every draw of the null is undefined; the measure is undefined for these vectors")
    mean = float(values.mean())
    if tail == "both":
        extreme = np.abs(values - mean) >= abs(observed - mean) - _ROUNDING
    elif tail == "high":
        extreme = values >= observed - _ROUNDING
    else:
        extreme = values <= observed + _ROUNDING
    count = int(extreme.sum())
    # the observed order is one of all orders, but not one of the drawn ones
    p = count / len(values) if exact else (1 + count) / (1 + len(values))
    low, high = (float(np.quantile(values, q, method=m)) for q, m in ((0.025, "lower"), (0.975, "higher")))
    return Null(low, high, mean, min(p, 1.0), tail, "exact" if exact else "permutation", len(values))

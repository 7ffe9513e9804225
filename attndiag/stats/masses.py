"""Do two methods spread their mass alike, and do two signed methods agree on who helps and who hurts.

Both distances compare p = |a| / sum |a| with q = |b| / sum |b|. They see sizes, not the order, and say nothing about
signs; `sign_agreement` says that and nothing else.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attndiag.errors import NotApplicableError
from attndiag.stats.lists import Array, as_pair


def shares(scores: NDArray[np.floating]) -> Array:
    """|a| / sum |a|; nan everywhere when all entries are 0 (undefined, never uniform)."""
    size = np.abs(np.asarray(scores, dtype=np.float64))
    total = size.sum()
    return size / total if total > 0 else np.full(size.shape, np.nan)


def jensen_shannon(a: NDArray[np.floating], b: NDArray[np.floating]) -> float:
    """Jensen-Shannon divergence in nats: KL(p || (p + q) / 2) / 2 + KL(q || (p + q) / 2) / 2.

    Range 0 to ln 2, lower is more alike. The divergence itself, not its root. nan when a or b is all zero.
    (Lin 1991.)

    Raises
    ------
    ShapeError, ValueError : unequal vectors, nan.
    """
    one, two = as_pair(a, b)
    return float(np.trace(jensen_shannon_terms(shares(one), shares(two))))


def jensen_shannon_terms(p: Array, q: Array) -> Array:
    """[item of p, item of q]: what a share of p beside a share of q adds to the divergence."""
    one, two = p[:, None], q[None, :]
    middle = (one + two) / 2
    return (_x_log_ratio(one, middle) + _x_log_ratio(two, middle)) / 2


def _x_log_ratio(x: Array, middle: Array) -> Array:
    """x ln(x / middle), 0 where x is 0."""
    ratio = np.divide(x, middle, out=np.ones(np.broadcast_shapes(x.shape, middle.shape)), where=middle > 0)
    return np.where(x == 0, 0.0, x * np.log(np.where(ratio == 0, 1.0, ratio)))


def total_variation(a: NDArray[np.floating], b: NDArray[np.floating]) -> float:
    """Total variation distance: sum |p - q| / 2, the mass that would have to move.

    Range 0 to 1, lower is more alike. nan when a or b is all zero.

    Raises
    ------
    ShapeError, ValueError : unequal vectors, nan.
    """
    one, two = as_pair(a, b)
    return float(np.abs(shares(one) - shares(two)).sum() / 2)


def sign_agreement(a: NDArray[np.floating], b: NDArray[np.floating], *, signed: tuple[bool, bool]) -> float:
    """Share of items on which two signed methods have the same sign, among the items where neither is 0.

    Range 0 to 1, higher is more alike; chance depends on how many items are positive in each, so read the null. nan
    when no item is left.

    Parameters
    ----------
    signed : whether the method behind a, and the one behind b, is signed.

    Raises
    ------
    NotApplicableError : one of them is not signed: its zeros and positives say nothing about direction.
    ShapeError, ValueError : unequal vectors, nan.
    """
    if not all(signed):
        which = " and ".join(name for name, is_signed in zip("ab", signed, strict=True) if not is_signed)
        raise NotApplicableError(f"signs are compared between signed methods only; {which} is non-negative")
    one, two = as_pair(a, b)
    product = np.sign(one) * np.sign(two)
    told = int((product != 0).sum())
    return float((product > 0).sum() / told) if told else float("nan")

"""Items that stand in for each other: no effect of one alone, an effect of all together.

Removing one of two heads that write the same shows nothing, and read as "no effect" that is wrong about both. So items
without an effect of their own are removed together, and where that has an effect, each is left in once: those that the
joint effect needs are redundant, the others are idle.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def stand_ins(
    single: NDArray[np.floating],
    joint: float,
    without: NDArray[np.floating],
    absent_below: NDArray[np.floating] | float,
    present_from: NDArray[np.floating] | float,
    *,
    floor: float = 0.0,
) -> NDArray[np.bool_]:
    """Which items of a set are redundant.

    Item i is redundant where |e_j| + floor < absent_below_j for every item j, |e_all| - floor >= present_from_i, and
    |e_all - e_all but i| - floor >= present_from_i.

    Parameters
    ----------
    single : [item] effect of removing one.
    joint : effect of removing all.
    without : [item] effect of removing all but this one.
    absent_below, present_from : margins of each item's row, see `evidence.margins`.
    floor : noise floor of m, the uncertainty of every effect.

    Returns
    -------
    [item] boolean. All False where the set has an effect of one member, or none together.

    Raises
    ------
    ValueError : fewer than 2 items, or effects of another number.
    """
    own = np.abs(np.asarray(single, dtype=np.float64))
    rest = np.asarray(without, dtype=np.float64)
    if own.ndim != 1 or own.shape != rest.shape or own.size < 2:
        raise ValueError(f"single has shape {own.shape} and without {rest.shape}; expected one entry for each of >= 2")
    if not bool((own + floor < absent_below).all()):
        return np.zeros(own.shape, dtype=bool)
    return (abs(joint) - floor >= present_from) & (np.abs(joint - rest) - floor >= present_from)

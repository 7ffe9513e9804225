"""m of a prompt with some items kept and the rest replaced: the one thing that every faithfulness metric asks for.

`MaskedValues` wraps a callable from a batch of keep masks to m. It asks for each mask once, in batches, so that
several methods and metrics share their forwards. It never sees a model: what "replaced" means is the caller's choice,
and its name travels with every metric.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from attndiag.errors import ShapeError

Array = NDArray[np.float64]
Masks = NDArray[np.bool_]
Value = Callable[[Masks], NDArray[np.floating]]

# ways to break a tie across the k-th place: all of them up to this many, else as many seeded draws
TIE_WAYS = 32


class MaskedValues:
    """Remembers m of every keep mask that was asked for.

    Parameters
    ----------
    value : from keep masks [batch, item] (True: the original, False: replaced) to m [batch]. With several replacement
        draws it returns the mean over them. Must be a function of the mask alone.
    n_items : admissible items of the prompt.
    replacement : what takes the place of an item; part of the name of every metric.
    batch_size : most masks in one call of `value`.

    Raises
    ------
    ValueError : no items, no name, batch size below 1.
    """

    def __init__(self, value: Value, n_items: int, replacement: str, *, batch_size: int = 64) -> None:
        if n_items < 1 or batch_size < 1 or not replacement:
            raise ValueError(
                f"n_items is {n_items}, batch_size {batch_size}, replacement {replacement!r}; expected at least one "
                "item, a batch of at least one and the name of the replacement"
            )
        self._value, self._batch_size = value, batch_size
        self.n_items, self.replacement = n_items, replacement
        self._known: dict[bytes, float] = {}

    @property
    def forwards(self) -> int:
        """How many different masks have been measured."""
        return len(self._known)

    def __call__(self, masks: Masks) -> Array:
        """m of each keep mask [batch, item].

        Raises
        ------
        ShapeError : masks of another length, or `value` returned another number of values.
        ValueError : `value` returned nan or infinity.
        """
        asked = np.asarray(masks, dtype=bool)
        if asked.ndim != 2 or asked.shape[1] != self.n_items:
            raise ShapeError(f"masks have shape {asked.shape}; expected [batch, item] with {self.n_items} items")
        keys = [row.tobytes() for row in asked]
        fresh = {key: row for key, row in zip(keys, asked, strict=True) if key not in self._known}
        names, rows = list(fresh), list(fresh.values())
        for start in range(0, len(rows), self._batch_size):
            batch = np.array(rows[start : start + self._batch_size])
            found = np.asarray(self._value(batch), dtype=np.float64)
            if found.shape != (len(batch),):
                raise ShapeError(f"value returned shape {found.shape} for {len(batch)} masks; expected one m for each")
            if not np.isfinite(found).all():
                raise ValueError("value returned nan or infinity; m must be finite for every mask")
            self._known.update(zip(names[start : start + self._batch_size], found.tolist(), strict=True))
        return np.array([self._known[key] for key in keys])

    @property
    def full(self) -> float:
        """m of the prompt as it is."""
        return float(self(np.ones((1, self.n_items), dtype=bool))[0])

    @property
    def empty(self) -> float:
        """m with every admissible item replaced."""
        return float(self(np.zeros((1, self.n_items), dtype=bool))[0])

    def single_effects(self) -> Array:
        """m - m with one item replaced, [item]; positive where the item helped."""
        return self.full - self(~np.eye(self.n_items, dtype=bool))


def top_masks(scores: NDArray[np.floating], k: int, *, seed: int = 0) -> Masks:
    """[way, item], True for the top k items: one row, or one for each way to break a tie across the k-th place.

    Above 32 ways, 32 seeded draws. Metrics average over the rows, so that ties are handled by expectation and never by
    where an item stands.

    Raises
    ------
    ValueError : k not in 0..n, or a score is nan.
    """
    values = np.asarray(scores, dtype=np.float64)
    n = len(values)
    if np.isnan(values).any():
        raise ValueError("a score is nan and has no place in a ranking; leave the item out")
    if not 0 <= k <= n:
        raise ValueError(f"k is {k}; expected 0 to {n}, the number of items")
    if k == 0:
        return np.zeros((1, n), dtype=bool)
    cut = np.sort(values)[-k]
    above, tied = values > cut, np.flatnonzero(values == cut)
    free = k - int(above.sum())
    if comb(len(tied), free) <= TIE_WAYS:
        chosen = [list(pick) for pick in combinations(tied.tolist(), free)]
    else:
        rng = np.random.default_rng([seed, k])
        chosen = [rng.choice(tied, free, replace=False).tolist() for _ in range(TIE_WAYS)]
    masks = np.repeat(above[None], len(chosen), axis=0)
    for row, pick in enumerate(chosen):
        masks[row, pick] = True
    return masks

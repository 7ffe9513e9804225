"""The pairs of query and key on which weight and head contribution differ most, each with the row that it stands in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Pair:
    """A query, a key and a head on which weight and head contribution differ, with the whole row behind them."""

    direction: str
    key_class: str
    head: int
    query_pos: int
    key_pos: int
    weight: float
    head_contribution: float
    row_written: float
    weight_share: float
    contribution_share: float
    row_weight: Array
    row_contribution: Array

    @property
    def difference(self) -> float:
        """contribution share - weight share."""
        return self.contribution_share - self.weight_share


def row_shares(values: Array) -> Array:
    """Each row divided by its sum; nan where the row is all zero."""
    total = values.sum(axis=-1, keepdims=True)
    return np.divide(values, total, out=np.full_like(values, np.nan), where=total > 0)


def strongest_of_heads(weight: Array, written: Array, *, rows: Mask, aside: Mask) -> tuple[Pair, ...]:
    """For each head the pair of either direction and either class of key on which the two shares differ most.

    Parameters
    ----------
    weight, written : [head, query, key], A_ij and A_ij ||f_j||.
    rows : [query], the queries that count.
    aside : [key], sinks and special tokens; key 0 is always among them.
    """
    aside = aside | (np.arange(len(aside)) == 0)
    classes = (("content", np.flatnonzero(~aside)), ("sink", np.flatnonzero(aside)))
    pairs = []
    # head by head: maps of all heads at once are what fills the memory in long prompts
    for head, (weights, sizes) in enumerate(zip(weight, written, strict=True)):
        weight_share, written_share = row_shares(weights), row_shares(sizes)
        difference = np.where(rows[:, None] & np.isfinite(written_share), written_share - weight_share, 0.0)
        for direction, sign in (("contribution_over_weight", 1.0), ("weight_over_contribution", -1.0)):
            for key_class, keys in classes:
                if not len(keys):
                    continue
                candidates = sign * difference[:, keys]
                query, column = np.unravel_index(candidates.argmax(), candidates.shape)
                key = keys[column]
                if not candidates[query, column] > 0:
                    continue
                pairs.append(
                    Pair(
                        direction=direction,
                        key_class=key_class,
                        head=head,
                        query_pos=int(query),
                        key_pos=int(key),
                        weight=float(weights[query, key]),
                        head_contribution=float(sizes[query, key]),
                        row_written=float(sizes[query].sum()),
                        weight_share=float(weight_share[query, key]),
                        contribution_share=float(written_share[query, key]),
                        row_weight=weights[query].copy(),
                        row_contribution=sizes[query].copy(),
                    )
                )
    return tuple(pairs)

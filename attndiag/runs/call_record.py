"""What is kept of one attention call of one prompt: settings, averages over rows, and everything together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attndiag.runs.pairs import Array, Pair


@dataclass(frozen=True)
class CallSettings:
    """What is measured of a call.

    Parameters
    ----------
    backend : of `attndiag.contributions`; `"streaming"` measures without [head, query, key] maps, and `"auto"` takes
        that where the maps of a call would not fit in the free memory.
    most_ranked_rows : query rows, evenly spread, on which rank agreement is measured in longer prompts.
    """

    backend: str = "auto"
    most_ranked_rows: int = 128


@dataclass(frozen=True, eq=False)
class Averages:
    """One measure of one call: a value for each head (or a single one), the rows behind it, and the rows left out."""

    values: Array
    n: NDArray[np.int64]
    undefined: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CallMeasures:
    """Everything that is kept of one call."""

    module: str
    layer: int | None
    kind: str
    call_index: int
    route: str
    kernel: str
    backend: str | None
    per_head: Mapping[str, Averages]
    per_layer: Mapping[str, Averages]
    last_query: int
    last_query_scores: Mapping[str, Array]
    pairs: tuple[Pair, ...]
    checks: Mapping[str, Any]
    certified: bool
    not_measured: str | None
    seconds: dict[str, float] = field(default_factory=dict)


def mean_over_rows(per_row: Array) -> Averages:
    """Mean over the last axis of [head, row] or [row]; undefined rows counted, not averaged."""
    table = np.atleast_2d(per_row)
    defined = np.isfinite(table)
    n = defined.sum(axis=1)
    total = np.where(defined, table, 0.0).sum(axis=1)
    values = np.divide(total, n, out=np.full(len(table), np.nan), where=n > 0)
    return Averages(values, n.astype(np.int64), (table.shape[1] - n).astype(np.int64))


def single(values: Array, n: int) -> Averages:
    values = np.atleast_1d(values)
    return Averages(values, np.full(len(values), n, dtype=np.int64), np.zeros(len(values), dtype=np.int64))

"""The maps that a view shows, one attention call at a time: weight, head contribution, contribution.

Up to 256 tokens a call's maps are kept whole. Beyond that three things are kept of each head, in memory linear in the
length: an exact window (the last 256 queries, their last 255 keys and key 0), an overview of everything pooled to at
most 128 by 128 blocks, and the strongest pairs. A block of the overview holds the mean over its queries of what they
give to its keys together, so that its rows add up to 1 as those of the pattern do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from attndiag.errors import NotApplicableError, UnsupportedModelError
from attndiag.explanations.contributions import contributions
from attndiag.explanations.top_contributions import top_contributions
from attndiag.hooks.record import AttentionCall
from attndiag.runs.call_view import value_norms

Maps = NDArray[np.float32]
MOST_TOKENS, MOST_BLOCKS, STRONGEST = 256, 128, 8
# queries worked on at a time in a long call
_ROWS = 256


@dataclass(frozen=True, eq=False)
class Window:
    """Which queries and keys the maps hold; `cut` where there are more."""

    queries: NDArray[np.int64]
    keys: NDArray[np.int64]
    cut: bool


@dataclass(frozen=True)
class Pair:
    """One strong pair of a head: positions, weight, and its share of what the head writes (None without one)."""

    head: int
    query: int
    key: int
    weight: float
    written: float | None


@dataclass(frozen=True, eq=False)
class Overview:
    """A long call as a whole.

    Parameters
    ----------
    block : tokens a block.
    weight, written : [head, query block, key block], mass and share; `written` None where not defined.
    strongest : the pairs with the largest weight or share, key 0 left out.
    """

    block: int
    weight: Maps
    written: Maps | None
    strongest: tuple[Pair, ...]


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """The maps of one attention call over the window, as shares in [0, 1].

    Parameters
    ----------
    label, kind, layer : of the layer; the number is None where the module stands in no stack.
    weight : [head, query, key], the pattern.
    written : [head, query, key], row shares of A_ij ||f_j||; None where contributions are not defined.
    together : [query, key], row shares of ||T_ij||; None likewise.
    row_written, row_together : [head, query] and [query], what the shares are shares of, in residual norm.
    certified : whether the call's certificate and completeness hold.
    note : why something is missing, or which check failed.
    overview : of a call that is longer than the window.
    """

    label: str
    kind: str
    weight: Maps
    written: Maps | None
    together: Maps | None
    row_written: Maps | None
    row_together: Maps | None
    certified: bool
    note: str = ""
    layer: int | None = None
    overview: Overview | None = None

    @property
    def differences(self) -> NDArray[np.float64]:
        """[head] mean over rows of the total variation distance of weight and contribution; 0 without the latter."""
        if self.written is None:
            return np.zeros(len(self.weight))
        return np.nan_to_num(np.abs(self.weight - self.written)).sum(-1).mean(-1).astype(np.float64) / 2

    @property
    def difference(self) -> float:
        """Mean of `differences`."""
        return float(self.differences.mean())


def window_of(n_queries: int, n_keys: int) -> Window:
    """All queries and keys, or the last ones with key 0."""
    if max(n_queries, n_keys) <= MOST_TOKENS:
        return Window(np.arange(n_queries), np.arange(n_keys), False)
    queries = np.arange(max(0, n_queries - MOST_TOKENS), n_queries)
    keys = np.concatenate([[0], np.arange(max(1, n_keys - MOST_TOKENS + 1), n_keys)])
    return Window(queries, keys, True)


def maps_of(call: AttentionCall, index: int, backend: Literal["auto", "reference"]) -> LayerMaps:
    """The maps of one call, whole or as a window with an overview."""
    number = str(index) if call.layer is None else str(call.layer)
    label = number if call.kind == "self" else f"{number} cross"
    if max(call.n_queries, call.n_keys) > MOST_TOKENS:
        return _long_maps(call, label)
    weight = contributions(call, "weight")
    failures = list(weight.failures)
    written = together = row_written = row_together = None
    note = call.output_reason
    if call.output is not None:
        by_head = contributions(call, "head_contribution", backend=backend)
        by_layer = contributions(call, "contribution", backend=backend)
        failures += [*by_head.failures, *by_layer.failures]
        written, row_written = row_shares(by_head.values[0].float().cpu().numpy())
        together, row_together = row_shares(by_layer.values[0].float().cpu().numpy())
        note = ""
    return LayerMaps(
        label=label,
        kind=call.kind,
        weight=weight.values[0].float().cpu().numpy(),
        written=written,
        together=together,
        row_written=row_written,
        row_together=row_together,
        certified=not failures,
        note=_note(failures, note),
        layer=call.layer,
    )


def _note(failures: list[str], note: str) -> str:
    return "; ".join([*dict.fromkeys(failures), *([note] if note else [])])


def row_shares(values: Maps) -> tuple[Maps, Maps]:
    """Rows divided by their sums, and the sums; an all-zero row stays zero."""
    total = values.sum(axis=-1)
    shares = np.divide(values, total[..., None], out=np.zeros_like(values), where=total[..., None] > 0)
    return shares, total


def _long_maps(call: AttentionCall, label: str) -> LayerMaps:
    window = window_of(call.n_queries, call.n_keys)
    norms = None if call.output is None else value_norms(call, call.w_o)
    block = -(-max(call.n_queries, call.n_keys) // MOST_BLOCKS)
    pooled = _Pool(call, block)
    strongest: list[Pair] = []
    seen: list[tuple[Maps, Maps | None, Maps | None]] = []
    for start, weight in _blocks(call):
        written = None if norms is None else (weight * norms[:, None]).astype(np.float32)
        shares, totals = (None, None) if written is None else row_shares(written)
        pooled.add(start, weight, shares)
        strongest = _strongest([*strongest, *_pairs(start, weight, shares)])
        inside = (window.queries >= start) & (window.queries < start + weight.shape[1])
        rows = window.queries[inside] - start
        if len(rows):
            cut = [None if one is None else one[:, rows][:, :, window.keys] for one in (weight, shares)]
            assert cut[0] is not None
            seen.append((cut[0], cut[1], None if totals is None else totals[:, rows]))
    together, row_together, failures, note = _together(call, window)
    written_rows = [one[1] for one in seen if one[1] is not None]
    total_rows = [one[2] for one in seen if one[2] is not None]
    return LayerMaps(
        label=label,
        kind=call.kind,
        weight=np.concatenate([one[0] for one in seen], axis=1),
        written=np.concatenate(written_rows, axis=1) if written_rows else None,
        together=together,
        row_written=np.concatenate(total_rows, axis=1) if total_rows else None,
        row_together=row_together,
        certified=not failures,
        note=_note(failures, note),
        layer=call.layer,
        overview=Overview(block, *pooled.result(), tuple(strongest)),
    )


def _blocks(call: AttentionCall) -> Iterator[tuple[int, Maps]]:
    """Pattern rows, a block of queries at a time: (first query, [head, query, key])."""
    whole = None if call.q is not None and call.traced_pattern is None else call.pattern[0].float().cpu().numpy()
    for start in range(0, call.n_queries, _ROWS):
        stop = min(start + _ROWS, call.n_queries)
        if whole is not None:
            yield start, whole[:, start:stop]
            continue
        rows = torch.arange(start, stop, device=call.z.device)
        with torch.no_grad():
            yield start, call.formula_pattern(rows)[0][0].float().cpu().numpy()


def _together(call: AttentionCall, window: Window) -> tuple[Maps | None, Maps | None, list[str], str]:
    """Shares of the layer's contributions on the window's rows, their totals, failed checks, why they are missing."""
    try:
        found = top_contributions(call, top_k=1, rows=window.queries.tolist())
    except (NotApplicableError, UnsupportedModelError) as error:
        failures = list(call.sampled_certificate.failures)
        return None, None, failures, " ".join(str(error).split())
    shares, totals = row_shares(found.stream.row_contribution[0].float().cpu().numpy())
    return shares[:, window.keys], totals, list(found.scores.failures), ""


class _Pool:
    """Sums over blocks of keys, and means over blocks of queries, filled a few queries at a time."""

    def __init__(self, call: AttentionCall, block: int) -> None:
        self.block, self.keys = block, -(-call.n_keys // block)
        shape = (call.n_heads, -(-call.n_queries // block), self.keys)
        self.weight, self.written = np.zeros(shape), np.zeros(shape)
        self.count = np.zeros(shape[1])
        self.with_written = False

    def add(self, start: int, weight: Maps, written: Maps | None) -> None:
        """Rows of the pattern and, where there are any, of the shares."""
        places = (start + np.arange(weight.shape[1])) // self.block
        np.add.at(self.count, places, 1)
        edges = np.arange(0, weight.shape[2], self.block)
        for total, values in ((self.weight, weight), (self.written, written)):
            if values is not None:
                sums = np.add.reduceat(values.astype(np.float64), edges, axis=2)
                np.add.at(total, (slice(None), places), sums)
        self.with_written = self.with_written or written is not None

    def result(self) -> tuple[Maps, Maps | None]:
        """Means over the queries of each block."""
        mean = [(one / np.maximum(self.count, 1)[:, None]).astype(np.float32) for one in (self.weight, self.written)]
        return mean[0], mean[1] if self.with_written else None


def _pairs(start: int, weight: Maps, written: Maps | None) -> list[Pair]:
    """The strongest pairs of each head among some rows, by weight and by share, key 0 left out."""
    found: list[Pair] = []
    width = weight.shape[2] - 1
    if width < 1:
        return found
    for head in range(len(weight)):
        chosen: set[int] = set()
        for values in (weight, written):
            if values is not None:
                flat = values[head, :, 1:].reshape(-1)
                count = min(STRONGEST, len(flat))
                chosen |= set(np.argpartition(-flat, count - 1)[:count].tolist())
        for place in chosen:
            row, key = divmod(place, width)
            share = None if written is None else float(written[head, row, key + 1])
            found.append(Pair(head, start + row, key + 1, float(weight[head, row, key + 1]), share))
    return found


def _strongest(pairs: list[Pair]) -> list[Pair]:
    """For each head, the largest by weight and the largest by share."""
    kept: dict[tuple[int, int, int], Pair] = {}
    for head in sorted({pair.head for pair in pairs}):
        mine = [pair for pair in pairs if pair.head == head]
        by_weight = sorted(mine, key=lambda pair: -pair.weight)[:STRONGEST]
        by_share = sorted(mine, key=lambda pair: -(pair.written or 0.0))[:STRONGEST]
        kept |= {(pair.head, pair.query, pair.key): pair for pair in [*by_weight, *by_share]}
    return list(kept.values())

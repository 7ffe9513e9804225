"""The measures of one attention call too long for its [head, query, key] maps, from `core.streaming`.

Means over all queries come from the totals of the stream, exactly. What needs whole rows (rank agreement, the strongest
pairs, the last query) is taken from up to `most_ranked_rows` rows, evenly spread, the last among them: the very rows
that the rank agreement of a shorter call is measured on. The median cancellation needs every pair and is left out.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from attndiag.core.attention import forbidden_entries
from attndiag.core.streaming import StreamResult
from attndiag.errors import NotApplicableError
from attndiag.explanations.top_contributions import top_contributions
from attndiag.hooks.record import AttentionCall
from attndiag.runs.call_record import Averages, CallMeasures, CallSettings, mean_over_rows, single
from attndiag.runs.call_view import (
    LATER_QUERIES,
    SINK_MASS,
    CallView,
    last_query_scores,
    norm_measures,
    rank_measures,
    spread_rows,
    value_norms,
)
from attndiag.runs.pairs import Array, Mask, strongest_of_heads


def measure_streamed_call(call: AttentionCall, special: Mask, settings: CallSettings) -> CallMeasures:
    """Measure a call of batch size 1 in memory linear in its length.

    Parameters and returns are those of `call_measures.measure_call`.

    Raises
    ------
    NotApplicableError, UnsupportedModelError : the call cannot be streamed; see `attndiag.top_contributions`.
    InsufficientMemoryError : even the streaming estimate exceeds what is available.
    """
    if call.kind == "self" and call.diagonal_offset != call.n_keys - call.n_queries:
        raise NotApplicableError(
            f"{call.module_name}: the newest keys are not the last ones (a static cache has room at its end), and a "
            'stream takes the last key for the last query\'s own; use backend="reference"'
        )
    seen = _Seen(call)
    spread = np.flatnonzero(seen.rows)
    spread = spread[spread_rows(len(spread), settings.most_ranked_rows)]
    # the last query is told of even where it does not count, as in a prompt of one token
    spread = np.union1d(spread, [call.n_queries - 1])
    found = top_contributions(call, top_k=1, rows=[*spread.tolist(), 0], columns=[0])
    stream = found.stream
    aside = special | _sink_keys(stream, seen)
    norms = value_norms(call, call.w_o)
    weight = _array(stream.row_weight)[:, :-1]
    view = CallView(
        weight=weight,
        written=weight * norms[:, None],
        together=_array(stream.row_contribution)[:-1],
        rows=seen.rows[spread],
        allowed=np.broadcast_to(seen.allowed(spread), weight.shape),
        readable=seen.readable,
        special=special,
        aside=aside,
        learned_sink=_array(stream.sink_mass),
    )
    by_head, by_layer = rank_measures(view, settings.most_ranked_rows)
    proof = call.sampled_certificate
    completeness = sum(error for error in (proof.formula_error, proof.output_error) if error is not None)
    failures = list(found.scores.failures)
    if not completeness <= proof.tolerance:
        failures.append(f"the parts miss the module's output by {completeness:.1e}, above {proof.tolerance:.1e}")
    pairs = strongest_of_heads(view.weight, view.written, rows=view.rows, aside=aside)
    return CallMeasures(
        module=call.module_name,
        layer=call.layer,
        kind=call.kind,
        call_index=call.call_index,
        route=call.route,
        kernel=call.kernel,
        backend="streaming",
        per_head=_sink_measures(stream, seen, special, norms[:, 0]) | norm_measures(call, view) | by_head,
        per_layer=_layer_measures(stream, seen, aside & ~special) | by_layer,
        last_query=call.n_queries - 1,
        last_query_scores=last_query_scores(view),
        pairs=tuple(replace(pair, query_pos=int(spread[pair.query_pos])) for pair in pairs),
        checks={
            "value_error": proof.value_error,
            "formula_error": proof.formula_error,
            "output_error": proof.output_error,
            "completeness_error": completeness,
            "tolerance": proof.tolerance,
            "rows": proof.rows,
            "excluded_rows": proof.excluded_rows,
            "failures": "; ".join(dict.fromkeys(failures)) or None,
        },
        certified=not failures,
        not_measured=None,
    )


class _Seen:
    """Which keys each query may read, told without a [query, key] map where the order is plain."""

    def __init__(self, call: AttentionCall) -> None:
        self.n_queries, self.n_keys = call.n_queries, call.n_keys
        self.own: NDArray[np.int64] | None = None
        if call.kind == "self":
            self.own = np.arange(self.n_queries) + call.diagonal_offset
        self._causal = call.is_causal
        mask = None if call.is_causal or call.mask is None else call.mask
        self._mask: torch.Tensor | None = None
        if mask is not None:
            mask = mask if mask.dtype == torch.bool else ~forbidden_entries(mask)
            # [head or 1, query or 1, key]
            self._mask = mask.reshape(-1, *mask.shape[-2:]) if mask.ndim > 1 else mask[None, None]
        self.rows = np.ones(self.n_queries, dtype=bool)
        self.readable = np.ones(self.n_keys, dtype=bool)
        if self._mask is not None:
            self.rows = np.broadcast_to(self._mask.any(dim=(0, 2)).cpu().numpy(), (self.n_queries,)).copy()
            self.readable = np.broadcast_to(self._mask.any(dim=(0, 1)).cpu().numpy(), (self.n_keys,)).copy()
        if call.kind == "self" and call.diagonal_offset == 0:
            self.rows[0] = False

    def allowed(self, queries: NDArray[np.int64]) -> Mask:
        """[head or 1, query, key] of these queries."""
        if self._causal:
            shift = self.n_keys - self.n_queries
            return np.arange(self.n_keys)[None, None] <= queries[None, :, None] + shift
        if self._mask is None:
            return np.ones((1, len(queries), self.n_keys), dtype=bool)
        return self._mask.expand(-1, self.n_queries, self.n_keys)[:, queries].cpu().numpy()

    def readers(self) -> NDArray[np.int64]:
        """[key], how many of the queries that count read each key, its own query left out."""
        if self._causal and self.own is not None:
            counted = np.flatnonzero(self.rows) + self.n_keys - self.n_queries
            return (len(counted) - np.searchsorted(counted, np.arange(self.n_keys), side="right")).astype(np.int64)
        total = np.zeros(self.n_keys, dtype=np.int64)
        for start in range(0, self.n_queries, 512):
            queries = np.arange(start, min(start + 512, self.n_queries))
            table = self.allowed(queries).any(axis=0) & self.rows[queries, None]
            if self.own is not None:
                table &= np.arange(self.n_keys)[None] != self.own[queries, None]
            total += table.sum(axis=0)
        return total


def _array(values: torch.Tensor) -> Array:
    return values[0].detach().double().cpu().numpy()


def _uncounted(stream: StreamResult, seen: _Seen) -> Array:
    """[head, key] weights of query 0 where it does not count; it is the last kept row."""
    row = _array(stream.row_weight)[:, -1]
    return row if not seen.rows[0] else np.zeros_like(row)


def _sink_keys(stream: StreamResult, seen: _Seen) -> Mask:
    """[key]: position 0, and keys whose mean mass over heads and later queries passes .3."""
    total = (_array(stream.head_key_weight) - _uncounted(stream, seen)).mean(axis=0)
    if seen.own is not None:
        counts = seen.rows & (seen.own >= 0)
        total[seen.own[counts]] -= _array(stream.own_weight)[:, counts].mean(axis=0)
    readers = seen.readers()
    mean = np.divide(total, readers, out=np.zeros_like(total), where=readers >= LATER_QUERIES)
    sinks = mean > SINK_MASS
    sinks[0] = True
    return sinks


def _sink_measures(stream: StreamResult, seen: _Seen, special: Mask, sink_norm: Array) -> dict[str, Averages]:
    rows, counted = seen.rows, int(seen.rows.sum())
    others = special.copy()
    others[0] = False
    at_special = (_array(stream.head_key_weight) - _uncounted(stream, seen))[:, others].sum(axis=1)
    if others.any() and counted:
        special_weight = single(at_special / counted, counted)
    else:
        special_weight = mean_over_rows(np.zeros((len(at_special), counted)))
    at_sink = _array(stream.column_weight)[..., 0]
    written = _array(stream.head_row_total)
    return {
        "sink_weight": mean_over_rows(at_sink[:, rows]),
        "learned_sink_mass": mean_over_rows(_array(stream.sink_mass)[:, rows]),
        "special_weight": special_weight,
        "sink_head_contribution_share": mean_over_rows(_share(at_sink * sink_norm[:, None], written)[:, rows]),
        "head_written": mean_over_rows(written[:, rows]),
    }


def _share(part: Array, total: Array) -> Array:
    return np.divide(part, total, out=np.full(total.shape, np.nan), where=total > 0)


def _layer_measures(stream: StreamResult, seen: _Seen, sinks: Mask) -> dict[str, Averages]:
    rows, total = seen.rows, _array(stream.row_total)
    share = _share(_array(stream.column_contribution)[:, 0], total)
    return {
        "sink_keys": single(np.float64(sinks.sum()), seen.n_keys),
        "sink_contribution_share": mean_over_rows(share[rows]),
        "layer_written": mean_over_rows(total[rows]),
    }

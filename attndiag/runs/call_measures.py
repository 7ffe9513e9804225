"""One attention call of one prompt -> its numbers: sink against contribution, value norms, rank agreement, checks.

Steps, all on the call's own tensors: weight, head contribution and contribution from `explain.contributions` (which
also brings certificate and completeness); row shares; the sink's part of them; ||v_j|| and ||f_j||; Kendall's tau-b
of each row with sinks and special tokens set aside; the pairs that differ most. Plain arrays come back, so nothing of
the call stays alive.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attndiag.core.attention import forbidden_entries
from attndiag.core.contributions import transformed_values
from attndiag.errors import UnsupportedModelError
from attndiag.explanations.contributions import contributions
from attndiag.hooks.record import AttentionCall
from attndiag.runs.pairs import Array, Mask, Pair, row_shares, strongest_of_heads
from attndiag.scores import Scores
from attndiag.shapes import expand_kv_heads
from attndiag.stats.agreement import LEAST_ITEMS, kendall_tau_b, tau_needed

SINK_MASS = 0.3  # mean mass above which a key counts as a sink (definitions: Gu 2024, arXiv 2410.10781)
_LATER_QUERIES = 3  # a mean over fewer says nothing about the key


@dataclass(frozen=True)
class CallSettings:
    """What is measured of a call.

    Parameters
    ----------
    backend : of `explain.contributions`.
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
    per_head: Mapping[str, Averages]
    per_layer: Mapping[str, Averages]
    last_query: int
    last_query_scores: Mapping[str, Array]
    pairs: tuple[Pair, ...]
    checks: Mapping[str, Any]
    certified: bool
    not_measured: str | None
    seconds: dict[str, float] = field(default_factory=dict)


class _Clock:
    """Adds up the time since the last look under a name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def look(self, work: str) -> None:
        now = time.perf_counter()
        self.seconds[work] = self.seconds.get(work, 0.0) + now - self._last
        self._last = now


def measure_call(call: AttentionCall, special: Mask, settings: CallSettings) -> CallMeasures:
    """Measure a call of batch size 1.

    Parameters
    ----------
    call : a record whose tensors are still those of the forward (inside `on_call`).
    special : [key_pos], True for special and chat-template tokens.
    settings : what to measure.

    Raises
    ------
    UnsupportedModelError : more than one sequence in the call.
    """
    if call.z.shape[0] != 1:
        raise UnsupportedModelError(f"{call.module_name} holds {call.z.shape[0]} sequences; measure one at a time")
    clock = _Clock()
    certificate = call.certificate
    clock.look("certificate")
    weight = contributions(call, "weight")
    clock.look("weight")
    not_measured = call.output_reason or "no output projection was found" if call.output is None else None
    by_head = by_layer = None
    if not_measured is None:
        by_head = contributions(call, "head_contribution", backend=settings.backend)
        clock.look("head_contribution")
        by_layer = contributions(call, "contribution", backend=settings.backend)
        clock.look("contribution")
    failures = tuple(dict.fromkeys(f for scores in (weight, by_head, by_layer) if scores for f in scores.failures))

    view = _View.of(call, weight, by_head, by_layer, special)
    per_head, per_layer = _sink_measures(view) | _norm_measures(call, view), _layer_measures(view)
    clock.look("shares and norms")
    head_ranks, layer_ranks = _rank_measures(view, settings.most_ranked_rows)
    clock.look("rank agreement")
    pairs = ()
    if view.written is not None:
        pairs = strongest_of_heads(view.weight, view.written, rows=view.rows, aside=view.aside)
    clock.look("strongest disagreements")
    return CallMeasures(
        module=call.module_name,
        layer=call.layer,
        kind=call.kind,
        call_index=call.call_index,
        route=call.route,
        kernel=call.kernel,
        per_head=per_head | head_ranks,
        per_layer=per_layer | layer_ranks,
        last_query=view.n_queries - 1,
        last_query_scores=_last_query(view),
        pairs=pairs,
        checks={
            "value_error": certificate.value_error,
            "formula_error": certificate.formula_error,
            "output_error": certificate.output_error,
            "completeness_error": None if by_layer is None else by_layer.checks.get("completeness_error"),
            "tolerance": certificate.tolerance,
            "rows": certificate.rows,
            "excluded_rows": certificate.excluded_rows,
            "failures": "; ".join(failures) or None,
        },
        certified=not failures,
        not_measured=not_measured,
        seconds=clock.seconds,
    )


@dataclass(frozen=True, eq=False)
class _View:
    """The arrays of one call, without the batch axis, in float64.

    weight, written : [head, query, key]; together : [query, key]; rows : [query], the queries that count; allowed :
    [head, query, key]; aside : [key], keys that rankings set aside; learned_sink : [head, query].
    """

    weight: Array
    written: Array | None
    together: Array | None
    rows: Mask
    allowed: Mask
    special: Mask
    aside: Mask
    learned_sink: Array

    @property
    def n_queries(self) -> int:
        return self.weight.shape[1]

    @classmethod
    def of(
        cls, call: AttentionCall, weight: Scores, by_head: Scores | None, by_layer: Scores | None, special: Mask
    ) -> _View:
        pattern = _array(weight.values)
        allowed = np.broadcast_to(_allowed(call, pattern), pattern.shape)
        rows = allowed.any(axis=(0, 2))
        if call.kind == "self" and call.diagonal_offset == 0:
            rows = rows & (np.arange(len(rows)) > 0)
        return cls(
            weight=pattern,
            written=None if by_head is None else _array(by_head.values),
            together=None if by_layer is None else _array(by_layer.values),
            rows=rows,
            allowed=allowed,
            special=special,
            aside=special | _sink_keys(pattern, allowed, rows, call),
            learned_sink=call.sink_mass[0].double().cpu().numpy(),
        )


def _array(values: torch.Tensor) -> Array:
    return values[0].detach().double().cpu().numpy()


def _allowed(call: AttentionCall, pattern: Array) -> Mask:
    """Which keys each query may read, [head or 1, query, key]."""
    if call.is_causal:
        return np.tril(np.ones(pattern.shape[1:], dtype=bool))[None]
    if call.mask is None:
        # where q was not seen, the softmax shows its mask only in what it gives exactly nothing
        return pattern > 0 if call.q is None else np.ones((1, 1, 1), dtype=bool)
    mask = call.mask if call.mask.dtype == torch.bool else ~forbidden_entries(call.mask)
    while mask.ndim < 4:
        mask = mask[None]
    return mask[0].cpu().numpy()


def _sink_keys(pattern: Array, allowed: Mask, rows: Mask, call: AttentionCall) -> Mask:
    """[key]: position 0, and keys whose mean mass over heads and later queries passes .3."""
    n_keys = pattern.shape[2]
    later = allowed.any(axis=0) & rows[:, None]
    if call.kind == "self":
        # what a token gives itself is no sign of a sink
        own = np.arange(pattern.shape[1]) + call.diagonal_offset
        later = later & (np.arange(n_keys)[None] != own[:, None])
    counted = later.sum(axis=0)
    total = (pattern.mean(axis=0) * later).sum(axis=0)
    mean = np.divide(total, counted, out=np.zeros(n_keys), where=counted >= _LATER_QUERIES)
    sinks = mean > SINK_MASS
    sinks[0] = True
    return sinks


def _mean_over_rows(per_row: Array) -> Averages:
    """Mean over the last axis of [head, row] or [row]; undefined rows counted, not averaged."""
    table = np.atleast_2d(per_row)
    defined = np.isfinite(table)
    n = defined.sum(axis=1)
    total = np.where(defined, table, 0.0).sum(axis=1)
    values = np.divide(total, n, out=np.full(len(table), np.nan), where=n > 0)
    return Averages(values, n.astype(np.int64), (table.shape[1] - n).astype(np.int64))


def _single(values: Array, n: int) -> Averages:
    values = np.atleast_1d(values)
    return Averages(values, np.full(len(values), n, dtype=np.int64), np.zeros(len(values), dtype=np.int64))


def _sink_measures(view: _View) -> dict[str, Averages]:
    rows = view.rows
    others = view.special.copy()
    others[0] = False
    measures = {
        "sink_weight": _mean_over_rows(view.weight[:, rows, 0]),
        "learned_sink_mass": _mean_over_rows(view.learned_sink[:, rows]),
        "special_weight": _mean_over_rows(view.weight[:, :, others].sum(axis=-1)[:, rows]),
    }
    if view.written is not None:
        measures["sink_head_contribution_share"] = _mean_over_rows(_sink_share(view.written)[:, rows])
        measures["head_written"] = _mean_over_rows(view.written.sum(axis=-1)[:, rows])
    return measures


def _sink_share(values: Array) -> Array:
    """Part of each row that key 0 has; nan where the row is all zero."""
    total = values.sum(axis=-1)
    return np.divide(values[..., 0], total, out=np.full(total.shape, np.nan), where=total > 0)


def _norm_measures(call: AttentionCall, view: _View) -> dict[str, Averages]:
    """||v_j|| and ||f_j|| of the sink and of the median other token, padding and unread keys left out."""
    n_keys = view.weight.shape[2]
    readable = view.allowed.any(axis=(0, 1))
    readable[0] = False
    work = torch.float64 if call.z.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        v = call.v.detach().to(work)
        norms = {"v": _array(expand_kv_heads(v, call.n_heads).norm(dim=-1))}
        # an elementwise gate depends on the query, so no key has one f_j there
        if call.output is not None and call.output_gate is None:
            norms["f"] = _array(transformed_values(v, call.w_o.to(work)).norm(dim=-1))
    measures = {}
    for name, values in norms.items():
        measures[f"sink_{name}_norm"] = _single(values[:, 0], 1)
        if n_keys > 1 and readable.any():
            measures[f"other_{name}_norm"] = _single(np.median(values[:, readable], axis=1), int(readable.sum()))
    return measures


def _layer_measures(view: _View) -> dict[str, Averages]:
    measures = {"sink_keys": _single(np.float64((view.aside & ~view.special).sum()), view.weight.shape[2])}
    if view.together is None or view.written is None:
        return measures
    counted = view.together[view.rows]
    bound = view.written[:, view.rows].sum(axis=0)
    measures["sink_contribution_share"] = _mean_over_rows(_sink_share(counted))
    measures["layer_written"] = _mean_over_rows(counted.sum(axis=-1))
    some = bound > 0
    if some.any():
        measures["cancellation"] = _single(np.median(np.minimum(counted[some] / bound[some], 1.0)), int(some.sum()))
    return measures


def _rank_measures(view: _View, most_rows: int) -> tuple[dict[str, Averages], dict[str, Averages]]:
    """Rank agreement of weight with head contribution (by head) and with contribution (mean weight, by layer)."""
    if view.written is None or view.together is None:
        return {}, {}
    rows = np.flatnonzero(view.rows)
    if len(rows) > most_rows:
        rows = rows[np.unique(np.linspace(0, len(rows) - 1, most_rows).round().astype(int))]
    keep = view.allowed[:, rows] & ~view.aside
    tau = _taus(view.weight[:, rows], view.written[:, rows], keep)
    anyhead = keep.any(axis=0)
    layer_tau = _taus(view.weight[:, rows].mean(axis=0)[None], view.together[rows][None], anyhead[None])
    needed = np.array([tau_needed(int(n)) for n in range(min(view.weight.shape[2], 200) + 1)])
    # beyond 200 items the bound only falls, so that of 200 is on the safe side
    bound = needed[np.minimum(keep.sum(axis=-1), len(needed) - 1)]
    above = np.where(np.isfinite(bound) & np.isfinite(tau), tau >= bound - 1e-9, np.nan)
    last = view.n_queries - 1
    differs = view.weight[:, last].argmax(axis=-1) != view.written[:, last].argmax(axis=-1)
    layer_differs = view.weight[:, last].mean(axis=0).argmax() != view.together[last].argmax()
    return (
        {
            "rank_agreement": _mean_over_rows(tau),
            "rank_agreement_above_chance": _mean_over_rows(above),
            "top_key_differs": _single(differs.astype(np.float64), 1),
        },
        {
            "layer_rank_agreement": _mean_over_rows(layer_tau),
            "layer_top_key_differs": _single(np.float64(layer_differs), 1),
        },
    )


def _taus(a: Array, b: Array, keep: Mask) -> Array:
    """tau-b of each row, [head, row]; rows that hold a nan are undefined."""
    n_heads, n_rows, n_keys = a.shape
    finite = (np.isfinite(a) & np.isfinite(b)).all(axis=-1, keepdims=True)
    kept = (keep & finite).reshape(-1, n_keys)
    # columns that no row keeps (sinks, special tokens) only cost time
    some = kept.any(axis=0)
    if some.sum() < LEAST_ITEMS:
        return np.full((n_heads, n_rows), np.nan)
    flat_a, flat_b = (x.reshape(-1, n_keys)[:, some] for x in (a, b))
    return kendall_tau_b(flat_a, flat_b, kept[:, some]).reshape(n_heads, n_rows)


def _last_query(view: _View) -> dict[str, Array]:
    """What each key gives the last query, heads joined, [key]."""
    last = view.n_queries - 1
    scores = {"weight": view.weight[:, last].mean(axis=0)}
    if view.written is not None and view.together is not None:
        with np.errstate(invalid="ignore"):
            scores["head_contribution"] = view.written[:, last].mean(axis=0)
            scores["head_contribution_share"] = row_shares(view.written[:, last]).mean(axis=0)
        scores["contribution"] = view.together[last]
    return scores

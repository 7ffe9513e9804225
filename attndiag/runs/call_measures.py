"""One attention call of one prompt -> its numbers: sink against contribution, value norms, rank agreement, checks.

Weight, head contribution and contribution come from `attndiag.contributions`, which also brings certificate and
completeness; `call_view` reads the measures off their maps, `streamed_measures` does without maps where a call is too
long for them. Plain arrays come back, so nothing of the call stays alive.
"""

from __future__ import annotations

import time
from dataclasses import replace

from attndiag.core.dispatch import available_bytes
from attndiag.errors import InsufficientMemoryError, UnsupportedModelError
from attndiag.explanations.contributions import contributions
from attndiag.explanations.top_contributions import can_stream
from attndiag.hooks.record import AttentionCall
from attndiag.runs.call_record import CallMeasures, CallSettings
from attndiag.runs.call_view import (
    CallView,
    last_query_scores,
    layer_measures,
    norm_measures,
    rank_measures,
    sink_measures,
)
from attndiag.runs.memory import USABLE, map_bytes
from attndiag.runs.pairs import Mask, strongest_of_heads
from attndiag.runs.streamed_measures import measure_streamed_call


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
    InsufficientMemoryError : the maps do not fit, and the call cannot be streamed.
    NotApplicableError : `"streaming"` was asked for and the call cannot be streamed.
    """
    if call.z.shape[0] != 1:
        raise UnsupportedModelError(f"{call.module_name} holds {call.z.shape[0]} sequences; measure one at a time")
    clock = _Clock()
    if _streams(call, settings.backend):
        measured = measure_streamed_call(call, special, settings)
        clock.look("streaming")
        return replace(measured, seconds=clock.seconds)
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

    view = CallView.of(call, weight, by_head, by_layer, special)
    per_head, per_layer = sink_measures(view) | norm_measures(call, view), layer_measures(view)
    clock.look("shares and norms")
    head_ranks, layer_ranks = rank_measures(view, settings.most_ranked_rows)
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
        backend=None if by_layer is None else by_layer.provenance["backend"],
        per_head=per_head | head_ranks,
        per_layer=per_layer | layer_ranks,
        last_query=view.n_queries - 1,
        last_query_scores=last_query_scores(view),
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


def _streams(call: AttentionCall, backend: str) -> bool:
    """Whether this call is measured without maps."""
    if backend != "auto":
        return backend == "streaming"
    needed = map_bytes(call.n_heads, call.n_queries, call.n_keys)
    free = available_bytes(call.z.device)
    if free is None or needed <= USABLE * free:
        return False
    if not can_stream(call):
        raise InsufficientMemoryError(
            f"{call.module_name}: the maps of its {call.n_heads} heads over {call.n_queries} queries and {call.n_keys} "
            f"keys need about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free, and a call that hides its q or k, "
            "gates its heads or has no output projection cannot be streamed; shorten the prompt"
        )
    return True

"""`edge_effects`: what each attention edge really does to the target, measured by taking it away.

effect(layer, head, i, j) = m(clean) - m(edge j -> i of that head removed), signed, positive where the edge helped.

Causal decoders are restarted at the edited layer from the stored residual stream, for the positions that can still
change (`hooks.restart`); everything else, and every decoder whose restart does not reproduce its own unedited run, is
measured by batched whole forwards. The result says which. Each batch carries an unedited row of its own, so an edge
without any say has an effect of exactly 0 whatever the batch.

Coarser grains take several edges away at once: `key` (a key for every later query of a head), `head` (all edges of a
head: its output is 0) and `layer` (all heads).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from attndiag.core.attention import forbidden_entries
from attndiag.errors import RunFolderError, ShapeError, UnsupportedModelError
from attndiag.explanations.causal_work import edge_work, rows_of_batch
from attndiag.explanations.resolve import prompt_label, resolve_target
from attndiag.explanations.resolved import ResolvedTarget
from attndiag.hooks.capture_context import capture
from attndiag.hooks.edit_kinds import Stream
from attndiag.hooks.record import AttentionCall
from attndiag.hooks.restart import Restart
from attndiag.hooks.sites import BlockSites, sites_of, stream_of
from attndiag.hooks.variants import ALL, NONE, Mode, Variants, losing_edges
from attndiag.models.access import evaluating
from attndiag.models.load import LoadedModel, as_prompts
from attndiag.prompts import Prompt, Target
from attndiag.scores import Scores

Edge = tuple[int, int, int, int]
Grain = Literal["edge", "key", "head", "layer"]
Route = Literal["auto", "restart", "forwards"]
Progress = Callable[[int, int], None]
RESTART_TOLERANCE = 2e-4
"""Largest error of an unedited restart, relative to the spread of the logits (bf16 and fp16: 100 times that)."""


@dataclass(frozen=True)
class _Group:
    """Edges of one layer that are measured in one batch. Heads and keys may be `ALL`; `query` is the first changed."""

    layer: int
    query: int
    edges: tuple[Edge, ...]


def edge_effects(
    lm: LoadedModel,
    prompt: Prompt | str,
    target: Target | None = None,
    *,
    layers: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
    edges: Iterable[Edge] | None = None,
    mode: Mode = "remove",
    grain: Grain = "edge",
    stream: Stream = "self",
    route: Route = "auto",
    batch_tokens: int = 2048,
    progress: Progress | None = None,
    resume: str | Path | None = None,
) -> Scores:
    """Exact effect of every edge of one prompt.

    Exact up to the rounding of the model: in float32 about 2e-5 of a logit on SmolLM2-135M whatever the effect, so
    that effects from .01 on hold to 1e-3 of themselves; a model loaded with `dtype="float64"` gives all of them so, in
    twice the time.

    Parameters
    ----------
    target : as in `attndiag.score`; the prompt's own when None.
    layers : layers to measure; all when None.
    queries : query positions (negative ones count from the end); all when None. Only for the grain `edge`.
    edges : measure these (layer, head, query, key) only.
    mode : `"remove"` (A_ij = 0, the rest of the row untouched) or `"renormalize"` (score -inf).
    grain : `"edge"`, `"key"`, `"head"` or `"layer"`; the last two exist for `mode="remove"` only.
    stream : which attention of an encoder-decoder.
    route : `"auto"` restarts where that is exact, else runs whole forwards; the other two insist.
    batch_tokens : most tokens in one batch: bounds the memory.
    progress : called with (edges done, edges in all).
    resume : file that keeps finished groups; an interrupted call with the same arguments goes on from there.

    Returns
    -------
    Scores
        Signed, in the unit of the target; `nan` where there is no edge (future, outside a window) or it was not asked
        for. Axes by grain: [layer, head, query_pos, key_pos], [layer, head, key_pos], [layer, head] or [layer], with
        layer numbers and token texts as labels. Checks: `clean` (m), `restart_error` (relative to the logits' spread,
        of a restarted unedited run), `edges`; provenance: `route`, `route_reason`, `seconds`.

    Raises
    ------
    UnsupportedModelError : `route="restart"` where a restart is not exact; blocks that are shared.
    ShapeError : layers, queries or edges out of range.
    RunFolderError : `resume` holds the results of another call.
    TargetError : see `attndiag.score`.
    InsufficientMemoryError : one batch does not fit; see `causal_work`.
    """
    if grain in ("head", "layer") and mode != "remove":
        raise ValueError(f"grain={grain!r} takes whole rows away, so nothing is left to renormalise; use mode='remove'")
    if grain != "edge" and queries is not None:
        raise ValueError(f"grain={grain!r} takes an edge away for every query; leave queries out")
    one = as_prompts(prompt)[0]
    edges = None if edges is None else [tuple(int(part) for part in edge) for edge in edges]  # type: ignore[misc]
    edge_work(
        lm, one, layers=layers, queries=queries, edges=edges, grain=grain, batch_tokens=batch_tokens
    ).require_fit()
    resolved = resolve_target(lm, one, target)
    visible, sites, tokens = _visible(lm, resolved, stream)
    plan = _plan(visible, sites, layers, queries, edges, grain)
    runner, route_taken, reason, error = _runner(lm, resolved, sites, stream, route)
    began = time.perf_counter()
    kept = _Kept(resume, _fingerprint(lm, one, resolved, mode, grain, stream, route_taken, plan))
    found: dict[Edge, float] = dict(kept.found)
    total = sum(len(group.edges) for group in plan)
    restart = runner.restart
    clean = resolved.value(lm.run(resolved.inputs)) if restart is None else resolved.measure(restart.clean_rows)
    for group in plan:
        if group.edges[0] not in found or group.edges[-1] not in found:
            values = runner.measure(group, mode, grain, batch_tokens)
            found.update(zip(group.edges, values, strict=True))
            kept.add(group.edges, values)
        if progress is not None:
            progress(min(sum(1 for _ in found), total), total)
    kept.write()
    chosen = sorted({group.layer for group in plan})
    values, axes = _table(found, chosen, visible, grain)
    labels: dict[str, Sequence[Any]] = {"layer": chosen}
    if "query_pos" in axes:
        labels["query_pos"] = tokens[0]
    if "key_pos" in axes:
        labels["key_pos"] = tokens[1]
    return Scores(
        values=values,
        axes=axes,
        method="edge_effect" if grain == "edge" else f"{grain}_effect",
        unit=resolved.unit,
        sign="signed",
        labels=labels,
        target=resolved.targets[0],
        params={"mode": mode, "grain": grain, "stream": stream},
        provenance={
            "model": lm.info.name,
            "dtype": lm.info.dtype,
            "kernel": lm.info.attn_implementation,
            "prompt": prompt_label(one),
            "route": route_taken,
            "route_reason": reason,
            "seconds": time.perf_counter() - began,
        },
        checks={"clean": float(clean), "restart_error": error, "edges": total},
    )


# ------------------------------------------------------------------------------------------------------- planning
def _visible(
    lm: LoadedModel, resolved: ResolvedTarget, stream: str
) -> tuple[dict[int, Tensor], dict[int, BlockSites], tuple[list[str], list[str]]]:
    """For each layer [head, query, key] boolean: the edges that exist; the layers' sites; the token texts."""
    sites = {int(site.layer): site for site in sites_of(lm.model) if site.stream == stream and site.layer is not None}
    if not sites:
        raise UnsupportedModelError(f"{lm.info.architecture} has no {stream} attention in numbered layers")
    for site in sites.values():
        if site.calls != 1:
            raise UnsupportedModelError(f"{site.attention} runs {site.calls} times in one forward: a shared block")
    visible: dict[int, Tensor] = {}

    def look(call: AttentionCall) -> None:
        if stream_of(lm.model, call.module_name, call.kind == "cross") == stream:
            shape = (call.n_heads, call.n_queries, call.n_keys)
            visible[call.layer] = allowed_edges(call).expand(1, *shape)[0].cpu()

    with evaluating(lm.model), capture(lm.model, on_call=look):
        lm.run(resolved.inputs)
    own = resolved.encoded if resolved.encoded.decoder is None or stream == "encoder" else resolved.encoded.decoder
    source = resolved.encoded if stream == "cross" else own
    return visible, sites, (list(own.tokens[0]), list(source.tokens[0]))


def allowed_edges(call: AttentionCall) -> Tensor:
    """Broadcastable to [1, head, query, key]: what the mask allows; what is not 0 where only a softmax was seen."""
    if call.q is None:
        return call.pattern > 0
    if call.is_causal:
        return torch.ones(call.n_queries, call.n_keys, dtype=torch.bool, device=call.z.device).tril()
    if call.mask is None:
        return torch.ones(1, 1, dtype=torch.bool, device=call.z.device)
    return call.mask if call.mask.dtype == torch.bool else ~forbidden_entries(call.mask)


def _plan(
    visible: dict[int, Tensor],
    sites: dict[int, BlockSites],
    layers: Sequence[int] | None,
    queries: Sequence[int] | None,
    edges: Iterable[Edge] | None,
    grain: Grain,
) -> list[_Group]:
    wanted = sorted(sites) if layers is None else sorted({int(layer) for layer in layers})
    for layer in wanted:
        if layer not in sites:
            raise ShapeError(f"layer {layer} does not exist; the model has layers {min(sites)} to {max(sites)}")
    listed: dict[tuple[int, int], list[Edge]] = {}

    def put(layer: int, start: int, edge: Edge) -> None:
        listed.setdefault((layer, start), []).append(edge)

    if edges is not None:
        if grain != "edge":
            raise ValueError("edges= names single edges; use it with grain='edge'")
        for edge in dict.fromkeys(tuple(int(part) for part in edge) for edge in edges):
            layer, head, query, key = edge
            if layer not in visible or any(
                not 0 <= part < size for part, size in zip(edge[1:], visible[layer].shape, strict=True)
            ):
                raise ShapeError(f"edge {edge} is outside the model and the prompt")
            if not bool(visible[layer][head, query, key]):
                raise ShapeError(f"edge {edge} does not exist: the mask hides key {key} from query {query}")
            if layer in wanted:
                put(layer, query, (layer, head, query, key))
    else:
        for layer in wanted:
            there = visible[layer]
            n_heads, n_queries, _ = there.shape
            if grain == "edge":
                asked = range(n_queries) if queries is None else [_position(query, n_queries) for query in queries]
                for query in sorted(set(asked)):
                    for head, key in there[:, query].nonzero().tolist():
                        put(layer, query, (layer, head, query, key))
            elif grain == "key":
                for head in range(n_heads):
                    for key in there[head].any(0).nonzero()[:, 0].tolist():
                        first = int(there[head, :, key].int().argmax())
                        put(layer, first, (layer, head, ALL, key))
            elif grain == "head":
                for head in range(n_heads):
                    put(layer, 0, (layer, head, ALL, ALL))
            else:
                put(layer, 0, (layer, ALL, ALL, ALL))
    if not listed:
        raise ShapeError("there is no edge to measure; give layers, queries or edges that exist")
    return [_Group(layer, start, tuple(found)) for (layer, start), found in sorted(listed.items())]


def _position(query: int, n_queries: int) -> int:
    if not -n_queries <= query < n_queries:
        raise ShapeError(f"query {query} is outside a prompt of {n_queries} tokens")
    return query % n_queries


# ------------------------------------------------------------------------------------------------------ measuring
@dataclass(eq=False)
class _Runner:
    """Measures groups, by restarts or by whole forwards."""

    lm: LoadedModel
    resolved: ResolvedTarget
    sites: dict[int, BlockSites]
    restart: Restart | None

    def measure(self, group: _Group, mode: Mode, grain: Grain, batch_tokens: int) -> list[float]:
        """Effects of the group's edges in order, each against the unedited row of its own batch."""
        n = self.resolved.encoded.input_ids.shape[1]
        width = n - group.query if self.restart is not None else n
        size = rows_of_batch(batch_tokens, width, n)
        effects: list[float] = []
        device = self.resolved.encoded.input_ids.device
        for part in _chunks(group.edges, size):
            table = torch.tensor([(0, NONE, 0, 0), *part], device=device)
            start = group.query if self.restart is not None else 0
            variants = Variants(table[:, 1], table[:, 2], table[:, 3], mode, first_query=start)
            m = self._m(group, variants, one_query=grain == "edge")
            effects.extend((m[0] - m[1:]).tolist())
        return effects

    def _m(self, group: _Group, variants: Variants, *, one_query: bool) -> Tensor:
        if self.restart is not None:
            return self.resolved.measure(self.restart.logits(group.layer, group.query, variants, one_query=one_query))
        rows = len(variants)
        inputs = {name: value.expand(rows, *value.shape[1:]) for name, value in self.resolved.inputs.items()}
        site = self.sites[group.layer]
        with losing_edges(self.lm.model, site.attention, site.stream) as listener:
            listener.variants = variants
            output = self.lm.run(inputs)
            if listener.seen != 1:
                raise UnsupportedModelError(
                    f"{site.attention} was not reached: a compiled or exported model cannot be edited"
                )
        return self.resolved.value(output)


def _runner(
    lm: LoadedModel, resolved: ResolvedTarget, sites: dict[int, BlockSites], stream: str, route: Route
) -> tuple[_Runner, str, str, float | None]:
    """The way to measure, its name, why it was taken, and the error of a restarted unedited run."""
    if route not in ("auto", "restart", "forwards"):
        raise ValueError(f"route is {route!r}; expected 'auto', 'restart' or 'forwards'")
    error: float | None = None
    reason = "asked for"
    if route != "forwards":
        try:
            if resolved.positions is None or resolved.encoded.decoder is not None or stream != "self":
                raise UnsupportedModelError(f"a {resolved.kind} target on {lm.info.architecture} is not read there")
            restart = Restart(lm, resolved.encoded.input_ids, resolved.positions[0].tolist())
            error = restart.error()
            limit = RESTART_TOLERANCE * (1 if lm.info.dtype in ("float32", "float64") else 100)
            if not error <= limit:
                raise UnsupportedModelError(f"a restarted unedited run is off by {error:.1e} of the logits' spread")
            return _Runner(lm, resolved, sites, restart), "restart", "exact on unedited runs", error
        except UnsupportedModelError as refusal:
            if route == "restart":
                raise
            reason = str(refusal)
    return _Runner(lm, resolved, sites, None), "forwards", reason, error


def _chunks(edges: Sequence[Edge], size: int) -> Iterator[Sequence[Edge]]:
    for start in range(0, len(edges), size):
        yield edges[start : start + size]


def _table(
    found: dict[Edge, float], layers: list[int], visible: dict[int, Tensor], grain: Grain
) -> tuple[Tensor, tuple[str, ...]]:
    n_heads, n_queries, n_keys = (max(visible[layer].shape[axis] for layer in layers) for axis in range(3))
    axes: dict[Grain, tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]] = {
        "edge": (("layer", "head", "query_pos", "key_pos"), (n_heads, n_queries, n_keys), (1, 2, 3)),
        "key": (("layer", "head", "key_pos"), (n_heads, n_keys), (1, 3)),
        "head": (("layer", "head"), (n_heads,), (1,)),
        "layer": (("layer",), (), ()),
    }
    names, sizes, parts = axes[grain]
    values = torch.full((len(layers), *sizes), float("nan"))
    place = {layer: index for index, layer in enumerate(layers)}
    for edge, effect in found.items():
        values[(place[edge[0]], *(edge[part] for part in parts))] = effect
    return values, names


# --------------------------------------------------------------------------------------------------------- resuming
class _Kept:
    """Finished groups in a file, written every ten seconds and at the end, whole or not at all."""

    def __init__(self, path: str | Path | None, fingerprint: str) -> None:
        self._path = None if path is None else Path(path)
        self._fingerprint = fingerprint
        self.found: dict[Edge, float] = {}
        self._written = time.monotonic()
        if self._path is not None and self._path.exists():
            stored = torch.load(self._path, weights_only=True)
            if stored.get("fingerprint") != fingerprint:
                raise RunFolderError(
                    f"{self._path} holds edge effects of another model, prompt, target or mode; give another file"
                )
            self.found = {tuple(edge): value for edge, value in zip(stored["edges"], stored["values"], strict=True)}

    def add(self, edges: Sequence[Edge], values: Sequence[float]) -> None:
        """Keep the effects of one group."""
        if self._path is None:
            return
        self.found.update(zip(edges, values, strict=True))
        if time.monotonic() - self._written > 10:
            self.write()

    def write(self) -> None:
        """Write what was found so far."""
        if self._path is None:
            return
        beside = self._path.with_name(f"{self._path.name}.part")
        torch.save(
            {
                "fingerprint": self._fingerprint,
                "edges": [list(edge) for edge in self.found],
                "values": list(self.found.values()),
            },
            beside,
        )
        beside.replace(self._path)
        self._written = time.monotonic()


def _fingerprint(lm: LoadedModel, prompt: Prompt, resolved: ResolvedTarget, *rest: Any) -> str:
    """What makes two calls the same: model, input, target, arguments and the edges themselves."""
    ids = resolved.encoded.input_ids.tolist()
    said = repr((lm.info.as_dict(), prompt_label(prompt), ids, resolved.targets, rest))
    return hashlib.sha256(said.encode()).hexdigest()

"""`card`: what kind of attention does each layer of a model compute?

Measured in one probing forward: heads, widths, kernel and dtype come from the tensors that reached the attention
function, masks from the keys that it let through (`explain.visible`), cache bytes from the cache that the forward
filled. A second forward on one token repeated tells how positions enter (`explain.position_probe`). The configuration
is read last and only to be compared: where it says something else, the card says both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from attndiag.errors import NothingCapturedError, UnsupportedModelError
from attndiag.explanations.card_claims import Difference, compare_with_config
from attndiag.explanations.implied_maps import implied_maps
from attndiag.explanations.position_probe import positions_of
from attndiag.explanations.probing import Probe, as_loaded, probe_of, run_probe
from attndiag.explanations.visible import Visible, asking_kernels, shape_of, visible_of
from attndiag.hooks.capture_context import capture
from attndiag.hooks.captured import Captured
from attndiag.hooks.record import AttentionCall
from attndiag.hooks.structure import MODEL_CACHE_NAMES, layer_of
from attndiag.models.access import accepts
from attndiag.models.load import LoadedModel

if TYPE_CHECKING:
    import pandas as pd

LENGTH = 32
LONGEST = 512


@dataclass(frozen=True)
class LayerCard:
    """One attention call, or one layer that mixes tokens without a softmax.

    Attributes
    ----------
    module_name, module_class, layer, call_index : which one.
    kind : `"self"`, `"cross"`, or `"mixer"` for layers without softmax weights.
    route : how attndiag sees it (`"routed"`, `"traced"`); None for mixers.
    kernel, dtype : of the attention function that ran.
    query_heads, kv_heads, d_head, d_value : from its tensors. kv heads are those that reach the kernel; some families
        repeat them before.
    mask : what the visible keys look like (`"causal"`, `"causal, window 128"`, `"bidirectional"`, ...).
    causal : no query reads the future.
    window_seen : width found by intervention; None where the probe of `length` tokens showed no end.
    window_told : width that the kernel was given.
    positions : how positions enter (`"rope"`, `"alibi"`, `"relative bias"`, `"relative"`, `"absolute"`, `"none"`,
        `"unclear"`).
    scale, softcap, sinks : of the scores; None where q and k are not seen, or where the call has none.
    output : name of the output projection; None with the reason in `limits`.
    certified : the record reproduces what the model computed.
    measurable : what can be measured here.
    limits : what cannot, and why.
    attends : what the keys are: `"tokens"`, `"channels"` or `"states"` (see `AttentionCall`); masks, positions and
        claims of the configuration are about tokens only.
    """

    module_name: str
    module_class: str
    layer: int | None
    call_index: int
    kind: str
    route: str | None = None
    kernel: str | None = None
    dtype: str | None = None
    query_heads: int | None = None
    kv_heads: int | None = None
    d_head: int | None = None
    d_value: int | None = None
    mask: str | None = None
    causal: bool | None = None
    window_seen: int | None = None
    window_told: int | None = None
    positions: str = "unclear"
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    output: str | None = None
    certified: bool | None = None
    measurable: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    attends: str = "tokens"


@dataclass(frozen=True, eq=False)
class AttentionCard:
    """What `card` found.

    Attributes
    ----------
    model, architecture, dtype, device, n_parameters, attn_implementation : of the model; the last as its config says.
    length : tokens of the probe.
    layers : one for each attention call or mixer, in the order in which they ran.
    cache_bytes_per_token : bytes that one more token adds to the key/value cache, for one row, while no window is
        full; None where the model keeps no cache.
    cache_bytes_fixed : bytes of state that do not grow with tokens (recurrent layers), for one row.
    differences : where the configuration says something else than the probe.
    maps : facts about the map that each mixer without a softmax implies (see `implied_maps`), or the reason why it has
        none; empty unless asked for.
    """

    model: str
    architecture: str
    dtype: str
    device: str
    n_parameters: int
    attn_implementation: str | None
    length: int
    layers: tuple[LayerCard, ...]
    cache_bytes_per_token: int | None
    cache_bytes_fixed: int
    differences: tuple[Difference, ...]
    maps: tuple[dict[str, Any], ...] = ()

    def to_frame(self) -> pd.DataFrame:
        """One row for each layer."""
        import pandas as pd

        return pd.DataFrame([asdict(layer) for layer in self.layers])

    def to_dict(self) -> dict[str, Any]:
        """Everything, JSON-able."""
        own = {name: value for name, value in vars(self).items() if name not in ("layers", "differences")}
        return {
            **own,
            "layers": [asdict(layer) for layer in self.layers],
            "differences": [asdict(difference) for difference in self.differences],
        }

    def to_text(self) -> str:
        """A page of plain text; layers that are alike share a line."""
        from attndiag.explanations.card_text import card_text

        return card_text(self)

    def to_html(self) -> str:
        """The same as a fragment of HTML without scripts or links."""
        from attndiag.explanations.card_text import card_html

        return card_html(self)

    def _repr_html_(self) -> str:
        return self.to_html()

    def __repr__(self) -> str:
        return (
            f"AttentionCard({self.model}: {len(self.layers)} layers, {len(self.differences)} differences from its "
            "config)"
        )


def card(
    model: nn.Module | LoadedModel,
    *,
    inputs: Mapping[str, Any] | None = None,
    length: int | None = None,
    seed: int = 0,
    maps: bool = False,
) -> AttentionCard:
    """Probe a model and describe the attention of every layer.

    Parameters
    ----------
    model : a PyTorch module or what `attndiag.load` returned.
    inputs : one example batch for models that do not run on token ids alone.
    length : tokens of the probe; by default 32, or as long as it takes to see a window of up to 508 keys.
    seed : of the probe.
    maps : also find the map that each mixer without a softmax implies, on 12 tokens; some seconds on a large model.

    Raises
    ------
    UnsupportedModelError : the model does not run on the probe; the text says which arguments its forward takes.
    """
    lm = as_loaded(model)
    probe = probe_of(lm, batch=2, length=_affordable(lm, length or LENGTH), seed=seed, inputs=inputs)
    captured, visible, output = _probe(lm, probe)
    if inputs is None and length is None:
        told = [v.window for v in visible if v.window is not None]
        wanted = max((w + 4 for w in told if w + 4 <= LONGEST), default=0)
        if wanted > LENGTH:
            probe = probe_of(lm, batch=2, length=_affordable(lm, wanted), seed=seed)
            captured, visible, output = _probe(lm, probe)
    positions = positions_of(lm, probe)
    layers = [
        _call_card(call, seen, positions.get((call.module_name, call.call_index), "unclear"))
        for call, seen in zip(captured.calls, visible, strict=True)
    ]
    layers += [_mixer_card(lm, refusal) for refusal in captured.refusals]
    order = {name: place for place, (name, _) in enumerate(lm.model.named_modules())}
    layers.sort(key=lambda layer: order[layer.module_name])
    growing, fixed = _cache_bytes(output)
    return AttentionCard(
        model=lm.info.name,
        architecture=lm.info.architecture,
        dtype=lm.info.dtype,
        device=lm.info.device,
        n_parameters=lm.info.n_parameters,
        attn_implementation=lm.info.attn_implementation,
        length=int(probe.first.shape[1]),
        layers=tuple(layers),
        cache_bytes_per_token=growing,
        cache_bytes_fixed=fixed,
        differences=compare_with_config(lm.config, layers, int(probe.first.shape[1])),
        maps=_map_facts(lm, inputs, seed) if maps else (),
    )


def _map_facts(lm: LoadedModel, inputs: Mapping[str, Any] | None, seed: int) -> tuple[dict[str, Any], ...]:
    found, refused = implied_maps(lm, inputs=inputs, seed=seed)
    reasons = [{"module_name": name, "refused": reason} for name, reason in refused.items()]
    return (*(each.facts() for each in found.values()), *reasons)


def _probe(lm: LoadedModel, probe: Probe) -> tuple[Captured, list[Visible], Any]:
    """One forward: what was captured, who may read whom, and the output with its cache."""
    options = {"use_cache": True} if accepts(lm.model, "use_cache") else {}
    output = None
    captured = Captured()
    try:
        with asking_kernels(lm.model) as kernels, capture(lm) as captured:
            output = run_probe(lm, probe, **options)
    except NothingCapturedError:
        if not captured.refusals:
            raise
    return captured, visible_of(captured.calls, kernels), output


def _call_card(call: AttentionCall, visible: Visible, positions: str) -> LayerCard:
    about_tokens = call.kind == "self" and call.attends == "tokens"
    shape = shape_of(visible) if about_tokens else None
    certificate = call.certificate
    measurable, limits = _measurable(call)
    return LayerCard(
        module_name=call.module_name,
        module_class=call.module_class,
        layer=call.layer,
        call_index=call.call_index,
        kind=call.kind,
        route=call.route,
        kernel=call.kernel,
        dtype=str(call.z.dtype).removeprefix("torch."),
        query_heads=call.n_heads,
        kv_heads=call.n_kv_heads,
        d_head=None if call.q is None else call.q.shape[-1],
        d_value=call.v.shape[-1],
        mask=shape.describe() if shape is not None else _mask_of_others(call),
        causal=None if shape is None else shape.causal,
        window_seen=None if shape is None else shape.window,
        window_told=call.window,
        positions="none" if call.attends != "tokens" or (not about_tokens and positions == "unclear") else positions,
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks is not None,
        output=None if call.output is None else call.output.module_name,
        certified=certificate.passed,
        measurable=measurable,
        limits=(*limits, *certificate.failures),
        attends=call.attends,
    )


def _mask_of_others(call: AttentionCall) -> str:
    if call.kind == "cross":
        return "all keys of the other sequence"
    return f"none: its keys are {call.attends}, not tokens"


def _measurable(call: AttentionCall) -> tuple[tuple[str, ...], tuple[str, ...]]:
    can, cannot = ["weight", "value_norm"], []
    if call.output is None:
        cannot.append(f"contributions: {call.output_reason}")
    else:
        can += ["head_contribution", "projection"]
        if call.output_gate is None:
            can.insert(-1, "contribution")
        else:
            cannot.append("contribution by the Gram form: an output gate depends on the query; the direct form works")
        site = call.site
        if site.place == "unknown":
            cannot.append(f"contribution_residual, alti: {site.reason}")
        else:
            can += ["contribution_residual", "alti"]
            if site.place == "post" or site.branch_norm is not None:
                can.append("contribution_norm")
            else:
                cannot.append("contribution_norm: no norm follows the sum (norm='next' takes the one that reads it)")
    if call.q is None:
        cannot.append("scores: the model computes its softmax itself, q and k are not seen")
    else:
        can.append("scores")
    if call.attends == "tokens":
        can += ["edge knock-out", "value zeroing", "head ablation"]
    else:
        cannot.append(f"anything by token: its keys are {call.attends}; its weights say nothing about tokens")
    return tuple(can), tuple(cannot)


def _mixer_card(lm: LoadedModel, refusal: Any) -> LayerCard:
    module = lm.model.get_submodule(refusal.module_name)
    return LayerCard(
        module_name=refusal.module_name,
        module_class=refusal.module_class,
        layer=layer_of(refusal.module_name, module, lm.model),
        call_index=0,
        kind="mixer",
        measurable=("token replacement", "gradients", "layer ablation", "implied map where it is linear in its values"),
        limits=(f"weights and contributions: {refusal.reason}",),
    )


def _cache_bytes(output: Any) -> tuple[int | None, int]:
    """(bytes a token, bytes of fixed state), for one row; (None, 0) without a cache."""
    # the older names are only asked for where the newer one is not there: asking warns
    name = next((name for name in (*MODEL_CACHE_NAMES, "cache_params") if name in (output or {})), None)
    cache = None if name is None else output[name]
    if cache is None:
        return None, 0
    growing = fixed = 0
    for part in _cache_parts(cache):
        keys, values = getattr(part, "keys", None), getattr(part, "values", None)
        if isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.ndim == 4 and keys.numel():
            growing += sum(t.numel() * t.element_size() // (t.shape[0] * t.shape[2]) for t in (keys, values))
        else:
            fixed += _state_bytes(_tensors(vars(part).values()))
    beside = [value for name, value in vars(cache).items() if name != "layers"] if hasattr(cache, "layers") else []
    return growing, fixed + _state_bytes(_tensors(beside))


def _state_bytes(states: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() // t.shape[0] for t in states if t.ndim > 1 and t.shape[0])


def _tensors(held: Iterable[Any]) -> list[Tensor]:
    """Tensors among what a cache holds; recurrent layers keep theirs in dictionaries, some caches in lists."""
    found: list[Tensor] = []
    for value in held:
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        found += [each for each in inside if isinstance(each, Tensor)]
    return found


def _cache_parts(cache: Any) -> list[Any]:
    """The layers of a cache; of its self-attention half for encoder-decoders (the other half does not grow)."""
    inner = getattr(cache, "self_attention_cache", cache)
    layers = getattr(inner, "layers", None)
    return list(layers) if isinstance(layers, list | tuple) else [inner]


def _affordable(lm: LoadedModel, length: int) -> int:
    limit = getattr(lm.config, "max_position_embeddings", None)
    usable = limit - 2 if isinstance(limit, int) and limit > 8 else LONGEST  # some families keep two positions
    if length < 4:
        raise UnsupportedModelError(f"a probe of {length} tokens shows nothing; give at least 4")
    return min(length, usable)

"""What a configuration claims about attention, held against what the probe saw.

A difference is not always a fault: some families repeat their key/value heads before the kernel, some run eagerly by
default. `remark` says what is known about it; an empty remark means that the configuration and the model disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from attndiag.explanations.attention_card import LayerCard

_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_SOFT_CAP = ("attn_logit_softcapping",)


@dataclass(frozen=True)
class Difference:
    """The configuration says one thing and the probe another.

    Attributes
    ----------
    what : the field of the configuration.
    claimed, seen : its value and the measured one.
    modules : where.
    remark : an explanation that the probe supports; empty where there is none.
    """

    what: str
    claimed: str
    seen: str
    modules: tuple[str, ...]
    remark: str = ""

    @property
    def explained(self) -> bool:
        """True where the difference is known and harmless."""
        return bool(self.remark)

    def __str__(self) -> str:
        where = self.modules[0] if len(self.modules) == 1 else f"{len(self.modules)} modules from {self.modules[0]}"
        tail = f" ({self.remark})" if self.remark else ""
        return f"{self.what}: the config says {self.claimed}, the probe saw {self.seen} in {where}{tail}"


def compare_with_config(config: Any, layers: Sequence[LayerCard], length: int) -> tuple[Difference, ...]:
    """Every claim of a configuration that the probe contradicts."""
    if config is None:
        return ()
    text = _text_config(config)
    found: dict[tuple[str, str, str, str], list[str]] = {}

    def note(what: str, claimed: Any, seen: Any, layer: LayerCard, remark: str = "") -> None:
        found.setdefault((what, str(claimed), str(seen), remark), []).append(layer.module_name)

    repeated = {layer.module_name for layer in layers if layer.call_index > 0}
    for layer in layers:
        if layer.kind == "mixer" or layer.query_heads is None or layer.attends != "tokens":
            continue
        heads = _claim(text, layer, _HEADS)
        if heads is not None and layer.query_heads != heads[1]:
            halves = layer.module_name in repeated and layer.query_heads * 2 == heads[1]
            remark = "two calls a layer, half of the heads each" if halves else ""
            note(heads[0], heads[1], layer.query_heads, layer, remark)
        _kv_heads(text, layer, note)
        d_head = getattr(text, "head_dim", None)
        if _is_count(d_head) and layer.d_head is not None and layer.d_head != d_head:
            rope = getattr(text, "qk_rope_head_dim", None)
            note("head_dim", d_head, layer.d_head, layer, "the config counts the rotated part only" if rope else "")
        cap = next((value for name in _SOFT_CAP if (value := getattr(text, name, None)) is not None), None)
        if layer.route == "routed" and cap is not None and layer.softcap != cap:
            note("attn_logit_softcapping", cap, layer.softcap, layer)
        _window(text, layer, length, note)
        _kernel(config, layer, note)
    return tuple(
        Difference(what, claimed, seen, tuple(names), remark) for (what, claimed, seen, remark), names in found.items()
    )


def _kv_heads(text: Any, layer: LayerCard, note: Any) -> None:
    claim = _claim(text, layer, _KV_HEADS)
    if claim is None or layer.kv_heads == claim[1]:
        return
    remark = ""
    if layer.kv_heads == layer.query_heads and claim[1] < (layer.query_heads or 0) and layer.route == "traced":
        remark = "the model repeats them before its softmax"
    elif layer.kv_heads == 1 and getattr(text, "multi_query", False):
        remark = "multi_query shares one among all heads"
    elif getattr(text, "kv_lora_rank", None):
        remark = "the model expands a latent before the kernel"
    note(claim[0], claim[1], layer.kv_heads, layer, remark)


def _window(text: Any, layer: LayerCard, length: int, note: Any) -> None:
    claimed = claimed_window(text, layer.layer)
    if layer.kind != "self" or claimed is None or not layer.causal:
        return
    if claimed > length - 1:
        return  # the probe is too short to contradict it
    seen = layer.window_seen
    if seen == claimed:
        return
    note("sliding_window", claimed, "no window" if seen is None else f"{seen} keys", layer)


def claimed_window(text: Any, layer: int | None) -> int | None:
    """Window of one layer as the configuration tells it; None where it claims none for that layer."""
    window = getattr(text, "sliding_window", None)
    if not _is_count(window) or getattr(text, "use_sliding_window", True) is False:
        return None
    kinds = getattr(text, "layer_types", None)
    if isinstance(kinds, list | tuple) and layer is not None and layer < len(kinds):
        return window if "sliding" in str(kinds[layer]) else None
    return window


def _kernel(config: Any, layer: LayerCard, note: Any) -> None:
    asked = getattr(config, "_attn_implementation", None)
    if asked is None or layer.kernel is None or layer.route != "routed":
        return
    if asked.split("_")[0] not in layer.kernel and layer.kernel not in asked:
        note("attn_implementation", asked, layer.kernel, layer, "this layer runs its own attention function")


def _claim(text: Any, layer: LayerCard, names: tuple[str, ...]) -> tuple[str, int] | None:
    parts = layer.module_name.split(".")
    for name in names:
        side = name.split("_")[0]
        if side in ("encoder", "decoder") and side not in parts:
            continue
        value = getattr(text, name, None)
        if isinstance(value, list | tuple) and layer.layer is not None and layer.layer < len(value):
            value = value[layer.layer]
        if _is_count(value):
            return name, value
    return None


def _text_config(config: Any) -> Any:
    """The part of a configuration that describes the text model; the whole one where there is one part."""
    try:
        return config.get_text_config()
    except (AttributeError, ValueError):
        return config


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0

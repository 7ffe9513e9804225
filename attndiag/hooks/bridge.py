"""TransformerLens as a source: the hook points of a `TransformerBridge` become the same `AttentionCall` records.

Read are `hook_pattern`, `hook_v`, `hook_z`, the output projection, and of the block its residual stream and norms. A
bridge's `hook_q` and `hook_k` stand before the position encoding, so q and k are not recorded; the pattern is the one
that the model used. A layer without one of the hooks (fused attention kernels have no pattern) is refused by name.

`to_cache_dict` is the way back: captured tensors under TransformerLens names, for tools that read an ActivationCache.
`to_circuitsvis` gives the patterns of one prompt as the arguments of CircuitsVis' `attention_heads`. Both take calls of
any route.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attndiag.errors import ShapeError, UnsupportedModelError
from attndiag.hooks.record import AttentionCall
from attndiag.hooks.residual import BlockTrace, SeenChild, SeenNorm
from attndiag.models.projections import OutputProjection

if TYPE_CHECKING:
    from attndiag.hooks.recorder import Recorder

_NEEDED = ("attn.hook_pattern", "attn.hook_v", "attn.hook_z", "attn.hook_out")
_WANTED = ("hook_in", "hook_out", "ln1.hook_in", "ln1_post.hook_in", "ln2.hook_in", "mlp.hook_out", "ln2_post.hook_in")


@contextmanager
def bridge_listening(recorder: Recorder, bridge: Any, layers: Collection[int] | None) -> Iterator[None]:
    """Note every forward of a bridge's blocks until the context is left.

    Raises
    ------
    UnsupportedModelError : a block has no such hook point, or one of them did not fire.
    """
    blocks = list(bridge.blocks)
    wanted = [index for index in range(len(blocks)) if layers is None or index in layers]
    for index in wanted:
        missing = [name for name in _NEEDED if not _has(blocks[index], name)]
        if missing:
            raise UnsupportedModelError(
                f"blocks.{index} of this bridge has no {', '.join(missing)}; capture the transformers model instead, "
                'or boot the bridge with eager attention (attn_implementation="eager")'
            )
    seen: dict[int, dict[str, Tensor]] = {index: {} for index in wanted}
    counts = dict.fromkeys(wanted, 0)

    def keep(index: int, name: str) -> Any:
        def hook(tensor: Tensor, hook: Any) -> None:  # noqa: ARG001 - TransformerLens passes it by name
            seen[index][name] = tensor
            if name == "hook_out":
                _finish(recorder, bridge, index, counts[index], seen[index])
                counts[index] += 1
                seen[index] = {}

        return hook

    hooks = [
        (f"blocks.{index}.{name}", keep(index, name))
        for index in wanted
        for name in (*_NEEDED, *_WANTED)
        if _has(blocks[index], name)
    ]
    with bridge.hooks(fwd_hooks=hooks):
        yield
    idle = [index for index in wanted if seen[index]]
    if idle:
        raise UnsupportedModelError(
            f"blocks {idle} of the bridge were entered and not left; was the forward cut short?"
        )


def to_cache_dict(calls: Sequence[AttentionCall]) -> dict[str, Tensor]:
    """Captured calls under TransformerLens names (`blocks.3.attn.hook_pattern`, ...).

    hook_pattern [batch, head, query_pos, key_pos]; hook_v [batch, key_pos, kv_head, d_value]; hook_z [batch, query_pos,
    head, d_value]; hook_attn_out [batch, query_pos, d_model] and hook_resid_pre where known.

    Raises
    ------
    UnsupportedModelError : calls without a layer number, or several calls of one layer: their names would collide.
    """
    found: dict[str, Tensor] = {}
    for call in calls:
        if call.layer is None:
            raise UnsupportedModelError(f"{call.module_name} sits in no numbered block, so it has no name there")
        name = f"blocks.{call.layer}"
        if f"{name}.attn.hook_pattern" in found:
            raise UnsupportedModelError(
                f"layer {call.layer} made several calls; give those of one stack and one forward only"
            )
        found[f"{name}.attn.hook_pattern"] = call.pattern
        found[f"{name}.attn.hook_v"] = call.v.transpose(1, 2)
        found[f"{name}.attn.hook_z"] = call.z
        if call.attn_out is not None:
            found[f"{name}.hook_attn_out"] = call.attn_out
        if call.site.resid_pre is not None:
            found[f"{name}.hook_resid_pre"] = call.site.resid_pre
    return found


def to_circuitsvis(calls: Sequence[AttentionCall], tokens: Sequence[str], *, row: int = 0) -> dict[str, Any]:
    """The patterns of one prompt as keyword arguments of `circuitsvis.attention.attention_heads`.

    Parameters
    ----------
    calls : self-attention calls of one forward, any number of layers.
    tokens : texts of the positions that are tokens, as `lm.encode(prompt).tokens[row]` gives them.
    row : which row of the batch; its padding is cut away.

    Returns
    -------
    attention : float32 array [head, destination, source], heads of all calls one after the other, mass in [0, 1].
    tokens : list of texts. attention_head_names : `"L3H5"` for each head.

    Raises
    ------
    ShapeError : the number of tokens is not that of the call, or the row does not exist.
    UnsupportedModelError : a call whose queries and keys are not the same tokens (cross-attention, a cache, a call
        outside numbered blocks).
    """
    patterns, names = [], []
    for call in calls:
        if call.layer is None or call.kind == "cross" or call.attends != "tokens" or call.n_queries != call.n_keys:
            raise UnsupportedModelError(
                f"{call.module_name} (call {call.call_index}): {call.n_queries} queries read {call.n_keys} keys "
                f"({call.kind}, layer {call.layer}, keys are {call.attends}); CircuitsVis shows how the tokens of one "
                "prompt read each other, in numbered layers"
            )
        if not 0 <= row < call.z.shape[0]:
            raise ShapeError(f"row is {row}, but the batch holds {call.z.shape[0]}")
        pattern = call.pattern[row].detach().float().cpu()
        if call.query_valid is not None:
            real = call.query_valid[row].cpu()
            pattern = pattern[:, real][:, :, real]
        if pattern.shape[1] != len(tokens):
            raise ShapeError(f"{call.module_name} has {pattern.shape[1]} tokens in row {row}; {len(tokens)} were given")
        patterns.append(pattern)
        names += [f"L{call.layer}H{head}" for head in range(call.n_heads)]
    if not patterns:
        raise UnsupportedModelError("to_circuitsvis needs at least one call")
    return {"attention": torch.cat(patterns).numpy(), "tokens": list(tokens), "attention_head_names": names}


def _finish(recorder: Recorder, bridge: Any, index: int, call_index: int, seen: dict[str, Tensor]) -> None:
    missing = [name for name in _NEEDED if name not in seen]
    if missing:
        raise UnsupportedModelError(f"blocks.{index}: {', '.join(missing)} did not fire in this forward")
    block = bridge.blocks[index]
    pattern, z = seen["attn.hook_pattern"], seen["attn.hook_z"]
    heads = pattern.shape[1]
    if z.ndim == 3:
        z = z.unflatten(-1, (heads, -1))
    v = seen["attn.hook_v"]
    if v.ndim == 3:
        v = v.unflatten(-1, (-1, z.shape[-1]))
    trace = _trace(index, block, seen)
    recorder.deliver(
        AttentionCall(
            module_name=f"blocks.{index}.attn",
            module_class=type(block.attn).__name__,
            layer=index,
            call_index=call_index,
            kind="self",
            route="bridge",
            kernel="transformer_lens",
            q=None,
            k=None,
            v=v.transpose(1, 2),
            z=z,
            scale=None,
            traced_pattern=pattern,
            output=OutputProjection(
                f"blocks.{index}.attn.o", _core(block.attn.o), heads, z.shape[-1], device=z.device, dtype=z.dtype
            ),
            attn_out=seen["attn.hook_out"],
            trace=trace,
        )
    )


def _trace(index: int, block: Any, seen: dict[str, Tensor]) -> BlockTrace | None:
    """The block's tensors in the order of their names; the fit of the residual decides what they mean."""
    if "hook_in" not in seen:
        return None
    trace = BlockTrace(f"blocks.{index}", seen["hook_in"], seen.get("hook_out"))
    for name in ("ln1", "attention", "ln1_post", "ln2", "ln2_post"):
        if name == "attention":
            trace.attention_order = trace.next_order()
        elif f"{name}.hook_in" in seen:
            norm = _core(getattr(block, name))
            trace.norms.append(SeenNorm(f"blocks.{index}.{name}", norm, seen[f"{name}.hook_in"], trace.next_order()))
    if "mlp.hook_out" in seen:
        trace.children.append(SeenChild(seen["mlp.hook_out"], trace.next_order()))
    return trace


def _core(component: Any) -> nn.Module:
    """The transformers module inside a bridge's component."""
    return getattr(component, "original_component", component)


def _has(block: Any, name: str) -> bool:
    part = block
    for attribute in name.split("."):
        part = getattr(part, attribute, None)
        if part is None:
            return False
    return True

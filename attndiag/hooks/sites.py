"""Which module of a model writes what: attention, output projection, feed-forward branch and block of each layer.

Found once for a model by a trial forward over a few tokens, by behaviour: the projection is the linear map that reads
the head outputs, the feed-forward branch is the last module whose output c satisfies
`stream after = stream before + m * c` for tensors of the block. Names decide nothing.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attndiag.errors import UnsupportedModelError
from attndiag.hooks.capture_context import capture
from attndiag.hooks.record import AttentionCall
from attndiag.hooks.residual import FIT_TOLERANCE
from attndiag.hooks.routed import listening_apart
from attndiag.hooks.structure import block_names, first_tensor, is_norm, module_parts, without_hooks
from attndiag.models.access import accepts, evaluating, input_embedding

_TRIAL_TOKENS = 6
_known: WeakKeyDictionary[nn.Module, tuple[BlockSites, ...]] = WeakKeyDictionary()


@dataclass(frozen=True)
class BlockSites:
    """The modules of one layer, by name.

    Attributes
    ----------
    layer, stream : which attention: `"self"`, `"cross"` or `"encoder"` (see `hooks.edit_kinds`).
    block : outermost numbered block that holds the attention; None where the module sits in none.
    attention : the attention module.
    projection : its output projection, None where there is none (`reason` says why).
    mlp : what the feed-forward branch adds to the stream is this module's output; None where nothing fits.
    place : where the norm sits (see `ResidualSite`).
    calls : attention calls of the module in one forward; edits of heads need exactly one.
    runs : how often the block runs in one forward; more than once where layers share it, and nothing of it can be
        edited as one layer.
    """

    layer: int | None
    stream: str
    block: str | None
    attention: str
    projection: str | None
    mlp: str | None
    place: str
    calls: int
    reason: str = ""
    runs: int = 1


def stream_of(model: nn.Module, name: str, cross: bool) -> str:
    """`"cross"`, `"encoder"` (of an encoder-decoder) or `"self"`."""
    if cross:
        return "cross"
    parts = module_parts(name)
    both = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return "encoder" if both and "encoder" in parts and "decoder" not in parts else "self"


def sites_of(model: nn.Module) -> tuple[BlockSites, ...]:
    """The sites of every attention layer, in the order in which they run. Found once, then remembered.

    Raises
    ------
    UnsupportedModelError : the model reads no token ids, so no trial forward can be made.
    NothingCapturedError : no layer has softmax weights.
    """
    if model not in _known:
        _known[model] = _find(model)
    return _known[model]


def site_of(model: nn.Module, layer: int, stream: str) -> BlockSites:
    """One layer's sites; raises `UnsupportedModelError` naming the layers that exist."""
    found = [site for site in sites_of(model) if site.layer == layer and site.stream == stream]
    if not found:
        there = sorted({(site.stream, site.layer) for site in sites_of(model) if site.layer is not None})
        streams = {name: [number for kind, number in there if kind == name] for name, _ in there}
        raise UnsupportedModelError(
            f"no {stream} attention at layer {layer} of {type(model).__name__}; it has "
            + "; ".join(f"{name}: {numbers[0]} to {numbers[-1]}" for name, numbers in streams.items())
        )
    if len(found) > 1:
        raise UnsupportedModelError(
            f"layer {layer} of {type(model).__name__} has {len(found)} attention modules "
            f"({', '.join(site.attention for site in found)}); edits need one"
        )
    return found[0]


def _trial_inputs(model: nn.Module) -> dict[str, Any]:
    embedding = input_embedding(model)
    if embedding is None:
        raise UnsupportedModelError(f"{type(model).__name__} reads no token ids, so its sites cannot be tried out")
    device = embedding.weight.device
    ids = (torch.arange(_TRIAL_TOKENS, device=device) + 2).remainder(embedding.weight.shape[0])[None]
    given: dict[str, Any] = {"input_ids": ids}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids
    if accepts(model, "use_cache"):
        given["use_cache"] = False
    return given


def _find(model: nn.Module) -> tuple[BlockSites, ...]:
    given = _trial_inputs(model)
    seen = _BlockWatch(model)
    calls: list[AttentionCall] = []

    def note(call: AttentionCall) -> None:
        calls.append(call)
        seen.note(call)

    with ExitStack() as stack:
        for context in (evaluating(model), torch.no_grad(), without_hooks(model), listening_apart()):
            stack.enter_context(context)
        # capture first, so that its records are complete when a block's own hook below reads them
        stack.enter_context(capture(model, on_call=note))
        stack.callback(seen.remove)
        seen.attach()
        model(**given)
    counts: dict[str, int] = {}
    for call in calls:
        counts[call.module_name] = counts.get(call.module_name, 0) + 1
    sites = []
    for call in calls:
        if call.call_index:
            continue
        block = seen.block_of(call.module_name)
        sites.append(
            BlockSites(
                layer=call.layer,
                stream=stream_of(model, call.module_name, call.kind == "cross"),
                block=block,
                attention=call.module_name,
                projection=None if call.output is None else call.output.module_name,
                mlp=None if block is None else seen.mlp.get(block),
                place=seen.place.get(call.module_name, "unknown"),
                calls=counts[call.module_name],
                reason=call.output_reason if call.output is None else "",
                runs=1 if block is None else seen.entered.get(block, 1),
            )
        )
    return tuple(sites)


class _BlockWatch:
    """Keeps the outputs of a block's parts until the block is left, then finds the feed-forward branch among them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        names = block_names(dict(model.named_modules()))
        self._blocks = sorted(name for name in names if not any(name.startswith(f"{outer}.") for outer in names))
        self._nested = names - set(self._blocks)
        self._handles: list[Any] = []
        self._inputs: dict[str, Tensor] = {}
        self._parts: dict[str, list[tuple[str, Tensor]]] = {}
        self._streams: dict[str, list[Tensor]] = {}
        self._middle: dict[str, Tensor] = {}
        self._sums: dict[str, list[Tensor]] = {}
        self.entered: dict[str, int] = {}
        self.mlp: dict[str, str] = {}
        self.place: dict[str, str] = {}

    def block_of(self, name: str) -> str | None:
        """The outermost block that holds a module."""
        return next((block for block in self._blocks if name == block or name.startswith(f"{block}.")), None)

    def attach(self) -> None:
        """Hook every block and everything in it."""
        for name in self._blocks:
            block = self._model.get_submodule(name)
            self._handles.append(block.register_forward_pre_hook(self._enter(name)))
            for inner, part in block.named_modules():
                if inner:
                    self._handles.append(part.register_forward_hook(self._keep(name, f"{name}.{inner}")))
            self._handles.append(block.register_forward_hook(self._leave(name)))

    def remove(self) -> None:
        """Take every hook off again."""
        for handle in self._handles:
            handle.remove()

    def note(self, call: AttentionCall) -> None:
        """Use what the capture knows of an attention call in this block."""
        self.place[call.module_name] = call.site.place
        block = self.block_of(call.module_name)
        if block is None or call.attn_out is None:
            return
        site = call.site
        if site.resid_pre is not None:
            mid = site.resid_pre + site.multiplier * (
                call.attn_out if site.branch_norm is None else site.branch_norm.output
            )
            # the capture reports when a block is left; its last attention is the one that the branch follows
            self._middle[block] = mid

    def _enter(self, name: str) -> Any:
        def hook(_module: nn.Module, _args: tuple) -> None:
            self.entered[name] = self.entered.get(name, 0) + 1
            self._parts[name], self._sums[name], self._streams[name] = [], [], []

        return hook

    def _keep(self, block: str, name: str) -> Any:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            tensor = first_tensor(output)
            if tensor is None or not tensor.is_floating_point() or block not in self._parts:
                return
            # copied: some families add to a branch's output in place
            self._parts[block].append((name, tensor.detach().clone()))
            if is_norm(module):
                self._streams[block].append(tensor)
                if args and isinstance(args[0], Tensor):
                    self._sums[block].append(args[0])
            elif name in self._nested:
                self._streams[block].append(tensor)

        return hook

    def _leave(self, name: str) -> Any:
        def hook(_module: nn.Module, _args: tuple, output: Any) -> None:
            left = first_tensor(output)
            middle = self._middle.pop(name, None)
            if left is not None:
                streams = [*([] if middle is None else [middle]), *self._streams[name]]
                found = _branch(self._parts[name], streams, [left, *self._sums[name]])
                if found is not None:
                    self.mlp[name] = found
            del self._parts[name], self._streams[name], self._sums[name]

        return hook


def _branch(parts: list[tuple[str, Tensor]], streams: list[Tensor], sums: list[Tensor]) -> str | None:
    """Name of the last part c with `sum = stream + m * c`, m a number; None where no part fits."""
    for name, part in reversed(parts):
        for total in sums:
            for stream in streams:
                if total.shape == stream.shape == part.shape and _fits(total, stream, part):
                    return name
    return None


def _fits(total: Tensor, stream: Tensor, part: Tensor) -> bool:
    work = torch.float64 if total.dtype == torch.float64 else torch.float32
    change, direction = (total.to(work) - stream.to(work)).reshape(-1), part.to(work).reshape(-1)
    energy, size = float(direction @ direction), float(change.abs().max())
    if energy == 0.0 or size == 0.0:
        return False
    left_over = change - (float(direction @ change) / energy) * direction
    scale = max(float(total.abs().max()), float(stream.abs().max()))
    tolerance = FIT_TOLERANCE.get(total.dtype, 1e-5)
    # small against the summands, whose rounding it holds, and against the branch, which must explain the change
    return float(left_over.abs().max()) <= min(tolerance * scale, 0.05 * size)

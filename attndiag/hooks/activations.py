"""Activations of one forward at a named site of each layer, by reference, so that gradients can be taken in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from attndiag.errors import ShapeError, UnsupportedModelError
from attndiag.hooks.capture_context import capture
from attndiag.hooks.edit_kinds import Site, Stream
from attndiag.hooks.record import AttentionCall
from attndiag.hooks.sites import BlockSites, sites_of
from attndiag.hooks.structure import first_tensor


@dataclass(eq=False)
class Activations:
    """What a forward left at one site: `values[layer]`, filled while the context runs.

    [batch, position, d_model], or [batch, position, head, d_value] for `head_out`. `calls[layer]` holds the attention
    call for `head_out`, and `projected[layer]` the very tensor that W_O returned.
    """

    values: dict[int, Tensor] = field(default_factory=dict)
    calls: dict[int, AttentionCall] = field(default_factory=dict)
    projected: dict[int, Tensor] = field(default_factory=dict)


def layers_with(model: nn.Module, site: Site, stream: Stream) -> dict[int, BlockSites]:
    """The layers that have this site, in order.

    Raises
    ------
    UnsupportedModelError : none has; the text says why.
    """
    found = [each for each in sites_of(model) if each.stream == stream and each.layer is not None]
    # two calls of one run (differential attention) leave head outputs ambiguous, and nothing else
    found = [each for each in found if each.runs == 1 and (each.calls == 1 or site != "head_out")]
    needed = {"attn_out": "projection", "mlp_out": "mlp", "head_out": "attention"}.get(site, "block")
    there = {int(each.layer): each for each in found if getattr(each, needed) is not None}  # type: ignore[arg-type]
    if not there:
        raise UnsupportedModelError(
            f"no layer of {type(model).__name__} has a {site} site for its {stream} attention (shared blocks, or no "
            "module that writes it)"
        )
    return there


@contextmanager
def recording(model: nn.Module, site: Site, layers: Collection[int], stream: Stream = "self") -> Iterator[Activations]:
    """Keep the activations of `site` at some layers of every forward within the block (the last one counts).

    Raises
    ------
    ShapeError : a layer that has no such site. UnsupportedModelError : no layer has.
    """
    there = layers_with(model, site, stream)
    missing = [layer for layer in layers if layer not in there]
    if missing:
        raise ShapeError(
            f"layer {missing[0]} has no {site} ({stream}); {type(model).__name__} has it at layers "
            f"{', '.join(map(str, there))}"
        )
    kept = Activations()
    with ExitStack() as stack:
        if site == "head_out":
            wanted = {there[layer].attention: layer for layer in layers}

            def note(call: AttentionCall) -> None:
                if call.module_name in wanted:
                    kept.calls[wanted[call.module_name]] = call
                    kept.values[wanted[call.module_name]] = call.z

            stack.enter_context(capture(model, on_call=note))
            for layer in layers:
                if there[layer].projection is not None:
                    module = model.get_submodule(str(there[layer].projection))
                    stack.callback(module.register_forward_hook(_leaving(kept.projected, layer)).remove)
        for layer in layers if site != "head_out" else ():
            name = {"attn_out": there[layer].projection, "mlp_out": there[layer].mlp}.get(site, there[layer].block)
            module = model.get_submodule(str(name))
            if site == "resid_pre":
                handle = module.register_forward_pre_hook(_entering(kept, layer), with_kwargs=True)
            else:
                handle = module.register_forward_hook(_leaving(kept.values, layer))
            stack.callback(handle.remove)
        yield kept


def _entering(kept: Activations, layer: int) -> Any:
    def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        floats = (a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point())
        kept.values[layer] = next(floats)

    return hook


def _leaving(kept: dict[int, Tensor], layer: int) -> Any:
    def hook(_module: nn.Module, _args: tuple, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is not None:
            kept[layer] = tensor

    return hook

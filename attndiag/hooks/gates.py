"""An elementwise gate between the head outputs z and the output projection (Qwen3-Next and others).

A gate is made from the block's input, so the output stays linear in the values; a norm of z is made from z itself,
and the output is then no sum over tokens (BitNet). Which one it is, is found by running the module again with z
replaced: whatever stands there maps ones to the gate, and is a gate only if it maps every z' to gate * z'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attndiag.hooks.pausing import edits_paused
from attndiag.hooks.residual import FIT_TOLERANCE
from attndiag.hooks.routed import RoutedArguments, listening, listening_apart
from attndiag.hooks.structure import CACHE_NAMES, without_hooks

_NOT_A_GATE = (
    "what stands between the head outputs and the output projection depends on the head outputs themselves "
    "(a norm, for example), so the output is not a sum over tokens"
)


class ReplaceZ:
    """Listener that hands the module other head outputs than those it computed."""

    def __init__(self, module: nn.Module, z: Tensor) -> None:
        self.modules = {id(module)}
        self.calls = 0
        self._z = z

    def on_routed(self, arguments: RoutedArguments, output: Any) -> Any:  # noqa: ARG002
        """Return the replacement in the shape of the real output."""
        self.calls += 1
        original = output[0] if isinstance(output, tuple | list) else output
        replaced = self._z.reshape(original.shape)
        return (replaced, *output[1:]) if isinstance(output, tuple | list) else replaced


def find_output_gate(
    module: nn.Module, projection: nn.Module, z: Tensor, inputs: Tensor, arguments: dict[str, Any]
) -> tuple[Tensor | None, str]:
    """The gate between z and `inputs` of the projection, or None with the reason (empty: it does not read z at all).

    Parameters
    ----------
    module : the attention module; run twice more, without its cache.
    projection : the linear map whose input is compared.
    z : [batch, query_pos, head, d_value]; inputs : the same number of entries.
    arguments : what the module's forward was called with, by name.
    """
    # a cache would grow at each run; z is replaced, so it makes no difference that cached keys are missing
    arguments = {name: value for name, value in arguments.items() if name not in CACHE_NAMES}
    for name in [name for name in arguments if "mask" in name]:
        arguments[name] = over_new_keys(arguments[name], z.shape[1])
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(z.shape, generator=generator).to(device=z.device, dtype=z.dtype)
    gate = _input_under(module, projection, torch.ones_like(z), arguments)
    if gate is None:
        return None, "the module makes several attention calls and combines them before the output projection"
    seen_noise = _input_under(module, projection, noise, arguments)
    if seen_noise is None:
        return None, _NOT_A_GATE
    if torch.equal(gate, seen_noise):
        return None, ""  # it reads something else: the gate's own projection, for example
    tolerance = 4 * FIT_TOLERANCE.get(z.dtype, 1e-5)
    for replaced, seen in ((z, inputs), (noise, seen_noise)):
        error = (gate * replaced - seen.reshape(z.shape)).abs().max()
        if not bool(error <= tolerance * seen.abs().max()):
            return None, _NOT_A_GATE
    return gate, ""


def over_new_keys(mask: Any, n_queries: int) -> Any:
    """A mask without its columns for cached keys."""
    longer = isinstance(mask, Tensor) and mask.ndim >= 2 and mask.shape[-1] > n_queries
    return mask[..., -n_queries:] if longer else mask


def _input_under(module: nn.Module, projection: nn.Module, z: Tensor, arguments: dict[str, Any]) -> Tensor | None:
    """Input of the projection under head outputs `z`; None unless the module makes exactly one attention call."""
    seen: list[Tensor] = []
    listener = ReplaceZ(module, z.detach())
    with without_hooks(module), edits_paused(), listening_apart(), listening(listener), torch.no_grad():
        # put among the hooks of the trial alone, and gone with them
        projection.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
        module(**arguments)
    return seen[-1].reshape(z.shape) if listener.calls == 1 and seen else None

"""Whether a model used the head outputs that an edit handed it.

An edit of z proves itself when z arrives where it is projected. Where no linear map takes it as it was (a gate or a
norm stands between), what the attention module returns must at least have moved.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attndiag.errors import UnsupportedModelError
from attndiag.hooks.edit_kinds import Edit
from attndiag.hooks.gates import ReplaceZ, over_new_keys
from attndiag.hooks.pausing import edits_paused
from attndiag.hooks.routed import listening, listening_apart
from attndiag.hooks.structure import CACHE_NAMES, first_tensor, head_count, modules_to_trace, without_hooks
from attndiag.hooks.traced import TracedSoftmax, watching_softmax
from attndiag.models.access import evaluating


@dataclass(eq=False)
class _Unproved:
    """Edited head outputs on their way to the output projection."""

    module_name: str
    before: Tensor
    z: Tensor
    edits: list[Edit]


class EditProofs:
    """The edits of one forward that have not been seen to arrive."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._arguments: dict[str, dict[str, Any]] = {}
        self._unproved: list[_Unproved] = []

    def clear(self) -> None:
        """A new forward begins."""
        self._unproved.clear()

    def enter(self, name: str, arguments: dict[str, Any]) -> None:
        """An attention module begins, called with these arguments."""
        self._arguments[name] = arguments

    def expect(self, name: str, before: Tensor, z: Tensor, edits: list[Edit]) -> None:
        """`z` was handed on in place of `before`."""
        self._unproved.append(_Unproved(name, before, z, edits))

    def reached(self, args: tuple) -> None:
        """A linear map is about to read `args`: edited head outputs that have arrived there are proved."""
        if args and isinstance(args[0], Tensor):
            self._unproved = [each for each in self._unproved if not _carries(args[0], each.z)]

    def leave(self, module: nn.Module, name: str, output: Any, *, silent: Callable[[], bool]) -> None:
        """An attention module ends.

        Raises
        ------
        UnsupportedModelError : its output is the same with and without what the edits handed on.
        """
        mine = [each for each in self._unproved if each.module_name == name]
        self._unproved = [each for each in self._unproved if each.module_name != name]
        returned = first_tensor(output)
        if not mine or returned is None or silent() or any(_carries(returned, each.z) for each in mine):
            return
        clean, edited = (self._output_under(module, name, z) for z in (mine[0].before, mine[0].z))
        if clean is None or edited is None or torch.equal(clean, edited):
            raise UnsupportedModelError(
                f"{name}: the model did not use the edited head outputs, so {type(mine[0].edits[0]).__name__} had no "
                "effect to measure; edit attn_out or the residual stream instead"
            )

    def _output_under(self, module: nn.Module, name: str, z: Tensor) -> Tensor | None:
        """What the module returns for head outputs `z`, run once more without its cache; None if it reads none.

        A cache would grow at each run; z is replaced, so it makes no difference that cached keys are missing.
        """
        given = {key: value for key, value in self._arguments[name].items() if key not in CACHE_NAMES}
        for key in [key for key in given if "mask" in key]:
            given[key] = over_new_keys(given[key], z.shape[1])
        listener = ReplaceZ(module, z.detach())

        def replaced(_seen: TracedSoftmax) -> Tensor:
            listener.calls += 1
            return z.detach()

        with ExitStack() as stack:
            for context in (without_hooks(module), evaluating(module), listening_apart(), edits_paused()):
                stack.enter_context(context)
            stack.enter_context(listening(listener))
            stack.enter_context(torch.no_grad())
            if name in modules_to_trace(dict(self._model.named_modules())):
                stack.enter_context(watching_softmax(replaced, head_count(module)))
            output = first_tensor(module(**given))
        return output if listener.calls == 1 else None


def _carries(tensor: Tensor, z: Tensor) -> bool:
    """True when `tensor` is the flattened `z`."""
    if (
        tensor.numel() != z.numel()
        or tensor.dtype != z.dtype
        or tensor.shape[-1] not in (z.shape[3], z.shape[2] * z.shape[3])
    ):
        return False
    return tensor.data_ptr() == z.data_ptr() or torch.equal(tensor.reshape(-1), z.reshape(-1))

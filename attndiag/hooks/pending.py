"""A call between the moment it was made and the moment its output projection and its block are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from attndiag.hooks.record import AttentionCall
from attndiag.hooks.residual import BlockTrace
from attndiag.models.projections import OutputProjection, is_linear_like


@dataclass(frozen=True, eq=False)
class GateCandidate:
    """A linear map that ran after the call and reads as many numbers as z has."""

    name: str
    module: nn.Module
    inputs: Tensor
    output: Tensor


@dataclass(eq=False)
class PendingCall:
    """A call whose output projection and block are not known yet.

    `kept` is a copy of z as the watched softmax left it: a few modules go on to change it in place (VITS adds the
    values of relative positions), and then it is no longer A v. `passed_by` says which linear map took z and is no
    projection that could be used. `windows` of an image are rows of the call's batch;
    where the projection reads them position by position instead, its output is put into the order of the call.
    """

    call: AttentionCall
    trace: BlockTrace | None
    order: int
    projection: tuple[str, nn.Module] | None = None
    attn_out: Tensor | None = None
    sequence_first: bool = False
    gate_candidates: list[GateCandidate] = field(default_factory=list)
    kept: Tensor | None = None
    windows: int = 1
    windows_inside: bool = False
    passed_by: str = ""

    def __post_init__(self) -> None:
        if self.call.route == "traced":
            self.kept = self.call.z.detach().clone()

    def is_output(self, tensor: Tensor) -> bool:
        """True when `tensor` is the flattened z of this call, its first two axes in either order."""
        z = self.call.z if self.kept is None else self.kept
        if tensor.numel() != z.numel() or tensor.shape[-1] != z.shape[2] * z.shape[3] or tensor.dtype != z.dtype:
            return False
        if tensor.data_ptr() == z.data_ptr() or torch.equal(tensor.reshape(-1), z.reshape(-1)):
            return True
        if self.windows > 1 and torch.equal(self._by_window(tensor).reshape(-1), z.reshape(-1)):
            self.windows_inside = True
            return True
        swapped = tensor.shape[:2] == (z.shape[1], z.shape[0]) and tensor.ndim == 3
        if not (swapped and torch.equal(tensor.transpose(0, 1), z.flatten(2))):
            return False
        self.sequence_first = True
        return True

    def _by_window(self, tensor: Tensor) -> Tensor:
        """[batch x window, query_pos, width] from [batch, query_pos x window, width]."""
        return tensor.reshape(-1, self.call.n_queries, self.windows, tensor.shape[-1]).transpose(1, 2).flatten(0, 1)

    def finished(
        self, find_gate: Callable[[AttentionCall, GateCandidate], tuple[Tensor | None, str]], module: nn.Module
    ) -> AttentionCall:
        """The record with its output projection, or with the reason why it has none; `module` made the call."""
        call, found, attn_out, gate = self.call, self.projection, self.attn_out, None
        if self.kept is not None and not torch.equal(self.kept, call.z):
            call = replace(call, z=self.kept)
        trace = None if self.trace is None else replace(self.trace, attention_order=self.order)
        reason = self.passed_by
        if call.attends != "tokens":
            reason = f"its keys are {call.attends}, not tokens, so its output is no sum over tokens"
        elif call is not self.call:
            reason = "the head outputs were changed in place, by more than attention, before the output projection"
        if found is None and call.route == "routed" and call.attends == "tokens":
            for candidate in self.gate_candidates:
                gate, why_not = find_gate(call, candidate)
                reason = why_not or reason
                if gate is not None:
                    found, attn_out = (candidate.name, candidate.module), candidate.output
                    break
        if found is None or attn_out is None:
            reason = reason or f"no linear map takes the head outputs as its input{other_weights(module)}"
            return replace(call, output_reason=reason, trace=trace)
        z = call.z
        output = OutputProjection(*found, n_heads=call.n_heads, d_value=z.shape[3], device=z.device, dtype=z.dtype)
        if self.sequence_first:
            attn_out = attn_out.transpose(0, 1)
        if self.windows_inside:
            attn_out = self._by_window(attn_out)
        shape = (call.z.shape[0], call.n_queries, attn_out.shape[-1])
        # the very tensor where it fits: a view is not what the model went on with, and no gradient would reach it
        attn_out = attn_out if attn_out.shape == shape else attn_out.reshape(shape)
        return replace(call, output=output, output_gate=gate, attn_out=attn_out, trace=trace)


def other_weights(module: nn.Module) -> str:
    """Matrices of a module that belong to no linear map, in words: what could be W_O and cannot be read as one."""
    found: dict[str, list[str]] = {}
    for name, part in module.named_modules():
        if is_linear_like(part) or isinstance(part, nn.Embedding):
            continue
        kind = type(part).__name__ if name else "the module itself"
        for inner, weight in part.named_parameters(recurse=False):
            if weight.ndim > 1:
                found.setdefault(kind, []).append(name or inner)
    listed = {kind: ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") for kind, names in found.items()}
    return "".join(f"; weights of {kind}: {names}" for kind, names in listed.items())


def find_projection(pending: list[PendingCall], name: str, module: nn.Module, read: Tensor, output: Any) -> None:
    """A linear map ran: note whether it projects the newest calls, may stand behind a gate, or passes them by.

    Parameters
    ----------
    pending : the calls that are not finished, not empty.
    name, module : the linear map; read, output : what it was given and what it returned.
    """
    if not isinstance(output, Tensor):
        if pending[-1].is_output(read):
            said = f"{name} takes the head outputs and returns a {type(output).__name__}, not one tensor"
            pending[-1].passed_by = said
        return
    same_module = [p for p in pending if p.call.module_name == pending[-1].call.module_name]
    last = same_module[-1]
    if last.is_output(read):
        if last.projection is None or last.projection[0].startswith(f"{name}."):  # a wrapper is called after its core
            last.projection, last.attn_out = (name, module), output
        return
    earlier = next((p for p in same_module[:-1] if p.projection is None and p.is_output(read)), None)
    if earlier is not None:
        earlier.passed_by = f"{name} takes the head outputs, but only after the module's next softmax"
    elif len(same_module) > 1 and all(p.projection is None for p in same_module):
        _split_chunks(same_module, name, module, read, output)
    elif (
        last.projection is None and read.numel() == last.call.z.numel() and name.startswith(f"{last.call.module_name}.")
    ):
        last.gate_candidates.append(GateCandidate(name, module, read, output))


def _split_chunks(parts: list[PendingCall], name: str, module: nn.Module, inputs: Tensor, output: Tensor) -> None:
    """One projection after several calls (an image in chunks): give each call its slice, if they concatenate."""
    sizes = [part.call.z.shape[0] * part.call.n_queries for part in parts]
    width = parts[0].call.z.shape[2] * parts[0].call.z.shape[3]
    if inputs.shape[-1] != width or inputs.numel() != sum(sizes) * width:
        return
    joined = torch.cat([part.call.z.reshape(-1, width) for part in parts])
    if not torch.equal(joined, inputs.reshape(-1, width)):
        return
    for part, piece in zip(parts, output.reshape(sum(sizes), -1).split(sizes), strict=True):
        part.projection, part.attn_out = (name, module), piece

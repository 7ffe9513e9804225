"""Copying scores of a model's heads: the weights of the OV circuit, found by what they do.

For each attention call: W_V is the linear map of which v is a selection of output columns (whatever it is called, and
fused with W_Q and W_K or not); the norm before it is the norm whose output that map reads; the final norm is the one
whose output the unembedding reads. All found on one forward by comparing tensors, so nothing depends on a family's
names. A model in which some part is not found this way has no copying score, and the reason says which part.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attndiag.core.circuits import copying_score, embedding_circuit, fold_norm
from attndiag.core.norms import LinearisedNorm
from attndiag.errors import NotApplicableError, UnsupportedModelError
from attndiag.hooks.capture_context import capture
from attndiag.hooks.record import AttentionCall
from attndiag.hooks.residual import SeenNorm, linearise_norm
from attndiag.models.access import evaluating, input_embedding
from attndiag.models.load import LoadedModel
from attndiag.models.projections import is_linear_like, reference_parameter

Key = tuple[str, int, int | None]


@dataclass(frozen=True, eq=False)
class SeenMap:
    """One call of a linear map or norm: what it read and wrote, and its place in the order of events."""

    name: str
    module: nn.Module
    input: Tensor
    output: Tensor
    order: int

    def linearised(self) -> LinearisedNorm:
        """A norm frozen at what it read."""
        hidden = self.input.flatten(1, -2) if self.input.ndim > 3 else self.input  # a norm of each head's features
        return linearise_norm(SeenNorm(self.name, self.module, hidden, self.order))


@dataclass(eq=False)
class SeenForward:
    """What one forward showed: its attention calls, and the linear maps and norms with what they read and wrote."""

    calls: list[AttentionCall] = field(default_factory=list)
    linear: list[SeenMap] = field(default_factory=list)
    norms: list[SeenMap] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Circuit:
    """Weights of one attention call's OV circuit, norms folded in; `score` computes the copying score of its heads."""

    w_v: Tensor
    w_o: Tensor
    w_ue: Tensor

    def score(self) -> Tensor:
        """[head], in [-1, 1], as `core.circuits.copying_score`."""
        return copying_score(self.w_v, self.w_o, self.w_ue)


def output_value_circuits(lm: LoadedModel, tokens: Tensor) -> dict[Key, Circuit | str]:
    """The OV circuit of each attention call, or the reason why it was not found.

    Parameters
    ----------
    lm : a loaded model.
    tokens : [1, position] ids to run it on: many different ones, so that columns of weights can be told apart.

    Notes
    -----
    The direct path, as in `core.circuits.copying_score`: the embedding as the head's own norm reads it. What earlier
    layers add is not in it, so in deep layers the score is a property of the weights and little more.
    """
    seen = watched_forward(lm, tokens)
    keys = [(call.module_name, call.call_index, call.layer) for call in seen.calls]
    try:
        w_ue = _embedding_circuit(lm, seen)
    except (NotApplicableError, UnsupportedModelError) as error:
        return dict.fromkeys(keys, str(error))
    found: dict[Key, Circuit | str] = {}
    for key, call in zip(keys, seen.calls, strict=True):
        try:
            w_v, w_o = value_weights(call, seen), output_weights(call)
            if w_v.shape[1] != w_ue.shape[0]:
                raise NotApplicableError(f"it reads {w_v.shape[1]} features and the embedding has {w_ue.shape[0]}")
            found[key] = Circuit(w_v, w_o, w_ue)
        except (NotApplicableError, UnsupportedModelError) as error:
            found[key] = str(error)
    return found


def watched_forward(lm: LoadedModel, tokens: Tensor) -> SeenForward:
    seen = SeenForward()

    def watch(name: str, kept: list[SeenMap]) -> Any:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                order = len(seen.linear) + len(seen.norms)
                kept.append(SeenMap(name, module, args[0].detach(), output.detach(), order))

        return hook

    inputs = {"input_ids": tokens.to(lm.device)}
    if getattr(lm.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(evaluating(lm.model))
        for name, module in lm.model.named_modules():
            kept = seen.linear if is_linear_like(module) else seen.norms if _may_be_norm(module) else None
            if kept is not None:
                stack.callback(module.register_forward_hook(watch(name, kept)).remove)
        captured = stack.enter_context(capture(lm))
        lm.run(inputs)
    seen.calls = captured.calls
    return seen


def _embedding_circuit(lm: LoadedModel, seen: SeenForward) -> Tensor:
    """W_U W_E with the final norm folded in."""
    unembedding = lm.model.get_output_embeddings() if hasattr(lm.model, "get_output_embeddings") else None
    embedding = input_embedding(lm.model)
    if not isinstance(unembedding, nn.Module) or embedding is None:
        raise NotApplicableError("the model has no unembedding, so nothing says which token a vector raises")
    read = next((item for item in seen.linear if item.module is unembedding), None)
    first, last = seen.calls[0].trace, seen.calls[-1].trace
    if read is None or first is None or last is None or last.output is None:
        raise NotApplicableError("the unembedding or the blocks were not seen in a forward")
    if any(same(norm.output, first.input) and not inside(norm, first.name) for norm in seen.norms):
        raise NotApplicableError("a norm follows the embedding, so the direct path is not linear in it")
    norm = norm_before(read, seen)
    if not same(read.input if norm is None else norm.input, last.output):
        raise NotApplicableError("something other than one norm stands between the last block and the unembedding")
    w_u = matrix_of(read.module)
    if norm is not None:
        linear = norm.linearised()
        w_u = fold_norm(w_u, linear.gain.to(w_u.dtype), centre=linear.centre)
    w_e = embedding.weight.detach().double()
    if w_e.shape[1] != w_u.shape[0]:
        raise NotApplicableError(f"embedding ({w_e.shape[1]}) and unembedding ({w_u.shape[0]}) differ in width")
    rows = min(w_e.shape[0], w_u.shape[1])  # one of them may be padded beyond the vocabulary
    return embedding_circuit(w_u[:, :rows], w_e[:rows])


def value_weights(call: AttentionCall, seen: SeenForward) -> Tensor:
    """W_V, [kv_head, d_model, d_value], with the norm before it folded in."""
    v = call.v.detach()[0].transpose(0, 1).flatten(1)  # [position, kv_head * d_value]
    for item in seen.linear:
        if not inside(item, call.module_name):
            continue
        columns = columns_of(v, item.output, call.n_kv_heads)
        if columns is None:
            continue
        folded = folded_weights(matrix_of(item.module)[:, columns], item, call, seen)
        return folded.unflatten(1, (call.n_kv_heads, -1)).transpose(0, 1)
    raise NotApplicableError("its values are no selection of a linear map's outputs, so W_V was not found")


def folded_weights(matrix: Tensor, item: SeenMap, call: AttentionCall, seen: SeenForward) -> Tensor:
    """A matrix of a linear map as it reads the residual stream: the norm in front folded in, where there is one.

    Raises
    ------
    NotApplicableError : it reads something else, or the norm in front belongs to the block before (post-norm).
    """
    if call.trace is not None and same(item.input, call.trace.input) and call.site.place != "post":
        return matrix
    norm = norm_before(item, seen)
    if norm is None or call.site.place == "post":
        raise NotApplicableError(f"no norm stands right before {item.name} (a post-norm block): not the direct path")
    if inside(norm, call.module_name):
        raise NotApplicableError(f"a norm stands between the residual stream and {item.name} (a low-rank chain)")
    linear = norm.linearised()
    return fold_norm(matrix, linear.gain.to(matrix.dtype), centre=linear.centre)


def output_weights(call: AttentionCall) -> Tensor:
    """W_O, [head, d_value, d_model], with what the block does to the branch."""
    if call.output_gate is not None:
        raise NotApplicableError("an elementwise gate stands between the heads and W_O")
    w_o = call.w_o.double()
    site = call.site
    if site.branch_norm is not None:
        linear = linearise_norm(site.branch_norm)
        centred = w_o - w_o.mean(dim=-1, keepdim=True) if linear.centre else w_o
        w_o = centred * linear.gain.to(w_o.dtype)
    return w_o * site.multiplier


def norm_before(reader: SeenMap, seen: SeenForward) -> SeenMap | None:
    """The last norm before a linear map that wrote what the map reads."""
    return next(
        (norm for norm in reversed(seen.norms) if norm.order < reader.order and same(norm.output, reader.input)), None
    )


def inside(item: SeenMap, block: str) -> bool:
    return item.name.startswith(f"{block}.")


def columns_of(v: Tensor, output: Tensor, kv_heads: int) -> list[int] | None:
    """Columns of `output` that are v, head after head, each head's columns side by side at equal strides."""
    if output.ndim < 2 or output[..., 0].numel() != v.shape[0] or output.shape[-1] < v.shape[1]:
        return None
    wide = output.reshape(v.shape[0], -1)
    d_value = v.shape[1] // kv_heads
    where: dict[bytes, list[int]] = {}
    for index, column in enumerate(_bytes_of_columns(wide)):
        where.setdefault(column, []).append(index)
    starts: dict[int, int] = {}
    tied: list[int] = []
    for index, column in enumerate(_bytes_of_columns(v)):
        head, offset = divmod(index, d_value)
        matches = where.get(column, [])
        if len(matches) == 1:  # equal columns (dead ones) say nothing about their place
            starts.setdefault(head, matches[0] - offset)
        elif not index:
            tied = matches
    places = list(_placements(starts, wide.shape[1], v.shape[1], kv_heads))
    # every column twice, as where W_Q and W_K pick the same features: each place of the first one is tried
    places += [(first, stride) for first in tied[:64] for stride in dict.fromkeys((d_value, wide.shape[1] // kv_heads))]
    for first, stride in places:
        columns = [first + head * stride + offset for head in range(kv_heads) for offset in range(d_value)]
        if min(columns) >= 0 and max(columns) < wide.shape[1] and torch.equal(wide[:, columns], v):
            return columns
    return None


def _placements(starts: dict[int, int], width: int, v_width: int, kv_heads: int) -> Sequence[tuple[int, int]]:
    """(first column, stride) that the starts of some heads allow; all of W_V or its usual place where none is known."""
    d_value = v_width // kv_heads
    known = sorted(starts.items())
    if len(known) >= 2:
        (head, start), (other, other_start) = known[0], known[-1]
        stride = (other_start - start) // (other - head)
        return [(start - head * stride, stride)]
    strides = {d_value, width // kv_heads}
    if known:
        head, start = known[0]
        return [(start - head * stride, stride) for stride in strides]
    return [(0, d_value)] if width == v_width else [(width - v_width, d_value)]


def _bytes_of_columns(matrix: Tensor) -> list[bytes]:
    rows = matrix.T.contiguous().cpu()
    return [row.tobytes() for row in rows.view(torch.uint8).numpy()]


def matrix_of(module: nn.Module) -> Tensor:
    """[in, out] of a linear map in float64: its weight, or what it does to unit vectors."""
    if type(module) is nn.Linear:
        return module.weight.detach().T.double()
    if type(module) is Conv1D:
        return module.weight.detach().double()
    reference = reference_parameter(module)
    width = int(getattr(module, "in_features", 0))
    if reference is None or width == 0:
        raise UnsupportedModelError(f"the matrix of {type(module).__name__} cannot be read or measured")
    units = torch.eye(width + 1, width, dtype=reference.dtype, device=reference.device)  # the last row is 0
    with torch.no_grad():
        rows = module(units).double()
    return rows[:-1] - rows[-1]


def _may_be_norm(module: nn.Module) -> bool:
    """A module without children that holds vectors only, or is called a norm."""
    if next(module.children(), None) is not None:
        return False
    parameters = list(module.parameters(recurse=False))
    return bool(parameters and all(p.ndim == 1 for p in parameters)) or "norm" in type(module).__name__.lower()


def same(left: Tensor, right: Tensor) -> bool:
    """The same rows of features; axes of length 1 and how the leading axes are folded do not matter."""
    if left.shape[-1:] != right.shape[-1:] or left.numel() != right.numel() or left.dtype != right.dtype:
        return False
    return torch.equal(left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1]))

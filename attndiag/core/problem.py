"""Checks the arguments of the kernels and brings them into the dtype of the computation.

Everything that can be wrong with a call is found here, before any work: ranks and sizes, devices, NaN in the inputs
(named by tensor and head, so that one bad head is not spread over every number), masks that do not broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from attndiag.core.blocks import AttentionProblem, BlockTerm
from attndiag.errors import AttnDiagError, ShapeError
from attndiag.shapes import (
    Keys,
    OutputWeights,
    Queries,
    Values,
    check_broadcast,
    check_rank,
    check_same_size,
    group_size,
)


def attention_problem(
    q: Queries,
    k: Keys,
    v: Values,
    w_o: OutputWeights,
    *,
    scale: float,
    mask: BlockTerm | None = None,
    is_causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    position_bias: BlockTerm | None = None,
    row_scale: Tensor | None = None,
    layer: int | str | None = None,
) -> AttentionProblem:
    """Check one attention call and detach, cast and broadcast its tensors.

    float16, bfloat16 and float32 inputs are computed in float32, float64 inputs in float64; the arguments are those of
    `core.fused.attention_contributions`.

    Raises
    ------
    ShapeError : something does not fit; both shapes are named.
    ValueError : soft-cap or window out of range.
    AttnDiagError : tensors on different devices, or not finite (naming tensor, heads and `layer`).
    """
    where = "" if layer is None else f" of layer {layer}"
    _check_shapes(q, k, v, w_o)
    named = {"q": q, "k": k, "v": v, "w_o": w_o, "sinks": sinks, "row_scale": row_scale}
    named |= {"mask": mask, "position_bias": position_bias}
    tensors = {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}
    _check_devices(tensors)
    for name in ("q", "k", "v", "w_o"):
        _check_finite(name, tensors[name], where)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; expected a positive number, or None for no soft-cap")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; expected at least 1 (the position itself), or None for no window")

    batch, heads, n_queries, _ = q.shape
    scores_shape = torch.Size((batch, heads, n_queries, k.shape[2]))
    for name in ("mask", "position_bias"):
        if name in tensors:
            check_broadcast(name, tensors[name], scores_shape)
            _check_additive(name, tensors[name])
    if sinks is not None:
        sinks = sinks[None, :, None] if sinks.ndim == 1 else sinks
        check_broadcast("sinks", sinks, scores_shape[:3])
    if row_scale is not None:
        check_rank("row_scale", row_scale, "batch query_pos")
        check_broadcast("row_scale", row_scale, torch.Size((batch, n_queries)))

    dtype = working_dtype(q, k, v, w_o)
    factor = scale if softcap is None else scale / softcap
    return AttentionProblem(
        q=q.detach().to(dtype) * factor,
        k=k.detach().to(dtype),
        v=v.detach().to(dtype),
        w_o=w_o.detach().to(dtype),
        mask=mask.detach() if isinstance(mask, Tensor) else mask,
        is_causal=is_causal,
        window=window,
        softcap=softcap,
        sinks=None if sinks is None else sinks.detach().to(dtype).expand(scores_shape[:3]),
        position_bias=position_bias.detach() if isinstance(position_bias, Tensor) else position_bias,
        row_scale=None if row_scale is None else row_scale.detach().to(dtype).expand(batch, n_queries),
    )


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 where any tensor is float64, else float32 (half precision is computed in float32)."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def query_vectors(name: str, tensor: Tensor, problem: AttentionProblem, *, expand: bool) -> Tensor:
    """One d_model vector for each query, [batch, query_pos, d_model], in the dtype of the computation.

    With `expand`, [d_model] and [batch, 1, d_model] are accepted too.
    """
    shape = torch.Size((problem.batch, problem.n_queries, problem.d_model))
    if not expand and tensor.shape != shape:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(shape)} [batch, query_pos, d_model]")
    check_broadcast(name, tensor, shape)
    _check_devices({"q": problem.q, name: tensor})
    return tensor.detach().to(problem.q.dtype).expand(shape)


@contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Neither autocast nor reduced-precision float32 products (TF32, bf16) inside; both restored on exit."""
    before = torch.get_float32_matmul_precision()
    if before != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            yield
    finally:
        if before != "highest":
            torch.set_float32_matmul_precision(before)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, w_o: Tensor) -> None:
    check_rank("q", q, "batch head query_pos d_head")
    check_rank("k", k, "batch kv_head key_pos d_head")
    check_rank("v", v, "batch kv_head key_pos d_value")
    check_rank("w_o", w_o, "head d_value d_model")
    for axis, name in ((0, "batch"), (3, "d_head")):
        check_same_size(f"{name} of q", q.shape[axis], f"{name} of k", k.shape[axis])
    for axis, name in ((0, "batch"), (1, "the number of heads"), (2, "key_pos")):
        check_same_size(f"{name} of k", k.shape[axis], f"{name} of v", v.shape[axis])
    check_same_size("the number of heads of q", q.shape[1], "the number of heads of w_o", w_o.shape[0])
    check_same_size("d_value of v", v.shape[3], "d_value of w_o", w_o.shape[1])
    group_size(q.shape[1], k.shape[1])
    for name, tensor in (("q", q), ("k", k), ("v", v), ("w_o", w_o)):
        if tensor.numel() == 0:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}: an axis is empty, so there is nothing to attend")
        if not tensor.is_floating_point():
            raise ShapeError(f"{name} has dtype {tensor.dtype}; expected a floating-point tensor")


def _check_devices(tensors: dict[str, Tensor]) -> None:
    home = next(iter(tensors.values())).device
    strays = [f"{name} on {tensor.device}" for name, tensor in tensors.items() if tensor.device != home]
    if strays:
        raise AttnDiagError(f"q is on {home} but {', '.join(strays)}; move all of them to one device with .to(...)")


def _check_finite(name: str, tensor: Tensor, where: str) -> None:
    # one sum tells: nan and infinity survive it. An overflow of the sum itself only leads to the closer look below.
    if torch.isfinite(tensor.detach().sum(dtype=torch.float32 if tensor.dtype != torch.float64 else None)):
        return
    finite = torch.isfinite(tensor)
    if finite.all():
        return
    head_axis = 0 if name == "w_o" else 1
    others = [axis for axis in range(tensor.ndim) if axis != head_axis]
    bad = (~finite).sum(dim=others).nonzero()[:, 0].tolist()
    kind = "kv head" if name in ("k", "v") else "head"
    listed = ", ".join(str(head) for head in bad[:8]) + (f" and {len(bad) - 8} more" if len(bad) > 8 else "")
    what = "NaN" if torch.isnan(tensor).any() else "infinite values"
    raise AttnDiagError(
        f"{name}{where} holds {what} in {kind}{'s' if len(bad) > 1 else ''} {listed}: "
        "attention is not defined there. Look for an overflow upstream (half precision?), or leave those positions out"
    )


def _check_additive(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.bool and not tensor.is_floating_point():
        raise ShapeError(
            f"{name} has dtype {tensor.dtype}; expected bool (True = allowed) or an additive float. "
            "A 0/1 integer mask is ambiguous: convert it with .bool() if 1 means allowed"
        )

"""The parts of an attention output: what they are, what they add up to, and how they are walked over.

T_ij = row_scale_i sum_h A_ij^h f_j^h with f_j^h = v_j^h W_O^h. `part_blocks` yields them for a few query rows at a
time, `attention_output` is their sum, `completeness_error` says whether that sum is what the module returned. The
measures built on them are in `core.contributions`, whose docstring explains the shared parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import reduce
from typing import TypeVarTuple, cast

import torch
from torch import Tensor

from attndiag.core.attention import head_outputs
from attndiag.errors import ShapeError, UndefinedScoreWarning
from attndiag.shapes import (
    HeadOutputs,
    OutputWeights,
    Pattern,
    PerQuery,
    Residual,
    Values,
    check_broadcast,
    check_rank,
    expand_kv_heads,
    group_size,
)

Ts = TypeVarTuple("Ts")

# Elements of one block of parts: 64 MB in float64.
BLOCK_ELEMENTS = 2**23


def transformed_values(v: Values, w_o: OutputWeights) -> Tensor:
    """What each key can write through each head: f_j^h = v_j^h W_O^h, [batch, head, key_pos, d_model]."""
    v, w_o = lift(v, w_o)
    check_rank("v", v, "batch kv_head key_pos d_value")
    check_rank("w_o", w_o, "head d_value d_model")
    if v.shape[3] != w_o.shape[1]:
        raise ShapeError(f"v {tuple(v.shape)} and w_o {tuple(w_o.shape)} differ in d_value")
    return expand_kv_heads(v, w_o.shape[0]) @ w_o


def attention_output(
    pattern: Pattern,
    v: Values,
    w_o: OutputWeights,
    *,
    bias: Tensor | None = None,
    residual: Residual | None = None,
    row_scale: PerQuery | None = None,
    gate: HeadOutputs | None = None,
) -> Residual:
    """row_scale_i sum_j T_ij + residual_i + bias: the vector whose parts this module measures.

    Returns
    -------
    [batch, query_pos, d_model].
    """
    pattern, v, w_o, bias, residual, row_scale, gate = lift(pattern, v, w_o, bias, residual, row_scale, gate)
    check_parts(pattern, v, w_o, residual=residual, row_scale=row_scale, gate=gate, bias=bias)
    z = head_outputs(pattern, v)
    z = z if gate is None else z * gate
    total = torch.einsum("bqhc,hcd->bqd", z, w_o)
    total = total if row_scale is None else total * row_scale[..., None]
    for term in (residual, bias):
        total = total if term is None else total + term
    return total


def completeness_error(
    pattern: Pattern,
    v: Values,
    w_o: OutputWeights,
    attn_out: Residual,
    *,
    bias: Tensor | None = None,
    residual: Residual | None = None,
    row_scale: PerQuery | None = None,
    gate: HeadOutputs | None = None,
) -> PerQuery:
    """||sum of all parts - attn_out|| / ||attn_out||: whether the parts really add up to what the module returned.

    Returns
    -------
    [batch, query_pos], non-negative; 0 where both are zero, inf where only `attn_out` is zero. A row without any
    allowed key is exact here only where the model returns zeros for it too. Leave padded queries out of the maximum.
    """
    total = attention_output(pattern, v, w_o, bias=bias, residual=residual, row_scale=row_scale, gate=gate)
    if attn_out.shape != total.shape:
        raise ShapeError(f"attn_out {tuple(attn_out.shape)} and the sum of parts {tuple(total.shape)} differ in shape")
    total, attn_out = lift(total, attn_out)
    difference = (total - attn_out).norm(dim=-1)
    return torch.where(difference == 0, difference, difference / attn_out.norm(dim=-1))


def part_blocks(
    pattern: Pattern,
    v: Values,
    w_o: OutputWeights,
    *,
    residual: Residual | None = None,
    row_scale: PerQuery | None = None,
    diagonal_offset: int | None = None,
    gate: HeadOutputs | None = None,
    block: int | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (query rows, T_ij [batch, rows, key_pos, d_model]) in blocks of query rows, residual on the diagonal.

    Raises
    ------
    ShapeError : tensors do not fit, or the diagonal is not stated where it must be.
    """
    pattern, v, w_o, residual, row_scale, gate = lift(pattern, v, w_o, residual, row_scale, gate)
    check_parts(pattern, v, w_o, residual=residual, row_scale=row_scale, gate=gate)
    own_key = None if residual is None else own_keys(pattern, diagonal_offset)
    n_batch, n_heads, n_queries, n_keys = pattern.shape
    width = w_o.shape[2] if gate is None else max(w_o.shape[2], n_heads * w_o.shape[1])
    if block is None:
        block = max(1, BLOCK_ELEMENTS // max(1, n_batch * n_keys * width))
    elif block < 1:
        raise ValueError(f"block is {block}; expected at least 1 query row, or None to choose by memory")
    sources = transformed_values(v, w_o) if gate is None else expand_kv_heads(v, n_heads)
    for start in range(0, n_queries, block):
        rows = slice(start, min(start + block, n_queries))
        if gate is None:
            parts = torch.einsum("bhqk,bhkd->bqkd", pattern[:, :, rows], sources)
        else:
            gated = torch.einsum("bhqk,bqhc,bhkc->bqkhc", pattern[:, :, rows], gate[:, rows], sources)
            parts = gated.flatten(3) @ w_o.flatten(0, 1)
        if row_scale is not None:
            parts = parts * row_scale[:, rows, None, None]
        if residual is not None and own_key is not None:
            here = torch.arange(rows.stop - rows.start, device=parts.device)
            parts[:, here, own_key[rows]] += residual[:, rows]
        yield rows, parts


def normalise_rows(scores: Tensor, *, name: str = "a row share") -> Tensor:
    """Divide each row (last axis) by its sum: shares of what the query received, in [0, 1].

    An all-zero row is undefined, never uniform: nan, with an `UndefinedScoreWarning`. Shares hide how much there was
    to share, so keep the raw scores beside them.
    """
    return undefined_where_zero(scores, scores.sum(dim=-1, keepdim=True), name)


def undefined_where_zero(numerator: Tensor, divisor: Tensor, name: str) -> Tensor:
    """numerator / divisor, nan where the divisor is 0, with one `UndefinedScoreWarning` that counts those entries."""
    undefined = divisor == 0
    if undefined.any():
        warnings.warn(
            f"{name} is undefined where there is nothing to divide by: {int(undefined.sum())} of {undefined.numel()} "
            "query rows are all zero and come back as nan",
            UndefinedScoreWarning,
            stacklevel=3,
        )
    return (numerator / divisor.masked_fill(undefined, 1.0)).masked_fill(undefined, torch.nan)


def own_keys(pattern: Pattern, diagonal_offset: int | None) -> Tensor:
    """The key that each query is itself, [query_pos]: i + diagonal_offset.

    Raises
    ------
    ShapeError : n_q != n_k and no offset was given, or some query would have no key.
    """
    n_queries, n_keys = pattern.shape[2:]
    if diagonal_offset is None:
        if n_queries != n_keys:
            raise ShapeError(
                f"pattern {tuple(pattern.shape)} has {n_queries} queries and {n_keys} keys: say which key each query "
                f"is with diagonal_offset= ({n_keys - n_queries} behind a cache). In cross-attention no key is the "
                "query itself and the residual cannot be counted"
            )
        diagonal_offset = 0
    if diagonal_offset < 0 or n_queries + diagonal_offset > n_keys:
        raise ShapeError(
            f"diagonal_offset is {diagonal_offset}, but {n_queries} queries and {n_keys} keys allow 0 to "
            f"{n_keys - n_queries}"
        )
    return torch.arange(n_queries, device=pattern.device) + diagonal_offset


def lift(*tensors: *Ts) -> tuple[*Ts]:
    """Bring tensors (None stays None) to their common dtype, float32 at least; float64 stays exact."""
    dtypes = [tensor.dtype for tensor in tensors if isinstance(tensor, Tensor)]
    common = reduce(torch.promote_types, dtypes, torch.float32)
    return cast("tuple[*Ts]", tuple(t.to(common) if isinstance(t, Tensor) else t for t in tensors))


def check_pattern(pattern: Pattern, v: Values) -> None:
    """Raise `ShapeError` unless pattern and values belong together."""
    check_rank("pattern", pattern, "batch head query_pos key_pos")
    check_rank("v", v, "batch kv_head key_pos d_value")
    if pattern.shape[0] != v.shape[0] or pattern.shape[3] != v.shape[2]:
        raise ShapeError(f"pattern {tuple(pattern.shape)} and v {tuple(v.shape)} must agree in batch and key_pos")
    group_size(pattern.shape[1], v.shape[1])


def check_parts(
    pattern: Pattern,
    v: Values,
    w_o: OutputWeights,
    *,
    residual: Tensor | None = None,
    row_scale: Tensor | None = None,
    gate: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Raise `ShapeError` naming both shapes unless all pieces of one attention call fit together."""
    check_pattern(pattern, v)
    check_rank("w_o", w_o, "head d_value d_model")
    if pattern.shape[1] != w_o.shape[0]:
        raise ShapeError(f"pattern {tuple(pattern.shape)} and w_o {tuple(w_o.shape)} differ in the number of heads")
    if v.shape[3] != w_o.shape[1]:
        raise ShapeError(f"v {tuple(v.shape)} and w_o {tuple(w_o.shape)} differ in d_value")
    n_batch, n_heads, n_queries, _ = pattern.shape
    out = (n_batch, n_queries, w_o.shape[2])
    for name, tensor, expected in (
        ("residual", residual, out),
        ("row_scale", row_scale, out[:2]),
        ("gate", gate, (n_batch, n_queries, n_heads, w_o.shape[1])),
    ):
        if tensor is not None and tuple(tensor.shape) != expected:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}; pattern {tuple(pattern.shape)} and w_o {tuple(w_o.shape)} "
                f"need {expected}"
            )
    if bias is not None:
        check_broadcast("bias", bias, torch.Size(out))

"""What each key really writes into each query: the definitions, readable and float64-clean.

An attention weight says how much of a key is read; what arrives also depends on the value, on W_O, on the other
heads, on the residual stream and on the norm. With f_j^h = v_j^h W_O^h and T_ij = sum_h A_ij^h f_j^h (Kobayashi 2020,
arXiv 2004.10102) this module gives the size of T_ij and of its relatives; `core.norms.fold_output` folds residual
multipliers and norms into the arguments, so that one function serves every kind:

| kind | call |
|---|---|
| `contribution` | `contribution(pattern, v, w_o)` |
| `contribution_residual` | `contribution(pattern, v, w_o, residual=x)` |
| `contribution_norm` | `contribution(pattern, v, folded.w_o, residual=folded.residual, row_scale=folded.row_scale)` |

Shared parameters. pattern [batch, head, query_pos, key_pos], softmax output (rows sum below 1 with sinks);
v [batch, kv_head, key_pos, d_value], **bias included**: b_V folded into b_O would be wrong as soon as rows do not sum
to 1; w_o [head, d_value, d_model]; row_scale [batch, query_pos], a factor on every T_ij of a query; residual
[batch, query_pos, d_model], x_i, added to the part of the key that is the query itself, which is key
i + diagonal_offset (0 for self-attention, n_k - n_q behind a cache; no default when n_q != n_k, and meaningless in
cross-attention); gate [batch, query_pos, head, d_value], an elementwise factor on z before W_O (Qwen3-Next); block,
how many query rows are in work at a time. No [query_pos, key_pos, d_model] tensor is kept: the peak is
[batch, block, key_pos, d_model].

Precision. T_ij is summed directly, not through a Gram matrix. With c = ||T_ij|| / sum_h A_ij^h ||f_j^h|| the relative
error of the norm is at most of the order of eps / c, in float32 some 1e-7 / c, even where heads nearly cancel; a plain
Gram form is off by eps / c^2 and in float32 has lost every digit near c = 4e-4. Half-precision inputs are lifted to
float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attndiag.core.norms import select_query
from attndiag.core.parts import (
    attention_output,
    check_parts,
    check_pattern,
    completeness_error,
    lift,
    normalise_rows,
    own_keys,
    part_blocks,
    transformed_values,
    undefined_where_zero,
)
from attndiag.errors import ShapeError
from attndiag.shapes import HeadOutputs, OutputWeights, PairScores, Pattern, PerQuery, Residual, Values, expand_kv_heads

__all__ = [
    "alti",
    "alti_l2",
    "attention_output",
    "cancellation",
    "completeness_error",
    "contribution",
    "head_contribution",
    "mixing_ratio",
    "projection",
    "target_attribution",
    "transformed_values",
    "value_norm",
]


def value_norm(pattern: Pattern, v: Values) -> Pattern:
    """A_ij^h ||v_j^h||, the naive size: non-negative, in value norms.

    Not a property of the model: v -> v R, W_O -> R^-1 W_O changes it and nothing that the model computes.

    Returns
    -------
    [batch, head, query_pos, key_pos].
    """
    pattern, v = lift(pattern, v)
    check_pattern(pattern, v)
    return pattern * expand_kv_heads(v, pattern.shape[1]).norm(dim=-1)[:, :, None, :]


def head_contribution(pattern: Pattern, v: Values, w_o: OutputWeights, *, row_scale: PerQuery | None = None) -> Pattern:
    """A_ij^h ||f_j^h||: what key j writes into query i through head h alone (Kobayashi 2020, arXiv 2004.10102).

    Returns
    -------
    [batch, head, query_pos, key_pos], non-negative, in residual norms. Summed over heads it is an upper bound of
    `contribution`; see `cancellation` for how much of it survives.

    Raises
    ------
    ShapeError : tensors do not fit.
    """
    pattern, v, w_o, row_scale = lift(pattern, v, w_o, row_scale)
    check_parts(pattern, v, w_o, row_scale=row_scale)
    sizes = pattern * transformed_values(v, w_o).norm(dim=-1)[:, :, None, :]
    return sizes if row_scale is None else sizes * row_scale[:, None, :, None].abs()


def contribution(
    pattern: Pattern,
    v: Values,
    w_o: OutputWeights,
    *,
    residual: Residual | None = None,
    row_scale: PerQuery | None = None,
    diagonal_offset: int | None = None,
    gate: HeadOutputs | None = None,
    block: int | None = None,
) -> PairScores:
    """||T_ij||, T_ij = row_scale_i sum_h A_ij^h f_j^h, plus the residual on the diagonal where one is given.

    Sources: Kobayashi 2020 (arXiv 2004.10102) without, 2021 (arXiv 2109.07152) with residual and norm; see the table
    in the module's docstring, which explains the parameters too.

    Returns
    -------
    [batch, query_pos, key_pos], non-negative, in residual norms (after a folded norm: in units of its output).

    Raises
    ------
    ShapeError : tensors do not fit, or the diagonal is not stated where it must be.
    """
    blocks = part_blocks(
        pattern, v, w_o, residual=residual, row_scale=row_scale, diagonal_offset=diagonal_offset, gate=gate, block=block
    )
    return torch.cat([parts.norm(dim=-1) for _, parts in blocks], dim=1)


def mixing_ratio(
    pattern: Pattern,
    v: Values,
    w_o: OutputWeights,
    *,
    residual: Residual,
    row_scale: PerQuery | None = None,
    diagonal_offset: int | None = None,
    gate: HeadOutputs | None = None,
) -> PerQuery:
    """How much of a position's new vector comes from elsewhere (Kobayashi 2021, arXiv 2109.07152).

    ||sum_{j != i} R_ij|| / (||sum_{j != i} R_ij|| + ||R_ii||) with R_ij = T_ij + 1[i = j] x_i, norm folded in or not.
    Biases belong to neither side.

    Returns
    -------
    [batch, query_pos] in [0, 1]; nan with an `UndefinedScoreWarning` where both sides are zero.

    Raises
    ------
    ShapeError : tensors do not fit, or the diagonal is not stated where it must be.
    """
    pattern, v, w_o, residual, row_scale, gate = lift(pattern, v, w_o, residual, row_scale, gate)
    check_parts(pattern, v, w_o, residual=residual, row_scale=row_scale, gate=gate)
    own_key = own_keys(pattern, diagonal_offset)
    on_diagonal = torch.zeros(pattern.shape[2:], dtype=torch.bool, device=pattern.device)
    on_diagonal[torch.arange(len(own_key), device=pattern.device), own_key] = True
    # Two sums over disjoint keys, not a total minus the own part: nothing cancels.
    others = attention_output(pattern.masked_fill(on_diagonal, 0.0), v, w_o, row_scale=row_scale, gate=gate)
    own = attention_output(pattern.masked_fill(~on_diagonal, 0.0), v, w_o, row_scale=row_scale, gate=gate) + residual
    mixed, kept = others.norm(dim=-1), own.norm(dim=-1)
    return undefined_where_zero(mixed, mixed + kept, "mixing_ratio")


def projection(
    pattern: Pattern,
    v: Values,
    w_o: OutputWeights,
    *,
    bias: Tensor | None = None,
    row_scale: PerQuery | None = None,
    gate: HeadOutputs | None = None,
    attn_out: Residual | None = None,
) -> tuple[PairScores, PerQuery]:
    """<T_ij, o_i> / ||o_i||: how far each key pushes along the output that all of them make, signed.

    Parameters
    ----------
    bias : the part of o_i that belongs to no key (b_o), broadcastable to [batch, query_pos, d_model].
    attn_out : o_i [batch, query_pos, d_model]; None: sum_j T_ij + bias.

    Returns
    -------
    scores : [batch, query_pos, key_pos], signed, in residual norms.
    bias_part : [batch, query_pos], <bias, o_i> / ||o_i||. scores.sum(-1) + bias_part = ||o_i||.

    Both are nan with an `UndefinedScoreWarning` where o_i = 0.

    Raises
    ------
    ShapeError : tensors do not fit.
    """
    pattern, v, w_o, bias, row_scale, gate, attn_out = lift(pattern, v, w_o, bias, row_scale, gate, attn_out)
    summed = attention_output(pattern, v, w_o, bias=bias, row_scale=row_scale, gate=gate)
    attn_out = summed if attn_out is None else attn_out
    if attn_out.shape != summed.shape:
        raise ShapeError(f"attn_out {tuple(attn_out.shape)} and the sum of parts {tuple(summed.shape)} must be alike")
    size = attn_out.norm(dim=-1)
    unit = undefined_where_zero(attn_out, size[..., None], "projection")
    # Reading direction of each head: <A f, u> = A <v, W_O u>, a second score-shaped product.
    reading = torch.einsum("hcd,bqd->bqhc", w_o, unit)
    reading = (reading if gate is None else reading * gate).transpose(1, 2)
    scores = (pattern * (reading @ expand_kv_heads(v, pattern.shape[1]).transpose(-1, -2))).sum(dim=1)
    if row_scale is not None:
        scores = scores * row_scale[..., None]
    bias_part = torch.zeros_like(size).masked_fill(size == 0, torch.nan) if bias is None else (bias * unit).sum(dim=-1)
    return scores, bias_part


def target_attribution(
    pattern: Pattern,
    v: Values,
    w_o: OutputWeights,
    direction: Tensor,
    query: int | Tensor,
    *,
    row_scale: PerQuery | None = None,
    gate: HeadOutputs | None = None,
) -> Tensor:
    """A_tj^h <f_j^h, u>: what head and key write along a direction at one query, signed (ALTI-Logit, arXiv 2305.12535).

    The direct path only: what later layers make of it is not in this number.

    Parameters
    ----------
    direction : u [d_model] or [batch, d_model], in the residual stream. For a logit difference
        `final_norm.pull_back(W_U[target] - W_U[foil], query)`.
    query : position t in the query axis, one for all or [batch].

    Returns
    -------
    [batch, head, key_pos], signed, in units of the direction (logits).

    Raises
    ------
    ShapeError : tensors do not fit, or `query` lies outside the queries.
    """
    pattern, v, w_o, direction, row_scale, gate = lift(pattern, v, w_o, direction, row_scale, gate)
    check_parts(pattern, v, w_o, row_scale=row_scale, gate=gate)
    if direction.shape not in (w_o.shape[-1:], (pattern.shape[0], w_o.shape[-1])):
        raise ShapeError(
            f"direction has shape {tuple(direction.shape)}; expected [{w_o.shape[-1]}] or "
            f"[{pattern.shape[0]}, {w_o.shape[-1]}] (batch, d_model)"
        )
    direction = direction.expand(pattern.shape[0], -1)
    reading = torch.einsum("hcd,bd->bhc", w_o, direction)
    if gate is not None:
        reading = reading * select_query(gate, query)
    weights = select_query(pattern.transpose(1, 2), query)
    scores = weights * torch.einsum("bhc,bhkc->bhk", reading, expand_kv_heads(v, pattern.shape[1]))
    return scores if row_scale is None else scores * select_query(row_scale, query)[:, None, None]


def cancellation(pattern: Pattern, v: Values, w_o: OutputWeights, *, block: int | None = None) -> PairScores:
    """c_ij = ||T_ij|| / sum_h A_ij^h ||f_j^h||: the share of the heads' writing that survives their sum.

    Returns
    -------
    [batch, query_pos, key_pos] in [0, 1]; 1 where all heads write the same way, near 0 where they cancel. nan where
    nothing is written at all (forbidden keys); that is the ordinary case for masked pairs, so without a warning.
    """
    written = head_contribution(pattern, v, w_o).sum(dim=1)
    kept = contribution(pattern, v, w_o, block=block)
    # Rounding can leave a parallel pair a hair above 1.
    return torch.where(written > 0, (kept / written).clamp(max=1.0), torch.nan)


def alti(
    pattern: Pattern,
    v: Values,
    w_o: OutputWeights,
    *,
    residual: Residual | None = None,
    bias: Tensor | None = None,
    row_scale: PerQuery | None = None,
    diagonal_offset: int | None = None,
    gate: HeadOutputs | None = None,
    block: int | None = None,
) -> tuple[PairScores, PairScores]:
    """How much closer to the output each part brings the rest, in the 1-norm (Ferrando 2022, arXiv 2203.04212).

    raw_ij = max(0, ||y_i||_1 - ||y_i - T'_ij||_1) with T'_ij = row_scale_i T_ij + 1[i = j] residual_i and
    y_i = sum_j T'_ij + bias_i. Exact, every component, in blocks of query rows. The paper has y after the norm: fold
    it (`core.norms.fold_output`); in a pre-norm block y is the residual stream after attention.

    Returns
    -------
    shares : [batch, query_pos, key_pos] in [0, 1], rows sum to 1; nan with an `UndefinedScoreWarning` where a row of
        `raw` is all zero: nothing was written, or the bias outweighs every part so that none brings the rest closer.
    raw : [batch, query_pos, key_pos], non-negative, in 1-norms of the output.

    Raises
    ------
    ShapeError : tensors do not fit, or the diagonal is not stated where it must be.
    """
    y = attention_output(pattern, v, w_o, bias=bias, residual=residual, row_scale=row_scale, gate=gate)
    blocks = part_blocks(
        pattern, v, w_o, residual=residual, row_scale=row_scale, diagonal_offset=diagonal_offset, gate=gate, block=block
    )
    rows_of_scores: list[Tensor] = []
    for rows, parts in blocks:
        target = y[:, rows, None, :].to(parts.dtype)
        # |y| - |y - t| = min(s t, 2|y| - s t) with s the sign of y. The left side loses the digits of a part that is
        # small beside y, the right side does not.
        along = torch.where(target < 0, -parts, parts)
        rows_of_scores.append(torch.minimum(along, 2 * target.abs() - along).sum(dim=-1).clamp(min=0))
    raw = torch.cat(rows_of_scores, dim=1)
    return normalise_rows(raw, name="alti"), raw


def alti_l2(
    pattern: Pattern,
    v: Values,
    w_o: OutputWeights,
    *,
    residual: Residual | None = None,
    bias: Tensor | None = None,
    row_scale: PerQuery | None = None,
    diagonal_offset: int | None = None,
    gate: HeadOutputs | None = None,
    block: int | None = None,
) -> tuple[PairScores, PairScores]:
    """`alti` with the 2-norm: raw_ij = max(0, ||y_i||_2 - ||y_i - T'_ij||_2).

    A variant with a name of its own: in the authors' ablation it is the weaker one (arXiv 2203.04212). Parameters,
    returns and raises as in `alti`, in 2-norms of the output.
    """
    y = attention_output(pattern, v, w_o, bias=bias, residual=residual, row_scale=row_scale, gate=gate)
    blocks = part_blocks(
        pattern, v, w_o, residual=residual, row_scale=row_scale, diagonal_offset=diagonal_offset, gate=gate, block=block
    )
    rows_of_scores: list[Tensor] = []
    for rows, parts in blocks:
        target = y[:, rows, None, :].to(parts.dtype)
        # ||y|| - ||y - t|| = <2y - t, t> / (||y|| + ||y - t||): no difference of near-equal numbers.
        divisor = target.norm(dim=-1) + (target - parts).norm(dim=-1)
        gained = ((2 * target - parts) * parts).sum(dim=-1)
        rows_of_scores.append((gained / divisor.masked_fill(divisor == 0, 1.0)).clamp(min=0))
    raw = torch.cat(rows_of_scores, dim=1)
    return normalise_rows(raw, name="alti_l2"), raw

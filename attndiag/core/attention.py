"""Softmax attention in readable steps: scores, rows, outputs.

What attention is, written so that each line can be read beside the formula (Vaswani 2017, arXiv 1706.03762):

1. `attention_scores`: S = scale * Q K^T, soft-capped, plus a position bias, plus the mask.
2. `softmax_rows`: A = softmax of S over the **keys**; attention sinks take part in the normalisation only.
3. `head_outputs`: z_i = sum_j A_ij v_j.
4. `multi_head_attention`: projections, split heads, the three steps above, concatenate, W_O.

Rows are queries and columns are keys, always. Nothing here changes a dtype or a device: for a float64 reference,
give float64 tensors. A row in which every key is forbidden has all-zero weights, hence a zero output; frameworks
differ there (some give nan, some zeros, some uniform weights over every key, padding included).
"""

from __future__ import annotations

import torch
from torch import Tensor

from attndiag.errors import ShapeError
from attndiag.shapes import HeadOutputs, Keys, Pattern, Queries, Values, check_rank, expand_kv_heads

NEG_INF = float("-inf")


def attention_scores(
    q: Queries,
    k: Keys,
    *,
    scale: float,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Pattern:
    """Attention scores before the softmax.

    s = scale * q k^T;  s <- softcap * tanh(s / softcap);  s <- s + position_bias;  then the mask.

    Parameters
    ----------
    q : [batch, head, query_pos, d_head].
    k : [batch, kv_head, key_pos, d_head]; query head h reads kv head `h // (head / kv_head)`.
    scale : factor on the dot products, usually 1 / sqrt(d_head).
    softcap : bound on the scaled scores (Gemma 2, arXiv 2408.00118), before bias and mask. None: no bound.
    position_bias : additive, broadcastable to the scores (ALiBi, T5). Same rule as `mask` for forbidden entries.
    mask : bool, True where attending is **allowed**; or additive float, broadcastable to the scores. Float entries
        at or below half the most negative number of their dtype count as forbidden, which is what frameworks mean
        by `torch.finfo(dtype).min`.

    Returns
    -------
    Scores [batch, head, query_pos, key_pos], unbounded, `-inf` where forbidden.

    Raises
    ------
    ShapeError : tensors do not fit; both shapes are named.
    """
    check_rank("q", q, "batch head query_pos d_head")
    check_rank("k", k, "batch kv_head key_pos d_head")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ShapeError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in batch (axis 0) and d_head (axis 3)")
    scores = scale * (q @ expand_kv_heads(k, q.shape[1]).transpose(-1, -2))
    if softcap is not None:
        if not softcap > 0:
            raise ValueError(f"softcap is {softcap}; expected a positive number, or None for no soft-cap")
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = _add(scores, position_bias, "position_bias")
    if mask is not None:
        scores = _add(scores, mask, "mask")
    return scores


def softmax_rows(scores: Pattern, *, sinks: Tensor | None = None) -> tuple[Pattern, Tensor]:
    """Softmax over the keys, with optional attention sinks.

    A_ij = exp(s_ij) / (exp(sink_i) + sum_k exp(s_ik)); without sinks the first term of the divisor is absent.

    Parameters
    ----------
    scores : [batch, head, query_pos, key_pos], `-inf` where forbidden.
    sinks : logits that take part in the normalisation and write nothing: [head], or broadcastable to
        [batch, head, query_pos].

    Returns
    -------
    pattern : [batch, head, query_pos, key_pos], mass in [0, 1]; rows sum to 1, or to 1 - sink_mass.
    sink_mass : [batch, head, query_pos], mass in [0, 1]; zeros without sinks.

    A row in which every key is forbidden has all-zero weights (and sink mass 1 where there is a sink).

    Raises
    ------
    ShapeError : `sinks` does not broadcast to the rows.
    """
    check_rank("scores", scores, "batch head query_pos key_pos")
    rows = scores.shape[:-1]
    if sinks is None:
        dead = (scores == NEG_INF).all(dim=-1, keepdim=True)
        # Dead rows are filled before the softmax too, so that no nan is ever made and gradients stay finite.
        pattern = torch.softmax(scores.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)
        return pattern, scores.new_zeros(rows)
    logits = sinks[None, :, None] if sinks.ndim == 1 else sinks
    _check_broadcast("sinks", logits, rows)
    extended = torch.cat([scores, logits.to(scores.dtype).expand(rows)[..., None]], dim=-1)
    dead = (extended == NEG_INF).all(dim=-1, keepdim=True)
    extended = torch.softmax(extended.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)
    return extended[..., :-1], extended[..., -1]


def head_outputs(pattern: Pattern, v: Values) -> HeadOutputs:
    """What each head gathers: z_i = sum_j A_ij v_j.

    Parameters
    ----------
    pattern : [batch, head, query_pos, key_pos].
    v : [batch, kv_head, key_pos, d_value], bias included.

    Returns
    -------
    z : [batch, query_pos, head, d_value].

    Raises
    ------
    ShapeError : `pattern` and `v` do not fit.
    """
    check_rank("pattern", pattern, "batch head query_pos key_pos")
    check_rank("v", v, "batch kv_head key_pos d_value")
    if pattern.shape[0] != v.shape[0] or pattern.shape[3] != v.shape[2]:
        raise ShapeError(f"pattern {tuple(pattern.shape)} and v {tuple(v.shape)} must agree in batch and key_pos")
    return (pattern @ expand_kv_heads(v, pattern.shape[1])).transpose(1, 2)


def forbidden_entries(additive: Tensor) -> Tensor:
    """Where an additive float mask means "forbidden": at or below half the most negative number of its dtype.

    Float64 uses float32's bound: masks are made in the model's dtype and cast up afterwards.
    """
    bounds = torch.finfo(torch.float32 if additive.dtype == torch.float64 else additive.dtype)
    return additive <= bounds.min / 2


def _add(scores: Tensor, term: Tensor, name: str) -> Tensor:
    _check_broadcast(name, term, scores.shape)
    if term.dtype == torch.bool:
        return scores.masked_fill(~term, NEG_INF)
    if not term.is_floating_point():
        raise ShapeError(
            f"{name} has dtype {term.dtype}; expected bool (True = allowed) or an additive float. "
            "A 0/1 integer mask is ambiguous: convert it with .bool() if 1 means allowed"
        )
    return (scores + term.to(scores.dtype)).masked_fill(forbidden_entries(term), NEG_INF)


def _check_broadcast(name: str, tensor: Tensor, shape: torch.Size) -> None:
    try:
        fits = torch.broadcast_shapes(tensor.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, which does not broadcast to {tuple(shape)}")

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

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from attndiag.errors import ShapeError
from attndiag.shapes import (
    HeadOutputs,
    Keys,
    Pattern,
    Queries,
    Values,
    check_broadcast,
    check_rank,
    expand_kv_heads,
    group_size,
)

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
    TypeError : the mask is neither bool nor float, or the position bias is not float.
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
        if not position_bias.is_floating_point():
            raise TypeError(f"position_bias has dtype {position_bias.dtype}; expected a float. Masks go to mask=")
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
    check_broadcast("sinks", logits, rows)
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


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """Cut the last axis into heads: [batch, pos, head * d_head] -> [batch, head, pos, d_head]."""
    check_rank("x", x, "batch pos width")
    if n_heads < 1 or x.shape[2] % n_heads:
        raise ShapeError(f"x {tuple(x.shape)} cannot be split into {n_heads} heads: the width must be a multiple")
    return x.unflatten(2, (n_heads, -1)).transpose(1, 2)


def concat_heads(z: HeadOutputs) -> Tensor:
    """Lay the heads side by side: [batch, query_pos, head, d_value] -> [batch, query_pos, head * d_value]."""
    check_rank("z", z, "batch query_pos head d_value")
    return z.flatten(2)


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """Weights of one attention layer, one slice a head.

    w_q : [head, d_query, d_head]; w_k : [kv_head, d_source, d_head]; w_v : [kv_head, d_source, d_value];
    w_o : [head, d_value, d_model]; biases b_q [head, d_head], b_k [kv_head, d_head], b_v [kv_head, d_value],
    b_o [d_model], or None. Fewer kv heads than heads is grouped-query attention, one kv head is multi-query.
    """

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None
    b_o: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("w_q", "w_k", "w_v", "w_o"):
            check_rank(name, getattr(self, name), "head d_in d_out")
        group_size(self.w_q.shape[0], self.w_k.shape[0])
        for left, left_axis, right, right_axis in (
            ("w_k", 0, "w_v", 0),
            ("w_k", 1, "w_v", 1),
            ("w_q", 2, "w_k", 2),
            ("w_q", 0, "w_o", 0),
            ("w_v", 2, "w_o", 1),
        ):
            one, other = tuple(getattr(self, left).shape), tuple(getattr(self, right).shape)
            if one[left_axis] != other[right_axis]:
                raise ShapeError(f"{left} {one} axis {left_axis} and {right} {other} axis {right_axis} must be equal")
        for name in ("q", "k", "v", "o"):
            bias, weight = getattr(self, f"b_{name}"), getattr(self, f"w_{name}")
            expected = (weight.shape[2],) if name == "o" else (weight.shape[0], weight.shape[2])
            if bias is not None and tuple(bias.shape) != expected:
                raise ShapeError(
                    f"b_{name} has shape {tuple(bias.shape)}; w_{name} {tuple(weight.shape)} needs {expected}"
                )

    @classmethod
    def from_linear(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        *,
        n_heads: int,
        n_kv_heads: int | None = None,
        **biases: Tensor,
    ) -> AttentionWeights:
        """Cut `nn.Linear` weights [out, in] (and biases `b_q`, `b_k`, `b_v` [out], `b_o`) into heads."""
        unknown = set(biases) - {"b_q", "b_k", "b_v", "b_o"}
        if unknown:
            raise TypeError(f"unknown bias {sorted(unknown)}; expected b_q, b_k, b_v or b_o")
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        heads = {"q": n_heads, "k": n_kv_heads, "v": n_kv_heads}
        weights: dict[str, Tensor] = {}
        for name, weight in (("q", q), ("k", k), ("v", v)):
            weights[f"w_{name}"] = split_heads(weight.T[None], heads[name])[0]
        weights["w_o"] = split_heads(o[None], n_heads)[0].transpose(1, 2)
        for name, bias in biases.items():
            weights[name] = bias if name == "b_o" else split_heads(bias[None, None], heads[name[2:]])[0, :, 0]
        return cls(**weights)


@dataclass(frozen=True, eq=False)
class AttentionSteps:
    """Every intermediate of one attention layer, named and shaped as in the module's formulas.

    q [batch, head, query_pos, d_head]; k [batch, kv_head, key_pos, d_head]; v [batch, kv_head, key_pos, d_value];
    scores and pattern [batch, head, query_pos, key_pos]; sink_mass [batch, head, query_pos];
    z [batch, query_pos, head, d_value]; attn_out [batch, query_pos, d_model].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    pattern: Tensor
    sink_mass: Tensor
    z: Tensor
    attn_out: Tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape after each step, in the order of computation."""
        return {field.name: tuple(getattr(self, field.name).shape) for field in fields(self)}


def multi_head_attention(
    x: Tensor,
    weights: AttentionWeights,
    *,
    source: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> AttentionSteps:
    """Multi-head attention, one step a line, every intermediate kept.

    o_i = sum_h (sum_j A_ij^h v_j^h) W_O^h + b_O with A = softmax over keys of scale * (x W_Q) (source W_K)^T.

    Parameters
    ----------
    x : [batch, query_pos, d_query], what the queries read.
    weights : the layer; grouped-query and multi-query layers simply have fewer kv heads.
    source : [batch, key_pos, d_source], what keys and values read. None: `x` itself (self-attention).
    scale : None means 1 / sqrt(d_head). Without it q.k has standard deviation sqrt(d_head) for unit components.
    softcap, position_bias, mask : as in `attention_scores`.
    sinks : as in `softmax_rows`.

    Returns
    -------
    `AttentionSteps`.

    Raises
    ------
    ShapeError : a step does not fit; both shapes are named.
    """
    source = x if source is None else source
    check_rank("x", x, "batch query_pos d_query")
    check_rank("source", source, "batch key_pos d_source")
    q = _project("x", x, "w_q", weights.w_q, weights.b_q)
    k = _project("source", source, "w_k", weights.w_k, weights.b_k)
    v = _project("source", source, "w_v", weights.w_v, weights.b_v)
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    scores = attention_scores(q, k, scale=scale, softcap=softcap, position_bias=position_bias, mask=mask)
    pattern, sink_mass = softmax_rows(scores, sinks=sinks)
    z = head_outputs(pattern, v)
    attn_out = concat_heads(z) @ weights.w_o.flatten(0, 1)
    if weights.b_o is not None:
        attn_out = attn_out + weights.b_o
    return AttentionSteps(q, k, v, scores, pattern, sink_mass, z, attn_out)


def forbidden_entries(additive: Tensor) -> Tensor:
    """Where an additive float mask means "forbidden": at or below half the most negative number of its dtype.

    Float64 uses float32's bound: masks are made in the model's dtype and cast up afterwards.
    """
    bounds = torch.finfo(torch.float32 if additive.dtype == torch.float64 else additive.dtype)
    return additive <= bounds.min / 2


def _project(name: str, x: Tensor, weight_name: str, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.shape[2] != weight.shape[1]:
        raise ShapeError(
            f"{name} {tuple(x.shape)} does not fit {weight_name} {tuple(weight.shape)}: width {x.shape[2]} "
            f"against {weight.shape[1]}"
        )
    # One product for all heads, as real layers do it; the cost does not depend on the number of heads.
    projected = split_heads(x @ weight.transpose(0, 1).flatten(1), weight.shape[0])
    return projected if bias is None else projected + bias[None, :, None, :]


def _add(scores: Tensor, term: Tensor, name: str) -> Tensor:
    check_broadcast(name, term, scores.shape)
    if term.dtype == torch.bool:
        return scores.masked_fill(~term, NEG_INF)
    if not term.is_floating_point():
        raise TypeError(
            f"{name} has dtype {term.dtype}; expected bool (True = allowed) or an additive float. "
            "A 0/1 integer mask is ambiguous: convert it with .bool() if 1 means allowed"
        )
    return (scores + term.to(scores.dtype)).masked_fill(forbidden_entries(term), NEG_INF)

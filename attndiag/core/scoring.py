"""Other ways to compare a query with a key, and attention without a softmax.

`dot`, `scaled_dot`, `general` (Luong 2015, arXiv 1508.04025), `additive` (Bahdanau 2015, arXiv 1409.0473) give scores
for `softmax_rows`. Linear attention (Katharopoulos 2020, arXiv 2006.16236) replaces exp(q.k) by phi(q).phi(k) with
phi = elu + 1: the output is computed in O(n), and the weights that this implies can still be written down.

q is [batch, head, query_pos, d_query] and k [batch, head, key_pos, d_key]; GQA keys are expanded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attndiag.errors import ShapeError
from attndiag.shapes import AllowedMask, HeadOutputs, Keys, Pattern, Queries, Values, check_rank, expand_kv_heads


def dot_scores(q: Queries, k: Keys) -> Pattern:
    """q . k. For independent zero-mean unit-variance components the variance is d_head."""
    q, k = _pair(q, k)
    _check_width("q", q, 3, "k", k, 3)
    return q @ k.transpose(-1, -2)


def scaled_dot_scores(q: Queries, k: Keys) -> Pattern:
    """q . k / sqrt(d_head): unit variance for unit components, whatever the width."""
    return dot_scores(q, k) / q.shape[-1] ** 0.5


def general_scores(q: Queries, k: Keys, weight: Tensor) -> Pattern:
    """q^T W k with W [d_query, d_key], or one a head [head, d_query, d_key] (Luong's "general")."""
    q, k = _pair(q, k)
    _check_width("q", q, 3, "weight", weight, -2)
    _check_width("k", k, 3, "weight", weight, -1)
    return q @ weight @ k.transpose(-1, -2)


def additive_scores(q: Queries, k: Keys, *, w_q: Tensor, w_k: Tensor, v: Tensor) -> Pattern:
    """v^T tanh(W_q q + W_k k), Bahdanau's alignment model.

    Parameters
    ----------
    q, k : [batch, head, query_pos, d_query] and [batch, head, key_pos, d_key]; the widths may differ.
    w_q, w_k : [d_attn, d_query] and [d_attn, d_key].
    v : [d_attn].

    Returns
    -------
    Scores [batch, head, query_pos, key_pos] in (-|v|_1, |v|_1). Builds [batch, head, query_pos, key_pos, d_attn].
    """
    q, k = _pair(q, k)
    _check_width("q", q, 3, "w_q", w_q, 1)
    _check_width("k", k, 3, "w_k", w_k, 1)
    _check_width("w_q", w_q, 0, "v", v, 0)
    _check_width("w_k", w_k, 0, "v", v, 0)
    hidden = (q @ w_q.T)[:, :, :, None, :] + (k @ w_k.T)[:, :, None, :, :]
    return torch.tanh(hidden) @ v


def elu_features(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1, that is x + 1 above 0 and exp(x) below; positive."""
    # Written out: torch's elu(x) + 1 loses all digits of exp(x) for very negative x.
    return torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0)))


def linear_attention_weights(q: Queries, k: Keys, *, mask: AllowedMask | None = None) -> Pattern:
    """The weights that linear attention implies: A_ij = phi(q_i).phi(k_j) / sum_k phi(q_i).phi(k_k).

    Parameters
    ----------
    q, k : [batch, head, query_pos, d_head] and [batch, kv_head, key_pos, d_head].
    mask : bool, True = allowed, broadcastable to the weights.

    Returns
    -------
    [batch, head, query_pos, key_pos], mass in [0, 1], rows sum to 1; a row without any weight is all zero.
    """
    weights = dot_scores(elu_features(q), elu_features(k))
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"mask has dtype {mask.dtype}; expected bool (True = allowed)")
        weights = weights.masked_fill(~mask, 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0)


def linear_attention_outputs(q: Queries, k: Keys, v: Values, *, causal: bool) -> HeadOutputs:
    """Linear attention in its O(n) form; equals `head_outputs(linear_attention_weights(...), v)`.

    z_i = phi(q_i) S_i / phi(q_i) n_i with S_i = sum_j phi(k_j) v_j^T and n_i = sum_j phi(k_j), over all j or,
    `causal`, over j <= i as running sums.

    Returns
    -------
    z : [batch, query_pos, head, d_value].

    Raises
    ------
    ShapeError : tensors do not fit, or `causal` with different numbers of queries and keys.
    """
    q, k = _pair(q, k)
    _check_width("q", q, 3, "k", k, 3)
    _check_width("k", k, 2, "v", v, 2)
    features_q, features_k, v = elu_features(q), elu_features(k), expand_kv_heads(v, q.shape[1])
    if not causal:
        memory, norm = features_k.transpose(-1, -2) @ v, features_k.sum(dim=2)
        numerator, divisor = features_q @ memory, features_q @ norm[..., None]
    else:
        _check_width("q", q, 2, "k", k, 2)
        memory = (features_k[..., :, None] * v[..., None, :]).cumsum(dim=2)
        numerator = (features_q[..., None, :] @ memory)[..., 0, :]
        divisor = (features_q * features_k.cumsum(dim=2)).sum(dim=-1, keepdim=True)
    return (numerator / divisor.masked_fill(divisor == 0, 1.0)).transpose(1, 2)


def _pair(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    check_rank("q", q, "batch head query_pos d_query")
    check_rank("k", k, "batch kv_head key_pos d_key")
    _check_width("q", q, 0, "k", k, 0)
    return q, expand_kv_heads(k, q.shape[1])


def _check_width(left: str, one: Tensor, left_axis: int, right: str, other: Tensor, right_axis: int) -> None:
    if one.shape[left_axis] != other.shape[right_axis]:
        raise ShapeError(
            f"{left} {tuple(one.shape)} axis {left_axis} and {right} {tuple(other.shape)} axis {right_axis} must agree"
        )

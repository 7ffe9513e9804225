"""Gradients of a target through attention patterns, and how far an attribution is from complete.

A pattern enters the model only through z_i^h = sum_j A_ij^h v_j^h, so with the gradient of the target m in z at hand
the gradient in every weight is a product of two vectors, whatever kernel computed the attention:

    dm/dA_ij^h = <dm/dz_i^h, v_j^h>

It treats A_ij as free: the softmax, which couples the weights of a row, is not differentiated. A_ij * dm/dA_ij is then
the first-order estimate of m(clean) - m(A_ij = 0).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from attndiag.errors import ShapeError
from attndiag.shapes import HeadOutputs, Pattern, Values, check_rank, check_same_size, expand_kv_heads


def pattern_gradient(grad_z: HeadOutputs, v: Values) -> Pattern:
    """Gradient of a scalar in every attention weight: dm/dA_ij^h = <dm/dz_i^h, v_j^h>.

    Parameters
    ----------
    grad_z : [batch, query_pos, head, d_value], dm/dz.
    v : [batch, kv_head, key_pos, d_value], value bias included.

    Returns
    -------
    [batch, head, query_pos, key_pos], signed, unit of m for one unit of weight. Entries that the mask forbids hold what
    the formula gives; multiply by the pattern, or mask them, before they are ranked.

    Raises
    ------
    ShapeError : the tensors do not fit together.
    """
    check_rank("grad_z", grad_z, "batch query_pos head d_value")
    check_rank("v", v, "batch kv_head key_pos d_value")
    check_same_size("batch of grad_z", grad_z.shape[0], "batch of v", v.shape[0])
    check_same_size("d_value of grad_z", grad_z.shape[3], "d_value of v", v.shape[3])
    return grad_z.transpose(1, 2) @ expand_kv_heads(v, grad_z.shape[2]).transpose(2, 3)


def pattern_attribution(pattern: Pattern, grad_z: HeadOutputs, v: Values) -> Pattern:
    """First-order effect of every edge: A_ij^h * dm/dA_ij^h, an estimate of m(clean) - m(A_ij^h set to 0).

    Exact where m is linear in z. Near 0 for weights that a saturated softmax holds near 1 only in the softmax's own
    gradient, which is not part of it; but a gradient is local, so a small value alone never shows that an edge has no
    effect.

    Returns
    -------
    [batch, head, query_pos, key_pos], signed, unit of m; summed over keys it is <dm/dz_i^h, z_i^h>.

    Raises
    ------
    ShapeError : the tensors do not fit together.
    """
    gradient = pattern_gradient(grad_z, v)
    if pattern.shape != gradient.shape:
        raise ShapeError(f"pattern has shape {tuple(pattern.shape)}; z and v give {tuple(gradient.shape)}")
    return pattern * gradient


def head_gradient(
    grad_output: Float[Tensor, "batch query_pos d_model"],
    w_o: Float[Tensor, "head d_value d_model"],
    gate: HeadOutputs | None = None,
) -> HeadOutputs:
    """dm/dz from the gradient in the module's output: dm/dz_i^h = W_O^h (dm/do_i), times the gate where there is one.

    Raises
    ------
    ShapeError : the tensors do not fit together.
    """
    check_rank("grad_output", grad_output, "batch query_pos d_model")
    check_same_size("d_model of grad_output", grad_output.shape[2], "d_model of W_O", w_o.shape[2])
    gradient = torch.einsum("bqm,hdm->bqhd", grad_output, w_o)
    return gradient if gate is None else gradient * gate


def completeness_gap(total: float, difference: float) -> float:
    """How much of m(x) - m(baseline) an attribution misses: |sum of scores - difference| / |difference|.

    0 is complete, 1 is as bad as no attribution at all; unbounded above, `nan` where the difference is 0 or not a
    number.
    """
    if difference == 0 or math.isnan(difference):
        return math.nan
    return abs(total - difference) / abs(difference)

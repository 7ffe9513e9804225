"""What heads write: how alike two heads are, which are quiet, and what the sinks contribute.

Built on contributions (Kobayashi 2020, arXiv 2004.10102): T_ij^h = A_ij^h f_j^h with f_j = v_j W_O, what key j writes
into query i through head h. No [query, key, d_model] tensor is ever made; reductions run in float64. Every number is
unchanged under v -> v R, W_O -> R^-1 W_O, which changes nothing that the model computes.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from attndiag.core.circuits import defined
from attndiag.core.contributions import contribution
from attndiag.core.heads import mean_over, query_mask, sink_mask
from attndiag.errors import ShapeError, UndefinedScoreWarning
from attndiag.shapes import OutputWeights, Pattern, Values, check_rank, check_same_size, expand_kv_heads


def head_similarity(
    pattern: Pattern,
    v: Values,
    w_o: OutputWeights,
    *,
    queries: Tensor | None = None,
    other: tuple[Pattern, Values, OutputWeights] | None = None,
) -> Tensor:
    """How alike two heads write: the cosine of everything they write, over all query-key pairs.

    similarity_{h,g} = sum_ij <T^h_ij, T^g_ij> / sqrt(sum_ij ‖T^h_ij‖² sum_ij ‖T^g_ij‖²),  T^h_ij = A^h_ij f^h_j

    computed as sum_j <f^h_j, f^g_j> sum_i A^h_ij A^g_ij, so that no T is ever made.

    Parameters
    ----------
    pattern : [batch, head, query_pos, key_pos].
    v : [batch, kv_head, key_pos, d_head], bias included.
    w_o : [head, d_head, d_model].
    queries : [batch, query_pos] bool, the rows that count.
    other : the same three of another layer, on the same inputs. None: the heads of this layer with each other.

    Returns
    -------
    [batch, head, other_head], in [-1, 1]: 1 for duplicated heads, -1 for heads that cancel. nan with an
    `UndefinedScoreWarning` for heads that write nothing.
    """
    mine = _weighted(pattern, v, w_o, queries)
    theirs = mine if other is None else _weighted(*other, queries)
    if mine[0].shape[2:] != theirs[0].shape[2:] or mine[0].shape[0] != theirs[0].shape[0]:
        raise ShapeError(
            f"patterns {tuple(mine[0].shape)} and {tuple(theirs[0].shape)} must agree in batch, query_pos and key_pos"
        )
    cross = _inner(mine, theirs)
    own, their_own = _self_inner(mine), _self_inner(theirs)
    size = (own[:, :, None] * their_own[:, None, :]).sqrt()
    return defined(cross / size, size > 0, "the similarity of heads", "a head writes nothing")


def head_output_norm(pattern: Pattern, v: Values, w_o: OutputWeights, *, queries: Tensor | None = None) -> Tensor:
    """Mean length of what each head writes: mean over queries of ‖sum_j A_ij f_j‖, [batch, head], residual norm."""
    values, weights, out = _checked(pattern, v, w_o)
    z = weights @ values
    gram = out @ out.transpose(-1, -2)
    # ‖z W_O‖² = z (W_O W_O^T) z^T: d_head instead of d_model numbers a query
    squared = torch.einsum("bhqc,hcd,bhqd->bhq", z, gram, z).clamp(min=0)
    return mean_over(squared.sqrt(), query_mask(queries, pattern), "the head output norm")


def dormant_heads(output_norm: Tensor, *, below: float = 0.1) -> tuple[Tensor, Tensor]:
    """Heads that write next to nothing on these inputs, beside the others of their layer.

    relative = ‖head output‖ / mean over the layer's heads of the same;  dormant = relative < below

    Parameters
    ----------
    output_norm : [..., head] from `head_output_norm`.
    below : the threshold, a choice to be shown with the result.

    Returns
    -------
    dormant : [..., head] bool (False where undefined).
    relative : [..., head], non-negative, mean 1 over a layer; nan where no head of the layer writes anything.

    Notes
    -----
    Judged by the output and not by the sink mass, which misses heads that attend widely to small values and accuses
    heads that do write from the sink (Sandoval-Segura 2025, arXiv 2504.03889). Dormant on some inputs says nothing
    about others (Guo 2024, arXiv 2410.13835).
    """
    relative = output_norm / output_norm.mean(dim=-1, keepdim=True)
    return relative < below, relative


@dataclass(frozen=True, eq=False)
class ValueDrain:
    """Sink mass against its contribution share: a sink with small values takes weight and writes little.

    Parameters
    ----------
    weight_share : [batch, head], mean over queries of the sinks' share of the row's weight.
    contribution_share : [batch, head], the same of A_ij ‖f_j‖.
    norm_ratio : [batch, head], mean ‖f_j‖ over the sinks / mean ‖f_j‖ over the other keys.
    layer_weight_share : [batch], mean of `weight_share` over heads.
    layer_contribution_share : [batch], sinks' share of ‖sum_h A_ij^h f_j^h‖, mean over queries.
    """

    weight_share: Tensor
    contribution_share: Tensor
    norm_ratio: Tensor
    layer_weight_share: Tensor
    layer_contribution_share: Tensor


def value_drain(
    pattern: Pattern,
    v: Values,
    w_o: OutputWeights,
    *,
    queries: Tensor | None = None,
    sinks: Tensor | None = None,
    keys: Tensor | None = None,
) -> ValueDrain:
    """Sink mass against its contribution share, for each head and for the layer.

    Parameters
    ----------
    pattern, v, w_o, queries : as in `head_similarity`. Leave the sink itself out of the queries.
    sinks : [batch, key_pos] bool; default position 0.
    keys : [batch, key_pos] bool, real keys: padding is left out of the mean norm. Default: all.

    Returns
    -------
    `ValueDrain`, shares in [0, 1]; the drain is weight_share - contribution_share. Gu 2024, arXiv 2410.10781;
    contributions as in Kobayashi 2020, arXiv 2004.10102. nan with an `UndefinedScoreWarning` where a head writes
    nothing at some query.
    """
    values, weights, out = _checked(pattern, v, w_o)
    counted, on_sinks = query_mask(queries, pattern), sink_mask(sinks, pattern)
    real = torch.ones_like(on_sinks) if keys is None else keys.to(on_sinks.device)
    f = values @ out
    norms = f.norm(dim=-1)
    joint = contribution(weights, v.double(), out)
    weight_share = _share(weights, on_sinks, counted, "weight")
    return ValueDrain(
        weight_share=weight_share,
        contribution_share=_share(weights * norms[:, :, None], on_sinks, counted, "contribution"),
        norm_ratio=_key_mean(norms, on_sinks & real) / _key_mean(norms, real & ~on_sinks),
        layer_weight_share=weight_share.mean(dim=-1),
        layer_contribution_share=_share(joint[:, None], on_sinks, counted, "contribution of the layer")[:, 0],
    )


def _share(sizes: Tensor, on_sinks: Tensor, counted: Tensor, what: str) -> Tensor:
    total = sizes.sum(dim=-1)
    part = (sizes * on_sinks[:, None, None]).sum(dim=-1)
    empty = (total == 0) & counted[:, None]
    if bool(empty.any()):
        warnings.warn(
            f"the sinks' share of the {what} is undefined where a row holds none of it; returned as nan",
            UndefinedScoreWarning,
            stacklevel=3,
        )
    return mean_over(part / total, counted, f"the sinks' share of the {what}")


def _key_mean(values: Tensor, keys: Tensor) -> Tensor:
    chosen = torch.where(keys[:, None], values, 0.0)
    return chosen.sum(dim=-1) / keys.sum(dim=-1)[:, None]


def _checked(pattern: Tensor, v: Tensor, w_o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Float64 v with key/value heads expanded, pattern and W_O, after checking that they fit."""
    check_rank("pattern", pattern, "batch head query_pos key_pos")
    check_rank("v", v, "batch kv_head key_pos d_head")
    check_rank("w_o", w_o, "head d_head d_model")
    check_same_size("heads of the pattern", pattern.shape[1], "heads of w_o", w_o.shape[0])
    if pattern.shape[0] != v.shape[0] or pattern.shape[3] != v.shape[2] or v.shape[3] != w_o.shape[1]:
        raise ShapeError(
            f"pattern {tuple(pattern.shape)}, v {tuple(v.shape)} and w_o {tuple(w_o.shape)} must agree in batch, "
            "key_pos and d_head"
        )
    return expand_kv_heads(v, pattern.shape[1]).double(), pattern.double(), w_o.double()


def _weighted(pattern: Tensor, v: Tensor, w_o: Tensor, queries: Tensor | None) -> tuple[Tensor, Tensor]:
    """The pattern with the rows that do not count set to zero, and f = v W_O."""
    values, weights, out = _checked(pattern, v, w_o)
    return weights * query_mask(queries, pattern)[:, None, :, None], values @ out


def _inner(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    together = torch.einsum("bhqk,bgqk->bhgk", a[0], b[0])
    return torch.einsum("bhgk,bhkm,bgkm->bhg", together, a[1], b[1])


def _self_inner(a: tuple[Tensor, Tensor]) -> Tensor:
    return ((a[0] ** 2).sum(dim=2) * (a[1] ** 2).sum(dim=-1)).sum(dim=-1)

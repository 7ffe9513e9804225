"""‖sum_h A_ij^h f_j^h‖ without the vectors: one small triangular factor for each key.

With F_j the [head, d_model] matrix of transformed values f_j^h = v_j^h W_O^h (Kobayashi 2020, arXiv 2004.10102),

    ‖T_ij‖² = a_ij^T G_j a_ij,   G_j = F_j F_j^T = L_j L_j^T,   so   ‖T_ij‖ = ‖L_j^T a_ij‖.

The Gram matrix is accumulated and factored in float64 and only L_j is cast down: a sum of squares cannot turn
negative, and the rounding of L_j enters linearly (2e-6 where a float32 Gram matrix is off by 2e-3, at a
cancellation ratio of 7e-4). G_j is scaled to unit diagonal first and lifted by 1e-14, so that heads that write
parallel or zero vectors factor too; the lift changes a norm by at most 1e-7 of sum_h A‖f‖.

One more row holds ‖f_j^h‖, so the same batched product also gives sum_h A_ij^h ‖f_j^h‖, the denominator of the
cancellation ratio.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attndiag.core.blocks import AttentionProblem, PatternBlock, expand_heads

LIFTS = (1e-14, 1e-13, 1e-12)
# Float64 workspace of the Gram accumulation, bytes: measured best on 2 MB of L2, flat up to twice that.
GRAM_BYTES = 2**21
KEY_CHUNK = 128  # keys in one batched product; 128 to 256 measured best
DIRECT_BYTES = 2**23
NORM_CHUNK = 512


def value_norms(problem: AttentionProblem, batch: int) -> Tensor:
    """‖f_j^h‖, [head, key_pos], without f: ‖v R_h‖ with R_h R_h^T = W_O^h W_O^h^T, factored in float64.

    Few keys build f instead, which is cheaper then.
    """
    v, w_o = problem.v[batch], problem.w_o
    few = v.shape[1] <= 2 * v.shape[2]
    if not few:
        w_o = w_o.double()
        gram = w_o @ w_o.mT
        norms = gram.diagonal(dim1=1, dim2=2).clamp_min(0.0).sqrt()
        w_o = (_factor(gram, norms) * norms[:, :, None]).to(v.dtype)
    chunks = v.split(NORM_CHUNK, dim=1)
    return torch.cat([torch.bmm(expand_heads(some, problem.group), w_o).norm(dim=-1) for some in chunks], dim=1)


def key_factors(problem: AttentionProblem, batch: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """[key_pos, head + 1, head]: rows :head are L_j^T, row `head` is ‖f_j^h‖.

    `dtype` float64 also computes f itself in float64 (for pairs whose heads nearly cancel).
    """
    wanted = problem.q.dtype if dtype is None else dtype
    heads, n_keys = problem.n_heads, problem.n_keys
    v, w_o = problem.v[batch].to(wanted), problem.w_o.to(wanted)
    factors = torch.empty(n_keys, heads + 1, heads, dtype=wanted, device=v.device)
    keys, width = _gram_chunks(problem)
    for start in range(0, n_keys, keys):
        some = slice(start, min(start + keys, n_keys))
        some_v = expand_heads(v[:, some], problem.group)
        gram = torch.zeros(some_v.shape[1], heads, heads, dtype=torch.float64, device=v.device)
        for column in range(0, problem.d_model, width):
            part = torch.bmm(some_v, w_o[:, :, column : column + width]).double().permute(1, 0, 2)
            gram.baddbmm_(part, part.mT)
        norms = gram.diagonal(dim1=1, dim2=2).clamp_min(0.0).sqrt()
        factors[some, heads] = norms.to(wanted)
        factors[some, :heads] = (_factor(gram, norms) * norms[:, :, None]).mT.to(wanted)
    return factors


def contribution_from_factors(block: PatternBlock, factors: Tensor) -> tuple[Tensor, Tensor]:
    """‖T_ij‖ and sum_h A_ij^h ‖f_j^h‖ of a block, each [key, query]. `factors` are those of the block's keys."""
    weights = block.by_key
    heads = factors.shape[2]
    norm = torch.empty(weights.shape[0], weights.shape[2], dtype=weights.dtype, device=weights.device)
    bound = torch.empty_like(norm)
    chunk = KEY_CHUNK if weights.device.type == "cpu" else weights.shape[0]
    for start in range(0, weights.shape[0], chunk):
        some = slice(start, start + chunk)
        product = torch.bmm(factors[some], weights[some])
        bound[some] = product[:, heads]
        torch.sum(product[:, :heads].square_(), dim=1, out=norm[some])
    return norm.sqrt_(), bound


def contribution_direct(problem: AttentionProblem, block: PatternBlock, norms: Tensor) -> tuple[Tensor, Tensor]:
    """The same two from the vectors themselves: cheaper for a few queries, when factoring cannot pay."""
    weights = block.weights
    v = problem.v[block.batch][:, block.keys]
    n_keys, n_queries = weights.shape[1:]
    norm = torch.empty(n_keys, n_queries, dtype=weights.dtype, device=weights.device)
    vectors = problem.n_heads + n_queries if n_queries > 1 else 1
    chunk = max(8, DIRECT_BYTES // (vectors * problem.d_model * weights.element_size()))
    flat = problem.w_o.reshape(-1, problem.d_model)
    for start in range(0, n_keys, chunk):
        some = slice(start, min(start + chunk, n_keys))
        some_v = expand_heads(v[:, some], problem.group)
        if n_queries == 1:
            gathered = (weights[:, some] * some_v).permute(1, 0, 2).reshape(some.stop - some.start, -1)
            written = (gathered @ flat)[:, None]
        else:
            f = torch.bmm(some_v, problem.w_o).permute(1, 0, 2)
            written = torch.bmm(weights[:, some].permute(1, 2, 0), f)
        torch.sum(written.square_(), dim=-1, out=norm[some])
    bound = torch.einsum("hkq,hk->kq", weights, norms[:, block.keys])
    return norm.sqrt_(), bound


def transformed_at(problem: AttentionProblem, batch: int, weights: Tensor, key_pos: Tensor) -> Tensor:
    """sum_h w^h f^h for one key a query: `weights` [head, query], `key_pos` [query] -> [query, d_model]."""
    v = expand_heads(problem.v[batch][:, key_pos], problem.group)
    gathered = (weights[:, :, None] * v).permute(1, 0, 2).reshape(len(key_pos), -1)
    return gathered @ problem.w_o.reshape(-1, problem.d_model)


def _gram_chunks(problem: AttentionProblem) -> tuple[int, int]:
    """(keys, columns of d_model) of one step of the accumulation."""
    if problem.q.device.type != "cpu":
        # few large launches; the float64 copy of f stays below half a gigabyte
        return max(16, 2**29 // (8 * problem.n_heads * problem.d_model)), problem.d_model
    keys = 64
    columns = GRAM_BYTES // (8 * problem.n_heads * keys)
    return keys, min(problem.d_model, max(64, columns // 64 * 64))


def _factor(gram: Tensor, norms: Tensor) -> Tensor:
    """A square root of each Gram matrix scaled to unit diagonal: Cholesky, or eigenvalues where rounding forbids it."""
    inverse = torch.where(norms > 0, 1 / norms, 0)
    unit = gram * inverse[:, :, None] * inverse[:, None, :]
    diagonal = unit.diagonal(dim1=1, dim2=2)
    diagonal.fill_(1.0)
    lifted = LIFTS[0]
    diagonal.add_(lifted)
    factor, info = torch.linalg.cholesky_ex(unit)
    for lift in LIFTS[1:]:
        if not info.any():
            return factor
        diagonal.add_(lift - lifted)
        lifted = lift
        failed = info != 0
        factor[failed], info[failed] = torch.linalg.cholesky_ex(unit[failed])
    if info.any():
        failed = info != 0
        values, vectors = torch.linalg.eigh(unit[failed])
        factor[failed] = vectors * values.clamp_min(0.0).sqrt()[:, None, :]
    return factor

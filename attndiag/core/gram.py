"""‖sum_h A_ij^h f_j^h‖ without the vectors: one small triangular factor for each key.

With F_j the [head, d_model] matrix of transformed values f_j^h = v_j^h W_O^h (Kobayashi 2020, arXiv 2004.10102),

    ‖T_ij‖² = a_ij^T G_j a_ij,   G_j = F_j F_j^T = L_j L_j^T,   so   ‖T_ij‖ = ‖L_j^T a_ij‖.

The Gram matrix is accumulated and factored in float64 and only L_j is cast down: a sum of squares cannot turn
negative, and the rounding of L_j enters linearly (2e-6 where a float32 Gram matrix is off by 2e-3, at a
cancellation ratio of 7e-4). G_j is scaled to unit diagonal first and lifted by 1e-14, so that heads that write
parallel or zero vectors factor too; the lift changes a norm by at most 1e-7 of sum_h A‖f‖. With many heads the
products are float32 (`COARSE_HEADS`); keys whose factorisation then fails are done again in float64.

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
# From this many heads on, products of f are float32, in runs of so many columns that are summed in float64: the
# rounding left, about 1e-9 of (sum_h A‖f‖)², matters below the cancellation that is repeated in float64 anyway, and
# float64 products would take half of the preparation (measured at 32 heads).
COARSE_HEADS, COARSE_WIDTH = 8, 128
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
        w_o = (_robust_factor(gram, norms) * norms[:, :, None]).to(v.dtype)
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
    coarse = wanted == torch.float32 and heads >= COARSE_HEADS
    keys, width = _gram_chunks(problem, coarse)
    for start in range(0, n_keys, keys):
        some = slice(start, min(start + keys, n_keys))
        some_v = v[:, some]
        gram = _gram(expand_heads(some_v, problem.group), w_o, width, coarse)
        norms = gram.diagonal(dim1=1, dim2=2).clamp_min(0.0).sqrt()
        factor, info = torch.linalg.cholesky_ex(_unit(gram, norms, LIFTS[0]))
        if info.any():
            failed = info.nonzero()[:, 0]
            if coarse:
                gram[failed] = _gram(expand_heads(some_v[:, failed], problem.group), w_o, width, False)
                norms = gram.diagonal(dim1=1, dim2=2).clamp_min(0.0).sqrt()
            factor[failed] = _robust_factor(gram[failed], norms[failed])
        factors[some, heads] = norms.to(wanted)
        factors[some, :heads] = (factor * norms[:, :, None]).mT.to(wanted)
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


def contribution_direct(problem: AttentionProblem, block: PatternBlock) -> tuple[Tensor, Tensor]:
    """The same two from the vectors themselves: cheaper for a few queries, when factoring cannot pay."""
    weights, w_o = block.by_key.mT, problem.w_o  # [key, query, head]
    v = problem.v[block.batch][:, block.keys]
    norm = torch.zeros(weights.shape[:2], dtype=weights.dtype, device=weights.device)
    bound = torch.empty_like(norm)
    keys, width = _direct_chunks(problem, weights.shape[1])
    for start in range(0, weights.shape[0], keys):
        some = slice(start, start + keys)
        some_v, some_weights = expand_heads(v[:, some], problem.group), weights[some]
        sizes = torch.zeros(some_v.shape[:2], dtype=v.dtype, device=v.device)
        for column in range(0, problem.d_model, width):
            f = torch.bmm(some_v, w_o[:, :, column : column + width])
            norm[some] += torch.bmm(some_weights, f.permute(1, 0, 2)).square_().sum(dim=-1)
            sizes += f.square_().sum(dim=-1)
        bound[some] = torch.bmm(some_weights, sizes.sqrt_().mT[:, :, None])[:, :, 0]
    return norm.sqrt_(), bound


def transformed_at(problem: AttentionProblem, batch: int, weights: Tensor, key_pos: Tensor) -> Tensor:
    """sum_h w^h f^h for one key a query: `weights` [head, query], `key_pos` [query] -> [query, d_model]."""
    v = expand_heads(problem.v[batch][:, key_pos], problem.group)
    gathered = (weights[:, :, None] * v).permute(1, 0, 2).reshape(len(key_pos), -1)
    return gathered @ problem.w_o.reshape(-1, problem.d_model)


def _gram(v: Tensor, w_o: Tensor, width: int, coarse: bool) -> Tensor:
    """F_j F_j^T for each key of `v` [head, key, d_value], [key, head, head] in float64, `width` columns at a time."""
    gram = torch.zeros(v.shape[1], v.shape[0], v.shape[0], dtype=torch.float64, device=v.device)
    for column in range(0, w_o.shape[2], width):
        part = torch.bmm(v, w_o[:, :, column : column + width])
        if coarse:
            part = part.permute(1, 0, 2)
            gram += torch.bmm(part, part.mT)
        else:
            part = part.double().permute(1, 0, 2)
            gram.baddbmm_(part, part.mT)
    return gram


def _gram_chunks(problem: AttentionProblem, coarse: bool) -> tuple[int, int]:
    """(keys, columns of d_model) of one step of the accumulation."""
    if problem.q.device.type != "cpu":
        # few large launches; the parts of f and their copies stay below half a gigabyte
        width = min(problem.d_model, COARSE_WIDTH if coarse else 1024)
        return max(16, 2**29 // (12 * problem.n_heads * width)), width
    keys = 128 if coarse else 32
    columns = GRAM_BYTES // ((4 if coarse else 8) * problem.n_heads * keys) // 64 * 64
    return keys, min(problem.d_model, max(64, min(columns, COARSE_WIDTH if coarse else 256)))


def _direct_chunks(problem: AttentionProblem, n_queries: int) -> tuple[int, int]:
    """(keys, columns of d_model) for which f and the pair vectors stay in the cache."""
    keys = 64
    columns = GRAM_BYTES // (4 * keys * (problem.n_heads + n_queries)) // 64 * 64
    return keys, min(problem.d_model, max(64, columns))


def _robust_factor(gram: Tensor, norms: Tensor) -> Tensor:
    """A square root of each scaled Gram matrix: Cholesky with a growing lift, then eigenvalues clipped at 0."""
    factor, info = torch.linalg.cholesky_ex(_unit(gram, norms, LIFTS[0]))
    for lift in LIFTS[1:]:
        failed = info != 0
        if not failed.any():
            return factor
        factor[failed], info[failed] = torch.linalg.cholesky_ex(_unit(gram[failed], norms[failed], lift))
    failed = info != 0
    if not failed.any():
        return factor
    values, vectors = torch.linalg.eigh(_unit(gram[failed], norms[failed], 0.0))
    factor[failed] = vectors * values.clamp_min(0.0).sqrt()[:, None, :]
    return factor


def _unit(gram: Tensor, norms: Tensor, lift: float) -> Tensor:
    """Gram matrices scaled to diagonal 1 + lift; heads that write nothing become unit rows of their own."""
    inverse = torch.where(norms > 0, 1 / norms, 0)
    unit = gram * inverse[:, :, None] * inverse[:, None, :]
    unit.diagonal(dim1=1, dim2=2).fill_(1.0 + lift)
    return unit

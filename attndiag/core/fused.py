"""Value-aware contributions at about the price of attention itself.

One pass over blocks of queries gives any of the scores of `core.contributions`, straight from q, k, v and W_O: no
[query, key, d_model] tensor, and no [head, query, key] tensor unless `head_contribution` is asked for.

1. Preparation, once a sequence: a [head, head] triangular factor for each key (`core.gram`).
2. For each block of queries: scores over the visible keys, softmax (`core.blocks`), ‖L_j^T a_ij‖.
3. Pairs whose heads nearly cancel are repeated in float64 (`core.refine`).

Few queries skip the factors and build the vectors (`core.dispatch` says where the line lies). In float32 the numbers
are those of `core.contributions` to 1e-5 of the value (to 1e-5 of sum_h A‖f‖ where the cancellation ratio is below
1e-3). Single weights inherit the rounding of their score, 2e-8 ‖q‖ ‖k‖: give float64 where that is too much. For
sequences whose [query, key] results do not fit in memory see `core.streaming`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from attndiag.core.blocks import AttentionProblem, BlockTerm, PatternBlock, expand_heads, positions
from attndiag.core.dispatch import (
    CompileChoice,
    Formulation,
    KernelPlan,
    block_queries,
    choose_formulation,
    preparation_bytes,
    require_memory,
    score_bytes,
    wants_compile,
)
from attndiag.core.engine import BlockResult, BlockWalk
from attndiag.core.gram import transformed_at
from attndiag.core.problem import attention_problem, full_precision, query_vectors
from attndiag.errors import ShapeError
from attndiag.shapes import Keys, OutputWeights, PerQuery, Queries, Residual, Values

OUTPUTS = (
    "head_contribution",
    "contribution",
    "contribution_residual",
    "contribution_norm",
    "projection",
    "target_attribution",
    "cancellation",
    "entropy",
    "key_total",
    "head_total",
    "head_key_total",
    "sink_mass",
)
NEED_PAIR_NORMS = {"contribution", "contribution_residual", "contribution_norm", "cancellation", "key_total"}
NEED_VALUE_NORMS = {"head_contribution", "head_total", "head_key_total"}
WITH_RESIDUAL = {"contribution_residual", "contribution_norm"}
TOTALS = {"key_total", "head_total", "head_key_total"}
PER_HEAD_PAIR = {"head_contribution"}
PER_PAIR = {"contribution", "contribution_residual", "contribution_norm", "projection", "cancellation"}


@dataclass(frozen=True, eq=False)
class FusedResult:
    """What one pass computed; an output that was not asked for is None.

    Attributes
    ----------
    head_contribution : [batch, head, query_pos, key_pos], A_ij^h ‖f_j^h‖, non-negative, residual norms.
    contribution : [batch, query_pos, key_pos], ‖T_ij‖, non-negative, residual norms.
    contribution_residual, contribution_norm : [batch, query_pos, key_pos], ‖T_ij + 1[j = i + offset] residual_i‖. The
        same formula: which of the two it is depends on what the caller folded into `w_o`, `row_scale`, `residual`.
    projection : [batch, query_pos, key_pos], <T_ij, direction_i>, signed, residual norms for unit directions.
    target_attribution : [batch, head, key_pos], A_tj^h <f_j^h, direction_t> at the query t, signed.
    cancellation : [batch, query_pos, key_pos], ‖T_ij‖ / sum_h A_ij^h ‖f_j^h‖ in [0, 1]; nan where nothing is written.
    entropy : [batch, head, query_pos], nats, of the row normalised to mass 1; nan for rows without any mass.
    key_total : [batch, key_pos], sum_i ‖T_ij‖. head_total : [batch, head], sum_ij A_ij^h ‖f_j^h‖.
    head_key_total : [batch, head, key_pos], sum_i A_ij^h ‖f_j^h‖.
    sink_mass : [batch, head, query_pos], mass in [0, 1]; zeros without sinks.
    formulation : `"gram"` or `"direct"`. compiled : whether torch.compile was asked for the block body.
    refined_pairs : how many pairs were repeated in float64 because their heads nearly cancel.
    """

    formulation: Formulation
    compiled: bool
    refined_pairs: int
    head_contribution: Tensor | None = None
    contribution: Tensor | None = None
    contribution_residual: Tensor | None = None
    contribution_norm: Tensor | None = None
    projection: Tensor | None = None
    target_attribution: Tensor | None = None
    cancellation: Tensor | None = None
    entropy: Tensor | None = None
    key_total: Tensor | None = None
    head_total: Tensor | None = None
    head_key_total: Tensor | None = None
    sink_mass: Tensor | None = None


def attention_contributions(
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
    row_scale: PerQuery | None = None,
    residual: Residual | None = None,
    directions: Tensor | None = None,
    outputs: Iterable[str] = ("contribution",),
    compile: CompileChoice = "auto",
    target_query: int | Tensor | None = None,
    formulation: Formulation | None = None,
    layer: int | str | None = None,
    memory_limit: int | None = None,
) -> FusedResult:
    """Contributions of one attention call in one pass, without a [query, key, d_model] tensor.

    T_ij = row_scale_i sum_h A_ij^h f_j^h; ‖sum_h A_ij^h f_j^h‖ = ‖L_j^T a_ij‖, L_j L_j^T = F_j F_j^T, F_j = (f_j^h)_h.

    Parameters
    ----------
    q : [batch, head, query_pos, d_head]. k, v : [batch, kv_head, key_pos, d_head or d_value], v with its bias.
    w_o : [head, d_value, d_model]. A norm or multiplier after W_O is folded in beforehand (`core.norms.fold_output`).
    scale : factor on q.k.
    mask : bool (True = allowed) or additive float, broadcastable to [batch, head, query_pos, key_pos]; or a callable of
        (query positions [q, 1], key positions [1, k]) that returns such a tensor for a block, [head or nothing, q, k].
        Query positions are counted in keys: query i stands at i + key_pos - query_pos.
    is_causal : key j is allowed where j <= i + (key_pos - query_pos): aligned at the last query and the last key.
    window : key j is allowed where the query's position - j < window; without `is_causal` in both directions.
    softcap : bound on the scaled scores. sinks : logits [head] or [batch, head, query_pos].
    position_bias : additive, as `mask`.
    row_scale : [batch, query_pos], a factor on every T_ij of a query.
    residual : [batch, query_pos, d_model], final (`row_scale` does not apply to it); for `contribution_residual` and
        `contribution_norm`.
    directions : [batch, query_pos, d_model], or [d_model] for all; for `projection` and `target_attribution`.
    outputs : names out of `OUTPUTS`.
    compile : True, False, or "auto" for what measured faster on this device.
    target_query : the query t of `target_attribution`, an int or one for each sequence; None: the last.
    formulation : None chooses by measured crossover.
    layer : named in errors.
    memory_limit : bytes that outputs and working memory may take; None: 90 % of what is free.

    Returns
    -------
    `FusedResult`. Rows in which every key is forbidden are all zero. Half-precision inputs are computed in float32,
    float64 in float64; results are detached.

    Raises
    ------
    ShapeError : tensors do not fit, or an axis is empty.
    AttnDiagError : devices are mixed, or an input is not finite (names the heads).
    InsufficientMemoryError : the estimate exceeds what is available.
    ValueError : unknown output, or one whose argument is missing.

    References
    ----------
    Kobayashi 2020, arXiv 2004.10102; 2021, arXiv 2109.07152. The factored form is ours; see `core.gram`.
    """
    wanted = check_outputs(outputs, residual=residual, directions=directions)
    with full_precision(q.device.type):
        problem = attention_problem(
            q, k, v, w_o, scale=scale, mask=mask, is_causal=is_causal, window=window, softcap=softcap, sinks=sinks,
            position_bias=position_bias, row_scale=row_scale, layer=layer,
        )  # fmt: skip
        residual = None if residual is None else query_vectors("residual", residual, problem, expand=False)
        directions = None if directions is None else query_vectors("directions", directions, problem, expand=True)
        plan = plan_call(problem, wanted, formulation=formulation, compile=compile, memory_limit=memory_limit)
        return _Pass(problem, plan, wanted, residual, directions, target_query).run()


def plan_call(
    problem: AttentionProblem,
    outputs: frozenset[str],
    *,
    formulation: Formulation | None = None,
    compile: CompileChoice = "auto",
    memory_limit: int | None = None,
) -> KernelPlan:
    """Formulation, block size and memory of one call; refuses what cannot fit.

    Raises
    ------
    InsufficientMemoryError : names the output that takes most, and the streaming alternative.
    """
    form = choose_formulation(problem) if formulation is None else formulation
    block = problem.n_queries if form == "direct" else block_queries(problem)
    pairs = problem.batch * problem.n_queries * problem.n_keys * problem.q.element_size()
    outputs_bytes = pairs * (len(outputs & PER_PAIR) + problem.n_heads * len(outputs & PER_HEAD_PAIR))
    needed = outputs_bytes + preparation_bytes(problem, form) + 3 * score_bytes(problem, block)
    remedy = "Stream it: stream_contributions() keeps the top keys of every query in memory linear in the length"
    if outputs & PER_HEAD_PAIR:
        remedy = "Leave out head_contribution, which takes most of it, or stream: see stream_contributions()"
    require_memory(needed, memory_limit, problem.q.device, remedy + "; or pass fewer queries.")
    compiled = form == "gram" and wants_compile(compile, problem.q.device, problem.n_queries)
    return KernelPlan(form, block, compiled, needed)


def check_outputs(outputs: Iterable[str], *, residual: Tensor | None, directions: Tensor | None) -> frozenset[str]:
    """The requested names as a set; `ValueError` for an unknown one or a missing argument."""
    wanted = frozenset([outputs] if isinstance(outputs, str) else outputs)
    if unknown := sorted(wanted - set(OUTPUTS)):
        raise ValueError(f"unknown output {unknown[0]!r}; expected some of {', '.join(OUTPUTS)}")
    if not wanted:
        raise ValueError(f"outputs is empty; expected some of {', '.join(OUTPUTS)}")
    if residual is None and (needs := sorted(wanted & WITH_RESIDUAL)):
        raise ValueError(f"{needs[0]} needs residual=, the vector that the diagonal adds")
    if directions is None and (needs := sorted(wanted & {"projection", "target_attribution"})):
        raise ValueError(f"{needs[0]} needs directions=, one vector a query")
    return wanted


def block_projection(problem: AttentionProblem, block: PatternBlock, directions: Tensor) -> Tensor:
    """sum_h A_ij^h <f_j^h, u_i> of a block, [key, query], for `directions` [query, d_model] of its queries.

    <f_j^h, u_i> = <v_j^h, W_O^h u_i>: a second score-shaped product.
    """
    heads, d_value, d_model = problem.w_o.shape
    reading = directions @ problem.w_o.reshape(-1, d_model).mT
    reading = reading.view(-1, heads, d_value).permute(1, 2, 0)
    v = expand_heads(problem.v[block.batch][:, block.keys], problem.group)
    return torch.bmm(v, reading).mul_(block.weights).sum(dim=0)


def own_weights(problem: AttentionProblem, block: PatternBlock) -> tuple[Tensor, Tensor, Tensor]:
    """What each query of a block gives its own key.

    Returns (index within the block of the queries whose own key exists, its key position, weight [head, index]); the
    weight is 0 where the own key is forbidden.
    """
    device = block.weights.device
    own = positions(block.queries, problem.n_queries, device) + problem.offset
    here = (own >= 0).nonzero()[:, 0]
    own = own[here]
    seen = positions(block.keys, problem.n_keys, device)
    place = torch.searchsorted(seen, own).clamp_max(max(len(seen) - 1, 0))
    if not len(seen):
        return here, own, block.weights.new_zeros(problem.n_heads, len(own))
    return here, own, block.weights[:, place, here] * (seen[place] == own)


def on_the_diagonal(problem: AttentionProblem, block: PatternBlock, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """‖T_ii + residual_i‖ for the queries of a block whose own key exists.

    `residual` [query, d_model] belongs to the queries of the block. Returns (index within the block, key position,
    norm).
    """
    here, own, weights = own_weights(problem, block)
    vectors = transformed_at(problem, block.batch, weights, own)
    if problem.row_scale is not None:
        vectors = vectors * problem.row_scale[block.batch, block.queries][here, None]
    return here, own, (vectors + residual[here]).norm(dim=-1)


class _Pass:
    """One call on its way: allocates what was asked for and fills it block by block."""

    def __init__(
        self,
        problem: AttentionProblem,
        plan: KernelPlan,
        wanted: frozenset[str],
        residual: Tensor | None,
        directions: Tensor | None,
        target_query: int | Tensor | None,
    ) -> None:
        self.problem, self.plan, self.wanted = problem, plan, wanted
        self.residual, self.directions = residual, directions
        self.targets = target_queries(problem, target_query)
        # totals add up many small numbers: float64 until the end
        self.head_key_total = problem.q.new_zeros(problem.batch, problem.n_heads, problem.n_keys, dtype=torch.float64)
        self.key_total = torch.zeros_like(self.head_key_total[:, 0])
        self.out = {name: self._allocate(name) for name in sorted(wanted - TOTALS)}

    def run(self) -> FusedResult:
        """Every sequence, every block."""
        with_norms = bool(self.wanted & NEED_PAIR_NORMS)
        walk = BlockWalk(self.problem, self.plan, with_norms=with_norms, with_entropy="entropy" in self.wanted)
        for batch in range(self.problem.batch):
            for result in walk.of(batch, with_value_norms=bool(self.wanted & NEED_VALUE_NORMS)):
                self._weights(batch, result, walk.norms)
                if self.directions is not None:
                    self._directed(batch, result, self.directions[batch])
                if result.norm is not None and result.bound is not None:
                    self._pairs(batch, result, result.norm, result.bound)
        totals = {
            "key_total": self.key_total,
            "head_key_total": self.head_key_total,
            "head_total": self.head_key_total.sum(dim=-1),
        }
        totals = {name: total.to(self.problem.q.dtype) for name, total in totals.items() if name in self.wanted}
        return FusedResult(self.plan.formulation, self.plan.compiled, walk.guard.pairs, **self.out, **totals)

    def _allocate(self, name: str) -> Tensor:
        p = self.problem
        shapes = {
            "head_contribution": (p.batch, p.n_heads, p.n_queries, p.n_keys),
            "target_attribution": (p.batch, p.n_heads, p.n_keys),
            "entropy": (p.batch, p.n_heads, p.n_queries),
            "sink_mass": (p.batch, p.n_heads, p.n_queries),
        }
        shape = shapes.get(name, (p.batch, p.n_queries, p.n_keys))
        if name == "cancellation":
            return torch.full(shape, torch.nan, dtype=p.q.dtype, device=p.q.device)
        return torch.zeros(shape, dtype=p.q.dtype, device=p.q.device)

    def _weights(self, batch: int, result: BlockResult, norms: Tensor | None) -> None:
        """Outputs that read the weights of every head, and the norms of their values."""
        problem, block, rows = self.problem, result.block, slice(result.start, result.stop)
        scale = None if problem.row_scale is None else problem.row_scale[batch, rows].abs()
        if norms is not None and "head_contribution" in self.out:
            into = self.out["head_contribution"][batch][:, rows]
            if isinstance(block.keys, slice):
                # straight into place: a product that turns as it writes costs a third of product and copy
                into = into[:, :, block.keys]
                torch.mul(block.weights.mT, norms[:, None, block.keys], out=into)
            else:
                into[:, :, block.keys] = block.weights.mT * norms[:, None, block.keys]
            if scale is not None:
                into.mul_(scale[:, None])
        if norms is not None and self.wanted & {"head_total", "head_key_total"}:
            read = block.weights.sum(dim=2) if scale is None else block.weights @ scale
            self.head_key_total[batch][:, block.keys] += read * norms[:, block.keys]
        if "entropy" in self.out and block.entropy is not None:
            self.out["entropy"][batch][:, rows] = block.entropy
        if "sink_mass" in self.out and block.sink_mass is not None:
            self.out["sink_mass"][batch][:, rows] = block.sink_mass

    def _directed(self, batch: int, result: BlockResult, directions: Tensor) -> None:
        """Outputs that read <f_j^h, u_i>, for `directions` [query_pos, d_model]."""
        problem, block = self.problem, result.block
        rows, target = slice(result.start, result.stop), self.targets[batch]
        if "projection" in self.out:
            signed = block_projection(problem, block, directions[rows])
            signed = signed if problem.row_scale is None else signed.mul_(problem.row_scale[batch, rows])
            self.out["projection"][batch][rows, block.keys] = signed.mT
        if "target_attribution" in self.out and result.start <= target < result.stop:
            v = expand_heads(problem.v[batch][:, block.keys], problem.group)
            reading = problem.w_o @ directions[target]
            row = block.weights[:, :, target - result.start] * torch.einsum("hkc,hc->hk", v, reading)
            row = row if problem.row_scale is None else row.mul_(problem.row_scale[batch, target])
            self.out["target_attribution"][batch][:, block.keys] = row

    def _pairs(self, batch: int, result: BlockResult, norm: Tensor, bound: Tensor) -> None:
        """Outputs that read the norms of the pair vectors, both [key, query]."""
        problem, keys, rows = self.problem, result.block.keys, slice(result.start, result.stop)
        if "cancellation" in self.out:
            # rounding can leave a parallel pair a hair above 1
            ratio = torch.where(bound > 0, (norm / bound).clamp_max_(1.0), torch.nan)
            self.out["cancellation"][batch][rows, keys] = ratio.mT
        scaled = norm if problem.row_scale is None else norm * problem.row_scale[batch, rows].abs()
        if "key_total" in self.wanted:
            self.key_total[batch][keys] += scaled.sum(dim=1)
        if "contribution" in self.out:
            self.out["contribution"][batch][rows, keys] = scaled.mT
        for name in self.wanted & WITH_RESIDUAL:
            self.out[name][batch][rows, keys] = scaled.mT
            if self.residual is not None:
                here, own, size = on_the_diagonal(problem, result.block, self.residual[batch, rows])
                self.out[name][batch][here + result.start, own] = size


def target_queries(problem: AttentionProblem, query: int | Tensor | None) -> list[int]:
    """The query t of each sequence; None is the last."""
    chosen = torch.as_tensor(problem.n_queries - 1 if query is None else query)
    if chosen.ndim > 1 or (chosen.ndim == 1 and len(chosen) != problem.batch):
        raise ShapeError(f"target_query has shape {tuple(chosen.shape)}; expected one query, or one a sequence")
    listed = chosen.expand(problem.batch).tolist()
    if any(not 0 <= one < problem.n_queries for one in listed):
        raise ShapeError(f"target_query {listed} is outside the {problem.n_queries} queries")
    return listed

"""Contributions of long sequences: the strongest keys of every query, and totals, in memory linear in the length.

The walk of `core.fused` without its [query, key] results. Each block of queries is reduced as soon as it is there:

- the `top_k` keys with the largest ‖T_ij‖, with their weights in every head and their cancellation ratio,
- sums over queries for each key, and for each head and key; entropies; sink mass,
- whole rows, exactly, for the queries named in `rows`, and whole columns for the keys named in `columns`.

Working memory is head * visible keys * a few queries, plus head² * key_pos for the factors: twice the length, twice
the memory. A window or a block mask shortens the visible keys and so the time as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attndiag.core.blocks import AttentionProblem, BlockTerm, PatternBlock, positions
from attndiag.core.dispatch import (
    CompileChoice,
    KernelPlan,
    block_queries,
    preparation_bytes,
    require_memory,
    score_bytes,
    wants_compile,
)
from attndiag.core.engine import BlockResult, BlockWalk
from attndiag.core.fused import block_projection, on_the_diagonal, own_weights
from attndiag.core.problem import attention_problem, full_precision, query_vectors
from attndiag.errors import ShapeError
from attndiag.shapes import Keys, OutputWeights, PerQuery, Queries, Residual, Values


@dataclass(frozen=True, eq=False)
class StreamResult:
    """Everything that one pass over a long sequence keeps.

    Attributes
    ----------
    top_index : [batch, query_pos, top_k], key positions by descending contribution; -1 where a query has fewer keys
        that write anything.
    top_contribution : the same shape, ‖T_ij‖, residual norms; 0 beside index -1.
    top_weight : [batch, head, query_pos, top_k], A_ij^h of those keys, mass; 0 beside index -1.
    top_cancellation : [batch, query_pos, top_k], ‖T_ij‖ / sum_h A_ij^h ‖f_j^h‖ in [0, 1]; nan beside index -1.
    top_projection : [batch, query_pos, top_k], <T_ij, direction_i>, signed; None without `directions`.
    row_total : [batch, query_pos], sum_j ‖T_ij‖: what the top keys are a part of.
    head_row_total : [batch, head, query_pos], sum_j A_ij^h ‖f_j^h‖.
    key_total : [batch, key_pos], sum_i ‖T_ij‖. head_total : [batch, head], sum_ij A_ij^h ‖f_j^h‖.
    head_key_total : [batch, head, key_pos], sum_i A_ij^h ‖f_j^h‖. head_key_weight : the same of A_ij^h alone, mass.
    entropy : [batch, head, query_pos], nats, of the row normalised to mass 1; nan for rows without any mass.
    sink_mass : [batch, head, query_pos], mass; zeros without sinks.
    own_weight : [batch, head, query_pos], A_ii^h, mass; nan where the query has no own key.
    own_residual : [batch, query_pos], ‖T_ii + residual_i‖, the only entry that a residual changes; nan where the query
        has no own key; None without `residual`.
    rows : the queries whose rows were kept. row_contribution : [batch, len(rows), key_pos].
    row_weight : [batch, head, len(rows), key_pos]. row_cancellation : [batch, len(rows), key_pos], nan where nothing
        is written. row_projection : likewise, signed, None without `directions`.
    columns : the keys whose columns were kept. column_contribution : [batch, query_pos, len(columns)].
    column_weight : [batch, head, query_pos, len(columns)].
    compiled, refined_pairs, block : whether torch.compile was asked for; pairs repeated in float64; queries a block.
    """

    top_index: Tensor
    top_contribution: Tensor
    top_weight: Tensor
    top_cancellation: Tensor
    top_projection: Tensor | None
    row_total: Tensor
    head_row_total: Tensor
    key_total: Tensor
    head_total: Tensor
    head_key_total: Tensor
    head_key_weight: Tensor
    entropy: Tensor
    sink_mass: Tensor
    own_weight: Tensor
    own_residual: Tensor | None
    rows: tuple[int, ...]
    row_contribution: Tensor
    row_weight: Tensor
    row_cancellation: Tensor
    row_projection: Tensor | None
    columns: tuple[int, ...]
    column_contribution: Tensor
    column_weight: Tensor
    compiled: bool
    refined_pairs: int
    block: int


def stream_contributions(
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
    top_k: int = 16,
    rows: Sequence[int] | Tensor | None = None,
    columns: Sequence[int] = (),
    compile: CompileChoice = "auto",
    layer: int | str | None = None,
    memory_limit: int | None = None,
) -> StreamResult:
    """The strongest keys of every query and all totals, without any [query, key] tensor.

    Formulas, arguments and precision are those of `core.fused.attention_contributions`.

    Parameters
    ----------
    top_k : keys kept for each query, 1 to key_pos. Keys that write nothing are never among them.
    rows : queries whose whole rows are kept; negative ones count from the end.
    columns : keys whose whole columns are kept; likewise.
    mask, position_bias : a dense [query_pos, key_pos] tensor is itself quadratic in the length; a callable, or a
        tensor that is broadcast over the queries, is not.

    Returns
    -------
    `StreamResult`.

    Raises
    ------
    ShapeError : tensors do not fit, an axis is empty, `top_k` exceeds the keys, or a row or column does not exist.
    AttnDiagError : devices are mixed, or an input is not finite (names the heads).
    InsufficientMemoryError : even the streaming estimate exceeds what is available.
    """
    with full_precision(q.device.type):
        problem = attention_problem(
            q, k, v, w_o, scale=scale, mask=mask, is_causal=is_causal, window=window, softcap=softcap, sinks=sinks,
            position_bias=position_bias, row_scale=row_scale, layer=layer,
        )  # fmt: skip
        if not 1 <= top_k <= problem.n_keys:
            raise ShapeError(f"top_k is {top_k}; expected 1 to {problem.n_keys}, the number of keys")
        residual = None if residual is None else query_vectors("residual", residual, problem, expand=False)
        directions = None if directions is None else query_vectors("directions", directions, problem, expand=True)
        kept = _places("row", "queries", rows, problem.n_queries)
        sides = _places("column", "keys", columns, problem.n_keys)
        plan = _plan(problem, top_k, len(kept), len(sides), compile, memory_limit)
        return _Stream(problem, plan, top_k, kept, sides, residual, directions).run()


def _plan(
    problem: AttentionProblem,
    top_k: int,
    kept_rows: int,
    kept_columns: int,
    compile: CompileChoice,
    memory_limit: int | None,
) -> KernelPlan:
    heads, block = problem.n_heads, block_queries(problem)
    numbers = problem.n_queries * (4 * heads + 3 + top_k * (heads + 4)) + problem.n_keys * (4 * heads + 2)
    numbers += kept_rows * problem.n_keys * (heads + 3) + kept_columns * problem.n_queries * (heads + 1)
    needed = problem.batch * numbers * problem.q.element_size()
    needed += preparation_bytes(problem, "gram") + 3 * score_bytes(problem, block)
    remedy = "Pass fewer queries at a time with all keys (causal order is aligned at the last key), or a smaller top_k."
    require_memory(needed, memory_limit, problem.q.device, remedy)
    return KernelPlan("gram", block, wants_compile(compile, problem.q.device, problem.n_queries), needed)


def _places(name: str, of: str, wanted: Sequence[int] | Tensor | None, n: int) -> tuple[int, ...]:
    listed = [] if wanted is None else [int(place) for place in wanted]
    wrong = [place for place in listed if not -n <= place < n]
    if wrong:
        raise ShapeError(f"{name} {wrong[0]} is outside the {n} {of}")
    return tuple(place % n for place in listed)


class _Stream:
    """One streaming call on its way."""

    def __init__(
        self,
        problem: AttentionProblem,
        plan: KernelPlan,
        top_k: int,
        kept: tuple[int, ...],
        columns: tuple[int, ...],
        residual: Tensor | None,
        directions: Tensor | None,
    ) -> None:
        self.problem, self.plan, self.top_k, self.kept, self.columns = problem, plan, top_k, kept, columns
        self.residual, self.directions = residual, directions
        b, heads, n_q, n_k = problem.batch, problem.n_heads, problem.n_queries, problem.n_keys
        self.top_index = torch.full((b, n_q, top_k), -1, dtype=torch.int64, device=problem.q.device)
        self.top_contribution = self._zeros(b, n_q, top_k)
        self.top_weight = self._zeros(b, heads, n_q, top_k)
        self.top_cancellation = self._zeros(b, n_q, top_k).fill_(torch.nan)
        self.top_projection = None if directions is None else self._zeros(b, n_q, top_k)
        self.row_total = self._zeros(b, n_q)
        self.head_row_total = self._zeros(b, heads, n_q)
        # sums over many queries: float64 until the end
        self.key_total = self._zeros(b, n_k).double()
        self.head_key_total = self._zeros(b, heads, n_k).double()
        self.head_key_weight = self._zeros(b, heads, n_k).double()
        self.entropy = self._zeros(b, heads, n_q)
        self.sink_mass = self._zeros(b, heads, n_q)
        self.own_weight = self._zeros(b, heads, n_q).fill_(torch.nan)
        self.own_residual = None if residual is None else self._zeros(b, n_q).fill_(torch.nan)
        self.row_contribution = self._zeros(b, len(kept), n_k)
        self.row_weight = self._zeros(b, heads, len(kept), n_k)
        self.row_cancellation = self._zeros(b, len(kept), n_k).fill_(torch.nan)
        self.row_projection = None if directions is None else self._zeros(b, len(kept), n_k)
        self.column_contribution = self._zeros(b, n_q, len(columns))
        self.column_weight = self._zeros(b, heads, n_q, len(columns))

    def run(self) -> StreamResult:
        """Every sequence, every block."""
        walk = BlockWalk(self.problem, self.plan, with_norms=True, with_entropy=True)
        for batch in range(self.problem.batch):
            for result in walk.of(batch):
                if result.norm is not None and result.bound is not None and walk.norms is not None:
                    self._reduce(batch, result, walk.norms, result.norm, result.bound)
        dtype = self.problem.q.dtype
        return StreamResult(
            top_index=self.top_index,
            top_contribution=self.top_contribution,
            top_weight=self.top_weight,
            top_cancellation=self.top_cancellation,
            top_projection=self.top_projection,
            row_total=self.row_total,
            head_row_total=self.head_row_total,
            key_total=self.key_total.to(dtype),
            head_total=self.head_key_total.sum(dim=-1).to(dtype),
            head_key_total=self.head_key_total.to(dtype),
            head_key_weight=self.head_key_weight.to(dtype),
            entropy=self.entropy,
            sink_mass=self.sink_mass,
            own_weight=self.own_weight,
            own_residual=self.own_residual,
            rows=self.kept,
            row_contribution=self.row_contribution,
            row_weight=self.row_weight,
            row_cancellation=self.row_cancellation,
            row_projection=self.row_projection,
            columns=self.columns,
            column_contribution=self.column_contribution,
            column_weight=self.column_weight,
            compiled=self.plan.compiled,
            refined_pairs=walk.guard.pairs,
            block=self.plan.block,
        )

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.problem.q.dtype, device=self.problem.q.device)

    def _reduce(self, batch: int, result: BlockResult, value_norms: Tensor, norm: Tensor, bound: Tensor) -> None:
        problem, block, rows = self.problem, result.block, slice(result.start, result.stop)
        scale = None if problem.row_scale is None else problem.row_scale[batch, rows]
        size = norm if scale is None else norm * scale.abs()
        if block.entropy is not None:
            self.entropy[batch][:, rows] = block.entropy
        if block.sink_mass is not None:
            self.sink_mass[batch][:, rows] = block.sink_mass
        mass = block.weights.sum(dim=2)
        self.head_key_weight[batch][:, block.keys] += mass
        mass = mass if scale is None else block.weights @ scale.abs()
        self.head_key_total[batch][:, block.keys] += mass * value_norms[:, block.keys]
        self.key_total[batch][block.keys] += size.sum(dim=1)
        self.row_total[batch, rows] = size.sum(dim=0)
        written = (value_norms[:, None, block.keys] @ block.weights)[:, 0]
        self.head_row_total[batch][:, rows] = written if scale is None else written * scale.abs()
        signed = None
        if self.directions is not None:
            signed = block_projection(problem, block, self.directions[batch, rows])
            signed = signed if scale is None else signed.mul_(scale)
        here, _, diagonal = own_weights(problem, block)
        self.own_weight[batch][:, here + result.start] = diagonal
        if self.own_residual is not None and self.residual is not None:
            here, _, own = on_the_diagonal(problem, block, self.residual[batch, rows])
            self.own_residual[batch, here + result.start] = own
        self._keep_top(batch, result, size, norm, bound, signed)
        self._keep_rows(batch, result, size, norm, bound, signed)
        key_pos = positions(block.keys, problem.n_keys, size.device)
        for place, column in enumerate(self.columns):
            for here in (key_pos == column).nonzero().flatten().tolist():  # none where the block sees no such key
                self.column_contribution[batch, rows, place] = size[here]
                self.column_weight[batch][:, rows, place] = block.weights[:, here]

    def _keep_top(
        self, batch: int, result: BlockResult, size: Tensor, norm: Tensor, bound: Tensor, signed: Tensor | None
    ) -> None:
        """The strongest keys of each query of a block; `size`, `norm`, `bound`, `signed` are [key, query]."""
        block, rows = result.block, slice(result.start, result.stop)
        found = min(self.top_k, size.shape[0])
        if found == 0:
            return
        best, place = size.mT.contiguous().topk(found, dim=1)
        writes = best > 0
        key_pos = positions(block.keys, self.problem.n_keys, size.device)
        self.top_index[batch][rows, :found] = torch.where(writes, key_pos[place], -1)
        self.top_contribution[batch][rows, :found] = best
        self.top_cancellation[batch][rows, :found] = torch.where(writes, _ratio(norm, bound, place), torch.nan)
        weights = block.weights.gather(1, place.mT.expand(block.weights.shape[0], -1, -1))
        self.top_weight[batch][:, rows, :found] = (weights * writes.mT).mT
        if signed is not None and self.top_projection is not None:
            self.top_projection[batch][rows, :found] = torch.where(writes, signed.gather(0, place.mT).mT, 0.0)

    def _keep_rows(
        self, batch: int, result: BlockResult, size: Tensor, norm: Tensor, bound: Tensor, signed: Tensor | None
    ) -> None:
        """Whole rows of the chosen queries that lie in a block."""
        block: PatternBlock = result.block
        for place, row in enumerate(self.kept):
            if not result.start <= row < result.stop:
                continue
            here = row - result.start
            self.row_contribution[batch, place][block.keys] = size[:, here]
            self.row_weight[batch][:, place][:, block.keys] = block.weights[:, :, here]
            ratio = torch.where(bound[:, here] > 0, (norm[:, here] / bound[:, here]).clamp(max=1.0), torch.nan)
            self.row_cancellation[batch, place][block.keys] = ratio
            if signed is not None and self.row_projection is not None:
                self.row_projection[batch, place][block.keys] = signed[:, here]


def _ratio(norm: Tensor, bound: Tensor, place: Tensor) -> Tensor:
    """norm / bound at the places [query, rank] of [key, query] tensors; at most 1."""
    return (norm.gather(0, place.mT) / bound.gather(0, place.mT)).clamp_(max=1.0).mT

"""The loop that the fused and the streaming kernels share: block after block of queries, weights and norms.

For each block: raw scores, softmax over the keys, norms of the pair vectors by the formulation of the plan, and pairs
whose heads nearly cancel repeated in float64. The compiled body is the same arithmetic without in-place steps, so
that Inductor can fuse softmax and norms around the two batched products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attndiag.core.blocks import (
    DEAD_ROW,
    AttentionProblem,
    PatternBlock,
    normalisation,
    pattern_block,
    raw_scores,
    sinks_of,
    visible_keys,
)
from attndiag.core.dispatch import KernelPlan, compiled_or_eager
from attndiag.core.gram import contribution_direct, contribution_from_factors, key_factors, value_norms
from attndiag.core.refine import CancellationGuard


@dataclass(frozen=True, eq=False)
class BlockResult:
    """One block of queries of one sequence.

    Attributes
    ----------
    start, stop : the queries.
    block : their weights over the keys that they see.
    norm, bound : ‖T_ij‖ and sum_h A_ij^h ‖f_j^h‖, [key, query], before `row_scale`; None unless asked for.
    """

    start: int
    stop: int
    block: PatternBlock
    norm: Tensor | None
    bound: Tensor | None


class BlockWalk:
    """The blocks of one problem; `guard.pairs` counts the pairs that were repeated in float64."""

    def __init__(
        self, problem: AttentionProblem, plan: KernelPlan, *, with_norms: bool, with_entropy: bool = False
    ) -> None:
        self.problem, self.plan, self.with_norms, self.with_entropy = problem, plan, with_norms, with_entropy
        self.guard = CancellationGuard(problem)
        self.norms: Tensor | None = None

    def of(self, batch: int, *, with_value_norms: bool = False) -> Iterator[BlockResult]:
        """Walk one sequence. `with_value_norms` sets `norms` to ‖f_j^h‖, [head, key_pos], beforehand."""
        problem, plan = self.problem, self.plan
        factors, norms = None, None
        if self.with_norms and plan.formulation == "gram":
            factors = key_factors(problem, batch)
            norms = factors[:, problem.n_heads].mT
        elif with_value_norms:
            norms = value_norms(problem, batch)
        self.norms = norms
        workspace = self._workspace()
        for start, stop in problem.query_blocks(plan.block):
            keys = visible_keys(problem, batch, start, stop)
            if isinstance(keys, slice) and keys.stop == keys.start:
                yield self._empty(batch, start, stop)
                continue
            queries = slice(start, stop)
            norm = bound = None
            if plan.compiled and factors is not None:
                block, norm, bound = self._compiled_block(batch, queries, keys, factors[keys])
            else:
                block = pattern_block(problem, batch, queries, keys, workspace=workspace)
                if factors is not None:
                    norm, bound = contribution_from_factors(block, factors[keys])
                elif self.with_norms:
                    norm, bound = contribution_direct(problem, block)
            if norm is not None and bound is not None:
                self.guard.repair(block, norm, bound)
            yield BlockResult(start, stop, block, norm, bound)

    def _compiled_block(
        self, batch: int, queries: slice, keys: slice | Tensor, factors: Tensor
    ) -> tuple[PatternBlock, Tensor, Tensor]:
        scores = raw_scores(self.problem, batch, queries, keys)
        # clones start at offset 0 with plain strides: a view of either kind would make another graph
        sinks = sinks_of(self.problem, batch, queries)
        sinks = None if sinks is None else sinks.clone(memory_format=torch.contiguous_format)
        weights, dead, sink_mass, entropy, norm, bound = _compiled_body(scores, sinks, factors.clone())
        return PatternBlock(batch, queries, keys, weights, sink_mass, entropy, dead), norm, bound

    def _workspace(self) -> Tensor:
        queries = min(self.plan.block, self.problem.n_queries)
        size = self.problem.n_heads * self.problem.widest_block(queries) * queries
        shape = (2, size) if self.with_entropy else (size,)
        return torch.empty(shape, dtype=self.problem.q.dtype, device=self.problem.q.device)

    def _empty(self, batch: int, start: int, stop: int) -> BlockResult:
        """A block of queries without any key: a sink, where there is one, takes everything."""
        problem, queries = self.problem, slice(start, stop)
        weights = problem.q.new_zeros(problem.n_heads, 0, stop - start)
        dead = torch.ones(problem.n_heads, stop - start, dtype=torch.bool, device=weights.device)
        sinks = sinks_of(problem, batch, queries)
        mass = None if sinks is None else (sinks > -torch.inf).to(weights.dtype)
        entropy = torch.full_like(dead, torch.nan, dtype=weights.dtype)
        block = PatternBlock(batch, queries, slice(0, 0), weights, mass, entropy, dead)
        empty = weights[0] if self.with_norms else None
        return BlockResult(start, stop, block, empty, empty)


def block_body(
    scores: Tensor, sinks: Tensor | None, factors: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Softmax over the keys of [head, key, query] and both norms, as one function of tensors (for torch.compile).

    Returns weights, dead rows, sink mass, entropy, ‖T_ij‖ and sum_h A‖f‖ (both [key, query]).
    """
    heads = scores.shape[0]
    top = scores.amax(dim=1)
    dead = top <= DEAD_ROW
    shifted = scores - top[:, None]
    weights = torch.exp(shifted)
    total = weights.sum(dim=1)
    entropy = torch.where(dead, torch.nan, total.log() - (shifted * weights).sum(dim=1) / total)
    factor, sink_mass = normalisation(top, total, dead, sinks)
    weights = weights * factor[:, None]
    product = torch.bmm(factors, weights.permute(1, 0, 2))
    norm = product[:, :heads].square().sum(dim=1).sqrt()
    return weights, dead, sink_mass, entropy, norm, product[:, heads].contiguous()


_compiled_body = compiled_or_eager(block_body)

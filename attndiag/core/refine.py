"""Pairs whose heads nearly cancel, repeated in float64.

The cancellation ratio c_ij = ‖sum_h A_ij^h f_j^h‖ / sum_h A_ij^h ‖f_j^h‖ amplifies every rounding error by 1 / c. The
largest of them sits in the weights: a float32 score is known to about 2e-8 of ‖q‖ ‖k‖ (measured), and the weight
inherits that as a relative error, which no care taken afterwards can undo (with ‖q‖ ‖k‖ = 20, 4e-5 of the norm at
c = 1e-2). So pairs below a threshold are computed again from q and k, softmax included, in float64: only the queries
and keys concerned. On a model whose heads do not cancel this costs one comparison a pair.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attndiag.core.blocks import AttentionProblem, PatternBlock, pattern_block, positions
from attndiag.core.gram import contribution_from_factors, key_factors

# Threshold on c for each unit of max ‖q‖ ‖k‖ (scaled): error of a weight, with a margin of 1.5, over the 1e-5 to hold.
THRESHOLD_PER_SCORE = 3e-3
# Below the first float32 never suffices; above the second, pairs are too common to be repeated.
LEAST, MOST = 0.03, 0.1


class CancellationGuard:
    """Finds and repeats the unreliable pairs of one problem; a float64 problem has none."""

    def __init__(self, problem: AttentionProblem) -> None:
        self.problem = problem
        self.pairs = 0
        self.active = problem.q.dtype != torch.float64
        self.threshold = 0.0
        if self.active:
            size = problem.q.norm(dim=-1).amax(dim=-1)
            key_size = problem.k.norm(dim=-1).amax(dim=-1).repeat_interleave(problem.group, dim=1)
            # with a soft-cap q is divided by it, and the rounding of the cap itself adds to the score's
            reach = float((size * key_size).max()) * (problem.softcap or 1.0)
            self.threshold = min(max(THRESHOLD_PER_SCORE * reach, LEAST), MOST)
        self._batch = -1
        self._factors: Tensor | None = None

    def repair(self, block: PatternBlock, norm: Tensor, bound: Tensor) -> None:
        """Replace the entries of `norm` [key, query] below the threshold, **in place**; `bound` is sum_h A‖f‖."""
        if not self.active:
            return
        cancelled = norm < self.threshold * bound
        if not cancelled.any():
            return
        problem = self.problem
        rows = cancelled.any(dim=0).nonzero()[:, 0]
        columns = cancelled.any(dim=1).nonzero()[:, 0]
        queries = positions(block.queries, problem.n_queries, norm.device)[rows]
        keys = positions(block.keys, problem.n_keys, norm.device)[columns]
        again = pattern_block(problem, block.batch, queries, block.keys, dtype=torch.float64)
        part = replace(again, keys=keys, weights=again.weights[:, columns])
        exact = contribution_from_factors(part, self._exact_factors(block.batch)[keys])[0].to(norm.dtype)
        corner = (columns[:, None], rows[None, :])
        norm[corner] = torch.where(cancelled[corner], exact, norm[corner])
        self.pairs += int(cancelled.sum())

    def _exact_factors(self, batch: int) -> Tensor:
        """[key_pos, head + 1, head] in float64, made when the first pair of a sequence needs them."""
        if self._factors is None or self._batch != batch:
            self._factors = key_factors(self.problem, batch, dtype=torch.float64)
            self._batch = batch
        return self._factors

"""Pairs whose heads nearly cancel, repeated in float64.

The cancellation ratio c_ij = ‖sum_h A_ij^h f_j^h‖ / sum_h A_ij^h ‖f_j^h‖ amplifies every rounding error by 1 / c:
weights that float32 knows to 3e-7 leave 3e-4 of the norm at c = 1e-3, whatever is done afterwards. So pairs below
`THRESHOLD` are computed again from q and k, softmax included, in float64: the queries and keys concerned only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attndiag.core.blocks import AttentionProblem, PatternBlock, pattern_block, positions
from attndiag.core.gram import contribution_from_factors, key_factors

# 3e-7 (float32 weights of ordinary scores) over 1e-5 (precision to hold).
THRESHOLD = 0.03


class ExactFactors:
    """The float64 factors of one sequence, made when the first pair needs them."""

    def __init__(self, problem: AttentionProblem) -> None:
        self.problem = problem
        self._batch = -1
        self._factors: Tensor | None = None

    def of(self, batch: int) -> Tensor:
        """[key_pos, head + 1, head] in float64."""
        if self._factors is None or self._batch != batch:
            self._factors = key_factors(self.problem, batch, dtype=torch.float64)
            self._batch = batch
        return self._factors


def refine_cancelled(
    problem: AttentionProblem,
    block: PatternBlock,
    norm: Tensor,
    bound: Tensor,
    exact_factors: Callable[[int], Tensor],
) -> int:
    """Replace, **in place**, the entries of `norm` [key, query] that cancellation has made unreliable.

    `bound` is sum_h A‖f‖. Returns the number of pairs replaced (0 for a float64 problem, which needs none).
    """
    if norm.dtype == torch.float64:
        return 0
    cancelled = norm < THRESHOLD * bound
    if not cancelled.any():
        return 0
    rows = cancelled.any(dim=0).nonzero()[:, 0]
    columns = cancelled.any(dim=1).nonzero()[:, 0]
    queries = positions(block.queries, problem.n_queries, norm.device)[rows]
    own_keys = positions(block.keys, problem.n_keys, norm.device)
    factors = exact_factors(block.batch)[own_keys[columns]]
    again = pattern_block(problem, block.batch, queries, block.keys, dtype=torch.float64)
    part = PatternBlock(block.batch, queries, own_keys[columns], again.weights[:, columns], again.sink_mass, again.dead)
    exact = contribution_from_factors(part, factors)[0].to(norm.dtype)
    corner = (columns[:, None], rows[None, :])
    norm[corner] = torch.where(cancelled[corner], exact, norm[corner])
    return int(cancelled.sum())

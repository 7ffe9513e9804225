"""Blocks of the attention pattern: what the fused and the streaming kernels walk over.

An `AttentionProblem` holds one checked attention call. `pattern_block` gives the softmax weights of a few queries
over every key that they can see, **key-major**: [head, key, query]. That layout has two uses: the scores come out of
one batched product, and the same memory read as [key, head, query] is the operand of the batched products by key
(`core/gram.py`) without a copy.

Memory is head * visible keys * block of queries: linear in the number of keys, whatever the number of queries.
Causal order, sliding windows and masks narrow the keys of a block; a block whose mask leaves less than half of
the keys in its range works on the gathered keys alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attndiag.core.attention import forbidden_entries
from attndiag.errors import ShapeError
from attndiag.shapes import group_size

# Stands for -inf in the scores of a block: finite, so that no nan is ever made, yet exp() of it is exactly 0.
FORBIDDEN = -1e30
# A row whose largest score lies below this has no key at all.
DEAD_ROW = -1e29

# Logarithms near the smallest normal number: weights this far below the largest of their row are exactly 0. Vector
# libraries take 6 to 18 times as long for an exp() that underflows, and every forbidden key is one.
LOG_TINY = {torch.float32: -87.0, torch.float64: -707.0}

KeySelection = slice | Tensor
BlockTerm = Tensor | Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class AttentionProblem:
    """One attention call in the dtype of the computation; made by `core.problem.attention_problem`.

    Attributes
    ----------
    q : [batch, head, query_pos, d_head], the scale (and 1 / softcap) already folded in.
    k, v : [batch, kv_head, key_pos, d_head or d_value].
    w_o : [head, d_value, d_model].
    mask, position_bias : as given: broadcastable to [batch, head, query_pos, key_pos], or callables of
        (query positions [q, 1], key positions [1, k]); None where absent.
    sinks : [batch, head, query_pos] (expanded) or None.
    row_scale : [batch, query_pos] or None.
    offset : key position of query 0 (key_pos - query_pos).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w_o: Tensor
    mask: BlockTerm | None
    is_causal: bool
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    position_bias: BlockTerm | None
    row_scale: Tensor | None

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def n_heads(self) -> int:
        return self.q.shape[1]

    @property
    def n_queries(self) -> int:
        return self.q.shape[2]

    @property
    def n_keys(self) -> int:
        return self.k.shape[2]

    @property
    def group(self) -> int:
        return group_size(self.n_heads, self.k.shape[1])

    @property
    def d_model(self) -> int:
        return self.w_o.shape[2]

    @property
    def offset(self) -> int:
        return self.n_keys - self.n_queries

    def widest_block(self, queries: int) -> int:
        """The largest number of keys that a block of so many queries can see."""
        if self.window is None:
            return self.n_keys
        reach = self.window + queries - 1 if self.is_causal else 2 * self.window + queries - 2
        return min(self.n_keys, reach)

    def query_blocks(self, size: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of consecutive query blocks."""
        for start in range(0, self.n_queries, size):
            yield start, min(start + size, self.n_queries)


@dataclass(frozen=True, eq=False)
class PatternBlock:
    """Softmax weights of some queries over the keys that they see.

    Attributes
    ----------
    batch : index of the sequence.
    queries : slice or index tensor of the queries.
    keys : slice or index tensor of the keys; every other key has weight 0.
    weights : [head, key, query], mass.
    sink_mass : [head, query], mass; None without sinks.
    entropy : [head, query], nats, of the row without its sink; nan in dead rows; None unless asked for.
    dead : [head, query] bool, rows without any allowed key (all-zero weights).
    """

    batch: int
    queries: KeySelection
    keys: KeySelection
    weights: Tensor
    sink_mass: Tensor | None
    entropy: Tensor | None
    dead: Tensor

    @property
    def by_key(self) -> Tensor:
        """The weights as [key, head, query], a view."""
        return self.weights.permute(1, 0, 2)


def expand_heads(tensor: Tensor, group: int) -> Tensor:
    """[kv_head, ...] to [head, ...] (a view for one query head a group)."""
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=0)


def visible_keys(problem: AttentionProblem, batch: int, start: int, stop: int) -> KeySelection:
    """The keys that any query of [start, stop) may read: a slice, or an index tensor where a mask leaves holes."""
    low, high = 0, problem.n_keys
    first, last = start + problem.offset, stop - 1 + problem.offset  # key positions of the block's own tokens
    if problem.is_causal:
        high = min(high, last + 1)
    if problem.window is not None:
        low = max(low, first - problem.window + 1)
        if not problem.is_causal:
            high = min(high, last + problem.window)
    low, high = min(low, problem.n_keys), max(high, 0)
    if high <= low:
        return slice(0, 0)
    if problem.mask is None:
        return slice(low, high)
    term = _term(problem.mask, problem, batch, slice(start, stop), slice(low, high))
    allowed = term if term.dtype == torch.bool else ~forbidden_entries(term)
    seen = allowed.any(dim=0).any(dim=0).expand(high - low).nonzero()[:, 0]
    if len(seen) == 0:
        return slice(0, 0)
    if len(seen) < (high - low) / 2 and len(seen) < int(seen[-1] - seen[0]) + 1:
        return seen + low
    return slice(low + int(seen[0]), low + int(seen[-1]) + 1)


def raw_scores(
    problem: AttentionProblem,
    batch: int,
    queries: KeySelection,
    keys: KeySelection,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Scores of a block before the softmax, [head, key, query]; `FORBIDDEN` where a key may not be read.

    `dtype` float64 repeats the block exactly where float32 is not enough. `out` is flat memory to write into.
    """
    wanted = problem.q.dtype if dtype is None else dtype
    block_q = problem.q[batch][:, queries].to(wanted)
    block_k = problem.k[batch][:, keys].to(wanted)
    heads, n_k, n_q = problem.n_heads, block_k.shape[1], block_q.shape[1]
    if out is None or out.dtype != wanted or out.numel() < heads * n_k * n_q:
        scores = torch.empty(heads, n_k, n_q, dtype=wanted, device=block_q.device)
    else:
        scores = out[: heads * n_k * n_q].view(heads, n_k, n_q)
    if problem.group == 1:
        torch.bmm(block_k, block_q.mT, out=scores)
    else:
        for kv_head, one_k in enumerate(block_k):
            mine = slice(kv_head * problem.group, (kv_head + 1) * problem.group)
            torch.bmm(one_k.expand(problem.group, -1, -1), block_q[mine].mT, out=scores[mine])
    if problem.softcap is not None:
        scores.tanh_().mul_(problem.softcap)
    if problem.position_bias is not None:
        _apply(scores, _term(problem.position_bias, problem, batch, queries, keys))
    if problem.mask is not None:
        _apply(scores, _term(problem.mask, problem, batch, queries, keys))
    _apply_order(problem, scores, queries, keys)
    return scores


def softmax_over_keys(
    scores: Tensor, sinks: Tensor | None, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Softmax along the key axis of [head, key, query], **overwriting** the scores.

    `sinks` [head, query] take part in the normalisation only. Returns weights, dead rows [head, query], sink mass, and,
    where `out` gives room for a second array, the entropy of each row without its sink, ln Z - sum_j p_j ln w_j with
    w_j the unnormalised weights and Z their sum (cheaper than a logarithm for each weight).
    """
    top = scores.amax(dim=1)
    dead = top <= DEAD_ROW
    floor = LOG_TINY[scores.dtype]
    scores.sub_(top[:, None]).clamp_min_(floor)
    weights = scores.exp_() if out is None else torch.exp(scores, out=out)
    torch.threshold_(weights, 2 * math.exp(floor), 0.0)
    total = weights.sum(dim=1)
    entropy = None
    if out is not None:
        mean = scores.mul_(weights).sum(dim=1) / total
        entropy = torch.where(dead, torch.nan, total.log() - mean)
    factor, sink_mass = normalisation(top, total, dead, sinks)
    weights.mul_(factor[:, None])
    return weights, dead, sink_mass, entropy


def normalisation(top: Tensor, total: Tensor, dead: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What the unnormalised weights of a row are multiplied by, and the mass that its sink takes."""
    if sinks is None:
        return torch.where(dead, 0.0, 1 / total), None
    # the sink is compared with the keys, not the keys with the sink: a large sink would push every weight to zero
    # before its row could be described; exp() may overflow here, which gives the right factor, 0
    factor = torch.where(dead, 0.0, 1 / (total + torch.exp(sinks - top)))
    return factor, torch.sigmoid(sinks - top - total.log())


def sinks_of(problem: AttentionProblem, batch: int, queries: KeySelection) -> Tensor | None:
    """Sink logits of a block, [head, query]."""
    return None if problem.sinks is None else problem.sinks[batch][:, queries]


def pattern_block(
    problem: AttentionProblem,
    batch: int,
    queries: KeySelection,
    keys: KeySelection,
    *,
    dtype: torch.dtype | None = None,
    workspace: Tensor | None = None,
) -> PatternBlock:
    """Scores and softmax of one block; `keys` must not be empty.

    `workspace` is flat memory for the scores, or [2, size] for scores and weights apart, which gives entropies too.
    """
    first = workspace if workspace is None or workspace.ndim == 1 else workspace[0]
    scores = raw_scores(problem, batch, queries, keys, dtype=dtype, out=first)
    room = None
    if workspace is not None and workspace.ndim == 2:
        room = workspace[1, : scores.numel()].view(scores.shape)
    sinks = sinks_of(problem, batch, queries)
    sinks = None if sinks is None else sinks.to(scores.dtype)
    weights, dead, sink_mass, entropy = softmax_over_keys(scores, sinks, out=room)
    return PatternBlock(batch, queries, keys, weights, sink_mass, entropy, dead)


def positions(selection: KeySelection, size: int, device: torch.device) -> Tensor:
    """The positions that a selection picks out of `size`."""
    if isinstance(selection, slice):
        return torch.arange(*selection.indices(size), device=device)
    return selection


def _apply_order(problem: AttentionProblem, scores: Tensor, queries: KeySelection, keys: KeySelection) -> None:
    """Causal order and window, on the strips of the block where they cut."""
    if not problem.is_causal and problem.window is None:
        return
    own = positions(queries, problem.n_queries, scores.device) + problem.offset
    key_pos = positions(keys, problem.n_keys, scores.device)
    if isinstance(queries, slice) and isinstance(keys, slice):
        first, last = (queries.start or 0) + problem.offset, (queries.start or 0) + problem.offset + len(own) - 1
        ahead = slice(min(max(first + 1 - keys.start, 0), len(key_pos)), len(key_pos))
        behind = slice(0, 0 if problem.window is None else max(last - problem.window + 1 - keys.start, 0))
    else:
        ahead = behind = slice(0, len(key_pos))
    if problem.is_causal:
        scores[:, ahead].masked_fill_(key_pos[ahead, None] > own, FORBIDDEN)
    if problem.window is not None:
        scores[:, behind].masked_fill_(key_pos[behind, None] <= own - problem.window, FORBIDDEN)
        if not problem.is_causal:
            scores[:, ahead].masked_fill_(key_pos[ahead, None] >= own + problem.window, FORBIDDEN)


def _apply(scores: Tensor, term: Tensor) -> None:
    """Add a mask or bias [head or 1, query or 1, key or 1] to key-major scores."""
    turned = term.mT.contiguous()
    if term.dtype == torch.bool:
        scores.masked_fill_(~turned, FORBIDDEN)
        return
    forbidden = forbidden_entries(turned)
    scores.add_(turned.to(scores.dtype).masked_fill(forbidden, 0.0))
    scores.masked_fill_(forbidden, FORBIDDEN)


def _term(term: BlockTerm, problem: AttentionProblem, batch: int, queries: KeySelection, keys: KeySelection) -> Tensor:
    """The part of a mask or bias that concerns a block: [head or 1, query or 1, key or 1]."""
    if isinstance(term, Tensor):
        full = term[(None,) * (4 - term.ndim)]
        part = full[batch if full.shape[0] > 1 else 0]
        part = part[:, queries] if part.shape[1] > 1 else part
        return part[:, :, keys] if part.shape[2] > 1 else part
    device = problem.q.device
    query_pos = positions(queries, problem.n_queries, device) + problem.offset
    key_pos = positions(keys, problem.n_keys, device)
    made = term(query_pos[:, None], key_pos[None, :])
    shape = torch.Size((problem.n_heads, len(query_pos), len(key_pos)))
    try:
        fits = made.ndim <= 3 and torch.broadcast_shapes(made.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ShapeError(
            f"a mask or bias function returned shape {tuple(made.shape)} for {len(query_pos)} queries and "
            f"{len(key_pos)} keys; expected {tuple(shape)} [head, query, key] or one that broadcasts to it"
        )
    return made[(None,) * (3 - made.ndim)]

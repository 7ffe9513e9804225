"""One attention call while the model is still running: what an edit sees, and how positions are counted.

An edit names heads, queries and keys in the prompt's own terms: position 0 is its first token whatever padding stands
before it, -1 its last. `TokenFrame` knows the padding and the cache of the current forward and turns such positions
into indices of the call; `LiveCall` computes exactly those pattern rows that an edit needs, differentiably.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attndiag.core.attention import attention_scores, forbidden_entries, softmax_rows
from attndiag.errors import ShapeError
from attndiag.hooks.routed import RoutedArguments, kernel_terms
from attndiag.hooks.traced import TracedSoftmax
from attndiag.shapes import group_size

Which = int | Sequence[int] | None


def as_indices(which: Which) -> list[int] | None:
    """One index, several, or None for all."""
    if which is None:
        return None
    return [int(which)] if isinstance(which, int) else [int(index) for index in which]


@dataclass(frozen=True, eq=False)
class TokenFrame:
    """How prompt positions lie in the rows of one forward.

    Attributes
    ----------
    mask : [batch, position] boolean over all positions (cache included), True for tokens; None where all are.
    past : positions that a cache held before this forward.
    """

    mask: Tensor | None
    past: int = 0

    def present(self, which: list[int] | None, batch: int, total: int, name: str) -> Tensor:
        """[batch, total] boolean: which of the positions are meant, in absolute terms; padding never is.

        Raises
        ------
        ShapeError : a position lies outside some row's tokens and no cache could hold it later.
        """
        device = None if self.mask is None else self.mask.device
        valid = torch.ones(batch, total, dtype=torch.bool, device=device)
        if self.mask is not None and self.mask.shape[0] == batch and self.mask.shape[1] <= total:
            valid[:, : self.mask.shape[1]] = self.mask
        elif self.mask is not None:
            raise ShapeError(
                f"the attention mask is {tuple(self.mask.shape)}, the call has {batch} rows of {total} positions; "
                "edits by position need one mask entry for each position"
            )
        if which is None:
            return valid
        lengths, first = valid.sum(1), valid.int().argmax(1)
        chosen = torch.zeros_like(valid)
        for index in which:
            place = index if index >= 0 else lengths + index
            inside = (lengths > index) & (lengths + index >= 0) if index < 0 else lengths > index
            if not bool(inside.all()) and self.past == 0:
                short = int(lengths.min())
                raise ShapeError(
                    f"{name} {index} is outside a prompt of {short} tokens; expected {-short} to {short - 1}"
                )
            rows = inside.nonzero()[:, 0]
            chosen[rows, (first + place)[rows]] = True
        return chosen & valid


@dataclass(eq=False)
class LiveCall:
    """One call of one attention module, seen before its result is used.

    Attributes
    ----------
    v : [batch, kv_head, key_pos, d_value]; z : [batch, query_pos, head, d_value], the current head outputs.
    queries, keys : token frames of the two sides.
    """

    module: nn.Module
    module_name: str
    layer: int | None
    stream: str
    v: Tensor
    z: Tensor
    queries: TokenFrame
    keys: TokenFrame
    source: RoutedArguments | TracedSoftmax

    @property
    def n_heads(self) -> int:
        """Number of query heads."""
        return self.z.shape[2]

    def head_mask(self, which: Which) -> Tensor:
        """[head] boolean; raises `ShapeError` for a head that the layer does not have."""
        chosen = torch.zeros(self.n_heads, dtype=torch.bool, device=self.z.device)
        wanted = as_indices(which)
        if wanted is None:
            return ~chosen
        for head in wanted:
            if not 0 <= head < self.n_heads:
                raise ShapeError(
                    f"head {head} does not exist at {self.module_name}: it has {self.n_heads} query heads, 0 to "
                    f"{self.n_heads - 1}"
                )
            chosen[head] = True
        return chosen

    def query_mask(self, which: Which) -> Tensor:
        """[batch, query_pos] boolean: which rows of this call are meant."""
        n_queries = self.z.shape[1]
        present = self.queries.present(as_indices(which), self.z.shape[0], self.queries.past + n_queries, "query")
        return present[:, -n_queries:].to(self.z.device)

    def key_mask(self, which: Which) -> Tensor:
        """[batch, key_pos] boolean: which keys of this call are meant."""
        n_keys, batch = self.v.shape[2], self.z.shape[0]
        if self.stream == "cross":
            return self.keys.present(as_indices(which), batch, n_keys, "key").to(self.z.device)
        total = self.queries.past + self.z.shape[1]
        present = self.keys.present(as_indices(which), batch, total, "key").to(self.z.device)
        if n_keys <= total:  # a sliding cache has dropped the oldest
            return present[:, total - n_keys :]
        return torch.nn.functional.pad(present, (0, n_keys - total))  # a static cache has room left

    def values_of(self, heads: Tensor) -> Tensor:
        """v as the chosen query heads read it, [batch, chosen head, key_pos, d_value]."""
        return self.v[:, heads // group_size(self.n_heads, self.v.shape[1])].expand(self.z.shape[0], -1, -1, -1)

    def rows(self, heads: Tensor, queries: Tensor) -> PatternRows:
        """Pattern rows of chosen heads and queries (index tensors), in the working precision."""
        if isinstance(self.source, TracedSoftmax) and self.source.pattern is not None:
            pattern = self.source.pattern[:, heads][:, :, queries]
            return PatternRows(pattern, torch.zeros_like(pattern[..., 0]), None, None)
        return self._from_formula(heads, queries)

    def _from_formula(self, heads: Tensor, queries: Tensor) -> PatternRows:
        terms: Any = kernel_terms(self.source) if isinstance(self.source, RoutedArguments) else self.source
        q, k = self.source.q, self.source.k
        if q is None or k is None:
            raise ShapeError(f"{self.module_name}: neither a pattern nor q and k were seen")
        work = torch.float64 if q.dtype == torch.float64 else torch.float32
        n_heads, n_queries, n_keys = q.shape[1], q.shape[2], k.shape[2]

        def chosen(term: Tensor | None) -> Tensor | None:
            if term is None:
                return None
            term = term[(None,) * (4 - term.ndim)]
            term = term[:, heads] if term.shape[1] == n_heads and n_heads > 1 else term
            term = term[:, :, queries] if term.shape[2] == n_queries and n_queries > 1 else term
            if term.dtype == torch.bool:
                return term
            return term.to(work).masked_fill(forbidden_entries(term), -torch.inf)

        mask = terms.mask
        if terms.is_causal:
            mask = torch.arange(n_keys, device=q.device) <= torch.arange(n_queries, device=q.device)[:, None]
        scores = attention_scores(
            q[:, heads][:, :, queries].to(work),
            k[:, heads // group_size(n_heads, k.shape[1])].to(work),
            scale=terms.scale,
            softcap=getattr(terms, "softcap", None),
            position_bias=chosen(getattr(terms, "position_bias", None)),
            mask=chosen(mask),
        )
        sinks = getattr(terms, "sinks", None)
        if sinks is not None:
            sinks = sinks.to(work)
            sinks = sinks[heads] if sinks.ndim == 1 else sinks[:, heads][..., queries]
        pattern, sink_mass = softmax_rows(scores, sinks=sinks)
        return PatternRows(pattern, sink_mass, scores, sinks)


@dataclass(frozen=True, eq=False)
class PatternRows:
    """Some rows of a pattern: A [batch, head, row, key_pos], sink mass [batch, head, row], and where they came from."""

    pattern: Tensor
    sink_mass: Tensor
    scores: Tensor | None
    sinks: Tensor | None

    @property
    def visible(self) -> Tensor:
        """Entries that the mask allows; for a softmax that was only watched, entries that are not exactly 0."""
        return self.pattern > 0 if self.scores is None else self.scores > -torch.inf

    def without(self, removed: Tensor) -> Tensor:
        """The rows with some entries forbidden and the rest renormalised; a row that loses every key becomes 0."""
        if self.scores is not None:
            return softmax_rows(self.scores.masked_fill(removed, -torch.inf), sinks=self.sinks)[0]
        kept = self.pattern.masked_fill(removed, 0.0)
        # the sum of what is left, not 1 - A: that difference has no digits left where A is near 1
        total = kept.sum(-1, keepdim=True)
        renewed = torch.where(total > 0, kept / total.clamp_min(torch.finfo(total.dtype).tiny), torch.zeros_like(kept))
        return torch.where(removed.any(-1, keepdim=True), renewed, self.pattern)

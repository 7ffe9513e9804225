"""Attention small enough to check by hand: the numbers behind the page of worked examples.

Everything here goes through the reference code (`core.attention`, `core.scoring`), in float64, so that the page, which
computes the same formulas in the reader's browser, can be held against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attndiag.core.attention import attention_scores, head_outputs, softmax_rows
from attndiag.core.masks import causal_mask, intersect, window_mask
from attndiag.core.scoring import additive_scores, dot_scores, general_scores, scaled_dot_scores
from attndiag.shapes import AllowedMask

F64 = torch.float64
KEYS = ((1.0, 0.0), (0.0, 1.0))
VALUES = ((2.0, 0.0), (0.0, 4.0))
MASKS = ("causal", "all", "hidden_diagonal", "one_step_leak", "window_2")
WIDTHS = (4, 16, 64, 256, 512)
SCORINGS = ("dot", "scaled_dot", "general", "additive")


@dataclass(frozen=True)
class TwoItems:
    """One query that reads two items, step by step. Sums over the copies of a key where there are several.

    dots : q . k_j, [item]. scores : q . k_j / (sqrt(2) T), `-inf` where masked, [item]. weights : mass in [0, 1],
    [item]. parts : a_j v_j, [item, 2]. contributions : ||a_j v_j||, >= 0, [item]. output : sum_j a_j v_j, [2].
    """

    dots: tuple[float, ...]
    scores: tuple[float, ...]
    weights: tuple[float, ...]
    parts: tuple[tuple[float, ...], ...]
    contributions: tuple[float, ...]
    output: tuple[float, ...]


def two_items(
    q: Sequence[float],
    values: Sequence[Sequence[float]] = VALUES,
    *,
    temperature: float = 1.0,
    copies: int = 1,
    visible: Sequence[bool] = (True, True),
) -> TwoItems:
    """One query, the keys [1, 0] and [0, 1], two values.

    a = softmax over keys of q . k_j / (sqrt(2) T);  o = sum_j a_j v_j.

    Parameters
    ----------
    q : 2 numbers. values : 2 x 2.
    temperature : T > 0; large T evens the weights out.
    copies : how often item 1 (key and value) is there; the copies share one line of the result.
    visible : which items the query may read. None: all-zero weights, zero output.

    Raises
    ------
    ValueError : a temperature or a number of copies that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; expected a positive number")
    if copies < 1:
        raise ValueError(f"copies is {copies}; expected at least 1")
    item = torch.tensor([0] * copies + [1])
    query = torch.tensor(q, dtype=F64)[None, None, None]
    keys = torch.tensor(KEYS, dtype=F64)[item][None, None]
    value = torch.tensor(values, dtype=F64)[item][None, None]
    mask = torch.tensor(visible)[item][None, None, None]
    scores = attention_scores(query, keys, scale=1 / (math.sqrt(2) * temperature), mask=mask)
    pattern, _ = softmax_rows(scores)
    output = head_outputs(pattern, value)[0, 0, 0]
    weights = torch.zeros(2, dtype=F64).index_add_(0, item, pattern[0, 0, 0])
    parts = torch.zeros(2, 2, dtype=F64).index_add_(0, item, pattern[0, 0, 0][:, None] * value[0, 0])
    first = torch.tensor([0, copies])
    return TwoItems(
        dots=tuple(dot_scores(query, keys)[0, 0, 0][first].tolist()),
        scores=tuple(scores[0, 0, 0][first].tolist()),
        weights=tuple(weights.tolist()),
        parts=tuple(tuple(part) for part in parts.tolist()),
        contributions=tuple(parts.norm(dim=-1).tolist()),
        output=tuple(output.tolist()),
    )


def three_positions(mask: str = "causal", own_score: float = 0.0) -> tuple[tuple[float, ...], ...]:
    """Weights of three positions that read each other, [query_pos][key_pos], mass in [0, 1].

    All scores are 0 but those of a position with itself.

    Parameters
    ----------
    mask : `"causal"` (j <= i), `"all"`, `"hidden_diagonal"` (j < i), `"one_step_leak"` (j <= i + 1) or `"window_2"`
        (causal, two keys at most).
    own_score : score of each position with itself.

    Raises
    ------
    ValueError : the mask has another name.
    """
    causal = causal_mask(3, 3)
    allowed: dict[str, AllowedMask] = {
        "causal": causal,
        "all": torch.ones_like(causal),
        "hidden_diagonal": causal_mask(3, 3, offset=-1),
        "one_step_leak": causal_mask(3, 3, offset=1),
        "window_2": intersect(causal, window_mask(3, 3, window=2)),
    }
    if mask not in allowed:
        raise ValueError(f"mask is {mask!r}; expected one of {', '.join(MASKS)}")
    scores = own_score * torch.eye(3, dtype=F64)[None, None]
    pattern, _ = softmax_rows(scores.masked_fill(~allowed[mask], -math.inf))
    return tuple(tuple(row) for row in pattern[0, 0].tolist())


@dataclass(frozen=True)
class DotProductSpread:
    """What random q and k of one width give.

    variance, sd : of q . k, measured; `scaled_variance` after division by sqrt(d_k).
    counts, scaled_counts : histograms over `edges`; what lies outside is in the first and the last bin.
    largest, scaled_largest : mean largest weight of a query over 16 keys, mass; `frozen`, `scaled_frozen`: share of
        queries whose largest weight exceeds .99.
    """

    d_k: int
    draws: int
    variance: float
    sd: float
    scaled_variance: float
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    scaled_counts: tuple[int, ...]
    largest: float
    scaled_largest: float
    frozen: float
    scaled_frozen: float

    @property
    def root(self) -> float:
        """sqrt(d_k), what the standard deviation should be."""
        return math.sqrt(self.d_k)


def dot_product_spread(d_k: int, *, queries: int = 500, keys: int = 16, seed: int = 0) -> DotProductSpread:
    """Spread of q . k for independent standard normal components: Var(q . k) = d_k (Vaswani 2017, footnote 4).

    Parameters
    ----------
    d_k : width of q and k.
    queries, keys : 500 queries with 16 keys each are 8,000 products.
    seed : of the draws.
    """
    if d_k < 1:
        raise ValueError(f"d_k is {d_k}; expected at least 1")
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, queries, 1, d_k, generator=generator, dtype=F64)
    k = torch.randn(1, queries, keys, d_k, generator=generator, dtype=F64)
    dots, scaled = dot_scores(q, k), scaled_dot_scores(q, k)
    edges = torch.linspace(-100, 100, 201, dtype=F64)
    largest, scaled_largest = (softmax_rows(s)[0].amax(-1) for s in (dots, scaled))
    return DotProductSpread(
        d_k=d_k,
        draws=queries * keys,
        variance=dots.var().item(),
        sd=dots.std().item(),
        scaled_variance=scaled.var().item(),
        edges=tuple(edges.tolist()),
        counts=_histogram(dots, edges),
        scaled_counts=_histogram(scaled, edges),
        largest=largest.mean().item(),
        scaled_largest=scaled_largest.mean().item(),
        frozen=(largest > 0.99).double().mean().item(),
        scaled_frozen=(scaled_largest > 0.99).double().mean().item(),
    )


def scorings(length: float) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    """(scores, weights) of the keys [1, 0] and [0, 1] under four rules, for the query [length, 0].

    `dot` q.k; `scaled_dot` q.k / sqrt(2); `general` q^T W k with W = [[0, 1], [1, 0]], which looks for the other key;
    `additive` v^T tanh(W_q q + W_k k) with W_q = W_k = I and v = [-2, -2], whose scores stay in (-4, 4).
    """
    q = torch.tensor([length, 0.0], dtype=F64)[None, None, None]
    k = torch.tensor(KEYS, dtype=F64)[None, None]
    identity = torch.eye(2, dtype=F64)
    found: dict[str, Tensor] = {
        "dot": dot_scores(q, k),
        "scaled_dot": scaled_dot_scores(q, k),
        "general": general_scores(q, k, identity.flip(0)),
        "additive": additive_scores(q, k, w_q=identity, w_k=identity, v=torch.tensor([-2.0, -2.0], dtype=F64)),
    }
    return {
        name: (tuple(scores[0, 0, 0].tolist()), tuple(softmax_rows(scores)[0][0, 0, 0].tolist()))
        for name, scores in found.items()
    }


def shared_heads(heads: int, kv_heads: int, *, d_head: int = 64, item_bytes: int = 2) -> tuple[tuple[int, ...], int]:
    """Which key/value head each query head reads, h // (heads / kv_heads), and cache bytes a token and layer.

    The cache holds 2 * kv_heads * d_head numbers a token: keys and values.
    """
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} key/value heads: expected a divisor")
    group = heads // kv_heads
    return tuple(head // group for head in range(heads)), 2 * kv_heads * d_head * item_bytes


def _histogram(numbers: Tensor, edges: Tensor) -> tuple[int, ...]:
    """Counts between the edges; numbers outside fall into the outermost bins."""
    inside = numbers.flatten().clamp(float(edges[0]), float(edges[-1]))
    bins = torch.bucketize(inside, edges[1:-1])
    return tuple(torch.bincount(bins, minlength=len(edges) - 1).tolist())

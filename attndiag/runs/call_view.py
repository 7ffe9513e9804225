"""The maps of one call as arrays, and the measures that are read off them.

Weight, head contribution and contribution; row shares and the sink's part of them; ||v_j|| and ||f_j||; Kendall's tau-b
of each row with sinks and special tokens set aside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attndiag.core.attention import forbidden_entries
from attndiag.hooks.record import AttentionCall
from attndiag.runs.call_record import Averages, mean_over_rows, single
from attndiag.runs.pairs import Array, Mask, row_shares
from attndiag.scores import Scores
from attndiag.shapes import expand_kv_heads
from attndiag.stats.agreement import LEAST_ITEMS, kendall_tau_b, tau_needed

SINK_MASS = 0.3  # mean mass above which a key counts as a sink (definitions: Gu 2024, arXiv 2410.10781)
LATER_QUERIES = 3  # a mean over fewer says nothing about the key


@dataclass(frozen=True, eq=False)
class CallView:
    """The arrays of one call, without the batch axis, in float64.

    weight, written : [head, query, key]; together : [query, key]; rows : [query], the queries that count; allowed :
    [head, query, key]; readable : [key], read by any query; aside : [key], keys that rankings set aside;
    learned_sink : [head, query].
    """

    weight: Array
    written: Array | None
    together: Array | None
    rows: Mask
    allowed: Mask
    readable: Mask
    special: Mask
    aside: Mask
    learned_sink: Array

    @property
    def n_queries(self) -> int:
        return self.weight.shape[1]

    @classmethod
    def of(
        cls, call: AttentionCall, weight: Scores, by_head: Scores | None, by_layer: Scores | None, special: Mask
    ) -> CallView:
        pattern = _array(weight.values)
        allowed = np.broadcast_to(_allowed(call, pattern), pattern.shape)
        rows = allowed.any(axis=(0, 2))
        if call.kind == "self" and call.diagonal_offset == 0:
            rows = rows & (np.arange(len(rows)) > 0)
        return cls(
            weight=pattern,
            written=None if by_head is None else _array(by_head.values),
            together=None if by_layer is None else _array(by_layer.values),
            rows=rows,
            allowed=allowed,
            readable=allowed.any(axis=(0, 1)),
            special=special,
            aside=special | _sink_keys(pattern, allowed, rows, call),
            learned_sink=call.sink_mass[0].double().cpu().numpy(),
        )


def _array(values: torch.Tensor) -> Array:
    return values[0].detach().double().cpu().numpy()


def _allowed(call: AttentionCall, pattern: Array) -> Mask:
    """Which keys each query may read, [head or 1, query, key]."""
    if call.is_causal:
        return np.tril(np.ones(pattern.shape[1:], dtype=bool))[None]
    if call.mask is None:
        # where q was not seen, the softmax shows its mask only in what it gives exactly nothing
        return pattern > 0 if call.q is None else np.ones((1, 1, 1), dtype=bool)
    mask = call.mask if call.mask.dtype == torch.bool else ~forbidden_entries(call.mask)
    while mask.ndim < 4:
        mask = mask[None]
    return mask[0].cpu().numpy()


def _sink_keys(pattern: Array, allowed: Mask, rows: Mask, call: AttentionCall) -> Mask:
    """[key]: position 0, and keys whose mean mass over heads and later queries passes .3."""
    n_keys = pattern.shape[2]
    later = allowed.any(axis=0) & rows[:, None]
    if call.kind == "self":
        # what a token gives itself is no sign of a sink
        own = np.arange(pattern.shape[1]) + call.diagonal_offset
        later = later & (np.arange(n_keys)[None] != own[:, None])
    counted = later.sum(axis=0)
    total = (pattern.mean(axis=0) * later).sum(axis=0)
    mean = np.divide(total, counted, out=np.zeros(n_keys), where=counted >= LATER_QUERIES)
    sinks = mean > SINK_MASS
    sinks[0] = True
    return sinks


def sink_measures(view: CallView) -> dict[str, Averages]:
    rows = view.rows
    others = view.special.copy()
    others[0] = False
    measures = {
        "sink_weight": mean_over_rows(view.weight[:, rows, 0]),
        "learned_sink_mass": mean_over_rows(view.learned_sink[:, rows]),
        "special_weight": mean_over_rows(view.weight[:, :, others].sum(axis=-1)[:, rows]),
    }
    if view.written is not None:
        measures["sink_head_contribution_share"] = mean_over_rows(_sink_share(view.written)[:, rows])
        measures["head_written"] = mean_over_rows(view.written.sum(axis=-1)[:, rows])
    return measures


def _sink_share(values: Array) -> Array:
    """Part of each row that key 0 has; nan where the row is all zero."""
    total = values.sum(axis=-1)
    return np.divide(values[..., 0], total, out=np.full(total.shape, np.nan), where=total > 0)


def norm_measures(call: AttentionCall, view: CallView) -> dict[str, Averages]:
    """||v_j|| and ||f_j|| of the sink and of the median other token, padding and unread keys left out."""
    n_keys = view.weight.shape[2]
    readable = view.readable.copy()
    readable[0] = False
    norms = {"v": value_norms(call, None)}
    # an elementwise gate depends on the query, so no key has one f_j there
    if call.output is not None and call.output_gate is None:
        norms["f"] = value_norms(call, call.w_o)
    measures = {}
    for name, values in norms.items():
        measures[f"sink_{name}_norm"] = single(values[:, 0], 1)
        if n_keys > 1 and readable.any():
            measures[f"other_{name}_norm"] = single(np.median(values[:, readable], axis=1), int(readable.sum()))
    return measures


def value_norms(call: AttentionCall, w_o: Tensor | None) -> Array:
    """[head, key] ||v_j||, or ||f_j|| = ||v_j W_O|| with `w_o` [head, d_value, d_model]; one head at a time."""
    work = torch.float64 if call.z.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        v = expand_kv_heads(call.v.detach().to(work), call.n_heads)[0]
        written = v if w_o is None else (one @ w.to(work) for one, w in zip(v, w_o, strict=True))
        return torch.stack([one.norm(dim=-1) for one in written]).double().cpu().numpy()


def layer_measures(view: CallView) -> dict[str, Averages]:
    measures = {"sink_keys": single(np.float64((view.aside & ~view.special).sum()), view.weight.shape[2])}
    if view.together is None or view.written is None:
        return measures
    counted = view.together[view.rows]
    bound = view.written[:, view.rows].sum(axis=0)
    measures["sink_contribution_share"] = mean_over_rows(_sink_share(counted))
    measures["layer_written"] = mean_over_rows(counted.sum(axis=-1))
    some = bound > 0
    if some.any():
        measures["cancellation"] = single(np.median(np.minimum(counted[some] / bound[some], 1.0)), int(some.sum()))
    return measures


def rank_measures(view: CallView, most_rows: int) -> tuple[dict[str, Averages], dict[str, Averages]]:
    """Rank agreement of weight with head contribution (by head) and with contribution (mean weight, by layer)."""
    if view.written is None or view.together is None:
        return {}, {}
    rows = np.flatnonzero(view.rows)
    rows = rows[spread_rows(len(rows), most_rows)]
    keep = view.allowed[:, rows] & ~view.aside
    tau = _taus(view.weight[:, rows], view.written[:, rows], keep)
    anyhead = keep.any(axis=0)
    layer_tau = _taus(view.weight[:, rows].mean(axis=0)[None], view.together[rows][None], anyhead[None])
    needed = np.array([tau_needed(int(n)) for n in range(min(view.weight.shape[2], 200) + 1)])
    # beyond 200 items the bound only falls, so that of 200 is on the safe side
    bound = needed[np.minimum(keep.sum(axis=-1), len(needed) - 1)]
    above = np.where(np.isfinite(bound) & np.isfinite(tau), tau >= bound - 1e-9, np.nan)
    last = view.n_queries - 1
    differs = view.weight[:, last].argmax(axis=-1) != view.written[:, last].argmax(axis=-1)
    layer_differs = view.weight[:, last].mean(axis=0).argmax() != view.together[last].argmax()
    return (
        {
            "rank_agreement": mean_over_rows(tau),
            "rank_agreement_above_chance": mean_over_rows(above),
            "top_key_differs": single(differs.astype(np.float64), 1),
        },
        {
            "layer_rank_agreement": mean_over_rows(layer_tau),
            "layer_top_key_differs": single(np.float64(layer_differs), 1),
        },
    )


def spread_rows(n: int, most: int) -> NDArray[np.int64]:
    """At most `most` of `n` places, evenly spread, first and last among them."""
    return np.arange(n) if n <= most else np.unique(np.linspace(0, n - 1, most).round().astype(np.int64))


def _taus(a: Array, b: Array, keep: Mask) -> Array:
    """tau-b of each row, [head, row]; rows that hold a nan are undefined."""
    n_heads, n_rows, n_keys = a.shape
    finite = (np.isfinite(a) & np.isfinite(b)).all(axis=-1, keepdims=True)
    kept = (keep & finite).reshape(-1, n_keys)
    # columns that no row keeps (sinks, special tokens) only cost time
    some = kept.any(axis=0)
    if some.sum() < LEAST_ITEMS:
        return np.full((n_heads, n_rows), np.nan)
    flat_a, flat_b = (x.reshape(-1, n_keys)[:, some] for x in (a, b))
    return kendall_tau_b(flat_a, flat_b, kept[:, some]).reshape(n_heads, n_rows)


def last_query_scores(view: CallView) -> dict[str, Array]:
    """What each key gives the last query, heads joined, [key]."""
    last = view.n_queries - 1
    scores = {"weight": view.weight[:, last].mean(axis=0)}
    if view.written is not None and view.together is not None:
        with np.errstate(invalid="ignore"):
            scores["head_contribution"] = view.written[:, last].mean(axis=0)
            scores["head_contribution_share"] = row_shares(view.written[:, last]).mean(axis=0)
        scores["contribution"] = view.together[last]
    return scores

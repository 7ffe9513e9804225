"""The strongest keys of every query at lengths where no pattern fits in memory.

The streaming counterpart of `attndiag.contributions`: one captured call -> per-query top keys, totals by key and head,
entropies and chosen rows, in memory linear in the length (`core.streaming`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from attndiag.core.streaming import StreamResult, stream_contributions
from attndiag.errors import NotApplicableError
from attndiag.hooks.record import AttentionCall
from attndiag.scores import Scores

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class TopContributions:
    """What one pass over a long call keeps.

    Attributes
    ----------
    scores : [batch, query_pos, rank], the contributions ‖T_ij‖ of each query's strongest keys, descending, residual
        norms; nan where a query has fewer keys, and for padded queries.
    stream : the keys behind them and every total (`core.streaming.StreamResult`); padded queries write nothing there,
        so that no total counts them.
    """

    scores: Scores
    stream: StreamResult

    def to_frame(self) -> pd.DataFrame:
        """One row a query and rank: key_pos, contribution, its share of the row's total, cancellation, top head."""
        frame = self.scores.to_frame().rename(columns={"value": "contribution"})
        batch, query, rank = (frame[axis].to_numpy() for axis in ("batch", "query_pos", "rank"))
        stream = self.stream
        frame["key_pos"] = stream.top_index.cpu().numpy()[batch, query, rank]
        total = stream.row_total.cpu().numpy()[batch, query]
        frame["share_of_row"] = frame["contribution"] / np.where(total > 0, total, np.nan)
        frame["cancellation"] = stream.top_cancellation.cpu().numpy()[batch, query, rank]
        weights = stream.top_weight.cpu().numpy()
        frame["head_of_largest_weight"] = weights.argmax(axis=1)[batch, query, rank]
        return frame.query("key_pos >= 0").reset_index(drop=True)


def can_stream(call: AttentionCall) -> bool:
    """Whether `top_contributions` takes this call: q and k were seen, nothing gates the heads, W_O was found."""
    seen = call.q is not None and call.k is not None and call.scale is not None
    return seen and call.output_gate is None and call.output is not None


def top_contributions(
    call: AttentionCall,
    *,
    top_k: int = 16,
    rows: Sequence[int] | Tensor | None = None,
    columns: Sequence[int] = (),
    dtype: torch.dtype | None = None,
) -> TopContributions:
    """The strongest keys of every query of one captured call, no pattern formed.

    ‖T_ij‖ = ‖sum_h A_ij^h v_j^h W_O^h‖ (Kobayashi 2020, arXiv 2004.10102), the same numbers as
    `contributions(call, "contribution")`.

    Parameters
    ----------
    call : a record from `attndiag.capture`; its sampled certificate decides whether the result is verified.
    top_k : keys kept for each query, 1 to key_pos.
    rows : queries whose whole rows are kept too; negative ones count from the end.
    columns : keys whose whole columns are kept too; likewise.
    dtype : of the computation; None is float32, or float64 for a float64 call.

    Raises
    ------
    NotApplicableError : q and k were not seen, or the head outputs are gated.
    UnsupportedModelError : there is no output projection; the text says why.
    ShapeError : `top_k` exceeds the keys, or a row or column does not exist.
    InsufficientMemoryError : even the streaming estimate exceeds what is available.
    """
    if call.q is None or call.k is None or call.scale is None or call.output_gate is not None:
        raise NotApplicableError(
            f"{call.module_name}: streaming needs q and k of an ungated call; use attndiag.contributions, in which the "
            "pattern is read"
        )
    w_o = call.w_o
    work = dtype or (torch.float64 if call.z.dtype == torch.float64 else torch.float32)
    proof = call.sampled_certificate
    with torch.no_grad():
        stream = stream_contributions(
            call.q.to(work),
            call.k.to(work),
            call.v.to(work),
            w_o.to(work),
            scale=cast(float, call.scale),
            mask=_without_padding(call),
            is_causal=call.is_causal,
            softcap=call.softcap,
            sinks=call.sinks,
            position_bias=call.position_bias,
            top_k=top_k,
            rows=rows,
            columns=columns,
            layer=call.module_name,
        )
    values = stream.top_contribution.masked_fill(stream.top_index < 0, torch.nan)
    if call.query_valid is not None:
        values = values.masked_fill(~call.query_valid[..., None], torch.nan)
    scores = Scores(
        values=values,
        axes=("batch", "query_pos", "rank"),
        method="contribution",
        unit="residual norm",
        sign="non-negative",
        params={"top_k": top_k},
        provenance={
            "module": call.module_name,
            "layer": call.layer,
            "kernel": call.kernel,
            "backend": "streaming",
            "dtype": str(work).removeprefix("torch."),
        },
        checks={"formula_error": proof.formula_error, "output_error": proof.output_error, "certified_rows": proof.rows},
        failures=proof.failures,
    )
    return TopContributions(scores, stream)


def _without_padding(call: AttentionCall) -> Tensor | None:
    """The call's mask with the rows of padded queries closed, broadcast over the keys where it has no rows itself."""
    if call.query_valid is None:
        return call.mask
    real = call.query_valid[:, None, :, None]
    if call.mask is None:
        return real
    mask = call.mask[(None,) * (4 - call.mask.ndim)]
    return mask & real if mask.dtype == torch.bool else mask.masked_fill(~real, -torch.inf)

"""Streaming on captured calls: the top keys are those of the whole matrix."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import attndiag
from attndiag import top_contributions
from attndiag.errors import NotApplicableError


def test_top_keys_are_those_of_the_whole_matrix(tiny_llama):
    ids = torch.randint(2, 64, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, -6:] = 0
    with torch.no_grad(), attndiag.capture(tiny_llama) as captured:
        tiny_llama(ids, attention_mask=mask)
    for call in captured.calls:
        whole = attndiag.contributions(call, backend="reference").values
        top = top_contributions(call, top_k=5, rows=[-1])
        assert top.scores.verified
        assert top.scores.values[0, -6:].isnan().all()
        for query in (4, 20, 33):
            expected = whole[:, query].topk(5).values
            torch.testing.assert_close(top.scores.values[:, query], expected, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(top.stream.row_contribution[1, 0], whole[1, -1], atol=2e-5, rtol=2e-5)
        frame = top.to_frame()
        assert (frame.key_pos <= frame.query_pos).all()
        assert frame[frame.query_pos == 0].groupby("batch").size().tolist() == [1, 1]
        assert frame.share_of_row.dropna().between(0, 1 + 1e-6).all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_totals_leave_padded_queries_out(tiny_llama, side, implementation):
    tiny_llama.set_attn_implementation(implementation)
    ids = torch.randint(2, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    padding = slice(0, 7) if side == "left" else slice(17, 24)
    mask[0, padding] = 0
    with torch.no_grad(), attndiag.capture(tiny_llama) as captured:
        tiny_llama(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0))
    for call in captured.calls:
        weights = attndiag.contributions(call, "weight").values
        by_head = attndiag.contributions(call, "head_contribution", backend="reference").values
        together = attndiag.contributions(call, backend="reference").values
        stream = top_contributions(call, top_k=4).stream
        assert together[0, padding].isnan().all()
        for total, entries in (
            (stream.key_total, together.nansum(1)),
            (stream.row_total, together.nansum(2)),
            (stream.head_total, by_head.nansum((2, 3))),
            (stream.head_key_total, by_head.nansum(2)),
            (stream.head_row_total, by_head.nansum(3)),
            (stream.head_key_weight, weights.nansum(2)),
        ):
            torch.testing.assert_close(total, entries, atol=2e-5, rtol=2e-5)


def test_calls_without_q_and_k_are_refused():
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("bloom", vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    ).eval()
    with torch.no_grad(), attndiag.capture(model) as captured:
        model(torch.arange(2, 12)[None])
    with pytest.raises(NotApplicableError, match="q and k of an ungated call"):
        top_contributions(captured.calls[0])

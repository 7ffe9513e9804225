"""Attention without a usable W_O: the weights are recorded, and the refusal says what stands in its place."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    IBertConfig,
    IBertForMaskedLM,
    LiltConfig,
    LiltModel,
    SqueezeBertConfig,
    SqueezeBertForMaskedLM,
    XLNetConfig,
    XLNetLMHeadModel,
)

from attndiag.errors import UnsupportedModelError
from attndiag.hooks.capture_context import capture

SIZES = {
    "vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64,
}  # fmt: skip


def calls_of(model, **more):
    with torch.no_grad(), capture(model.eval()) as captured:
        model(input_ids=torch.arange(4, 20)[None], **more)
    return captured.calls


def xlnet():
    return XLNetLMHeadModel(XLNetConfig(vocab_size=64, d_model=32, n_layer=1, n_head=4, d_inner=48))


def squeezebert():
    return SqueezeBertForMaskedLM(SqueezeBertConfig(**SIZES, embedding_size=48))


def ibert():
    return IBertForMaskedLM(IBertConfig(**SIZES))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (xlnet, "no linear map takes the head outputs as its input; weights of the module itself: q, k, v, o, r, "),
        (squeezebert, "no linear map takes the head outputs as its input; weights of Conv1d: query, key, value"),
        (ibert, "attention.output.dense takes the head outputs and returns a tuple, not one tensor"),
    ],
)
def test_the_refusal_says_what_was_found(build, said):
    (call,) = calls_of(build())
    assert torch.allclose(call.pattern.sum(dim=-1), torch.ones(()), atol=1e-5)
    assert said in call.output_reason and call.output is None
    for read in (lambda: call.w_o, lambda: call.b_o):
        with pytest.raises(UnsupportedModelError, match="contributions are not") as caught:
            read()
        assert call.module_name in str(caught.value) and said in str(caught.value)


def test_of_two_softmaxes_in_one_module_the_first_is_refused():
    """LiLT attends over the layout, then over the text, and applies both output maps afterwards."""
    layout, text = calls_of(LiltModel(LiltConfig(**SIZES)), bbox=torch.zeros(1, 16, 4, dtype=torch.long))
    assert text.output is not None and text.output.module_name.endswith("attention.output.dense")
    assert "layout_output.dense takes the head outputs, but only after" in layout.output_reason
    with pytest.raises(UnsupportedModelError, match="layout_output"):
        layout.w_o  # noqa: B018

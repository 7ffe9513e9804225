"""Gradients in attention weights: against eager autograd, known effects, batches, encoder-decoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

import attndiag
from attndiag import Target
from attndiag.core.gradients import completeness_gap, head_gradient, pattern_attribution, pattern_gradient
from attndiag.errors import NotApplicableError, ShapeError
from attndiag.explanations.pattern_gradients import pattern_gradients
from attndiag.models.known import cross_copy, sink_against_value
from attndiag.models.load import LoadedModel

TEXT = "<bos> w5 w9 w30 w7 w9 w12"
TARGET = Target.logit_diff("w10", "w20")


def eager_pattern_gradient(lm: LoadedModel, text: str) -> list[Tensor]:
    """dm/dA by autograd through an eager model that returns its patterns."""
    lm.model.set_attn_implementation("eager")
    out = lm.model(**lm.encode(text).inputs, output_attentions=True, use_cache=False)
    m = out.logits[0, -1, 10] - out.logits[0, -1, 20]
    found = torch.autograd.grad(m, out.attentions)
    return [gradient[0] for gradient in found]


def test_pattern_gradients_equal_autograd_through_eager_attention(lm: LoadedModel) -> None:
    lm.model.set_attn_implementation("sdpa")
    slopes = pattern_gradients(lm, TEXT, TARGET, kind="gradient")[0]
    products = pattern_gradients(lm, TEXT, TARGET)[0]
    assert slopes.verified
    assert (slopes.axes, slopes.values.shape) == (("layer", "head", "query_pos", "key_pos"), (2, 4, 7, 7))
    future = torch.triu(torch.ones(7, 7, dtype=torch.bool), 1)
    assert torch.equal(torch.isnan(slopes.values), future.expand(2, 4, 7, 7))
    for layer, expected in enumerate(eager_pattern_gradient(lm, TEXT)):
        # the eager Llama takes its softmax in float32 whatever its dtype
        torch.testing.assert_close(slopes.values[layer][:, ~future], expected[:, ~future], rtol=1e-4, atol=1e-6)
    with attndiag.capture(lm) as captured:
        lm.forward(TEXT)
    patterns = torch.stack([call.pattern[0] for call in captured.calls])
    torch.testing.assert_close(products.values, patterns * slopes.values.nan_to_num(), rtol=1e-5, atol=1e-7)


def test_first_order_effects_are_exact_where_the_model_is_linear_in_its_heads() -> None:
    known = sink_against_value()
    lm = attndiag.load(known.model, tokenizer=known.tokenizer())
    answer, foil = known.expected["target"]
    found = pattern_gradients(lm, known.text(), Target.logit_diff(answer, foil))[0]
    for (layer, head, query, key), effect in known.expected["edge_effect"].items():
        assert float(found.values[layer, head, query, key]) == pytest.approx(effect, abs=2e-3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_batches_equal_single_prompts(llama_lm: LoadedModel, side: Any) -> None:
    texts = [TEXT, "<bos> w8 w8 w21", "<bos> w40 w5 w6 w7 w11 w13 w60 w33"]
    for kind in ("gradient", "attribution"):
        together = pattern_gradients(llama_lm, texts, TARGET, kind=kind, padding_side=side)
        for text, found in zip(texts, together, strict=True):
            alone = pattern_gradients(llama_lm, text, TARGET, kind=kind)[0]
            scale = float(alone.values.nan_to_num().abs().max())
            torch.testing.assert_close(found.values, alone.values, rtol=1e-5, atol=1e-5 * scale, equal_nan=True)


def test_swapping_answer_and_foil_negates_exactly(llama_lm: LoadedModel) -> None:
    one = pattern_gradients(llama_lm, TEXT, TARGET)[0].values
    assert torch.equal(one, -pattern_gradients(llama_lm, TEXT, TARGET.swapped())[0].values)
    assert float(one.abs().max()) > 0


def test_frozen_weights_have_pattern_gradients_too(llama_lm: LoadedModel) -> None:
    expected = pattern_gradients(llama_lm, TEXT, TARGET)[0].values
    llama_lm.model.requires_grad_(False)
    assert torch.equal(pattern_gradients(llama_lm, TEXT, TARGET)[0].values, expected)


def test_the_parts_of_an_encoder_decoder_are_named(word_lm: Callable[[nn.Module], LoadedModel]) -> None:
    config = T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=1, pad_token_id=1
    )
    t5 = word_lm(T5ForConditionalGeneration(config).eval())
    prompt = attndiag.Prompt("w5 w6 w7", decoder_text="w9")
    shapes = {"encoder": (2, 2, 3, 3), "decoder": (2, 2, 2, 2), "cross": (2, 2, 2, 3)}
    for part, shape in shapes.items():
        found = pattern_gradients(t5, prompt, Target.logit("w12"), part=part)[0]
        assert found.values.shape == shape
        assert found.verified
    assert pattern_gradients(t5, prompt, Target.logit("w12"))[0].params["part"] == "decoder"
    known = cross_copy()
    assert known.model.config.is_encoder_decoder
    with pytest.raises(ValueError, match="part is 'middle'"):
        pattern_gradients(t5, prompt, Target.logit("w12"), part="middle")


def test_what_cannot_be_asked_is_refused(llama_lm: LoadedModel) -> None:
    with pytest.raises(NotApplicableError, match="one stack of attention"):
        pattern_gradients(llama_lm, TEXT, TARGET, part="cross")
    with pytest.raises(ValueError, match="kind is 'slope'"):
        pattern_gradients(llama_lm, TEXT, TARGET, kind="slope")


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), group=st.sampled_from([1, 2, 4]), keys=st.integers(1, 6))
def test_a_pattern_gradient_is_the_change_of_a_linear_readout(seed: int, group: int, keys: int) -> None:
    """m = <g, z> is linear in A: a finite change of one weight moves it by exactly the gradient."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    v, pattern, g = draw(1, 2, keys, 3), draw(1, 2 * group, 4, keys), draw(1, 4, 2 * group, 3)
    slope = pattern_gradient(g, v)
    head, query, key = seed % (2 * group), seed % 4, seed % keys

    def readout(weights: Tensor) -> float:
        z = torch.einsum("bhqk,bhkd->bqhd", weights, v.repeat_interleave(group, dim=1))
        return float((g * z).sum())

    changed = pattern.clone()
    changed[0, head, query, key] += 0.7
    assert readout(changed) - readout(pattern) == pytest.approx(0.7 * float(slope[0, head, query, key]), abs=1e-10)
    assert float(pattern_attribution(pattern, g, v).sum()) == pytest.approx(readout(pattern), abs=1e-10)


def test_the_gradient_in_z_follows_from_the_one_in_the_output() -> None:
    z = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    w_o, gate = torch.randn(4, 5, 7, dtype=torch.float64), torch.rand(2, 3, 4, 5, dtype=torch.float64)
    output = torch.einsum("bqhd,hdm->bqm", z * gate, w_o)
    seed = torch.randn_like(output)
    (expected,) = torch.autograd.grad((output * seed).sum(), z)
    torch.testing.assert_close(head_gradient(seed, w_o, gate), expected)


def test_shapes_that_do_not_fit_and_gaps_that_do_not_exist() -> None:
    with pytest.raises(ShapeError, match="d_value of grad_z is 5 but d_value of v is 4"):
        pattern_gradient(torch.ones(1, 2, 4, 5), torch.ones(1, 2, 3, 4))
    with pytest.raises(ShapeError, match=r"pattern has shape \(1, 4, 2, 2\)"):
        pattern_attribution(torch.ones(1, 4, 2, 2), torch.ones(1, 2, 4, 5), torch.ones(1, 2, 3, 5))
    assert completeness_gap(1.5, 1.0) == 0.5
    assert completeness_gap(-1.0, 1.0) == 2.0
    assert completeness_gap(1.0, 0.0) != completeness_gap(1.0, 0.0)

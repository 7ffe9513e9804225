"""Estimates of edge effects: derivatives where they say so, exact where they must be, and refused where they cannot."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import attndiag as ad
from attndiag.errors import UnsupportedModelError
from attndiag.explanations.edge_estimators import edge_estimates
from attndiag.models import known

COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
FORMS = {
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
    "llama": COMMON,
    "gpt_oss": COMMON | {"sliding_window": 32, "num_local_experts": 4},
    "gemma2": COMMON | {"sliding_window": 32, "attn_implementation": "eager"},
}
TEXT = "t5 t9 t3 t44 t17 t8"
TARGET = ad.Target.logit_diff("t7", "t30")


def loaded(family: str, *, loud: float = 4.0):
    torch.manual_seed(1)
    settings = dict(FORMS.get(family, {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}))
    options = {"attn_implementation": settings.pop("attn_implementation")} if "attn_implementation" in settings else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), **options).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.2)
            elif weight.ndim == 2:
                weight.mul_(loud)
    words = Tokenizer(models.WordLevel(vocab={f"t{i}": i for i in range(64)}, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return ad.load(model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0"))


@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize("mode", ["remove", "renormalize"])
def test_with_every_later_position_the_estimate_is_exact(family, mode):
    lm = loaded(family)
    exact = ad.edge_effects(lm, TEXT, TARGET, mode=mode).values
    found = edge_estimates(lm, TEXT, TARGET, method="with_target", mode=mode, top=10**6, along=range(6))
    assert torch.equal(found.values.isnan(), exact.isnan())
    assert torch.allclose(found.values, exact, rtol=1e-3, atol=1e-4, equal_nan=True)
    assert found.checks["refined"] == 3 * 4 * 21
    assert found.checks["row_error"] < 1e-5


@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize("mode", ["remove", "renormalize"])
def test_edges_into_the_last_position_are_exact_by_themselves(family, mode):
    lm = loaded(family)
    exact = ad.edge_effects(lm, TEXT, TARGET, mode=mode).values
    found = edge_estimates(lm, TEXT, TARGET, method="own_position", mode=mode, top=10**6).values
    assert torch.allclose(found[:, :, -1], exact[:, :, -1], rtol=1e-3, atol=1e-4)
    first = edge_estimates(lm, TEXT, TARGET, mode=mode).values

    def off(estimate: torch.Tensor) -> float:
        return float((estimate - exact).nan_to_num().abs().mean())

    along = edge_estimates(lm, TEXT, TARGET, method="with_target", mode=mode, top=10**6).values
    assert off(along) < off(found) < off(first)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_in_the_last_layer_of_a_frozen_norm_first_order_is_the_derivative(family):
    """A hundredth of an edge's weight moves m by a hundredth of its first-order estimate."""
    lm = loaded(family)
    first = edge_estimates(lm, TEXT, TARGET).values
    clean = float(ad.score(lm, TEXT, TARGET).values)
    with ad.capture(lm) as captured:
        lm.forward(TEXT)
    for layer, head, query, key in ((2, 1, 5, 2), (1, 3, 4, 0), (0, 0, 3, 3)):
        pattern = captured.calls[layer].pattern[:, [head]].clone()
        pattern[..., query, key] *= 0.99
        with ad.edit(lm, ad.PatternReplacement(layer, pattern, head)):
            slope = (clean - float(ad.score(lm, TEXT, TARGET).values)) / 0.01
        assert float(first[layer, head, query, key]) == pytest.approx(slope, rel=0.05, abs=2e-3)


def test_the_strongest_are_recomputed_and_the_rest_left():
    lm = loaded("llama")
    first = edge_estimates(lm, TEXT, TARGET).values
    some = edge_estimates(lm, TEXT, TARGET, method="recomputed", top=10)
    exact = ad.edge_effects(lm, TEXT, TARGET).values
    chosen = first.abs().nan_to_num(-1).flatten().argsort(descending=True)[:10]
    rest = torch.ones(first.numel(), dtype=torch.bool)
    rest[chosen] = False
    assert torch.allclose(some.values.flatten()[chosen], exact.flatten()[chosen], atol=1e-5)
    assert torch.equal(some.values.flatten()[rest].nan_to_num(), first.flatten()[rest].nan_to_num())
    assert some.checks["token_layers"] > 0


def test_saturated_rows_keep_their_digits_when_renormalised():
    """A near 1: the share of the other keys is added up, not taken as 1 - A."""
    lm = loaded("llama", loud=40.0)
    found = edge_estimates(lm, TEXT, TARGET, mode="renormalize").values
    with ad.capture(lm) as captured:
        lm.forward(TEXT)
    assert float(captured.calls[0].pattern[0, :, 1:].amax()) > 0.999
    assert bool(found[~found.isnan()].isfinite().all())


def test_estimates_of_the_sink_model_are_its_effects():
    built = known.sink_against_value()
    lm = ad.load(built.model, tokenizer=built.tokenizer())
    for method in ("first_order", "own_position", "with_target", "recomputed"):
        found = edge_estimates(lm, built.text(), ad.Target.logit_diff(*built.expected["target"]), method=method)
        for (layer, head, query, key), effect in built.expected["edge_effect"].items():
            assert float(found.values[layer, head, query, key].nan_to_num()) == pytest.approx(effect, abs=1e-4)


def test_continuations_are_refined_at_all_their_positions():
    lm = loaded("llama")
    target = ad.Target.continuation_logprob(" t7 t30 t2")
    exact = ad.edge_effects(lm, TEXT, target).values
    found = edge_estimates(lm, TEXT, target, method="with_target", top=10**6, along=range(8)).values
    assert torch.allclose(found, exact, rtol=1e-3, atol=2e-4, equal_nan=True)


def test_swapping_answer_and_foil_negates():
    lm = loaded("gpt2")
    for method in ("first_order", "own_position"):
        one, other = (edge_estimates(lm, TEXT, t, method=method).values for t in (TARGET, TARGET.swapped()))
        assert torch.allclose(one, -other, atol=1e-6, equal_nan=True)


def test_what_cannot_be_estimated_raises():
    lm = loaded("bloom")
    assert bool(edge_estimates(lm, TEXT, TARGET).values.isfinite().any())
    with pytest.raises(UnsupportedModelError, match="is refined only by method='recomputed'"):
        edge_estimates(lm, TEXT, TARGET, method="own_position")
    with pytest.raises(ValueError, match="expected one of 'first_order', 'own_position'"):
        edge_estimates(lm, TEXT, TARGET, method="second_order")


def test_nothing_is_left_behind():
    lm = loaded("llama")
    before = ad.score(lm, TEXT, TARGET).values
    edge_estimates(lm, TEXT, TARGET, method="with_target", top=20)
    assert torch.equal(ad.score(lm, TEXT, TARGET).values, before)
    for module in lm.model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks

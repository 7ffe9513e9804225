"""Patching, attribution patching and head ablation: exact zeros, exact restoration, known answers."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

import attndiag as ad
from attndiag.errors import PromptError, ShapeError, UnsupportedModelError
from attndiag.explanations.interventions import ablate_heads, effect_of
from attndiag.explanations.patching import activation_patching, attribution_patching
from attndiag.hooks.activations import recording
from attndiag.models import known

SETTINGS = {
    "llama": {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    },
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "bart": {
        "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0,
    },
}  # fmt: skip
SITES = ["resid_pre", "resid_post", "head_out", "attn_out", "mlp_out"]
CLEAN, CORRUPTED = "t5 t9 t3 t44 t17", "t5 t8 t3 t41 t17"
TARGET = ad.Target.logit_diff("t7", "t30")


def loaded(family: str = "llama"):
    torch.manual_seed(1)
    factory = AutoModelForSeq2SeqLM if family == "bart" else AutoModelForCausalLM
    model = factory.from_config(AutoConfig.for_model(family, **SETTINGS[family])).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.2)
            elif weight.ndim == 2:
                weight.mul_(5)
    words = Tokenizer(models.WordLevel(vocab={f"t{i}": i for i in range(64)}, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return ad.load(model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0"))


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("mode", ["noise", "denoise"])
@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_every_patch_is_the_single_edit(family, site, mode):
    lm = loaded(family)
    found = activation_patching(lm, CLEAN, CORRUPTED, TARGET, site=site, mode=mode, batch_size=3)
    assert found.axes == (("layer", "head", "position") if site == "head_out" else ("layer", "position"))
    assert not bool(found.values.isnan().any())
    into, source = (CLEAN, CORRUPTED) if mode == "noise" else (CORRUPTED, CLEAN)
    with torch.no_grad(), recording(lm.model, site, [0, 1]) as kept:
        lm.run(lm.encode(source).inputs)
    base = float(ad.score(lm, into, TARGET).values)
    assert found.checks["clean" if mode == "noise" else "corrupted"] == pytest.approx(base, abs=1e-5)
    for layer, position in ((0, 1), (1, 3), (1, 4)):
        head = 2 if site == "head_out" else None
        values = kept.values[layer] if head is None else kept.values[layer][:, :, [head]]
        with ad.edit(lm, ad.Patch(layer, site, values, head, position)):
            patched = float(ad.score(lm, into, TARGET).values)
        expected = base - patched if mode == "noise" else patched - base
        place = (layer, position) if head is None else (layer, head, position)
        assert float(found.values[place]) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("train", [False, True])
def test_clean_equal_to_corrupted_gives_exact_zeros(site, train):
    lm = loaded()
    lm.model.train(train)
    for layer in lm.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    for mode in ("noise", "denoise"):
        found = activation_patching(lm, CLEAN, CLEAN, TARGET, site=site, mode=mode, batch_size=4)
        assert float(found.values.abs().max()) == 0.0
        assert (
            float(attribution_patching(lm, CLEAN, CLEAN, TARGET, site=site, mode=mode, top=2).values.abs().max()) == 0.0
        )
    assert lm.model.training is train


@pytest.mark.parametrize("site", ["resid_pre", "resid_post", "head_out", "attn_out"])
@pytest.mark.parametrize("family", ["llama", "bloom"])
@pytest.mark.parametrize("train", [False, True])
def test_patching_everything_restores_the_clean_logits_bit_for_bit(site, family, train):
    lm = loaded(family)
    lm.model.train(train)
    inputs, other = lm.encode(CLEAN).inputs, lm.encode(CORRUPTED).inputs
    layers = {"resid_pre": [0], "resid_post": [1]}.get(site, [0, 1])
    with torch.no_grad(), recording(lm.model, site, layers) as kept:
        clean = lm.run(inputs).logits
    edits = [ad.Patch(layer, site, kept.values[layer]) for layer in layers]
    if site in ("head_out", "attn_out"):  # the embedding of the corrupted tokens is still in the stream
        with torch.no_grad(), recording(lm.model, "resid_pre", [0]) as embedded:
            lm.run(inputs)
        edits.append(ad.Patch(0, "resid_pre", embedded.values[0]))
    with ad.edit(lm, *edits):
        restored = lm.run(other).logits
    assert torch.equal(restored, clean)
    assert not torch.equal(lm.run(other).logits, clean)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_attribution_patching_is_the_derivative_of_patching(family, site):
    """Between prompts that differ little, estimate and effect agree; here the difference is scaled down by hand."""
    lm = loaded(family)
    estimated = attribution_patching(lm, CLEAN, CORRUPTED, TARGET, site=site, mode="noise", top=4)
    with torch.no_grad(), recording(lm.model, site, [0, 1]) as one:
        base = float(measured(lm, CLEAN))
    with torch.no_grad(), recording(lm.model, site, [0, 1]) as two:
        lm.run(lm.encode(CORRUPTED).inputs)
    step = 1e-2
    for layer, position in ((0, 1), (1, 4)):
        values = one.values[layer] + step * (two.values[layer] - one.values[layer])
        head = 2 if site == "head_out" else None
        with ad.edit(lm, ad.Patch(layer, site, values if head is None else values[:, :, [head]], head, position)):
            slope = (base - float(measured(lm, CLEAN))) / step
        place = (layer, position) if head is None else (layer, head, position)
        scale = float(estimated.values.abs().max())
        assert float(estimated.values[place]) == pytest.approx(slope, rel=0.1, abs=0.01 * scale)
    exact = activation_patching(lm, CLEAN, CORRUPTED, TARGET, site=site, mode="noise")
    assert len(estimated.checks["exact"]) == 4
    for place, effect in estimated.checks["exact"].items():
        assert effect == pytest.approx(float(exact.values[place]), abs=2e-4)
    assert -1 <= estimated.checks["spearman_of_top"] <= 1


def measured(lm, prompt):
    return ad.score(lm, prompt, TARGET).values


@pytest.mark.parametrize("stream", ["self", "cross", "encoder"])
def test_encoder_decoders_are_patched_too(stream):
    lm = loaded("bart")
    clean, corrupted = ad.Prompt(CLEAN, decoder_text="t3 t6"), ad.Prompt(CORRUPTED, decoder_text="t3 t2")
    found = activation_patching(lm, clean, corrupted, TARGET, site="head_out", mode="noise", stream=stream)
    assert found.values.shape == (2, 4, 5 if stream == "encoder" else 3)
    assert float(found.values.abs().max()) > 0


def test_swapping_answer_and_foil_negates_every_effect():
    lm = loaded()
    for measure in (activation_patching, attribution_patching):
        one = measure(lm, CLEAN, CORRUPTED, TARGET, site="attn_out", mode="noise").values
        assert torch.allclose(
            one, -measure(lm, CLEAN, CORRUPTED, TARGET.swapped(), site="attn_out", mode="noise").values
        )


def test_ablations_of_the_induction_model_cost_what_was_computed():
    built = known.induction_gpt2(length=8)
    lm = ad.load(built.model, tokenizer=built.tokenizer())
    words = built.text().split()
    half = (len(words) - 1) // 2
    prompt = " ".join(words[: half + 2])
    target = ad.Target.continuation_logprob(" " + " ".join(words[half + 2 :]))
    for head, cost in built.expected["ablation_effect"].items():
        found = float(ablate_heads(lm, prompt, target, heads=[head]).values) / (half - 1)
        assert found == pytest.approx(cost, abs=2e-3)
    for edge_mode in ("zero", "mean"):
        idle = ablate_heads(lm, prompt, target, heads=list(built.expected["idle_heads"]), mode=edge_mode)
        assert float(idle.values) == pytest.approx(0, abs=1e-3)


def test_redundant_heads_hide_each_other():
    built = known.duplicated_heads()
    lm = ad.load(built.model, tokenizer=built.tokenizer())
    target = ad.Target.logit_diff(*built.expected["target"])
    for heads, cost in (([(0, 0)], 0.0), ([(0, 1)], 0.0), ([(0, 0), (0, 1)], 8.0), ([(0, 0), (0, 2)], 0.0)):
        assert float(ablate_heads(lm, built.text(), target, heads=heads).values) == pytest.approx(cost, abs=1e-4)


def test_preserved_patterns_leave_only_the_values():
    """Ablating the previous-token head changes what the induction head attends to, not what it would copy."""
    built = known.induction_gpt2(length=8)
    lm = ad.load(built.model, tokenizer=built.tokenizer())
    words = built.text().split()
    prompt, target = " ".join(words[:11]), ad.Target.logprob(words[11])
    full = float(ablate_heads(lm, prompt, target, heads=[(0, 0)]).values)
    kept = float(ablate_heads(lm, prompt, target, heads=[(0, 0)], preserve_patterns=True).values)
    assert full > 3
    assert kept == pytest.approx(0, abs=1e-3)


def test_means_and_draws_come_from_the_donors():
    lm = loaded()
    donors = ["t1 t2 t3", "t6 t7"]
    with torch.no_grad():
        pooled = []
        for donor in donors:
            with recording(lm.model, "head_out", [1]) as kept:
                lm.run(lm.encode(donor).inputs)
            pooled.append(kept.values[1][0])
    mean = torch.cat(pooled).mean(0)[[1, 3]]
    expected = effect_of(lm, CLEAN, TARGET, [ad.HeadAblation(1, [1, 3], "mean", mean)]).values
    found = ablate_heads(lm, CLEAN, TARGET, heads=[(1, 3), (1, 1)], mode="mean", donors=donors).values
    assert torch.allclose(found, expected, atol=1e-5)
    one, two, three = (
        ablate_heads(lm, CLEAN, TARGET, heads=[(0, 1)], mode="resample", donors=donors, seed=seed).values
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, three)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_batched_effects_equal_single_ones(family, side):
    lm = loaded(family)
    prompts = [CLEAN, "t8 t2", "t11 t12 t13"]
    edits = [ad.Knockout(1, 1, -1, 0), ad.ValueZeroing(0, 1), ad.HeadAblation(1, 3, "mean")]
    singles = torch.cat([effect_of(lm, prompt, TARGET, edits).values for prompt in prompts])
    together = effect_of(lm, prompts, TARGET, edits, padding_side=side).values
    torch.testing.assert_close(together, singles, rtol=1e-5, atol=1e-5 * float(singles.abs().max()))


def test_what_cannot_be_patched_raises():
    lm = loaded()
    with pytest.raises(PromptError, match=r"equally many tokens: 5 \['t5'.* against 4"):
        activation_patching(lm, CLEAN, "t1 t2 t3 t4", TARGET, site="attn_out", mode="noise")
    with pytest.raises(ShapeError, match="layer 2 has no mlp_out; the model has it at layers 0 to 1"):
        activation_patching(lm, CLEAN, CORRUPTED, TARGET, site="mlp_out", mode="noise", layers=[2])
    with pytest.raises(ValueError, match="expected 'noise'"):
        activation_patching(lm, CLEAN, CORRUPTED, TARGET, site="mlp_out", mode="both")
    with pytest.raises(UnsupportedModelError, match="no layer of LlamaForCausalLM has a head_out site for its cross"):
        activation_patching(lm, CLEAN, CORRUPTED, TARGET, site="head_out", mode="noise", stream="cross")
    with pytest.raises(ShapeError, match="no heads were given"):
        ablate_heads(lm, CLEAN, TARGET, heads=[])
    with pytest.raises(ShapeError, match="give donors="):
        ablate_heads(lm, CLEAN, TARGET, heads=[(0, 0)], mode="resample")

"""Cards agree with configurations that are true, and contradict those that are not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import attndiag
from attndiag.errors import NothingCapturedError, ShapeError, UnsupportedModelError
from attndiag.explanations.attention_card import LayerCard
from attndiag.models.known import loud_gemma2, loud_gpt_oss, sound_llama, sound_window, wide_window
from attndiag.models.known.recurrent import DateTranslator

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from families.build import build_family

PLAIN = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**PLAIN, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 1}
GPT2 = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
BERT = {**PLAIN, "max_position_embeddings": 64}

# family: (settings, kv heads, how positions enter, what the mask looks like)
FAMILIES = {
    "llama": (GROUPED, 2, "rope", "causal"),
    "qwen2": (GROUPED, 2, "rope", "causal"),
    "qwen3": ({**GROUPED, "head_dim": 8}, 2, "rope", "causal"),
    "gemma": ({**GROUPED, "head_dim": 8}, 2, "rope", "causal"),
    "olmo2": (GROUPED, 2, "rope", "causal"),
    "cohere": (GROUPED, 2, "rope", "causal"),
    "granite": (GROUPED, 2, "rope", "causal"),
    "stablelm": (GROUPED, 2, "rope", "causal"),
    "starcoder2": (GROUPED, 2, "rope", "causal"),
    "phi": (GROUPED, 2, "rope", "causal"),
    "mistral": ({**GROUPED, "sliding_window": 5}, 2, "rope", "causal, window 5"),
    "gpt_neox": ({**PLAIN, "max_position_embeddings": 64}, 4, "rope", "causal"),
    "gpt2": (GPT2, 4, "absolute", "causal"),
    "gptj": ({**GPT2, "rotary_dim": 4}, 4, "rope", "causal"),
    "codegen": ({**GPT2, "rotary_dim": 4}, 4, "rope", "causal"),
    "opt": (
        {**PLAIN, "ffn_dim": 32, "max_position_embeddings": 64, "word_embed_proj_dim": 32},
        4,
        "absolute",
        "causal",
    ),
    "bloom": ({"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}, 4, "alibi", "causal"),
    "falcon": (
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        1,
        "rope",
        "causal",
    ),
    "bert": (BERT, 4, "absolute", "bidirectional"),
    "roberta": (BERT, 4, "absolute", "bidirectional"),
    "electra": ({**BERT, "embedding_size": 32}, 4, "absolute", "bidirectional"),
    "mpnet": (BERT, 4, "absolute", "bidirectional"),
    "xlm-roberta": (BERT, 4, "absolute", "bidirectional"),
    "roformer": (BERT, 4, "relative", "bidirectional"),
    "camembert": (BERT, 4, "absolute", "bidirectional"),
}


def built(family: str) -> nn.Module:
    settings, _, _, mask = FAMILIES[family]
    config = AutoConfig.for_model(family, **settings)
    kind = AutoModelForCausalLM if mask.startswith("causal") else AutoModelForMaskedLM
    torch.manual_seed(0)
    model = kind.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(6)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_card_against_config(family):
    _, kv_heads, positions, mask = FAMILIES[family]
    card = attndiag.card(built(family))
    assert len(card.layers) == 2
    for layer in card.layers:
        assert (layer.query_heads, layer.kv_heads, layer.d_value) == (4, kv_heads, 8)
        assert layer.mask == mask
        assert layer.kind == "self"
        assert layer.certified
        assert "contribution" in layer.measurable
        assert layer.positions == positions
    assert all(difference.explained for difference in card.differences), card.differences
    if mask.startswith("causal"):
        assert card.cache_bytes_per_token == 2 * 2 * kv_heads * 8 * 4
    else:
        assert card.cache_bytes_per_token is None


def test_mixed_layers_sinks_and_soft_caps():
    oss = attndiag.card(loud_gpt_oss().model)
    assert [layer.mask for layer in oss.layers] == ["causal, window 8", "causal"]
    assert all(layer.sinks and layer.positions.startswith("rope") for layer in oss.layers)
    gemma = attndiag.card(loud_gemma2().model)
    assert [layer.mask for layer in gemma.layers] == ["causal, window 8", "causal"]
    assert {layer.softcap for layer in gemma.layers} == {6.0}
    assert gemma.layers[0].scale != gemma.layers[0].d_head ** -0.5
    assert not oss.differences
    assert not gemma.differences


def test_encoder_decoder():
    config = AutoConfig.for_model(
        "t5", vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    card = attndiag.card(AutoModelForSeq2SeqLM.from_config(config).eval())
    assert [(layer.kind, layer.mask, layer.positions) for layer in card.layers] == [
        ("self", "bidirectional", "relative bias"),
        ("self", "causal", "relative bias"),
        ("cross", "all keys of the other sequence", "none"),
    ]


def test_layers_without_a_softmax():
    config = AutoConfig.for_model(
        "qwen3_next", **GROUPED, head_dim=8, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    card = attndiag.card(AutoModelForCausalLM.from_config(config).eval())
    mixer, attention = card.layers
    assert (mixer.kind, mixer.layer, attention.kind, attention.layer) == ("mixer", 0, "self", 1)
    assert "token replacement" in mixer.measurable
    assert "weights and contributions" in mixer.limits[0]
    assert any("gate" in limit for limit in attention.limits)
    mamba = AutoConfig.for_model("mamba", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    only = attndiag.card(AutoModelForCausalLM.from_config(mamba).eval())
    assert [layer.module_class for layer in only.layers] == ["MambaMixer"] * 2
    minimax = AutoConfig.for_model(
        "minimax", **GROUPED, head_dim=8, num_local_experts=2, num_experts_per_tok=1, block_size=4,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    linear = attndiag.card(AutoModelForCausalLM.from_config(minimax).eval())
    # one layer that grows, 2 kv heads of 8; one whose 4 heads of 8 x 8 do not
    assert (linear.cache_bytes_per_token, linear.cache_bytes_fixed) == (2 * 2 * 8 * 4, 4 * 8 * 8 * 4)
    # two layers of 64 channels: a window of 4 for the convolution and a state of 4, in float32
    assert (only.cache_bytes_per_token, only.cache_bytes_fixed) == (0, 2 * 64 * (4 + 4) * 4)
    # 4 heads of 8 x 8 states, and a window of 4 over q, k (2 heads of 8 each) and v (4 heads of 8)
    assert card.cache_bytes_fixed == (4 * 8 * 8 + 4 * (2 * 8 + 2 * 8 + 4 * 8)) * 4


def test_configs_that_lie_are_contradicted():
    model = sound_llama().model
    assert not attndiag.card(model).differences
    model.config.num_key_value_heads = 4
    model.config.num_attention_heads = 8
    model.config.sliding_window = 6
    found = {d.what: d for d in attndiag.card(model).differences}
    assert set(found) == {"num_key_value_heads", "num_attention_heads", "sliding_window"}
    assert (found["num_key_value_heads"].claimed, found["num_key_value_heads"].seen) == ("4", "2")
    assert (found["sliding_window"].claimed, found["sliding_window"].seen) == ("6", "no window")
    assert not any(d.explained for d in found.values())

    (window,) = attndiag.card(wide_window().model).differences
    assert (window.what, window.claimed, window.seen) == ("sliding_window", "4", "5 keys")
    assert window.modules == ("model.layers.0.self_attn",)
    assert not attndiag.card(sound_window().model).differences


@pytest.mark.parametrize(
    ("kind", "planted", "claimed", "seen"),
    [
        ("sliding_window", 4, "4", "no window"),
        ("sliding_window", 9, "9", "no window"),
        ("num_key_value_heads", 1, "1", "2"),
        ("num_key_value_heads", 4, "4", "2"),
        ("head_dim", 5, "5", "16"),
    ],
)
def test_a_planted_lie_is_contradicted_alone(kind, planted, claimed, seen):
    model = sound_llama().model
    setattr(model.config, kind, planted)
    (difference,) = attndiag.card(model).differences
    assert (difference.what, difference.claimed, difference.seen) == (kind, claimed, seen)
    assert not difference.explained
    assert f"the config says {claimed}, the probe saw {seen}" in str(difference)


@pytest.mark.filterwarnings("ignore")
def test_channels_are_no_tokens():
    built_model = build_family("florence2")
    card = attndiag.card(built_model.model, inputs=built_model.inputs)
    channels = [layer for layer in card.layers if layer.attends != "tokens"]
    assert {layer.module_class for layer in channels} == {"Florence2VisionChannelAttention"}
    for layer in channels:
        assert (layer.attends, layer.positions, layer.causal) == ("channels", "none", None)
        assert layer.mask == "none: its keys are channels, not tokens"
        assert "edge knock-out" not in layer.measurable
        assert any("its weights say nothing about tokens" in limit for limit in layer.limits)
        assert layer.certified
    assert not any(name in difference.modules for difference in card.differences for name in channels)
    assert "its keys are channels, not tokens" in card.to_text()


def test_implied_maps_on_a_card():
    config = AutoConfig.for_model(
        "mamba2", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8,
        n_groups=2, chunk_size=4, expand=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    assert attndiag.card(model).maps == ()
    card = attndiag.card(model, maps=True)
    assert [facts["module_name"] for facts in card.maps] == ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]
    for facts in card.maps:
        assert facts["columns"] == "post_convolution"
        assert facts["core_error"] < 1e-5
        assert facts["output_error"] < 1e-5 < facts["unfrozen_error"]
        assert facts["row_sum_smallest"] < facts["row_sum_largest"]
    json.dumps(card.to_dict())
    for said in (card.to_text(), card.to_html()):
        assert "positions behind a short convolution" in said
        assert "with norm and gate frozen" in said
    rwkv = AutoConfig.for_model("rwkv", vocab_size=64, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    refused = attndiag.card(AutoModelForCausalLM.from_config(rwkv).eval(), maps=True)
    assert "no scan with values" in refused.to_text()


def test_text_json_and_html_say_the_same():
    card = attndiag.card(wide_window().model)
    text, page = card.to_text(), card.to_html()
    for said in ("causal, window 5", "the config says 4, the probe saw 5 keys"):
        assert said in text
        assert said in page
    assert "<script" not in page
    assert "http" not in page
    facts = json.loads(json.dumps(card.to_dict()))
    assert facts["layers"][0]["window_seen"] == 5
    assert facts["differences"][0]["claimed"] == "4"
    assert len(card.to_frame()) == 2
    assert card._repr_html_() == page


def test_names_are_escaped():
    card = attndiag.card(sound_llama().model)
    object.__setattr__(card, "model", "<b>x</b>")
    assert "<b>x</b>" not in card.to_html()


def test_models_that_cannot_be_probed_say_why():
    config = AutoConfig.for_model(
        "vit", image_size=16, patch_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4,
    )  # fmt: skip
    model = AutoModel.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match=r"pixel_values.*inputs="):
        attndiag.card(model)
    card = attndiag.card(model, inputs={"pixel_values": torch.randn(2, 3, 16, 16)})
    assert card.layers[0].mask == "bidirectional"
    with pytest.raises(UnsupportedModelError, match="source, target"):
        attndiag.card(DateTranslator("dot").eval())
    with pytest.raises(UnsupportedModelError, match="at least 4"):
        attndiag.card(sound_llama().model, length=2)


def test_models_without_attention_and_masks_that_do_not_fit():
    ids = torch.arange(2, 12)[None]
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(NothingCapturedError, match="no attention call of Sequential was seen"):
        attndiag.card(plain, inputs={"input": torch.randn(2, 4)})
    with pytest.raises(ShapeError, match=r"attention_mask is \(1, 7\) but input_ids is \(1, 10\)"):
        attndiag.card(sound_llama().model, inputs={"input_ids": ids, "attention_mask": torch.ones(1, 7)})
    whole_numbers = torch.ones(1, 1, 10, 10, dtype=torch.int64).tril()
    for kernel, said in (
        ("sdpa", "does not run on input_ids, attention_mask.*inputs="),
        ("eager", "mask of torch.int64"),
    ):
        model = sound_llama().model
        model.set_attn_implementation(kernel)
        with pytest.raises(UnsupportedModelError, match=said):
            attndiag.card(model, inputs={"input_ids": ids, "attention_mask": whole_numbers})
        with pytest.raises(UnsupportedModelError, match="does not run on input_ids, attention_mask"):
            attndiag.card(model, inputs={"input_ids": ids, "attention_mask": torch.ones(1, 1, 3, 3)})
        # a float mask is added: ones everywhere hide nothing, and the card says what the model then computes
        open_mask = attndiag.card(model, inputs={"input_ids": ids, "attention_mask": torch.ones(1, 1, 10, 10)})
        assert {layer.mask for layer in open_mask.layers} == {"bidirectional"}


def test_a_layer_card_is_a_plain_record():
    layer = attndiag.card(sound_llama().model).layers[0]
    assert isinstance(layer, LayerCard)
    assert layer.output == "model.layers.0.self_attn.o_proj"
    assert layer.scale == 0.25
    assert layer.window_told is None
    assert hash(layer)


@pytest.mark.real_model
def test_default_model(default_lm):
    card = attndiag.card(default_lm)
    assert len(card.layers) == 30
    assert {(c.query_heads, c.kv_heads, c.d_head, c.positions) for c in card.layers} == {(9, 3, 64, "rope")}
    width = torch.finfo(next(default_lm.model.parameters()).dtype).bits // 8
    assert card.cache_bytes_per_token == 30 * 2 * 3 * 64 * width
    assert not card.differences

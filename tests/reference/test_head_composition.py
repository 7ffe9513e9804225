"""Composition of heads of real model classes, against explicit [d_model, d_model] circuits read off by name."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from attndiag.errors import NotApplicableError
from attndiag.explanations.head_composition import (
    BEFORE_NORM,
    CONTENT_ONLY,
    KINDS,
    _columns,
    composition_scores,
    strongest_pairs,
)
from attndiag.explanations.head_scores import heads, survey_input
from attndiag.models.known import induction_gpt2, induction_llama
from attndiag.models.load import load

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 8,
}  # fmt: skip


def measured(model):
    lm = load(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return composition_scores(lm, survey_input(lm))


def jitter(model, seed=0):
    """Gains and biases away from 1 and 0, so that folding them is seen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def ratio(writes, reads):
    return (torch.linalg.norm(writes @ reads) / (torch.linalg.norm(writes) * torch.linalg.norm(reads))).item()


def compare(scores, circuits, n_layers):
    """circuits(layer, head) -> OV, QK as the query reads it, QK as the key reads it; rows read, columns write."""
    seen = 0
    for later in range(n_layers):
        for earlier in range(n_layers):
            for b in range(4):
                for a in range(4):
                    got = [scores[kind].values[later, b, earlier, a].item() for kind in KINDS]
                    if earlier >= later:
                        assert all(value != value for value in got)
                        continue
                    writes = circuits(earlier, a)[0]
                    ov, q, k = circuits(later, b)
                    for kind, value, reads in zip(KINDS, got, (q, k, ov), strict=True):
                        expected = ratio(writes, reads) - scores[kind].checks["baseline"]
                        assert value == pytest.approx(expected, abs=1e-6)
                        seen += 1
    assert seen


def by_name(model, *, first_norm="input_layernorm", group=2, q_norm=None, branch=None):
    """Llama-like weights read off by name."""

    def circuits(layer, head):
        block = model.model.layers[layer]
        attention = block.self_attn
        gain = getattr(block, first_norm).weight.double() if first_norm else torch.ones(32, dtype=torch.double)
        q, k, v = (
            (getattr(attention, f"{n}_proj").weight.double().T * gain[:, None]).unflatten(1, (-1, 8)) for n in "qkv"
        )
        if q_norm == "head":
            q, k = q * attention.q_norm.weight.double(), k * attention.k_norm.weight.double()
        if q_norm == "whole":
            q = q * attention.q_norm.weight.double().unflatten(0, (-1, 8))
            k = k * attention.k_norm.weight.double().unflatten(0, (-1, 8))
        o = attention.o_proj.weight.double().T.unflatten(0, (-1, 8))[head]
        if branch:
            o = o * getattr(block, branch).weight.double()
        q, k, v = q[:, head], k[:, head // group], v[:, head // group]
        return v @ o, q @ k.T, k @ q.T

    return circuits


def test_a_grouped_query_rotary_model():
    torch.manual_seed(0)
    model = jitter(LlamaForCausalLM(LlamaConfig(**SIZES)))
    scores, reasons = measured(model)
    assert reasons == {}
    compare(scores, by_name(model), 3)
    assert scores["q_composition"].provenance["remarks"] == (CONTENT_ONLY,)


def test_a_norm_on_queries_and_keys_is_folded():
    torch.manual_seed(0)
    model = jitter(Qwen3ForCausalLM(Qwen3Config(**SIZES)))
    scores, reasons = measured(model)
    assert reasons == {}
    compare(scores, by_name(model, q_norm="head"), 3)
    assert scores["q_composition"].provenance["remarks"] == (CONTENT_ONLY, BEFORE_NORM)


def test_a_norm_over_all_heads_and_a_norm_on_the_branch():
    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    model = jitter(Olmo2ForCausalLM(Olmo2Config(**sizes, eos_token_id=1)))
    scores, reasons = measured(model)
    assert reasons == {}
    circuits = by_name(model, first_norm=None, q_norm="whole", branch="post_attention_layernorm")
    compare(scores, circuits, 3)


def test_fused_biased_layer_norm_weights(tiny_gpt2):
    model = jitter(tiny_gpt2)
    width = model.config.n_embd
    d_head = width // model.config.n_head

    def circuits(layer, head):
        block = model.transformer.h[layer]
        weight = block.attn.c_attn.weight.double() * block.ln_1.weight.double()[:, None]
        weight = weight - weight.mean(dim=0, keepdim=True)
        here = slice(head * d_head, (head + 1) * d_head)
        q, k, v = (weight[:, part * width :][:, here] for part in range(3))
        return v @ block.attn.c_proj.weight.double()[here], q @ k.T, k @ q.T

    scores, reasons = measured(model)
    assert reasons == {}
    compare(scores, circuits, model.config.n_layer)
    assert scores["q_composition"].provenance["remarks"] == ()  # learned positions: nothing is rotated


@pytest.mark.parametrize("build", [induction_gpt2, induction_llama])
def test_an_induction_head_reads_the_previous_token_head_with_its_keys(build):
    scores, reasons = measured(build().model)
    assert reasons == {}
    best = strongest_pairs(scores).iloc[0]
    assert (best["kind"], best["earlier_layer"], best["layer"]) == ("k", 0, 1)
    expected = {"induction_gpt2": (0, 0), "induction_llama": (0, 0)}[build.__name__]
    assert (best["earlier_head"], best["head"]) == expected
    assert best["score"] > 10 * scores["k_composition"].checks["spread"]


def test_random_models_are_at_chance():
    torch.manual_seed(1)
    scores, _ = measured(LlamaForCausalLM(LlamaConfig(**{**SIZES, "hidden_size": 64, "head_dim": 8})).eval())
    for kind in KINDS:
        values = scores[kind].values
        assert values[values.isfinite()].mean().abs() < scores[kind].checks["spread"]


def test_what_is_not_linear_in_the_stream_is_refused():
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=64,
    )  # fmt: skip
    scores, reasons = measured(BertForMaskedLM(config).eval())
    assert scores == {} and len(reasons) == 2
    assert all("post-norm" in text for text in reasons.values())
    with pytest.raises(NotApplicableError, match="for the probe composition"):
        strongest_pairs(scores)


def test_queries_that_are_scaled_before_the_attention():
    """OPT multiplies q by d_head^-1/2 itself, so q is W_Q's output up to a factor and a bias."""
    torch.manual_seed(0)
    model = jitter(
        OPTForCausalLM(
            OPTConfig(
                vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4,
                max_position_embeddings=64, word_embed_proj_dim=32,
            )
        )
    )  # fmt: skip

    def circuits(layer, head):
        block = model.model.decoder.layers[layer]
        gain = block.self_attn_layer_norm.weight.double()[:, None]
        q, k, v = (getattr(block.self_attn, f"{n}_proj").weight.double().T * gain for n in "qkv")
        here = slice(head * 8, (head + 1) * 8)
        q, k, v = ((w - w.mean(dim=0, keepdim=True))[:, here] for w in (q, k, v))
        return v @ block.self_attn.out_proj.weight.double().T[here], q @ k.T, k @ q.T

    scores, reasons = measured(model)
    assert reasons == {}
    compare(scores, circuits, 3)
    assert scores["q_composition"].provenance["remarks"] == ()


def test_columns_in_another_order_and_up_to_a_factor():
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(1, 20, 24, generator=generator)
    order = torch.randperm(24, generator=generator)[:16]
    factor = torch.linspace(-2, 3, 16)
    columns, found = _columns(output[0][:, order] * factor, output, 4)
    assert columns == order.tolist()
    assert torch.allclose(torch.as_tensor(found).float(), factor, rtol=1e-5)
    exact, one = _columns(output[0][:, 8:24], output, 4)
    assert exact == list(range(8, 24)) and one == 1.0
    # a sum of two columns, a column of zeros and too few rows are no selection
    assert _columns(torch.cat([output[0][:, :15], output[0][:, :1] + output[0][:, 1:2]], dim=1), output, 4) is None
    assert _columns(torch.cat([output[0][:, :15], torch.zeros(20, 1)], dim=1), output, 4) is None
    assert _columns(output[0][:4, order] * factor, output[:, :4], 4) is None


@pytest.mark.parametrize(("q_rank", "named"), [(None, "kv_b_proj"), (16, "q_b_proj")])
def test_latent_attention_is_refused_by_name(q_rank, named):
    """Its keys and values (and queries) come through a low-rank chain with a norm in it."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=2, q_lora_rank=q_rank, kv_lora_rank=16, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=8, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = jitter(DeepseekV3ForCausalLM(config))
    scores, reasons = measured(model)
    assert scores == {} and len(reasons) == 2
    assert all(f"self_attn.{named} (a low-rank chain)" in text for text in reasons.values()), reasons
    table = heads(model, probes=["composition", "copying"])
    assert not table.scores
    told = {(item.probe, item.layer): item.reason for item in table.not_measurable}
    assert set(told) == {(probe, layer) for probe in ("composition", "copying") for layer in (0, 1)}
    assert all("low-rank chain" in reason for reason in told.values())


def test_next_is_the_head_that_the_same_head_reads_next():
    scores, _ = measured(LlamaForCausalLM(LlamaConfig(**SIZES)).eval())
    frame = strongest_pairs(scores, None)
    assert len(frame) == 3 * 3 * 16
    for (_kind, _layer, _head), group in frame.groupby(["kind", "layer", "head"]):
        assert group["score"].is_monotonic_decreasing
        assert group["next"].tolist()[:-1] == group["score"].tolist()[1:]
        assert group["next"].isna().tolist()[-1]

"""Composition of heads of real model classes, against explicit [d_model, d_model] circuits read off by name."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from attndiag.errors import NotApplicableError
from attndiag.explanations.head_composition import BEFORE_NORM, CONTENT_ONLY, KINDS, composition_scores, strongest_pairs
from attndiag.explanations.head_scores import survey_input
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

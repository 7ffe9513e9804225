"""Capture: what is recorded equals what the model used, on every form of attention, and the model notices nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
)

import attndiag
from attndiag.errors import NothingCapturedError, UnsupportedModelError
from attndiag.models import known

N = 17
COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
GQA = COMMON | {"num_key_value_heads": 2, "head_dim": 8}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
GPT_NEO = {
    "vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 5,
    "attention_types": [[["global", "local"], 1]],
}  # fmt: skip
XLM = {"n_words": 64, "vocab_size": 64, "emb_dim": 32, "n_layers": 2, "n_heads": 4}
BLOOM = {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}
T5 = {
    "vocab_size": 64,
    "d_model": 32,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 8,
    "d_ff": 48,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 1,
}  # fmt: skip

# family, configuration, factory, route, where attention's output enters the stream
FORMS = [
    ("gpt2", GPT2, AutoModelForCausalLM, "routed", "pre"),
    ("llama", GQA, AutoModelForCausalLM, "routed", "pre"),
    ("qwen3", GQA, AutoModelForCausalLM, "routed", "pre"),
    ("mistral", GQA | {"sliding_window": 5}, AutoModelForCausalLM, "routed", "pre"),
    ("gemma2", GQA | {"sliding_window": 5}, AutoModelForCausalLM, "routed", "sandwich"),
    ("gpt_oss", GQA | {"sliding_window": 5, "num_local_experts": 4}, AutoModelForCausalLM, "routed", "pre"),
    ("granite", GQA | {"residual_multiplier": 0.25}, AutoModelForCausalLM, "routed", "pre"),
    ("olmo2", COMMON, AutoModelForCausalLM, "routed", "sandwich"),
    ("gpt_neox", COMMON, AutoModelForCausalLM, "routed", "parallel"),
    ("bert", COMMON, AutoModel, "routed", "post"),
    ("t5", T5, AutoModelForSeq2SeqLM, "routed", "pre"),
    ("bart", BART, AutoModelForSeq2SeqLM, "routed", "post"),
    ("bloom", BLOOM, AutoModelForCausalLM, "traced", "pre"),
    ("falcon", COMMON, AutoModelForCausalLM, "traced", "parallel"),
    ("gpt_neo", GPT_NEO, AutoModelForCausalLM, "traced", "pre"),
    ("mpt", {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4}, AutoModelForCausalLM, "traced", "pre"),
    ("deberta-v2", COMMON, AutoModel, "traced", "post"),
    ("openai-gpt", GPT2, AutoModelForCausalLM, "traced", "post"),
    ("xlm", XLM, AutoModel, "traced", "unknown"),
]  # fmt: skip
IDS = [form[0] for form in FORMS]


def build(family: str, settings: dict, factory: type, implementation: str | None = None) -> nn.Module:
    torch.manual_seed(1)
    options = {} if implementation is None else {"attn_implementation": implementation}
    model = factory.from_config(AutoConfig.for_model(family, **settings), **options).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.2)
            elif weight.ndim == 2:
                weight.mul_(2 if family == "t5" else 8)  # T5 does not scale its scores
    return model


def inputs_of(model: nn.Module, *, pad: str | None = None) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 64, (2, N), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if pad is not None:
        given["attention_mask"][0, slice(0, 4) if pad == "left" else slice(-4, None)] = 0
        if "position_ids" in model.forward.__code__.co_varnames and pad == "left":
            given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp_min(0)
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids[:, :7]
    return given


def first(output) -> torch.Tensor:
    return output.logits if "logits" in output else output[0]


@pytest.mark.parametrize(("family", "settings", "factory", "route", "place"), FORMS, ids=IDS)
@pytest.mark.parametrize("pad", [None, "left", "right"])
def test_forms_are_certified_and_outputs_bit_equal(family, settings, factory, route, place, pad):
    model = build(family, settings, factory)
    inputs = inputs_of(model, pad=pad)
    with torch.no_grad():
        plain = first(model(**inputs))
        with attndiag.capture(model) as captured:
            watched = first(model(**inputs))
    assert torch.equal(plain, watched)
    per_layer = 3 if model.config.is_encoder_decoder else 1
    assert len(captured.calls) == 2 * per_layer
    assert not captured.refusals
    for call in captured.calls:
        assert call.route == route
        assert call.certificate.check().value_error < 1e-6
        assert call.certificate.output_error < 1e-6
        assert call.site.place == place
    in_last_stack = [c for c in captured.calls if c.kind == "self"][-2:]
    assert [c.layer for c in in_last_stack] == [0, 1]


@pytest.mark.parametrize(
    ("family", "settings", "factory"), [form[:3] for form in FORMS if form[3] == "routed"], ids=IDS[:12]
)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_pattern_equals_the_weights_of_the_eager_model(family, settings, factory, implementation):
    if family in ("gemma2", "gpt_oss") and implementation == "sdpa":
        with pytest.raises(ValueError, match=r"sdpa|scaled_dot_product"):
            model = build(family, settings, factory, implementation)
            model(**inputs_of(model))
        return
    model = build(family, settings, factory, implementation)
    reference = build(family, settings, factory, "eager")
    reference.load_state_dict(model.state_dict())
    inputs = inputs_of(model)
    with torch.no_grad(), attndiag.capture(model) as captured:
        model(**inputs)
    with torch.no_grad():
        output = reference(**inputs, output_attentions=True)
    if model.config.is_encoder_decoder:
        expected = [*output.encoder_attentions]
        for own, cross in zip(output.decoder_attentions, output.cross_attentions, strict=True):
            expected += [own, cross]
        assert [c.kind for c in captured.calls] == ["self", "self", "self", "cross", "self", "cross"]
    else:
        expected = output.attentions
    for call, weights in zip(captured.calls, expected, strict=True):
        # the native weights of eager, and the recomputed ones of sdpa
        assert (call.pattern - weights).abs().max() < 3e-6
        assert (call.formula_pattern()[0] - weights).abs().max() < 3e-6


def test_sinks_keep_their_mass_in_a_column_of_their_own():
    loud = known.loud_gpt_oss()
    with torch.no_grad(), attndiag.capture(loud.model) as captured:
        loud.model(loud.prompt_ids)
    for call in captured.calls:
        assert float(call.sink_mass.max()) > 0.01
        torch.testing.assert_close(call.pattern.sum(-1) + call.sink_mass, torch.ones_like(call.sink_mass))


@pytest.mark.parametrize("length", [4, 8, 9])
def test_sequence_first_modules_keep_batch_and_heads_apart(length):
    """With the length as first axis, a split by it can look right by chance (2 rows of 4 heads, 8 or 4 positions)."""
    config = AutoConfig.for_model(
        "fsmt", langs=["en", "de"], src_vocab_size=64, tgt_vocab_size=64, d_model=32, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    ids = torch.randint(4, 64, (2, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), attndiag.capture(model) as captured:
        model(input_ids=ids, decoder_input_ids=ids)
    assert len(captured.calls) == 3
    for call in captured.calls:
        assert (call.z.shape[0], call.n_heads, call.n_queries) == (2, 4, length)
        assert call.certificate.check().output_error is not None


def test_two_calls_of_one_module_are_told_apart():
    model = build("diffllama", GQA, AutoModelForCausalLM)
    with torch.no_grad(), attndiag.capture(model) as captured:
        model(**inputs_of(model))
    assert [(c.layer, c.call_index) for c in captured.calls] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    with pytest.raises(UnsupportedModelError, match="no linear map"):
        _ = captured.calls[0].w_o
    assert captured.calls[0].certificate.passed


def test_shared_block_counts_its_calls():
    settings = COMMON | {"embedding_size": 16, "num_hidden_layers": 3}
    model = build("albert", settings, AutoModel)
    with torch.no_grad(), attndiag.capture(model) as captured:
        model(**inputs_of(model))
    assert [c.call_index for c in captured.calls] == [0, 1, 2]
    assert len({c.module_name for c in captured.calls}) == 1
    for call in captured.calls:
        call.certificate.check()


def test_an_output_gate_is_found_and_a_norm_is_refused():
    settings = GQA | {
        "layer_types": ["linear_attention", "full_attention"], "num_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }  # fmt: skip
    gated = build("qwen3_next", settings, AutoModelForCausalLM)
    with torch.no_grad(), attndiag.capture(gated) as captured:
        gated(**inputs_of(gated))
    (call,) = captured.calls
    assert call.output_gate is not None
    assert 0 < float(call.output_gate.min()) < float(call.output_gate.max()) < 1  # a sigmoid
    call.certificate.check()
    assert [r.module_class for r in captured.refusals] == ["Qwen3NextGatedDeltaNet"]
    assert attndiag.contributions(call, "contribution").verified

    normed = build("bitnet", GQA, AutoModelForCausalLM)
    with torch.no_grad(), attndiag.capture(normed) as captured:
        normed(**inputs_of(normed))
    with pytest.raises(UnsupportedModelError, match=r"depends on the head outputs themselves \(a norm"):
        attndiag.contributions(captured.calls[0], "contribution")
    assert attndiag.contributions(captured.calls[0], "weight").verified


def test_gate_search_leaves_a_cache_as_it_was():
    settings = GQA | {"layer_types": ["full_attention"] * 2, "num_experts": 2, "moe_intermediate_size": 16,
                      "num_experts_per_tok": 1, "shared_expert_intermediate_size": 16}  # fmt: skip
    model = build("qwen3_next", settings, AutoModelForCausalLM)
    ids = inputs_of(model)["input_ids"][:1]
    with torch.no_grad():
        plain = model.generate(ids, max_new_tokens=4, do_sample=False)
        with attndiag.capture(model) as captured:
            watched = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(plain, watched)
    assert [c.n_keys for c in captured.calls if c.layer == 0] == [N, N + 1, N + 2, N + 3]
    for call in captured.calls:
        call.certificate.check()
    # several new tokens behind a cache: the mask spans keys that the trial runs do not have
    with torch.no_grad():
        past = model(ids[:, :12]).past_key_values
        with attndiag.capture(model) as captured:
            model(ids[:, 12:15], past_key_values=past)
    for call in captured.calls:
        assert call.output_gate is not None
        call.certificate.check()


def test_layers_filter_and_its_mistakes(tiny_llama):
    ids = torch.arange(2, 12)[None]
    with torch.no_grad(), attndiag.capture(tiny_llama, layers=[1]) as captured:
        tiny_llama(ids)
    assert [c.layer for c in captured.calls] == [1]
    with (
        pytest.raises(UnsupportedModelError, match=r"no attention call at layer \[7\].*layers \[0, 1\]"),
        torch.no_grad(),
        attndiag.capture(tiny_llama, layers=[1, 7]),
    ):
        tiny_llama(ids)


def test_on_call_streams_and_keeps_nothing(tiny_llama):
    seen = []
    with torch.no_grad(), attndiag.capture(tiny_llama, on_call=lambda call: seen.append(call.site.place)) as captured:
        tiny_llama(torch.arange(2, 12)[None])
    assert seen == ["pre", "pre"]
    assert captured.calls == []
    assert captured.n_calls == 2


def test_nothing_captured_is_an_error_that_names_the_layers():
    model = build("mamba", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}, AutoModel)
    message = r"MambaMixer \(it mixes tokens without a softmax\).*replacement"
    with pytest.raises(NothingCapturedError, match=message), torch.no_grad(), attndiag.capture(model):
        model(torch.arange(2, 12)[None])


def test_an_empty_block_is_an_error(tiny_gpt2):
    with pytest.raises(NothingCapturedError, match="Did a forward run"), attndiag.capture(tiny_gpt2):
        pass


def test_no_softmax_is_refused_not_guessed():
    model = build("fnet", {k: v for k, v in COMMON.items() if k != "num_attention_heads"}, AutoModel)
    with pytest.raises(NothingCapturedError, match="Fourier"), torch.no_grad(), attndiag.capture(model):
        model(torch.arange(2, 12)[None])

"""Ten ways in which captures of attention go wrong unnoticed; each must be right here or raise."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
    WavLMConfig,
    WavLMModel,
)

import attndiag
from attndiag.errors import NothingCapturedError, UnsupportedModelError, UnverifiedCaptureError
from attndiag.hooks.certify import probe_pattern
from attndiag.hooks.record import AttentionCall

IDS = torch.randint(2, 64, (2, 17), generator=torch.Generator().manual_seed(0))


def louder(model: nn.Module, factor: float = 8.0) -> nn.Module:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(factor)
    return model.eval()


def calls_of(model: nn.Module, *args, **kwargs) -> list[AttentionCall]:
    with torch.no_grad(), attndiag.capture(model) as captured:
        model(*args, **kwargs)
    return captured.calls


def test_1_falcon_weights_are_causal_whatever_output_attentions_says():
    config = FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    for call in calls_of(louder(FalconForCausalLM(config)), IDS):
        future = torch.ones(17, 17).triu(1).bool()
        assert float(call.pattern[..., future].abs().max()) == 0.0
        call.certificate.check()


def test_2_wavlm_heads_differ():
    config = WavLMConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 4), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    model = louder(WavLMModel(config))
    with torch.no_grad():
        sound = torch.randn(1, 900)
        reported = model(sound, output_attentions=True).attentions[0]
    assert torch.equal(reported[:, 0], reported[:, 1])  # what the library reports: one mean, repeated
    call = calls_of(model, sound)[0]
    torch.testing.assert_close(call.pattern.mean(1), reported[:, 0])
    assert call.output.module_name.endswith("out_proj")
    assert call.n_heads == 4
    assert (call.pattern[:, 0] - call.pattern[:, 1]).abs().max() > 1e-3
    call.certificate.check()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_3_padded_queries_are_left_out(tiny_llama, implementation):
    tiny_llama.set_attn_implementation(implementation)
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    padded = calls_of(tiny_llama, IDS, attention_mask=mask, position_ids=positions)
    alone = calls_of(tiny_llama, IDS[:1, 5:])
    for call, single in zip(padded, alone, strict=True):
        assert not call.query_valid[0, :5].any()
        assert call.certificate.excluded_rows == 5 * call.n_heads
        assert float(call.pattern[0, :, :5].abs().sum()) == 0.0  # by definition, whatever the kernel does
        torch.testing.assert_close(call.pattern[0, :, 5:, 5:], single.pattern[0], atol=1e-5, rtol=1e-4)
        scores = attndiag.contributions(call)
        assert scores.verified
        assert scores.values[0, :5].isnan().all()
        expected = attndiag.contributions(single).values[0]
        torch.testing.assert_close(scores.values[0, 5:, 5:], expected, atol=1e-5, rtol=1e-4)


def test_4_compiled_models_are_captured_and_a_bypass_raises(tiny_llama):
    with torch.no_grad():
        eager = tiny_llama(IDS).logits
    compiled = torch.compile(tiny_llama, backend="eager")
    with torch.no_grad(), attndiag.capture(compiled) as captured:
        logits = compiled(IDS).logits
    assert len(captured.calls) == 2
    assert torch.equal(logits, eager)

    tiny_llama.compile(backend="eager")
    with torch.no_grad():
        tiny_llama(IDS)
        with attndiag.capture(tiny_llama) as captured:
            tiny_llama(IDS)
    assert len(captured.calls) == 2

    with pytest.raises(NothingCapturedError), attndiag.capture(tiny_llama):
        nn.Linear(2, 2)(torch.ones(1, 2))  # another model ran


def test_5_gradient_checkpointing_counts_the_second_forward(tiny_llama):
    tiny_llama.config.use_cache = False
    with attndiag.capture(tiny_llama) as captured:
        plain = tiny_llama(IDS, labels=IDS)
        plain.loss.backward()
    expected = [p.grad.clone() for p in tiny_llama.parameters() if p.grad is not None]
    assert len(captured.calls) == 2
    tiny_llama.zero_grad()
    tiny_llama.train()
    tiny_llama.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with attndiag.capture(tiny_llama) as captured:
        tiny_llama(IDS, labels=IDS).loss.backward()
    assert sorted((c.layer, c.call_index) for c in captured.calls) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for parameter, gradient in zip((p for p in tiny_llama.parameters() if p.grad is not None), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_6_masks_in_every_form(tiny_llama):
    # a static cache shows more keys than tokens; both prefill and decoding
    with torch.no_grad():
        expected = [c.pattern for c in calls_of(tiny_llama, IDS)]
        cache = StaticCache(config=tiny_llama.config, max_cache_len=24)
        with attndiag.capture(tiny_llama) as captured:
            tiny_llama(IDS[:, :16], past_key_values=cache)
            tiny_llama(IDS[:, 16:], past_key_values=cache)
        for call in captured.calls:
            assert call.n_keys == 24
            call.certificate.check()
        last = [c for c in captured.calls if c.call_index == 1]
        for call, pattern in zip(last, expected, strict=True):
            torch.testing.assert_close(call.pattern[:, :, 0, :17], pattern[:, :, 16], atol=1e-5, rtol=1e-4)
            assert float(call.pattern[..., 17:].abs().max()) == 0.0


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_6_sliding_caches_stay_certified(cache):
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=5, bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = louder(MistralForCausalLM(config))
    checked = []
    with torch.no_grad(), attndiag.capture(model, on_call=lambda call: checked.append(call.certificate.check())):
        model.generate(
            IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, do_sample=False, cache_implementation=cache
        )
    assert len(checked) == 12


def test_7_sinks_take_part_in_the_rows():
    loud = attndiag.models.known.loud_gpt_oss()
    for call in calls_of(loud.model, loud.prompt_ids):
        assert float(call.pattern.sum(-1).min()) < 0.999
        call.certificate.check()


def test_8_active_dropout_is_refused_and_modes_are_left_alone():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4)).train()
    with pytest.raises(UnsupportedModelError, match=r"model\.eval\(\)"), attndiag.capture(model):
        model(IDS)
    assert model.training
    calls_of(model.eval(), IDS)
    assert not model.training


@pytest.mark.parametrize("family", ["llama", "mpt"])
def test_8_dropout_that_only_the_attention_function_knows_is_refused(family):
    settings = {
        "llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
                  "attention_dropout": 0.5},
        "mpt": {"d_model": 32, "n_layers": 1, "n_heads": 4, "attn_config": {"attn_pdrop": 1}},
    }[family]  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=64, **settings)).train()
    with pytest.raises(UnsupportedModelError, match=r"dropout.*model\.eval\(\)"), attndiag.capture(model):
        model(IDS)


def test_9_patterns_are_computed_on_demand_and_not_kept(tiny_llama):
    (call, _) = calls_of(tiny_llama, IDS)
    first, second = call.pattern, call.pattern
    assert first.data_ptr() != second.data_ptr()
    held = [value for value in vars(call).values() if isinstance(value, torch.Tensor)]
    assert all(tensor.shape[-2:] != (17, 17) for tensor in held)


def test_10_the_kernel_in_use_is_what_is_recorded():
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=5,
    )  # fmt: skip
    model = louder(Gemma2ForCausalLM(config))
    assert {c.kernel for c in calls_of(model, IDS)} == {"eager"}  # the class's own default, not the library's
    bert = louder(
        BertModel(
            BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
        )
    )
    assert {c.kernel for c in calls_of(bert, IDS)} == {"sdpa"}
    bert.set_attn_implementation("eager")
    assert {c.kernel for c in calls_of(bert, IDS)} == {"eager"}


# ------------------------------------------------------------------ further promises of the capture
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_certified(tiny_llama, dtype):
    for call in calls_of(tiny_llama.to(dtype), IDS):
        assert call.z.dtype == dtype
        assert call.formula_pattern()[0].dtype == torch.float32
        assert 0 < call.certificate.check().value_error < 2e-2
        assert attndiag.contributions(call).verified


def test_float64_is_certified_to_its_own_precision(tiny_llama):
    for call in calls_of(tiny_llama.double(), IDS):
        assert call.certificate.check().value_error < 1e-13


def test_an_opaque_kernel_can_be_made_to_tell(tiny_llama):
    for call in calls_of(tiny_llama, IDS):
        assert call.native_pattern is None  # sdpa reports nothing
        assert (probe_pattern(call) - call.pattern).abs().max() < 2e-6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_is_certified():
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = louder(LlamaForCausalLM._from_config(config, attn_implementation="flex_attention"))
    (call,) = calls_of(model, IDS)
    assert call.kernel == "flex"
    call.certificate.check()
    assert (probe_pattern(call) - call.pattern).abs().max() < 1e-4


def test_nested_captures_see_the_same(tiny_llama):
    with torch.no_grad(), attndiag.capture(tiny_llama) as outer, attndiag.capture(tiny_llama, layers=[1]) as inner:
        tiny_llama(IDS)
    assert len(outer.calls) == 2
    assert len(inner.calls) == 1
    assert torch.equal(outer.calls[1].z, inner.calls[0].z)


def test_two_models_do_not_mix(tiny_llama, tiny_gpt2):
    with torch.no_grad(), attndiag.capture(tiny_llama) as left, attndiag.capture(tiny_gpt2) as right:
        tiny_gpt2(IDS)
        tiny_llama(IDS)
    assert {c.module_class for c in left.calls} == {"LlamaAttention"}
    assert {c.module_class for c in right.calls} == {"GPT2Attention"}


def test_gradients_flow_as_without_a_capture(tiny_llama):
    tiny_llama(IDS, labels=IDS).loss.backward()
    expected = [p.grad.clone() for p in tiny_llama.parameters()]
    tiny_llama.zero_grad()
    with attndiag.capture(tiny_llama) as captured:
        tiny_llama(IDS, labels=IDS).loss.backward()
    assert captured.calls[0].z.requires_grad
    assert all(torch.equal(p.grad, e) for p, e in zip(tiny_llama.parameters(), expected, strict=True))
    assert not captured.calls[0].pattern.requires_grad


def test_tensors_changed_after_the_call_fail_the_certificate(tiny_llama):
    (call, _) = calls_of(tiny_llama, IDS)
    call.v.mul_(1.5)
    with pytest.raises(UnverifiedCaptureError, match=r"model\.layers\.0\.self_attn.*in place.*on_call"):
        call.certificate.check()
    scores = attndiag.contributions(call)
    assert not scores.verified
    with pytest.raises(UnverifiedCaptureError):
        scores.require_verified()


def test_one_token_and_one_row(tiny_llama):
    for call in calls_of(tiny_llama, IDS[:1, :1]):
        assert call.pattern.shape == (1, 4, 1, 1)
        assert call.certificate.check().rows == 1
        assert attndiag.contributions(call).verified


def test_many_captures_leave_nothing_behind(tiny_llama):
    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    def once() -> None:
        with torch.no_grad(), attndiag.capture(tiny_llama, certify=True) as captured:
            tiny_llama(IDS)
        assert captured.calls[0].certificate.passed

    for _ in range(3):
        once()
    before = tensors()
    for _ in range(200):
        once()
    assert tensors() <= before + 5

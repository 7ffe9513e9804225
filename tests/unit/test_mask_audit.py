"""Audits find every planted fault under its name, on three families each, and nothing on sound models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    ElectraConfig,
    ElectraForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

import attndiag
from attndiag.errors import UnsupportedModelError
from attndiag.explanations.masked_rows import fully_masked_rows
from attndiag.explanations.probing import as_loaded, probe_of
from attndiag.explanations.scale_audit import jacobian_norm, scale_audit
from attndiag.models.known import KNOWN_MODELS, sound_llama, wide_window

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}


def widened(model: nn.Module) -> nn.Module:
    """Weights large enough that every path shows; eager attention, so that every mask is a tensor."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 1.5 / weight.shape[1] ** 0.5)
    model.set_attn_implementation("eager")
    return model.eval()


def llama() -> nn.Module:
    return widened(LlamaForCausalLM(LlamaConfig(**GROUPED)))


def gpt2() -> nn.Module:
    sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return widened(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)))


def neox() -> nn.Module:
    return widened(GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL, max_position_embeddings=64)))


def qwen2() -> nn.Module:
    return widened(Qwen2ForCausalLM(Qwen2Config(**GROUPED, pad_token_id=1)))


def bert() -> nn.Module:
    return widened(BertForMaskedLM(BertConfig(**SMALL, max_position_embeddings=64)))


def roberta() -> nn.Module:
    return widened(RobertaForMaskedLM(RobertaConfig(**SMALL, max_position_embeddings=64)))


def electra() -> nn.Module:
    return widened(ElectraForMaskedLM(ElectraConfig(**SMALL, embedding_size=32, max_position_embeddings=64)))


def mistral() -> nn.Module:
    return widened(MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=5)))


def gemma2() -> nn.Module:
    return widened(Gemma2ForCausalLM(Gemma2Config(**GROUPED, sliding_window=5)))


def gpt_oss() -> nn.Module:
    return widened(
        GptOssForCausalLM(GptOssConfig(**GROUPED, sliding_window=5, num_local_experts=2, num_experts_per_tok=1))
    )


ATTENTION = {
    "LlamaForCausalLM": "model.layers.0.self_attn",
    "Qwen2ForCausalLM": "model.layers.0.self_attn",
    "MistralForCausalLM": "model.layers.0.self_attn",
    "Gemma2ForCausalLM": "model.layers.0.self_attn",
    "GptOssForCausalLM": "model.layers.0.self_attn",
    "GPT2LMHeadModel": "transformer.h.0.attn",
    "GPTNeoXForCausalLM": "gpt_neox.layers.0.attention",
    "BertForMaskedLM": "bert.encoder.layer.0.attention.self",
    "RobertaForMaskedLM": "roberta.encoder.layer.0.attention.self",
    "ElectraForMaskedLM": "electra.encoder.layer.0.attention.self",
}
NORM = {
    "LlamaForCausalLM": "model.layers.0.input_layernorm",
    "Qwen2ForCausalLM": "model.layers.0.input_layernorm",
    "GPT2LMHeadModel": "transformer.h.0.ln_1",
    "GPTNeoXForCausalLM": "gpt_neox.layers.0.input_layernorm",
    "BertForMaskedLM": "bert.encoder.layer.0.attention.output.LayerNorm",
}


def plant_mask(model: nn.Module, fault: Callable[[Tensor], Tensor]) -> str:
    """The first layer gets `fault` of its mask (True = allowed); what padding forbade stays forbidden."""
    name = ATTENTION[type(model).__name__]

    def hook(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        given = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        length = args[0].shape[1] if args else kwargs["hidden_states"].shape[1]
        allowed = torch.ones(1, 1, length, length, dtype=torch.bool) if given is None else given >= 0
        additive = torch.where(fault(allowed), 0.0, torch.finfo(torch.float32).min)
        if "attention_mask" in kwargs:
            return args, {**kwargs, "attention_mask": additive}
        return (args[0], additive, *args[2:]), kwargs

    model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    return name


def band(allowed: Tensor, offset: int) -> Tensor:
    """True where key = query + offset."""
    return torch.ones(allowed.shape[-2:], dtype=torch.bool).tril(offset).triu(offset).expand_as(allowed)


def reads_no_padding(allowed: Tensor) -> Tensor:
    """Keys that some query of the row reads under the sound mask."""
    return allowed.any(-2, keepdim=True)


def one_step_ahead(allowed: Tensor) -> Tensor:
    return allowed | (band(allowed, 1) & reads_no_padding(allowed))


def no_diagonal(allowed: Tensor) -> Tensor:
    hidden = band(allowed, 0).clone()
    hidden[..., 0, 0] = False
    return allowed & ~hidden


def no_padding_part(allowed: Tensor) -> Tensor:
    """Every key that any row of the batch may read at this place."""
    return allowed.any(0, keepdim=True).expand_as(allowed)


def one_key_more(allowed: Tensor) -> Tensor:
    return allowed | (band(allowed, -5) & reads_no_padding(allowed))


def one_key_less(allowed: Tensor) -> Tensor:
    return allowed & ~band(allowed, -4)


@pytest.mark.parametrize("build", [llama, gpt2, neox])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [(one_step_ahead, "future_leak"), (torch.logical_not, "inverted_mask")],
    ids=["one step", "inverted"],
)
def test_leaks_of_causal_masks(build, fault, kind):
    model = build()
    assert attndiag.audit(model).passed
    name = plant_mask(model, fault)
    found = attndiag.audit(model)
    assert not found.passed
    assert found.findings[0].kind == kind
    assert found.findings[0].modules == (name,)
    assert found.findings[0].layers == (0,)
    if kind == "future_leak":
        assert {f.kind for f in found.findings} == {kind}
        assert found.findings[0].evidence["future_reach"] == 1
        assert found.findings[0].evidence["vanishes_when_frozen"] is False
        assert found.stack_reach[1] == 1


@pytest.mark.parametrize("build", [bert, roberta, electra])
def test_an_inverted_mask_of_an_encoder_shows_under_padding(build):
    model = build()
    assert attndiag.audit(model).passed
    name = plant_mask(model, lambda allowed: allowed if bool(allowed.all()) else ~allowed)
    findings = attndiag.audit(model).findings
    assert (findings[0].kind, findings[0].modules, findings[0].layers) == ("inverted_mask", (name,), (0,))


@pytest.mark.parametrize("build", [llama, qwen2, mistral])
def test_a_boolean_mask_read_the_other_way_round_under_sdpa(build):
    """As when a mask for `nn.MultiheadAttention`, where True forbids, reaches sdpa, where True allows."""
    model = build()
    model.set_attn_implementation("sdpa")
    name = ATTENTION[type(model).__name__]

    def hook(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        given = kwargs.get("attention_mask")
        if given is None:  # sdpa sets is_causal instead of a plain causal mask
            length = kwargs["hidden_states"].shape[1]
            given = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        assert given.dtype == torch.bool
        return args, {**kwargs, "attention_mask": ~given}

    model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    findings = attndiag.audit(model).findings
    assert (findings[0].kind, findings[0].modules) == ("inverted_mask", (name,))


@pytest.mark.parametrize("build", [llama, gpt2, bert])
def test_hidden_diagonal(build):
    model = build()
    name = plant_mask(model, no_diagonal)
    first = attndiag.audit(model).findings[0]
    assert (first.kind, first.modules) == ("hidden_diagonal", (name,))


@pytest.mark.parametrize("build", [llama, gpt2, bert])
def test_padding_leak(build):
    model = build()
    name = plant_mask(model, no_padding_part)
    findings = attndiag.audit(model).findings
    assert {f.kind for f in findings} == {"padding_leak"}
    assert findings[0].modules == (name,)


@pytest.mark.parametrize("build", [mistral, gemma2, gpt_oss])
@pytest.mark.parametrize(("fault", "seen"), [(one_key_more, 6), (one_key_less, 4)])
def test_window_off_by_one(build, fault, seen):
    model = build()
    assert attndiag.audit(model).passed
    name = plant_mask(model, fault)
    findings = attndiag.audit(model).findings
    assert [(f.kind, f.modules) for f in findings] == [("window_mismatch", (name,))]
    assert findings[0].evidence["seen"] == seen
    assert findings[0].evidence["configured"] == 5


@pytest.mark.parametrize("build", [llama, gpt2, bert])
def test_batch_leak(build):
    model = build()
    norm = model.get_submodule(NORM[type(model).__name__])
    norm.register_forward_hook(lambda _m, _a, output: output + 0.5 * output.mean(0, keepdim=True))
    findings = attndiag.audit(model).findings
    assert [f.kind for f in findings] == ["batch_leak"]
    assert findings[0].layers == (0,)


@pytest.mark.parametrize("build", [llama, gpt2, neox])
def test_upstream_mix_with_a_sound_mask(build):
    model = build()

    def mix(_module: nn.Module, _args: tuple, output: Tensor) -> Tensor:
        return output + 0.5 * torch.cat([output[:, 1:], torch.zeros_like(output[:, :1])], 1)

    model.get_submodule(NORM[type(model).__name__]).register_forward_hook(mix)
    findings = attndiag.audit(model).findings
    assert [f.kind for f in findings] == ["upstream_mix"]
    assert findings[0].layers == (0,)
    assert findings[0].evidence["vanishes_when_frozen"] is True
    assert findings[0].evidence["future_reach"] == 1


def test_tokens_mixed_before_the_blocks():
    model = llama()
    model.model.embed_tokens.register_forward_hook(lambda _m, _a, out: out + 0.5 * out.roll(-1, 1))
    findings = attndiag.audit(model).findings
    assert findings[0].kind == "upstream_mix"
    assert findings[0].modules == ()


@pytest.mark.parametrize("build", [llama, neox, bert])
@pytest.mark.parametrize(("power", "kind", "ratio"), [(0.0, "missing_scale", 8**0.5), (-1.0, "double_scale", 8**-0.5)])
def test_scale(build, power, kind, ratio):
    model = build()
    name = ATTENTION[type(model).__name__]
    model.get_submodule(name).scaling = 8.0**power
    findings = attndiag.audit(model).findings
    assert [(f.kind, f.modules) for f in findings] == [(kind, (name,))]
    assert findings[0].evidence["ratio"] == pytest.approx(ratio, rel=1e-5)


def test_a_scale_that_is_just_another_number_is_named_with_its_ratio():
    model = llama()
    model.model.layers[1].self_attn.scaling *= 1.5
    findings = attndiag.audit(model).findings
    assert [(f.kind, f.layers) for f in findings] == [("wrong_scale", (1,))]


def test_a_pool_over_padding_is_found():
    class MeanOfEverything(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.mean(1)

    config = BertConfig(**SMALL, max_position_embeddings=64)
    model = widened(BertForSequenceClassification(config))
    assert attndiag.audit(model).passed
    model.bert.pooler = MeanOfEverything()
    findings = attndiag.audit(model).findings
    assert [f.kind for f in findings] == ["padded_query_leak"]
    assert "logits" in findings[0].text


def test_a_model_that_draws_numbers_is_found():
    model = llama()
    model.model.layers[0].mlp.register_forward_hook(lambda _m, _a, output: output + 0.1 * torch.randn_like(output))
    assert "nondeterministic" in {f.kind for f in attndiag.audit(model).findings}


FAULTS = {
    "future_leak": "future_leak",
    "hidden_diagonal": "hidden_diagonal",
    "padding_leak": "padding_leak",
    "inverted_mask": "inverted_mask",
    "batch_leak": "batch_leak",
    "upstream_mix": "upstream_mix",
    "wide_window": "window_mismatch",
    "missing_scale": "missing_scale",
    "double_scale": "double_scale",
}


NO_SDPA = ("loud_gemma2", "loud_gpt_oss")


@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, kernel) for name in sorted(KNOWN_MODELS) for kernel in ("eager", "sdpa")[: 1 if name in NO_SDPA else 2]],
)
def test_known_models(name, implementation):
    known = KNOWN_MODELS[name]()
    known.model.set_attn_implementation(implementation)
    found = attndiag.audit(known.model)
    kinds = [finding.kind for finding in found.findings]
    fault = known.expected.get("fault")
    if fault is None:
        assert kinds == []
        return
    assert kinds[0] == FAULTS[fault]
    assert found.findings[0].layers == tuple(known.expected["faulty_layers"])
    if known.expected["vanishes_when_frozen"] is not None and "vanishes_when_frozen" in found.findings[0].evidence:
        assert found.findings[0].evidence["vanishes_when_frozen"] is known.expected["vanishes_when_frozen"]
    if known.expected["future_reach"] is not None:
        assert found.stack_reach[1] == known.expected["future_reach"]


def test_reach_grows_with_depth_under_windows():
    found = attndiag.audit(mistral())
    assert [(layer.past, layer.future, layer.limited) for layer in found.reach] == [(4, 0, False)] * 2
    assert found.stack_reach == (8, 0)  # two layers of four back


def test_base_models_are_judged_by_the_majority_of_their_layers():
    model = widened(LlamaModel(LlamaConfig(**{**GROUPED, "num_hidden_layers": 3})))
    assert attndiag.audit(model).passed
    fault = attndiag.audit(sound_llama().model, causal=False)
    assert fault.passed
    ATTENTION["LlamaModel"] = "layers.0.self_attn"
    plant_mask(model, one_step_ahead)
    assert [f.kind for f in attndiag.audit(model).findings] == ["future_leak"]
    assert attndiag.audit(model, causal=False).passed


def test_an_encoder_decoder_is_sound():
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    model = widened(T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)))
    found = attndiag.audit(model)
    assert found.passed
    assert {layer.kind for layer in found.reach} == {"self", "cross"}


def test_models_without_token_ids_say_what_they_need():
    config = ViTConfig(
        image_size=16, patch_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    model = ViTModel(config).eval()
    with pytest.raises(UnsupportedModelError, match=r"pixel_values.*inputs="):
        attndiag.audit(model)
    found = attndiag.audit(model, inputs={"pixel_values": torch.randn(2, 3, 16, 16)})
    assert found.passed
    assert {c.name for c in found.checks if c.state == "not checked"} >= {"batch neighbours", "right padding"}
    with pytest.raises(UnsupportedModelError, match="does not run on"):
        attndiag.audit(model, inputs={"pixel_values": torch.randn(2, 3, 9, 16)})
    with pytest.raises(ValueError, match="at least 6"):
        attndiag.audit(sound_llama().model, length=3)


class OwnModel(nn.Module):
    """A person's own language model: ids under another name, no config, PyTorch's encoder layers."""

    def __init__(self, ahead: int = 0) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 40)
        self.ahead = ahead

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        forbidden = torch.ones(length, length, dtype=torch.bool).triu(1 + self.ahead)
        return self.head(self.stack(self.table(tokens), mask=forbidden))


def test_a_module_of_ones_own():
    torch.manual_seed(0)
    tokens = torch.randint(40, (2, 10))
    sound, leaky = OwnModel().eval(), OwnModel(ahead=1).eval()
    assert attndiag.audit(sound, inputs={"tokens": tokens}).passed
    found = attndiag.audit(leaky, inputs={"tokens": tokens}, causal=True)
    assert found.findings
    assert found.stack_reach == (9, 2)  # one step a layer
    assert attndiag.audit(sound, inputs={"tokens": tokens}, causal=True).passed
    with pytest.raises(UnsupportedModelError, match=r"forward takes tokens.*inputs="):
        attndiag.audit(sound)


def test_an_audit_changes_nothing():
    model = llama()
    ids = torch.arange(2, 14)[None]
    state = torch.random.get_rng_state()
    with torch.no_grad():
        before = model(ids).logits
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    attndiag.audit(model)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_text_and_dictionary_say_the_same():
    found = attndiag.audit(wide_window().model)
    text = found.to_text()
    assert "a window of 4 keys is configured and queries read 5 keys" in text
    assert found.to_dict()["findings"][0]["evidence"]["seen"] == 5
    assert found.to_frame()["kind"].tolist()[0] == "window_mismatch"
    assert "window_mismatch" in repr(found)


def test_rows_without_a_key_are_shown():
    answers = {row.implementation: row.answer for row in fully_masked_rows()}
    assert answers["attndiag"] == "zeros"
    assert answers["scaled_dot_product_attention, boolean"] == "zeros"
    assert answers["softmax of scores + lowest float (eager)"] == "uniform over all keys"
    assert answers["softmax of scores + -inf (eager)"] == "nan"
    assert len(answers) == 7


def test_scale_statistics_component_by_component():
    lm = as_loaded(llama())
    probe = probe_of(lm, batch=1, length=6)
    audit = scale_audit(lm, probe)
    with torch.no_grad(), attndiag.capture(lm) as captured:
        lm.run(probe.inputs)
    call = captured.calls[0]
    row = audit.rows[0]
    assert (row.module_name, row.variant) == (call.module_name, "as used")
    dots, gaps, jacobians, tops = [], [], [], []
    for head in range(4):
        for i in range(6):
            q, k = call.q[0, head, i], call.k[0, head // 2, : i + 1]
            products = k @ q
            dots += products.tolist()
            if i:
                scores = (products * call.scale).sort(descending=True).values
                a = torch.softmax(scores, 0)
                gaps.append(float(scores[0] - scores[1]))
                tops.append(float(a[0] > 0.99))
                jacobians.append(float((a.diag() - a[:, None] * a[None]).norm()))
    assert row.dot_sd == pytest.approx(torch.tensor(dots).std(correction=0).item(), rel=1e-4)
    assert row.score_sd == pytest.approx(row.dot_sd * call.scale, rel=1e-4)
    assert row.top_gap == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)
    assert row.saturated == pytest.approx(sum(tops) / len(tops), abs=1e-6)
    assert row.jacobian == pytest.approx(sum(jacobians) / len(jacobians), rel=1e-4)
    assert {r.variant for r in audit.rows} == {"as used", "without scale", "fresh", "fresh without scale"}
    plain = next(r for r in audit.rows if r.variant == "without scale" and r.module_name == row.module_name)
    assert plain.score_sd == pytest.approx(row.dot_sd, rel=1e-6)
    assert plain.jacobian < row.jacobian  # larger scores saturate


def test_jacobian_norm_of_known_rows():
    rows = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert jacobian_norm(rows).tolist() == pytest.approx([0.0, 0.5])


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["default", "minilm"])
def test_real_models_are_sound(name):
    found = attndiag.audit(attndiag.load(name, device="cpu"))
    assert found.passed

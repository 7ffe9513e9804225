"""TransformerLens bridges: the same records as from transformers, and the caller's model untouched."""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import attndiag
from attndiag.errors import ModelLoadError, NothingCapturedError, ShapeError, UnsupportedModelError
from attndiag.hooks.adapters import Adapter
from attndiag.hooks.bridge import to_cache_dict, to_circuitsvis
from attndiag.models.bridge_model import BridgeModel, bridge_from, is_bridge

pytestmark = pytest.mark.filterwarnings("ignore")  # TransformerLens and what it imports warn about themselves
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64}
IDS = torch.randint(4, 64, (2, 12), generator=torch.Generator().manual_seed(0))
FAMILIES = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, max_position_embeddings=64)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**GROUPED, head_dim=8)),
}


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<bos>": 0, "<pad>": 1, "<unk>": 2, "a": 3, **{f"t{i}": i for i in range(4, 64)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", pad_token="<pad>", unk_token="<unk>", eos_token="<bos>"
    )


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[nn.Module, nn.Module]]:
    made = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, build in FAMILIES.items():
            torch.manual_seed(0)
            model = build().eval()
            with torch.no_grad():
                for key, weight in model.named_parameters():
                    if key.endswith("bias"):
                        weight.normal_(0, 0.1)
                    elif weight.ndim == 2:
                        weight.mul_(6)
            made[name] = (model, bridge_from(model, tokenizer()))
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_records_as_from_transformers(pairs, family):
    model, bridge = pairs[family]
    with torch.no_grad(), attndiag.capture(model) as plain:
        logits = model(IDS).logits
    with torch.no_grad(), attndiag.capture(bridge) as captured:
        other = bridge(IDS)
    torch.testing.assert_close(other, logits, atol=1e-5, rtol=1e-5)
    assert len(captured.calls) == len(plain.calls) == 2
    for ours, theirs in zip(plain.calls, captured.calls, strict=True):
        theirs.certificate.check()
        assert theirs.route == "bridge"
        assert theirs.layer == ours.layer
        assert theirs.n_kv_heads == ours.n_kv_heads
        torch.testing.assert_close(theirs.pattern, ours.pattern, atol=1e-5, rtol=0)
        torch.testing.assert_close(theirs.w_o, ours.w_o)
        assert theirs.site.place == ours.site.place
        for kind in ("contribution", "head_contribution", "contribution_residual", "alti"):
            expected = attndiag.contributions(ours, kind=kind).values
            found = attndiag.contributions(theirs, kind=kind).values
            torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)


def test_the_model_is_not_mutated(pairs):
    model, bridge = pairs["llama"]
    assert not any("Bridge" in type(module).__name__ for module in model.modules())
    assert model.config.output_attentions is False
    theirs = {parameter.data_ptr() for parameter in bridge.parameters()}
    assert not theirs & {parameter.data_ptr() for parameter in model.parameters()}


def test_a_bridge_can_be_loaded_and_run(pairs):
    model, bridge = pairs["gpt2"]
    lm = attndiag.load(bridge)
    assert isinstance(lm.model, BridgeModel)
    assert lm.vocabulary == 64
    with torch.no_grad(), attndiag.capture(lm, layers=[1]) as captured:
        output = lm.forward("t5 t6 t7 t8")
    assert [call.layer for call in captured.calls] == [1]
    ids = lm.encode("t5 t6 t7 t8").inputs["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(output.logits, model(ids).logits, atol=1e-5, rtol=1e-5)


def test_names_for_those_who_live_there(pairs):
    _, bridge = pairs["gpt2"]
    with torch.no_grad():
        _, cache = bridge.run_with_cache(IDS)
        with attndiag.capture(bridge) as captured:
            bridge(IDS)
    ours = to_cache_dict(captured.calls)
    for name in ("attn.hook_pattern", "attn.hook_z", "attn.hook_v", "hook_resid_pre"):
        full = f"blocks.1.{name}"
        torch.testing.assert_close(ours[full], cache[full].reshape(ours[full].shape))
    with pytest.raises(UnsupportedModelError, match="several calls"):
        to_cache_dict([*captured.calls, captured.calls[0]])


@pytest.mark.parametrize("route", ["routed", "bridge"])
def test_arrays_for_circuitsvis(pairs, route):
    plain, bridge = pairs["llama"]
    model = plain if route == "routed" else bridge
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    if route == "routed":
        mask[1, 9:] = 0
    with torch.no_grad(), attndiag.capture(model) as captured:
        model(ids, attention_mask=mask)
    for row, length in ((0, 12), (1, 9 if route == "routed" else 12)):
        tokens = [f"t{index}" for index in ids[row, :length].tolist()]
        made = to_circuitsvis(captured.calls, tokens, row=row)
        assert set(made) == {"attention", "tokens", "attention_head_names"}
        assert made["attention"].shape == (8, length, length)
        assert made["attention"].dtype == np.float32
        assert made["attention_head_names"] == [f"L{layer}H{head}" for layer in (0, 1) for head in range(4)]
        np.testing.assert_allclose(made["attention"].sum(-1), 1.0, atol=1e-5)  # destination rows, source columns
        assert float(np.triu(made["attention"], 1).max()) == 0.0
        expected = captured.calls[1].pattern[row, 2, :length, :length].numpy()
        np.testing.assert_allclose(made["attention"][6], expected, atol=1e-6)
    with pytest.raises(ShapeError, match="3 were given"):
        to_circuitsvis(captured.calls, ["a", "b", "c"])
    with pytest.raises(ShapeError, match="row is 2"):
        to_circuitsvis(captured.calls, ["t"] * 12, row=2)
    with pytest.raises(UnsupportedModelError, match="at least one call"):
        to_circuitsvis([], [])
    with torch.no_grad():
        past = plain(IDS[:, :6], use_cache=True).past_key_values
        with attndiag.capture(plain) as behind:
            plain(IDS[:, 6:], past_key_values=past)
    with pytest.raises(UnsupportedModelError, match="6 queries read 12 keys"):
        to_circuitsvis(behind.calls, ["t"] * 6)


@pytest.mark.real_model
@pytest.mark.timeout(600)
def test_the_default_model_through_transformer_lens(default_lm):
    """SmolLM2 by both routes on the same prompt: logits, patterns and contributions to 1e-5, the model untouched."""
    prompt = "When Mary and John went to the store, John gave a drink to"
    model = default_lm.model
    before = [(name, type(module)) for name, module in model.named_modules()]
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = model.config.to_dict()
    bridge = bridge_from(model, default_lm.tokenizer)
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert model.config.to_dict() == config
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    ids = default_lm.encode(prompt).inputs["input_ids"]
    with torch.no_grad(), attndiag.capture(default_lm) as plain:
        logits = default_lm.forward(prompt).logits
    with torch.no_grad(), attndiag.capture(bridge) as captured:
        other = bridge(ids, prepend_bos=False)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(ids, prepend_bos=False)
    torch.testing.assert_close(other, logits, atol=1e-5 * float(logits.abs().max()), rtol=0)
    assert len(captured.calls) == len(plain.calls) == 30
    ours = to_cache_dict(plain.calls)
    for routed, bridged in zip(plain.calls, captured.calls, strict=True):
        bridged.certificate.check()
        assert (bridged.n_heads, bridged.n_kv_heads) == (9, 3)
        torch.testing.assert_close(bridged.pattern, routed.pattern, atol=1e-5, rtol=0)
        expected = attndiag.contributions(routed).require_verified().values
        found = attndiag.contributions(bridged).require_verified().values
        torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    for layer in (0, 20, 29):  # what our own route puts under their names is what their cache holds
        for name in ("attn.hook_pattern", "attn.hook_z"):
            full = f"blocks.{layer}.{name}"
            torch.testing.assert_close(ours[full], cache[full].reshape(ours[full].shape), atol=1e-5, rtol=1e-4)
    tokens = list(default_lm.encode(prompt).tokens[0])
    assert to_circuitsvis(plain.calls, tokens)["attention"].shape == (270, 14, 14)


def test_hooks_of_the_caller_stay_and_ours_go(pairs):
    _, bridge = pairs["gpt2"]
    seen = []
    bridge.blocks[0].attn.hook_pattern.add_hook(lambda _, hook: seen.append(hook.name))
    with torch.no_grad(), attndiag.capture(bridge) as captured:
        bridge(IDS)
    bridge(IDS)
    assert len(seen) == 2
    assert len(captured.calls) == 2
    bridge.reset_hooks()
    with pytest.raises(RuntimeError, match="stop"), attndiag.capture(bridge):
        raise RuntimeError("stop")
    bridge(IDS)
    with pytest.raises(NothingCapturedError), attndiag.capture(bridge):
        pass


def test_refusals(pairs):
    _, bridge = pairs["gpt2"]
    adapter = Adapter(weights="output:1", values="output:0", output="output:0")
    with (
        pytest.raises(UnsupportedModelError, match="hook points of its own"),
        attndiag.capture(bridge, modules={"x": adapter}),
    ):
        pass

    class NoPattern(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Module()])

    NoPattern.__module__ = "transformer_lens.fake"
    assert is_bridge(NoPattern())
    with (
        pytest.raises(UnsupportedModelError, match=r"blocks.0 of this bridge has no attn.hook_pattern"),
        attndiag.capture(NoPattern()),
    ):
        pass
    with pytest.raises(ModelLoadError, match="not a TransformerBridge"):
        BridgeModel(nn.Linear(2, 2))


def test_transformer_lens_is_imported_only_when_asked_for():
    code = "import attndiag, sys; attndiag.capture; attndiag.load; sys.exit('transformer_lens' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

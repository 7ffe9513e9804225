"""The catalogue: every entry runs and is what it says; near names, duplicates, parameters."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from attndiag import Prompt, Target
from attndiag.catalog import (
    CATALOG,
    Method,
    UnknownMethodError,
    UnknownParameterError,
    catalogue,
    explain,
    method_named,
    work_of,
)
from attndiag.errors import InsufficientMemoryError, PromptError, UnsupportedModelError
from attndiag.explanations import causal_work
from attndiag.models.load import LoadedModel
from attndiag.scores import Scores

TEXT = "w21 w5 w9 w30 w7 w9 w12"
TARGET = Target.logit_diff("w10", "w20")
AXES = {
    "token": {("position",)},
    "edge": {
        ("layer", "head", "query_pos", "key_pos"),
        ("layer", "batch", "head", "query_pos", "key_pos"),
        ("layer", "batch", "query_pos", "key_pos"),
    },
    "activation": {("layer", "position"), ("layer", "head", "position")},
    "layer": {("layer",)},
    "prompt": {("batch",)},
    "head": {("head",), ("head", "temperature"), ("layer", "head")},
    "row": {("layer", "batch", "query_pos")},
}
QUICK: dict[str, dict[str, Any]] = {
    "induction": {"threshold": 0.0},
    "integrated_gradients": {"steps": 4, "max_steps": 4},
    "gradient_shap": {"samples": 8},
    "lime": {"samples": 40},
    "kernel_shap": {"samples": 40},
    "replacement": {"replacement": "uniform:draws=2"},
    "contribution_norm": {"norm": "next"},
    "pattern_freedom": {"heads": [(0, 1), (1, 2)], "draws": 3, "steps": 5},
    "frozen_pattern": {"heads": [(0, 1), (1, 2)], "other": "w40 w41 w42 w43 w44 w45 w46"},
    "activation_patching": {"site": "head_out", "mode": "noise", "corrupted": "w21 w6 w9 w31 w7 w9 w12"},
    "attribution_patching": {"site": "attn_out", "mode": "denoise", "corrupted": "w21 w6 w9 w31 w7 w9 w12"},
    "head_ablation": {"heads": [(0, 1), (1, 2)]},
    "temperature_sweep": {"heads": [(0, 1), (1, 2)], "temperatures": [0.5, 2.0]},
}


def model_for(name: str, llama_lm: LoadedModel, word_lm: Any) -> LoadedModel:
    if name != "deeplift":
        return llama_lm
    config = OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, dropout=0.0,
        max_position_embeddings=64, word_embed_proj_dim=32, pad_token_id=1,
    )  # fmt: skip
    return word_lm(OPTForCausalLM(config).eval())


@pytest.mark.parametrize("name", CATALOG)
def test_every_entry_is_what_it_says(name: str, llama_lm: LoadedModel, word_lm: Any) -> None:
    entry, lm = CATALOG[name], model_for(name, llama_lm, word_lm)
    weights = copy.deepcopy(lm.model.state_dict())
    found = explain(lm, TEXT, TARGET, method=name, **QUICK.get(name, {}))
    assert isinstance(found, Scores)
    assert found.axes in AXES[entry.scope]
    assert found.sign == entry.sign
    unit = entry.unit.replace("target", "logits")
    assert found.unit == unit
    assert (found.target == TARGET) == entry.targeted
    known = found.values[~found.values.isnan()]
    assert bool(torch.isfinite(known).all())
    assert known.numel() > 0
    if entry.sign == "non-negative":
        assert float(known.min()) >= 0
    else:
        assert float(known.abs().max()) > 0
    if entry.unit in ("mass", "ratio", "share of row"):
        assert float(known.max()) <= 1 + 1e-6
    again = explain(lm, [TEXT], TARGET, method=name, **QUICK.get(name, {}))
    assert isinstance(again, list)
    assert torch.equal(again[0].values.nan_to_num(), found.values.nan_to_num())
    after = lm.model.state_dict()
    assert all(torch.equal(weights[key], after[key]) for key in weights)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in lm.model.modules())
    frame = found.to_frame()
    assert len(frame) == found.values.numel()
    if entry.targeted and entry.sign == "signed":
        swapped = explain(lm, TEXT, TARGET.swapped(), method=name, **QUICK.get(name, {}))
        assert torch.equal(swapped.values.nan_to_num(), -found.values.nan_to_num())


@pytest.mark.parametrize("name", CATALOG)
def test_a_batch_padded_on_either_side_equals_single_prompts(name: str, llama_lm: LoadedModel, word_lm: Any) -> None:
    entry, lm = CATALOG[name], model_for(name, llama_lm, word_lm)
    params = {key: value for key, value in QUICK.get(name, {}).items() if key not in ("corrupted", "other")}
    prompts = [
        Prompt(TEXT, pair="w21 w6 w9 w31 w7 w9 w12", target="w10", foil="w20"),
        Prompt("w8 w9 w8", pair="w8 w5 w8", target="w10", foil="w20"),
    ]
    if name == "frozen_pattern":  # the other prompt has to be as long as each of them
        prompts, params = prompts[:1], {**params, "other": QUICK[name]["other"]}
    single = [explain(lm, prompt, method=name, **params) for prompt in prompts]
    for side in ("left", "right") if "padding_side" in entry.parameters else (None,):
        sided = {} if side is None else {"padding_side": side}
        together = explain(lm, prompts, method=name, **params, **sided)
        for one, other in zip(single, together, strict=True):
            torch.testing.assert_close(other.values, one.values, rtol=1e-4, atol=1e-5, equal_nan=True)


class Int8Linear(torch.nn.Module):
    """A linear map with whole-number weights, as quantised checkpoints have: no gradient comes back through it."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True).clamp_min(1e-8) / 127
        self.weight = torch.nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return given @ (self.weight * self.scale).T


@pytest.mark.parametrize("name", CATALOG)
def test_a_quantised_model_has_interventions_and_says_that_it_has_no_gradients(
    name: str, llama_lm: LoadedModel, word_lm: Any
) -> None:
    entry, lm = CATALOG[name], model_for(name, llama_lm, word_lm)
    lm.model.lm_head = Int8Linear(lm.model.lm_head)
    params = QUICK.get(name, {})
    if "gradients" in entry.needs:
        with pytest.raises(UnsupportedModelError, match="no gradient reaches"):
            explain(lm, TEXT, TARGET, method=name, **params)
    else:
        found = explain(lm, TEXT, TARGET, method=name, **params)
        assert found.values[~found.values.isnan()].numel() > 0


def test_two_prompts_are_compared_by_pair_or_by_name(llama_lm: LoadedModel) -> None:
    other = "w21 w6 w9 w31 w7 w9 w12"
    params = {"site": "attn_out", "mode": "noise"}
    own = explain(llama_lm, Prompt(TEXT, pair=other), TARGET, method="activation_patching", **params)
    named = explain(llama_lm, TEXT, TARGET, method="activation_patching", corrupted=other, **params)
    assert torch.equal(own.values, named.values)
    with pytest.raises(PromptError, match=r"this prompt has no pair; give Prompt\(\.\.\., pair=\.\.\.\) or corrupted="):
        explain(llama_lm, TEXT, TARGET, method="activation_patching", **params)
    with pytest.raises(PromptError, match=r"must have equally many tokens: 7 .* against 3"):
        explain(llama_lm, Prompt(TEXT, pair="w21 w6 w9"), TARGET, method="attribution_patching", **params)
    with pytest.raises(UnknownParameterError, match="activation_patching needs site and mode; give site="):
        explain(llama_lm, Prompt(TEXT, pair=other), TARGET, method="activation_patching")


def test_long_work_is_counted_before_and_reported_meanwhile(llama_lm: LoadedModel) -> None:
    seen: list[tuple[int, int]] = []
    work = work_of(llama_lm, TEXT, "edge_effect", {"layers": [1]})
    assert work is not None
    assert (work.what, work.count, work.n_tokens) == ("edges", 4 * 7 * 8 // 2, 7)
    explain(llama_lm, TEXT, TARGET, method="edge_effect", layers=[1], steps_done=lambda *counts: seen.append(counts))
    assert seen[-1] == (work.count, work.count)
    patches = work_of(llama_lm, TEXT, "activation_patching", {"site": "head_out", "mode": "noise"})
    assert patches is not None
    assert patches.count == 2 * 4 * 7
    assert "patches, at most" in str(patches)
    assert work_of(llama_lm, TEXT, "saliency", {}) is None
    with pytest.raises(UnknownParameterError, match="no parameter 'layer'"):
        work_of(llama_lm, TEXT, "edge_effect", {"layer": 1})


@pytest.mark.parametrize(
    ("name", "params", "remedy"),
    [
        ("edge_effect", {}, "give a smaller batch_tokens"),
        ("head_effect", {"batch_tokens": 1}, "take a shorter prompt"),
        ("activation_patching", {"site": "head_out", "mode": "noise", "corrupted": TEXT}, "give a smaller batch_size"),
    ],
)
def test_work_that_cannot_fit_is_refused_before_it_begins(
    name: str, params: dict[str, Any], remedy: str, llama_lm: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal_work, "available_bytes", lambda _device: 1000)
    with pytest.raises(InsufficientMemoryError, match=f"of a prompt of 7 tokens need about .* are free; {remedy}"):
        explain(llama_lm, TEXT, TARGET, method=name, **params)


@pytest.mark.parametrize("name", CATALOG)
def test_every_entry_can_be_listed(name: str) -> None:
    entry = CATALOG[name]
    assert entry.what
    assert entry.cost
    assert entry.source == "definition" or "arXiv" in entry.source
    assert callable(entry.function)
    assert set(entry.parameters).isdisjoint({"lm", "prompts", "prompt", "target", *entry.fixed})


def test_many_prompts_give_many_scores_and_report_progress(llama_lm: LoadedModel) -> None:
    seen: list[tuple[int, int]] = []
    texts = [TEXT, Prompt("<bos> w8 w9", target="w10", foil="w20")]
    for method, params in (("occlusion", {"batch_size": 1}), ("weight", {}), ("edge_effect", {"layers": [1]})):
        seen.clear()
        found = explain(
            llama_lm, texts, [TARGET, TARGET], method=method, progress=lambda *counts: seen.append(counts), **params
        )
        assert len(found) == 2
        assert seen == [(1, 2), (2, 2)]
    with pytest.raises(ValueError, match="1 targets were given for 2 prompts"):
        explain(llama_lm, texts, [TARGET], method="edge_effect")


def test_near_names_are_suggested(llama_lm: LoadedModel) -> None:
    with pytest.raises(
        UnknownMethodError, match="no method 'integrated_gradient'; did you mean 'integrated_gradients'"
    ):
        method_named("integrated_gradient")
    with pytest.raises(UnknownMethodError, match="there are replacement, saliency"):
        method_named("zzzz")
    with pytest.raises(UnknownParameterError, match=r"no parameter 'step'; did you mean 'steps'\? it takes aggregate"):
        explain(llama_lm, TEXT, TARGET, method="integrated_gradients", step=4)
    with pytest.raises(UnknownParameterError, match="frozen_pattern needs other; give other="):
        explain(llama_lm, TEXT, TARGET, method="frozen_pattern", heads=[(0, 0)])
    with pytest.raises(UnknownParameterError, match="no parameter 'kind'"):
        explain(llama_lm, TEXT, TARGET, method="pattern_gradient", kind="attribution")


def test_duplicates_are_refused() -> None:
    entry = Method("one", "what", "a:b", "token", "signed", "target", "1 forward")
    with pytest.raises(ValueError, match="two methods are called 'one': a:b and a:b"):
        catalogue([entry, entry])
    with pytest.raises(TypeError):
        CATALOG["one"] = entry  # type: ignore[index]


def test_the_catalogue_is_read_without_torch() -> None:
    code = "import sys, attndiag.catalog; assert 'torch' not in sys.modules and 'captum' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

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
)
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

"""Small random models of transformers families, and what the installed transformers says about them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from families.build import CouldNotBuildError, build_family, finite, run, tensors_of
from families.shrink import VOCAB, shrunk_config
from families.source import ROUTING_CALL, family_sources, models_folder
from families.sweep import read_record, sweep

# One family of each sort: causal, latent attention, gated, windowed, masked, sequence to sequence, vision, windows in
# two dimensions, sound, picture and text, attention of its own, series.
FAMILIES = {
    "llama": "text",
    "deepseek_v3": "text",
    "qwen3_next": "text",
    "gemma2": "text",
    "bert": "text",
    "t5": "text",
    "vit": "image",
    "swin": "image",
    "wav2vec2": "audio",
    "llava": "image+text",
    "qwen2_vl": "image+text",
    "bloom": "text",
    "patchtst": "series",
}

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about configurations that nobody would train


@pytest.mark.parametrize(("family", "kind"), FAMILIES.items())
def test_builds_small_runs_and_is_repeatable(family, kind):
    built = build_family(family)

    assert built.kind == kind
    assert built.level == "small"
    assert not built.model.training
    assert built.parameters < 10_000_000
    first, second = tensors_of(run(built.model, built.inputs)), tensors_of(run(built.model, built.inputs))
    assert first and finite(first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_weights_are_wide_enough_for_attention_that_differs_from_uniform(family):
    built = build_family(family)
    built.model.set_attn_implementation("eager")
    attentions = run(built.model, built.inputs | {"output_attentions": True}).attentions
    last_row = torch.stack([layer[..., -1, :].max(-1).values.mean() for layer in attentions])

    assert bool((last_row > 2 / built.inputs["input_ids"].shape[1]).all()), last_row


def test_same_seed_same_model_other_seed_another():
    first, second, other = (build_family("llama", seed=seed) for seed in (0, 0, 1))

    def weights(built):
        return torch.cat([parameter.flatten() for parameter in built.model.parameters()])

    assert torch.equal(weights(first), weights(second))
    assert not torch.equal(weights(first), weights(other))


def test_grouped_heads_stay_grouped_and_equal_heads_stay_equal():
    mistral = build_family("mistral").model.config
    llama = build_family("llama").model.config

    assert mistral.num_attention_heads > mistral.num_key_value_heads
    assert llama.num_attention_heads == llama.num_key_value_heads


def test_windows_cut_the_text_short():
    built = build_family("mistral")

    assert built.model.config.sliding_window < built.inputs["input_ids"].shape[1]


def test_every_kind_of_layer_survives_the_shrinking():
    for family in ("gemma3", "qwen3_next", "lfm2"):
        text = build_family(family).model.config.get_text_config()
        default = type(text)()

        assert set(text.layer_types) == set(default.layer_types), family


def test_placeholders_lie_inside_the_vocabulary_and_fit_the_tower():
    built = build_family("qwen2_vl")
    config = built.model.config
    holders = (built.inputs["input_ids"] == config.image_token_id).sum()

    assert config.image_token_id < VOCAB
    assert int(holders) == built.model.get_image_features(
        built.inputs["pixel_values"], built.inputs["image_grid_thw"]
    ).pooler_output[0].shape[0]  # fmt: skip


def test_stated_fields_win_over_rules():
    from transformers import LlavaConfig

    config = shrunk_config(LlavaConfig, text_config__hidden_size=32, text_config__num_attention_heads=2)

    assert config.text_config.hidden_size == 32
    assert config.vision_config.hidden_size == 64


def test_failure_names_its_reason():
    with pytest.raises(CouldNotBuildError, match="composition"):
        build_family("rag")


def test_a_family_that_dies_or_hangs_costs_only_itself(tmp_path):
    import os
    import time

    def work(name):
        if name == "dies":
            os._exit(7)
        if name == "hangs":
            time.sleep(60)
        if name == "raises":
            raise RuntimeError("boom")
        return {"family": name, "outcome": "certified"}

    names = ["dies", "fine", "hangs", "raises"]
    sweep(names, work, tmp_path, processes=2, seconds=2, gigabytes=64)
    outcomes = {name: read_record(tmp_path, name) for name in names}

    assert "code 7" in outcomes["dies"]["reason"]
    assert "longer than 2 s" in outcomes["hangs"]["reason"]
    assert "boom" in outcomes["raises"]["reason"]
    assert outcomes["fine"]["outcome"] == "certified"


def test_a_sweep_goes_on_where_it_stopped(tmp_path):
    ran = tmp_path / "ran.txt"

    def work(name):
        ran.write_text((ran.read_text() if ran.exists() else "") + name + "\n")
        return {"family": name, "outcome": "certified"}

    out = tmp_path / "out"
    sweep(["a"], work, out, gigabytes=64)
    records = sweep(["a", "b"], work, out, gigabytes=64)

    assert ran.read_text().split() == ["a", "b"]
    assert [record["family"] for record in records] == ["a", "b"]


def test_number_of_routed_families_in_the_installed_transformers():
    """An upgrade that moves the ground is seen here: look at what changed, sweep again, then change the numbers."""
    sources = family_sources()
    routed = {name for name, source in sources.items() if source.routed}
    own = {name for name, source in sources.items() if not source.routed and source.attention_classes}
    by_hand = {
        path.parent.name
        for path in models_folder().glob("*/modeling_*.py")
        if path.parent.name != "auto" and ROUTING_CALL in path.read_text(encoding="utf-8")
    }

    assert routed == by_hand
    assert (len(sources), len(routed), len(own)) == (531, 356, 84)
    assert {"llama", "gpt2", "bert", "t5", "whisper", "vit", "qwen3_next", "deepseek_v32"} <= routed
    assert {"falcon", "bloom", "mpt", "gpt_neo", "deberta", "xlnet", "mpnet", "xglm", "openai", "xlm"} <= own

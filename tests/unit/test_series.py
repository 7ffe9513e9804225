"""The shipped training run: complete, small, readable, and it shows the phase change."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attndiag.core.heads import prefix_matching_score, previous_token_score
from attndiag.core.phases import phase_window
from attndiag.core.probes import repeated_random_tokens
from attndiag.errors import ModelLoadError
from attndiag.models.series import DATA_FOLDER, load_series, save_series

PROBE = repeated_random_tokens(16, 25, admissible=torch.arange(1, 64), bos=0, seed=123)


@torch.no_grad()
def scores_of(model: LlamaForCausalLM) -> tuple[float, float, float, float]:
    """Best prefix-matching and previous-token score, loss on the first and on the second copy."""
    model.set_attn_implementation("eager")
    output = model(PROBE.tokens, output_attentions=True)
    prefix = max(
        prefix_matching_score(a, PROBE.tokens, queries=PROBE.queries).score.mean(dim=0).max().item()
        for a in output.attentions
    )
    previous = max(
        previous_token_score(a, queries=PROBE.body).score.mean(dim=0).max().item() for a in output.attentions
    )
    losses = torch.nn.functional.cross_entropy(
        output.logits[:, :-1].transpose(1, 2), PROBE.tokens[:, 1:], reduction="none"
    )
    first, second = (losses[mask[:, 1:]].mean().item() for mask in (PROBE.first_copy, PROBE.scored_losses))
    return prefix, previous, first, second


def test_the_series_is_complete_and_small():
    induction, control = load_series("induction"), load_series("control")
    assert induction.steps == tuple(range(0, 901, 25)) and len(induction) == 37
    assert control.steps == tuple(range(0, 901, 75)) and len(control) == 13
    assert sum(file.stat().st_size for file in DATA_FOLDER.glob("*.safetensors")) < 4_200_000
    for series in (induction, control):
        assert series.notes["seed"] == 0
        assert {"train_loss", "prefix_matching", "icl"} <= set(series.measured)
        assert all(len(row) == len(series) for row in series.measured.values())
        assert math.isnan(series.measured["train_loss"][0])
        assert series.measured["train_loss"][-1] < series.measured["train_loss"][1]


def test_models_are_the_trained_ones():
    series = load_series()
    model = series.at(900)
    assert not model.training
    assert sum(p.numel() for p in model.parameters()) == 41_664
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in model.parameters())
    assert all(p.abs().max() == 0 for name, p in model.named_parameters() if ".mlp." in name)
    steps = [step for step, _ in zip(load_series("control"), range(3), strict=False)]
    assert [step for step, _ in steps] == [0, 75, 150]
    assert not torch.equal(series.at(0).lm_head.weight, model.lm_head.weight)


def test_the_phase_change_is_in_the_weights_and_the_control_has_none():
    series = load_series()
    rows = [scores_of(model) for _, model in series]
    window = phase_window(series.steps, [row[0] for row in rows])
    assert window.found, window.reason
    assert 475 <= window.start < window.end <= 650
    assert window.end - window.start < 150
    prefix, previous, first, second = rows[-1]
    assert prefix > 0.75 and previous > 0.6
    assert first > 4.1 and second < 0.5  # ln 63 = 4.14 is chance
    # float16 and another draw of the probe move the score that training noted by little
    assert [row[0] for row in rows] == pytest.approx(series.measured["prefix_matching"], abs=0.03)
    control = [scores_of(model)[0] for _, model in load_series("control")]
    assert max(control) < 0.1


def test_series_round_trip_keeps_everything_that_float16_holds(tmp_path):
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=1, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    models = [LlamaForCausalLM(config) for _ in range(2)]
    path = tmp_path / "run.safetensors"
    save_series(
        path,
        config=config,
        steps=[0, 7],
        states=[m.state_dict() for m in models],
        measured={"loss": [math.nan, 2.5]},
        notes={"seed": 4},
    )
    series = load_series(path)
    assert series.steps == (0, 7) and series.notes == {"seed": 4}
    assert math.isnan(series.measured["loss"][0]) and series.measured["loss"][1] == 2.5
    for (step, loaded), model in zip(series, models, strict=True):
        assert step in (0, 7)
        for name, weight in loaded.state_dict().items():
            assert torch.equal(weight, model.state_dict()[name].half().float())


def test_series_that_cannot_be_read_or_written_say_why(tmp_path):
    with pytest.raises(
        ModelLoadError, match=r"no checkpoint series 'indcution'; shipped are \['control', 'induction'\]"
    ):
        load_series("indcution")
    with pytest.raises(ModelLoadError, match="no checkpoint at step 30"):
        load_series().at(30)
    text = tmp_path / "text.safetensors"
    text.write_text("not a tensor in sight")
    with pytest.raises(ModelLoadError, match="is not a checkpoint series"):
        load_series(text)
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=1, num_hidden_layers=1, num_attention_heads=2)
    keep = {"config": config, "notes": {}}
    with pytest.raises(ModelLoadError, match="one entry a checkpoint everywhere"):
        save_series(text, steps=[0, 1], states=[{"w": torch.ones(2)}], measured={}, **keep)
    with pytest.raises(ModelLoadError, match=r"float16 cannot hold the weights \['w'\]"):
        save_series(text, steps=[0], states=[{"w": torch.full((2,), 1e6)}], measured={}, **keep)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 5, 6])
def test_fresh_seeds_have_the_phase_change_too(seed, monkeypatch):
    script = Path(__file__).parents[2] / "scripts" / "train_induction.py"
    spec = importlib.util.spec_from_file_location("train_induction", script)
    training = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, training)  # its dataclasses look themselves up there
    spec.loader.exec_module(training)
    induction, control = training.train(2, seed), training.train(1, seed)
    window, learning = induction.window(), induction.learning_window(control)
    assert 400 < window.start < window.end < 800
    assert max(control.measured["prefix_matching"]) < 0.1
    assert learning.found and abs(learning.end - window.end) < 100

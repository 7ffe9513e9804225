"""The commands card and audit: output, files and exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import ConvBertConfig, ConvBertForMaskedLM, Mamba2Config, Mamba2ForCausalLM
from typer.testing import CliRunner

from attndiag.cli import app
from attndiag.models.known import sound_window

run = CliRunner().invoke


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("sound")
    known = sound_window()
    known.model.save_pretrained(place)
    known.tokenizer().save_pretrained(place)
    return place


def test_card_in_three_forms(folder, tmp_path):
    text = run(app, ["card", str(folder), "-q"])
    assert text.exit_code == 0
    assert "causal, window 4" in text.stdout
    facts = run(app, ["card", str(folder), "-q", "--json"])
    assert json.loads(facts.stdout)["layers"][0]["kv_heads"] == 2
    page = tmp_path / "deep" / "card.html"
    assert run(app, ["card", str(folder), "-q", "-o", str(page)]).exit_code == 0
    assert "causal, window 4" in page.read_text(encoding="utf-8")
    assert run(app, ["card", str(folder), "-o", "card.pdf"]).exit_code == 2


def test_card_with_the_maps_of_mixers(tmp_path):
    config = Mamba2Config(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, state_size=8, num_heads=8, head_dim=8, n_groups=2,
        chunk_size=4, expand=2,
    )  # fmt: skip
    Mamba2ForCausalLM(config).save_pretrained(tmp_path)
    sound_window().tokenizer().save_pretrained(tmp_path)
    plain = run(app, ["card", str(tmp_path), "-q"])
    assert plain.exit_code == 0, plain.output
    assert "implied maps of the mixers" not in plain.stdout
    said = run(app, ["card", str(tmp_path), "-q", "--maps"]).stdout
    assert "backbone.layers.0.mixer: one map a head, columns are positions behind a short convolution" in said
    facts = json.loads(run(app, ["card", str(tmp_path), "-q", "--maps", "--json"]).stdout)
    assert facts["maps"][0]["core_error"] < 1e-5


def test_a_config_that_lies_ends_with_status_1(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["attn_logit_softcapping"] = 30.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run(app, ["card", str(tmp_path), "-q"])
    assert result.exit_code == 1
    assert "attn_logit_softcapping: the config says 30.0, the probe saw None" in result.stdout


def test_audit_of_a_sound_model(folder, tmp_path):
    result = run(app, ["audit", str(folder), "-q"])
    assert result.exit_code == 0
    assert "no findings" in result.stdout
    file = tmp_path / "audit.json"
    assert run(app, ["audit", str(folder), "-q", "-o", str(file)]).exit_code == 0
    assert json.loads(file.read_text())["passed"] is True


def test_an_audit_that_finds_something_ends_with_status_1(folder, tmp_path):
    # its convolutions read padding, mask or not
    torch.manual_seed(0)
    config = ConvBertConfig(
        vocab_size=32, hidden_size=32, embedding_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, pad_token_id=1,
    )  # fmt: skip
    ConvBertForMaskedLM(config).save_pretrained(tmp_path)
    sound_window().tokenizer().save_pretrained(tmp_path)
    result = run(app, ["audit", str(tmp_path), "-q", "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["findings"][0]["kind"] == "padding_leak"


def test_misuse():
    assert run(app, ["audit", "/nowhere/at/all", "-q"]).exit_code == 2
    assert run(app, ["audit", "--length", "2"]).exit_code == 2

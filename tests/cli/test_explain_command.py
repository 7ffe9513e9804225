"""`attndiag explain` and `attndiag methods` on a small saved model: tables, JSON, files, exit states, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from attndiag.cli import app
from attndiag.commands.options import METHODS_HELP
from attndiag.errors import NotApplicableError

TEXT = "w5 w9 w30 w7 w9 w12"


@pytest.fixture
def folder(tmp_path: Path, tiny_llama: LlamaForCausalLM) -> Path:
    path = tmp_path / "checkpoint"
    tiny_llama.save_pretrained(path)
    names = ["<bos>", "<pad>", "<unk>", "<mask>", *(f"w{index}" for index in range(4, 64))]
    backend = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", pad_token="<pad>")
    tokenizer.unk_token = "<unk>"
    tokenizer.save_pretrained(path)
    return path


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def explain(folder: Path, *words: str) -> Result:
    return run("explain", *words, "-m", str(folder), "--device", "cpu", "-q")


def test_a_prompt_gives_a_table(folder: Path) -> None:
    done = explain(folder, TEXT, "--target", "w10", "--foil", "w20", "--replacement", "uniform:draws=2")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("# replacement, in logits, signed, replacement=uniform(draws=2, seed=0), m=")
    columns = ["position", "position_label", "value", "se", "distinct", "flip_share", "ood", "admissible"]
    assert lines[1].split() == columns
    assert len(lines) == 8


def test_json_holds_every_row_and_swapping_negates(folder: Path) -> None:
    words = ["--method", "integrated_gradients", "--set", "baseline=token=w40", "--set", "steps=4", "--json"]
    one = json.loads(explain(folder, TEXT, "--target", "w10", "--foil", "w20", *words).stdout)[0]
    two = json.loads(explain(folder, TEXT, "--target", "w20", "--foil", "w10", *words).stdout)[0]
    assert one["params"]["baseline"] == "token=w40"
    assert one["checks"]["completeness_gap"] < 0.05
    assert one["rows"][0]["value"] is None
    assert [row["value"] for row in one["rows"][1:]] == [-row["value"] for row in two["rows"][1:]]


def test_a_file_goes_on_past_a_prompt_that_fails(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {"id": "good", "prompt": TEXT, "target": "w10", "foil": "w20"},
        {"id": "unheard", "prompt": TEXT, "target": "mary"},
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    table = tmp_path / "out" / "scores.parquet"
    done = explain(folder, "--prompts", str(prompts), "--method", "occlusion", "-o", str(table))
    assert done.exit_code == 1
    assert done.stderr.startswith("unheard: 'mary' is outside the vocabulary")
    frame = pd.read_parquet(table)
    assert list(frame["prompt"].unique()) == ["good"]
    assert len(frame) == 6
    shown = explain(folder, "--prompts", str(prompts), "--id", "good", "--method", "weight", "--top", "3")
    assert shown.exit_code == 0, shown.output
    assert len(shown.stdout.splitlines()) == 5


def test_scores_that_fail_their_own_check_are_shown_and_marked(folder: Path) -> None:
    words = ["--method", "integrated_gradients", "--set", "steps=1", "--set", "max_steps=1", "--set", "keep=none"]
    done = explain(folder, TEXT, "--target", "w10", "--foil", "w20", *words)
    assert done.exit_code == 1
    assert "prompt: not verified: the scores miss m(x) - m(mean_embedding)" in done.stderr
    assert "completeness gap" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["explain"], "give a prompt, for example"),
        (["explain", TEXT, "--method", "saliencyy"], "no method 'saliencyy'; did you mean 'saliency'"),
        (["explain", TEXT, "--foil", "w20"], "a foil needs a target"),
        (["explain", TEXT, "--set", "steps"], "is not NAME=VALUE"),
        (["explain", TEXT, "--id", "x"], "not both"),
        (["explain", TEXT, "--set", "heads=3"], "is not a list such as L23H3"),
        (["explain", "--id", "ioi-0"], "there is no prompt 'ioi-0' in the shipped set; did you mean 'ioi-"),
        (["explain", TEXT, "-o", "x.xlsx"], "ends neither in .csv nor in .parquet"),
        (["methods", "--scope", "block"], "no scope 'block'; expected one of activation, edge, head, layer, prompt"),
    ],
)
def test_misuse_is_told_before_a_model_is_loaded(words: list[str], message: str) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())


def test_parameters_that_do_not_exist_or_do_not_fit_are_misuse(folder: Path) -> None:
    unknown = explain(folder, TEXT, "--method", "occlusion", "--set", "windw=2")
    assert unknown.exit_code == 2
    assert "did you mean 'window'" in unknown.stderr
    wide = explain(folder, TEXT, "--method", "occlusion", "--set", "window=99")
    assert wide.exit_code == 2
    assert "the shortest prompt has 6 tokens" in " ".join(wide.stderr.split())


def test_a_parameter_that_does_not_fit_a_later_prompt_throws_nothing_away(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": "long", "prompt": TEXT, "target": "w10"}, {"id": "short", "prompt": "w5 w9 w7", "target": "w10"}]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    words = ["--prompts", str(prompts), "--method", "occlusion", "--set", "window=5", "--json"]
    done = explain(folder, *words)
    assert done.exit_code == 1, done.output
    assert [each["prompt"] for each in json.loads(done.stdout)] == ["long"]
    assert "short: " in done.stderr and "the shortest prompt has 3 tokens" in done.stderr
    # on the first prompt it is misuse
    first = explain(folder, "--prompts", str(prompts), "--method", "occlusion", "--set", "window=99")
    assert first.exit_code == 2 and not first.stdout


def test_skipped_entries_are_told_and_counted(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "good", "prompt": TEXT}) + "\nnot json\n")
    words = ["explain", "--prompts", str(prompts), "--method", "weight", "-m", str(folder), "--device", "cpu"]
    assert run(*words).exit_code == 2
    done = run(*words, "--skip-bad")
    assert done.exit_code == 1 and "skipped" in done.stderr and "prompts.jsonl:2:" in done.stderr


def test_two_prompts_are_patched_from_a_file_with_pairs(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    row = {"id": "one", "prompt": "w5 w9 w30 w7", "target": "w10", "foil": "w20", "pair": "w5 w8 w30 w7"}
    path.write_text(json.dumps(row) + "\n")
    words = ["explain", "--prompts", str(path), "-m", str(folder), "--device", "cpu"]
    words += ["--set", "site=head_out", "--set", "layers=1", "--set", "mode=noise"]
    done = run(*words, "--method", "activation_patching", "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)[0]["rows"]
    assert len(rows) == 4 * 4
    assert all(each["value"] == 0 for each in rows if each["position"] == 0)  # the prompts begin with the same token
    assert "one: 16 patches, at most 17 forwards of its 4 tokens, about" in " ".join(done.stderr.split())
    estimated = run(*words, "--method", "attribution_patching", "--set", "top=3", "-q", "--json")
    beside = {(each["head"], each["position"]): each["exact"] for each in json.loads(estimated.stdout)[0]["rows"]}
    exact = {(each["head"], each["position"]): each["value"] for each in rows}
    assert sum(value is not None for value in beside.values()) == 3
    assert all(value == pytest.approx(exact[place]) for place, value in beside.items() if value is not None)
    alone = explain(folder, TEXT, "--method", "activation_patching", "--set", "site=attn_out", "--set", "mode=noise")
    assert alone.exit_code == 2
    assert "this prompt has no pair" in " ".join(alone.stderr.split())


def test_heads_are_named_as_everywhere(folder: Path) -> None:
    words = ["--method", "temperature_sweep", "--set", "heads=L0H1,L1H3", "--target", "w10", "--json"]
    rows = json.loads(explain(folder, TEXT, *words).stdout)[0]["rows"]
    assert {row["head_label"] for row in rows} == {"L0H1", "L1H3"}
    assert len(rows) == 14
    missing = explain(folder, TEXT, "--method", "temperature_sweep")
    assert missing.exit_code == 2
    assert "temperature_sweep needs heads" in missing.stderr


def test_the_methods_for_a_run_are_all_that_it_takes() -> None:
    from attndiag.catalog import CATALOG
    from attndiag.comparison.methods import ACROSS_LAYERS, check_methods
    from attndiag.runs.plan import DEEP_METHODS, DEFAULT_METHODS

    listed = json.loads(run("methods", "--for", "run", "--json").stdout)
    names = [each["name"] for each in listed]
    check_methods(names)
    assert {*DEFAULT_METHODS, *DEEP_METHODS, *ACROSS_LAYERS} <= set(names)
    for name in {*CATALOG} - {*names}:
        with pytest.raises(NotApplicableError):
            check_methods([name])
    # as users see it, in both spellings, and named by the commands that take them
    text = run("methods", "--for", "compare").stdout
    assert [line.split()[0] for line in text.splitlines() if not line.startswith(" ")] == names
    assert all(each["reading"] and each["cost"] and each["source"] for each in listed)
    assert "`attndiag methods --for run`" in METHODS_HELP
    assert run("methods", "--for", "run", "--scope", "token").exit_code == 2


def test_methods_are_listed_without_torch() -> None:
    done = run("methods", "--scope", "token", "--json")
    listed = json.loads(done.stdout)
    assert {"replacement", "saliency", "kernel_shap"} <= {each["name"] for each in listed}
    assert all(each["cost"] and each["source"] for each in listed)
    code = "import sys\nfrom attndiag.cli import main\ntry:\n    main()\n"
    code += "except SystemExit as stop:\n    assert not stop.code\nassert 'torch' not in sys.modules"
    for words in (["methods"], ["methods", "--for", "run"]):
        subprocess.run([sys.executable, "-c", code, *words], check=True, timeout=60, capture_output=True)


def test_pieces_of_a_character_and_line_breaks_are_shown(tiny_folder: Path) -> None:
    words = ["a🎉\n b", "--method", "input_x_gradient"]
    done = explain(tiny_folder, *words)
    assert done.exit_code == 0, done.output
    # the first of the four bytes shows the character, the others that they have no text of their own
    labels = [line.split()[1] for line in done.stdout.splitlines()[2:]]
    assert labels == ["a", "🎉", "∅", "∅", "∅", "⏎", "·", "b"]
    # files and JSON keep the texts as they are
    rows = json.loads(explain(tiny_folder, *words, "--json").stdout)[0]["rows"]
    assert [row["position_label"] for row in rows] == ["a", "🎉", "", "", "", "\n", " ", "b"]

"""`attndiag heads`: files, words, exit status, and misuse that is told before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from attndiag.cli import app


def heads(*words: str) -> Result:
    return CliRunner().invoke(app, ["heads", *words, "-q"])


def test_scores_and_effects_of_a_small_model(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["-m", str(tiny_folder), "--device", "cpu", "-o", str(out), "--rows", "2", "--length", "8"]
    done = heads(*words, "--probe", "induction,previous", "--probe", "sink", "--ablate", "3", "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["facts"]["length"] == 8 and facts["probes"] == "induction, previous, sink"
    frame = pd.read_parquet(out / "heads.parquet")
    assert len(frame) == 8 and frame["ablation_effect"].notna().sum() == 3
    assert (out / "heads.html").is_file() and (out / "figures" / "effects.pdf").is_file()
    again = heads(*words)
    assert again.exit_code == 2 and "holds a head table already" in again.stderr
    replaced = heads(*words, "--probe", "duplicate", "--overwrite")
    assert replaced.exit_code == 0 and "ablation_effect" not in pd.read_csv(out / "heads.csv")
    assert replaced.stdout.splitlines()[-1] == f"page: {out / 'heads.html'}"


def test_a_relation_of_the_shipped_prompts(tiny_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    text = "When Mary and John went to the store, {}John gave a drink to"
    rows = []
    for index, more in enumerate(("", "then ", "and so ", "a bit later ")):
        full = text.format(more)
        again = full.rindex("John")
        spans = {"subject": [14, 18], "again": [again, again + 4]}
        rows.append({"id": f"r{index}", "prompt": full, "target": " Mary", "foil": " store", "spans": spans})
    prompts.write_text("\n".join(map(json.dumps, rows)))
    words = ["-m", str(tiny_folder), "--device", "cpu", "--prompts", str(prompts)]
    done = heads(*words, "--relation", "again:subject", "--relation", "last:again", "-o", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    frame = pd.read_csv(tmp_path / "out" / "relations.csv")
    assert set(frame["relation"]) == {"again -> subject", "last token -> again"} and len(frame) == 16
    page = (tmp_path / "out" / "heads.html").read_text()
    assert "relation-2" in page and "last token → again" in page
    wrong = heads(*words, "--relation", "verb:subject", "-o", str(tmp_path / "wrong"))
    assert wrong.exit_code == 2 and "the prompts have again, subject" in wrong.stderr


def test_nothing_measurable_is_status_1(tiny_folder: Path, tmp_path: Path) -> None:
    words = ["-m", str(tiny_folder), "--device", "cpu", "--probe", "induction", "--bos", "yes"]
    done = heads(*words, "-o", str(tmp_path / "out"))
    assert done.exit_code == 1, done.output
    assert "No head could be measured" in done.stdout
    assert "BOS" in (tmp_path / "out" / "heads.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--probe", "inducton"], "there is no probe 'inducton'"),
        (["--probe", "previous", "--ablate", "5"], "effects are measured on the induction probe"),
        (["--relation", "subject"], "is not QUERY:KEY"),
        (["--rows", "0"], "Invalid value for '--rows'"),
    ],
)
def test_misuse_is_told_before_a_model_is_loaded(words: list[str], said: str, tmp_path: Path) -> None:
    done = heads(*words, "-m", str(tmp_path / "no-such-model"), "-o", str(tmp_path / "out"))
    assert done.exit_code == 2 and said in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    done = heads("-o", str(tmp_path), "--overwrite", "-m", str(tmp_path / "no-such-model"))
    assert done.exit_code == 2 and "holds no head table" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

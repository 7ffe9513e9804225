"""`attndiag heads`: files, words, exit status, and misuse that is told before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from attndiag.cli import app
from attndiag.models.known import induction_gpt2
from attndiag.models.series import load_series


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


def test_heads_by_another_score_and_pairs_of_heads(tiny_folder: Path, tmp_path: Path) -> None:
    words = ["-m", str(tiny_folder), "--device", "cpu", "-o", str(tmp_path / "out"), "--rows", "2", "--length", "8"]
    done = heads(*words, "--probe", "induction,duplicate", "--ablate", "2", "--ablate-by", "duplicate_token")
    assert done.exit_code == 0, done.output
    frame = pd.read_csv(tmp_path / "out" / "heads.csv")
    chosen = frame[frame["ablation_effect"].notna()]
    assert sorted(chosen["duplicate_token_score"]) == sorted(frame["duplicate_token_score"])[-2:]
    assert "come first by duplicate token" in (tmp_path / "out" / "heads.html").read_text()
    done = heads(*words, "--composition", "--overwrite")
    assert done.exit_code == 0, done.output
    assert len(pd.read_parquet(tmp_path / "out" / "pairs.parquet")) == 3 * 16
    assert "Which heads read which" in (tmp_path / "out" / "heads.html").read_text()


def test_a_list_of_checkpoints(tmp_path: Path) -> None:
    series, words_of = load_series(), induction_gpt2().tokenizer()
    places = []
    for step in (100, 900):
        series.at(step).save_pretrained(tmp_path / f"checkpoint-{step}")
        words_of.save_pretrained(tmp_path / f"checkpoint-{step}")
        places += ["--checkpoints", str(tmp_path / f"checkpoint-{step}")]
    words = ["--device", "cpu", "--rows", "4", "--length", "20", "--ablate", "1"]
    done = heads(*places, *words, "-o", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    frame = pd.read_csv(tmp_path / "out" / "phase_change.csv")
    assert frame["step"].tolist() == [100, 900]
    assert frame["prefix_matching"].iloc[0] < 0.2 < 0.6 < frame["prefix_matching"].iloc[1]
    assert (tmp_path / "out" / "heads.html").is_file()
    # another architecture under the name of a later step
    load_series("control").at(900).save_pretrained(tmp_path / "checkpoint-901")
    words_of.save_pretrained(tmp_path / "checkpoint-901")
    mixed = heads(*places, "--checkpoints", str(tmp_path / "checkpoint-901"), *words, "-o", str(tmp_path / "mixed"))
    assert mixed.exit_code == 2 and "a history needs checkpoints of one run" in mixed.stderr
    gone = heads("-m", str(tmp_path / "checkpoint-100"), "--revisions", "step1,step2", "-o", str(tmp_path / "gone"))
    assert gone.exit_code == 2 and "revision" in gone.stderr


def test_effects_in_an_order_that_could_not_be_measured_are_status_1(tiny_folder: Path, tmp_path: Path) -> None:
    # the built-in texts do not fit the 128 positions of this model
    words = ["-m", str(tiny_folder), "--device", "cpu", "-o", str(tmp_path / "out"), "--rows", "2", "--length", "8"]
    done = heads(*words, "--ablate", "2", "--ablate-by", "previous_token")
    assert done.exit_code == 1, done.output
    told = "previous_token_score, by which heads are chosen, is not measurable here (the texts cannot be encoded"
    assert f"not measurable: ablation: {told}" in done.stderr.replace("\n", " ")
    assert told in (tmp_path / "out" / "heads.html").read_text()
    assert "ablation_effect" not in pd.read_csv(tmp_path / "out" / "heads.csv")
    assert heads(*words, "--ablate", "2", "--overwrite").exit_code == 0


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
        (["--ablate", "2", "--ablate-by", "sinks"], "cannot be ranked by 'sinks'"),
        (["--ablate", "2", "--ablate-by", "entropy"], "add it to the probes"),
        (["--ablate-by", "previous_token"], "add --ablate 20"),
        (["--checkpoints", "no-such-folder"], "there is no such folder"),
        (["--revisions", "step1"], "at least two checkpoints, got 1"),
        (["--revisions", "step1,step2", "--phase-change"], "measured by itself"),
        (["--revisions", "step1,step2", "--revision", "main"], "it goes with no --revisions"),
        (["--prompts", "my.jsonl"], "only a relation reads a prompt set"),
        (["--checkpoints", ".", "--checkpoints", "..", "--revision", "main"], "it goes with no --checkpoints"),
        # the model is named below
        (["--checkpoints", ".", "--checkpoints", ".."], "Invalid value for --model"),
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

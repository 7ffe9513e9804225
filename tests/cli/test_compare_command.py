"""`attndiag compare` and `attndiag view RUN_DIR`: tables, JSON, CSV, page, own scores, exit statuses, refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from attndiag.cli import app

TEXT = "When Mary and John went"
FAST = ("--methods", "weight,rollout", "--replacements", "uniform:draws=2", "--metrics", "none")


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def kept(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "out"
    prompts = folder.parent / "p.jsonl"
    rows = [{"id": "one", "prompt": TEXT}, {"id": "two", "prompt": "John and Mary gave"}]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    own = folder.parent / "mine.csv"
    table = [{"prompt": row["id"], "position": 0, "score": 1.0} for row in rows]
    pd.DataFrame(table).to_csv(own, index=False)
    done = run("compare", "--prompts", prompts, *FAST, "--own", own, "-m", tiny_folder, "--device", "cpu", "-o", folder)
    # the own scores name one token only, so they cannot be judged, but nothing failed
    assert done.exit_code == 0, done.output
    assert (folder / "report.html").is_file() and f"page: {folder / 'report.html'}" in done.stdout
    assert "verdicts on tokens" in done.stdout and "verdicts on edges" in done.stdout
    return folder


def test_a_run_is_read_as_text_json_and_csv(kept: Path) -> None:
    text = run("compare", kept)
    assert text.exit_code == 0 and "agreement, mean tau-b" in text.stdout and "(ceiling)" in text.stdout
    facts = json.loads(run("compare", kept, "--json").stdout)
    assert (
        facts["prompts"] == 2
        and facts["passed"]
        and {row["method"] for row in facts["tokens"]} >= {"weight", "rollout"}
    )
    for table in ("methods", "edges", "heads", "prompts", "agreement", "faithfulness", "verdicts", "problems"):
        done = run("compare", kept, "--csv", "--table", table)
        assert done.exit_code == 0, done.output
        if table not in ("faithfulness", "problems"):
            assert len(pd.read_csv(io.StringIO(done.stdout))) > 0


def test_the_page_of_a_run_goes_elsewhere_too(kept: Path, tmp_path: Path) -> None:
    done = run("compare", kept, "-o", tmp_path / "page", "-q")
    assert done.exit_code == 0 and (tmp_path / "page" / "report.html").is_file()
    assert "report.html" in run("report", kept, "-q").stdout


def test_a_prompt_of_a_run_is_viewed_with_its_methods(kept: Path, tmp_path: Path) -> None:
    done = run("view", kept, "--id", "two", "-o", tmp_path / "v.html", "--json", "-q")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["methods"][:2] == ["weight", "rollout"] and facts["title"] == "John and Mary gave"
    wrong = run("view", kept, "--id", "tow")
    assert wrong.exit_code == 2 and "did you mean 'two'?" in wrong.output
    assert "its methods, target and effects are shown" in run("view", kept, "--effects").output.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a prompt, for example"),
        ([TEXT, "--methods", "nonsense"], "there is no method 'nonsense'"),
        ([TEXT, "--primary", "weight"], "names 1 methods; expected two"),
        ([TEXT, "--primary", "weight,nothing"], "primary names ['nothing']"),
        ([TEXT, "--foil", " x"], "a foil needs a target"),
        ([TEXT, "--json", "--csv"], "both want standard output"),
        ([TEXT, "--own", "nowhere.csv"], "there is no file nowhere.csv"),
        ([TEXT, "--replacements", "magic"], "magic"),
    ],
)
def test_misuse_is_said_before_any_model_is_loaded(words: list[str], said: str) -> None:
    done = run("compare", *words, "-m", "no-such-model")
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("\u2502", " ").split())


def test_options_about_making_a_run_do_not_go_with_one_that_is_there(kept: Path, tmp_path: Path) -> None:
    done = run("compare", kept, "--methods", "weight")
    assert done.exit_code == 2 and "is a run that is there" in " ".join(done.output.replace("\u2502", " ").split())
    done = run("compare", tmp_path)
    assert done.exit_code == 2 and "holds no run" in done.output


def test_help_shows_examples() -> None:
    done = run("compare", "--help")
    assert done.exit_code == 0 and "Examples:" in done.stdout and "attndiag compare out --csv" in done.stdout

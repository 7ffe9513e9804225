"""`attndiag compare` and `attndiag view RUN_DIR`: tables, JSON, CSV, page, own scores, exit statuses, refusals."""

from __future__ import annotations

import html
import io
import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from attndiag.cli import app
from attndiag.commands.view import _target
from attndiag.errors import NotApplicableError
from attndiag.prompts import Prompt, Target

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
    assert "memory: about" in done.stderr and "2 methods; edges: every edge" in done.stderr
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


def test_an_unfinished_run_says_so_first(kept: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    shutil.copytree(kept, half)
    marker = json.loads((half / "run.json").read_text())
    (half / "run.json").write_text(json.dumps({**marker, "finished": False}))
    (half / "results" / f"{marker['prompts'][1]['key']}.parquet").unlink()
    said = "unfinished: 1 of 2 prompts is done; the same run call goes on"
    text, csv = run("compare", half), run("compare", half, "--csv")
    assert text.exit_code == csv.exit_code == 1
    assert text.stdout.splitlines()[0] == said and said in csv.stderr and "unfinished" not in csv.stdout
    facts = json.loads(run("compare", half, "--json").stdout)
    assert (facts["status"], facts["n_done"], facts["n_prompts"]) == ("unfinished", 1, 2)
    assert "unfinished" not in run("compare", kept).stdout


def test_verdict_tables_say_what_their_p_is_the_chance_of(kept: Path) -> None:
    lines = run("compare", kept).stdout.splitlines()
    heads = [line for line in lines if line.startswith("verdicts on ")]
    told = [line for line in lines if line.startswith("p (shuffled): chance that the same claims, shuffled over the ")]
    assert len(heads) == len(told) == 2 and all("  p (shuffled)  " in line for line in heads)
    assert "tokens of each prompt" in told[0] and "keys of each head on a prompt" in told[1]


def test_the_declared_comparison_stands_in_the_text_and_in_the_json(
    kept: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    words = (TEXT, *FAST[:4], "--metrics", "aopc_comprehensiveness", "--edges", "none", "-m", tiny_folder, "--device")
    out = tmp_path / "out"
    text = run("compare", *words, "cpu", "--primary", "weight,rollout", "-o", out, "-q").stdout
    (line,) = [line for line in text.splitlines() if line.startswith("declared comparison")]
    pair, facts = "declared comparison, weight minus rollout: ", json.loads(run("compare", out, "--json").stdout)
    assert line.startswith(pair + "aopc_comprehensiveness[") and line.endswith(" (Holm)")
    assert " (higher is better, in nats) " in line
    assert ", 95 % interval " in line and line in run("compare", out).stdout
    primary = facts["primary"]
    (row,) = primary["metrics"]
    rows = pd.read_csv(io.StringIO(run("compare", out, "--csv", "--table", "differences").stdout))
    (same,) = rows[rows.primary].to_dict("records")
    assert (primary["first"], primary["second"], row["metric"]) == ("weight", "rollout", same["metric"])
    assert row["difference"] == pytest.approx(same["difference"]) and row["p_holm"] == pytest.approx(same["p_holm"])
    assert json.loads(run("compare", kept, "--json").stdout)["primary"] is None


def test_the_page_of_a_run_goes_elsewhere_too(kept: Path, tmp_path: Path) -> None:
    page = tmp_path / "page"
    done = run("compare", kept, "-o", page, "-q")
    assert done.exit_code == 0 and (page / "report.html").is_file()
    # the same call renders again; what an earlier page left and this one has not is gone
    (page / "figures" / "compared_older.png").write_bytes(b"")
    (page / "report.html").write_text((page / "report.html").read_text().replace("</body>", "old</body>"))
    assert run("compare", kept, "-o", page, "-q").exit_code == 0
    assert "old</body>" not in (page / "report.html").read_text()
    assert not (page / "figures" / "compared_older.png").exists() and list((page / "figures").glob("compared_*.svg"))
    for other in ("note.txt", "figures/mine.png"):
        (page / other).write_text("x")
        again = run("compare", kept, "-o", page, "-q")
        assert again.exit_code == 2 and "holds other things" in again.stderr and (page / other).is_file(), again.output
        (page / other).unlink()
    # a first call that was stopped while it drew
    drawn = (page / "report.html").read_text()
    (page / "report.html").unlink()
    assert run("compare", kept, "-o", page, "-q").exit_code == 0
    # the page of another run
    about = json.loads((kept / "run.json").read_text())["run"]
    (page / "report.html").write_text(drawn.replace(about, "0" * 16))
    assert run("compare", kept, "-o", page, "-q").exit_code == 2
    (page / "report.html").write_text("<html>somebody's own report</html>")
    assert run("compare", kept, "-o", page, "-q").exit_code == 2
    assert "report.html" in run("report", kept, "-q").stdout


def test_the_page_of_a_run_never_lies_among_other_things(kept: Path, tmp_path: Path) -> None:
    private = tmp_path / "documents"
    private.mkdir()
    (private / "diary.txt").write_text("dear diary")
    other = tmp_path / "other"
    shutil.copytree(kept, other)
    marker = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps({**marker, "run": "0" * 16}))
    before = (other / "report.html").read_bytes()
    for folder, said in (
        (private, "holds other things"),
        (other, "holds another run"),
        (private / "diary.txt", "file"),
    ):
        done = run("compare", kept, "-o", folder, "-q")
        assert done.exit_code == 2 and said in done.stderr, done.output
    assert [path.name for path in private.iterdir()] == ["diary.txt"]
    assert (other / "report.html").read_bytes() == before
    # a copy of this very run is its own folder too; what somebody keeps there is not listed
    same = tmp_path / "same"
    shutil.copytree(kept, same)
    (same / "secret-plans.txt").write_text("x")
    (same / "private").mkdir()
    (same / "private" / "letter.txt").write_text("x")
    assert run("compare", kept, "-o", same, "-q").exit_code == 0
    page = (same / "report.html").read_text()
    assert "secret-plans" not in page and "letter.txt" not in page and 'href="tables/methods.csv"' in page


def test_a_prompt_of_a_run_is_viewed_with_its_own_target(tiny_folder: Path, tmp_path: Path) -> None:
    import attndiag
    from attndiag.runs.comparing import run as measured

    lm = attndiag.load(tiny_folder, device="cpu")
    plan = {"methods": ["weight"], "replacements": [], "metrics": [], "heads": False, "edges": None}
    targets = {
        "prob": Target.prob(" store"),
        "logit": Target.logit(),
        "difference": Target.logit_diff(" store", " gave"),
    }
    prompts = [Prompt(TEXT, id=name) for name in targets]
    done = measured(lm, prompts, **plan, target=list(targets.values()), output=tmp_path / "run")
    assert done.facts["n_failed"] == 0, done.comparison.problems
    rows = done.comparison.prompts.set_index("prompt")
    for name in targets:
        said = run("view", tmp_path / "run", "--id", name, "-o", tmp_path / f"{name}.html", "-q")
        assert said.exit_code == 0 and not said.stderr, said.output
        page = (tmp_path / f"{name}.html").read_text()
        kind = targets[name].kind.replace("_", " ")
        found = re.search(r"m = (\S+) " + rows.unit[name], html.unescape(page))
        assert found is not None and kind in page
        assert float(found[1]) == pytest.approx(rows.m[name], rel=1e-3)


def test_targets_are_rebuilt_from_their_rows_or_refused() -> None:
    def row(kind: str, answer: str = "", foil: str = "") -> dict[str, str]:
        return {"prompt": "p", "target_kind": kind, "target": answer, "foil": foil}

    assert _target(row("logprob")) == Target.logprob()
    assert _target(row("masked_token_logit", " a", " b")) == Target.masked_token_logit(" a", " b")
    assert _target(row("class_logit", "2", "0")) == Target.class_logit(2, 0)
    assert _target(row("class_logit", "POSITIVE")) == Target.class_logit("POSITIVE")
    for kind, why in (("cosine", "pools"), ("continuation_logprob", "several positions"), ("new", "not know")):
        with pytest.raises(NotApplicableError, match=why):
            _target(row(kind, "x"))


def test_a_chat_prompt_of_a_run_is_viewed_as_the_model_read_it(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "chatty"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|end|>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|end|>assistant:{% endif %}"
    )
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"id": "one", "prompt": TEXT}))
    words = ("--prompts", prompts, "-m", folder, "--device", "cpu", "--no-heads", "--edges", "none", "-q")
    made = run("run", *words, "--chat-template", *FAST, "-o", tmp_path / "run")
    assert made.exit_code == 0, made.output
    viewed = run("view", tmp_path / "run", "-o", tmp_path / "v.html", "--json", "-q")
    assert viewed.exit_code == 0, viewed.output
    facts = json.loads(viewed.stdout)
    assert facts["title"].count("assistant:") == 1 and facts["methods"][:2] == ["weight", "rollout"]


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
    for words in (
        ("--methods", "weight"),
        ("--edges", "auto"),
        ("-m", "default"),
        ("--seed", "0"),
        ("--device", "cpu"),
        ("--dtype", "auto"),
        ("--revision", "main"),
        ("--skip-bad",),
        ("--overwrite",),
        ("--id", "one"),
    ):
        done = run("compare", kept, *words)
        said = " ".join(done.output.replace("\u2502", " ").split())
        assert done.exit_code == 2 and "is a run that is there" in said, words
        assert "--model" in said if words[0] == "-m" else words[0] in said, words
    assert run("compare", kept, "--csv", "--table", "prompts", "-q").exit_code == 0
    done = run("compare", tmp_path)
    assert done.exit_code == 2 and "holds no run" in done.output


def test_help_shows_examples() -> None:
    done = run("compare", "--help")
    assert done.exit_code == 0 and "Examples:" in done.stdout and "attndiag compare out --csv" in done.stdout


@pytest.mark.parametrize("command", ["view", "compare"])
def test_an_empty_prompt_is_an_empty_prompt_and_no_folder(command: str, tiny_folder: Path, tmp_path: Path) -> None:
    done = run(command, "", "-m", tiny_folder, "--device", "cpu", "-o", tmp_path / "x.html", "-q")
    assert done.exit_code in (1, 2) and "prompt is empty" in done.output + done.stderr, done.output + done.stderr

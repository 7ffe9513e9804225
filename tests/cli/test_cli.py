"""The command line: what goes to which stream, exit codes, one clear line for what went wrong."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from attndiag.cli import app
from attndiag.commands import console
from attndiag.reports import page as page_module
from attndiag.reports.figures import DRAWINGS
from attndiag.runs import weights_run
from attndiag.runs.folder import RunFolder

COMMANDS = ("report", "view", "validate", "models", "env")
TEXTS = ("When Mary and John went to the store", "John gave a drink to Mary", "to the store, John")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "set.jsonl"
    lines = [json.dumps({"id": f"p{i}", "prompt": text, "cluster": f"c{i}"}) for i, text in enumerate(TEXTS)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(autouse=True)
def _plain_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = '<svg width="1pt" height="1pt" viewBox="0 0 1 1"></svg>'
    monkeypatch.setattr(page_module, "save_figures", lambda *_: {drawing.name: empty for drawing in DRAWINGS})


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_report_makes_a_run_and_renders_it(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("report", "--prompts", prompts, "-m", tiny_folder, "-o", out, "--device", "cpu", "--seed", 3)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Over 3 prompts, position 0 takes ")
    assert lines[1] == "100 % certified (6 of 6 calls)"
    assert lines[2] == f"page: {out / 'report.html'}"
    assert "memory: about" in result.stderr and "measured in" in result.stderr
    assert (out / "report.html").is_file() and (out / "tables" / "heads.parquet").is_file()
    (facts,) = RunFolder.open(out).read("runs").to_dict("records")
    assert (facts["seed"], facts["prompt_file"]) == (3, str(prompts))


def test_json_is_all_there_is_on_standard_output(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    result = run("report", "--prompts", prompts, "-m", tiny_folder, "-o", tmp_path / "out", "--json", "--quiet")
    facts = json.loads(result.stdout)
    assert (facts["prompts"], facts["certified"], facts["calls"], facts["passed"]) == (3, 6, 6, True)
    assert 0 < facts["sink"]["sink_weight"] < 1
    assert result.stderr == ""
    # the same run again is not measured again
    again = run("report", "--prompts", prompts, "-m", tiny_folder, "-o", tmp_path / "out", "--json")
    assert json.loads(again.stdout) == facts
    assert "this very run is in" in again.stderr
    rendered = run("report", tmp_path / "out", "--json")
    assert json.loads(rendered.stdout) == facts


def test_limit_and_overwrite(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    words = ["report", "--prompts", prompts, "-m", tiny_folder, "-o", tmp_path / "out", "--quiet"]
    assert run(*words, "--limit", 1).exit_code == 0
    assert len(RunFolder.open(tmp_path / "out").read("prompts")) == 1
    refused = run(*words)
    assert refused.exit_code == 2
    assert "already holds a run" in refused.stderr and "--overwrite" in refused.stderr
    assert len(RunFolder.open(tmp_path / "out").read("prompts")) == 1
    assert run(*words, "--overwrite").exit_code == 0
    assert len(RunFolder.open(tmp_path / "out").read("prompts")) == 3


def test_prompts_that_fail_give_exit_code_1_and_a_line(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "set.txt"
    path.write_text("When Mary went\n" + "x" * 400 + "\n")
    result = run("report", "--prompts", path, "-m", tiny_folder, "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert "prompt line-2: prompt 'line-2' has 400 tokens but the model has 128 positions; shorten it" in result.stderr
    assert "Traceback" not in result.output


def test_bad_entries_stop_or_are_skipped_and_counted(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    with prompts.open("a") as file:
        file.write('{"promt": "x"}\n')
    words = ["report", "--prompts", prompts, "-m", tiny_folder, "-o", tmp_path / "out"]
    stopped = run(*words)
    assert stopped.exit_code == 2
    assert stopped.stderr.startswith(f"error: {prompts}:4: key 'promt' is unknown; did you mean 'prompt'?")
    assert not (tmp_path / "out").exists()
    skipped = run(*words, "--skip-bad", "--json")
    assert skipped.exit_code == 1
    assert json.loads(skipped.stdout)["skipped"] == 1
    assert f"skipped {prompts}:4: key 'promt'" in skipped.stderr
    (facts,) = RunFolder.open(tmp_path / "out").read("runs").to_dict("records")
    assert facts["n_skipped"] == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["report", "nowhere"], "error: there is no folder nowhere; make a run first"),
        (["report", "--prompts", "nope.jsonl"], "error: there is no prompt file nope.jsonl"),
        (["report", "-m", "./no-such-folder", "-o", "fresh"], "no-such-folder"),
        (["report", "out", "--limit", "3"], "RUN_DIR is a run that is there"),
        (["report", "out", "-o", "rep"], "leave out --output"),
        (["report", "out", "--seed", "0", "-m", "default"], "leave out --model, --seed"),
        (["report", "--limit", "0"], "Invalid value for '--limit'"),
        (["report", "--backend", "swift"], "Invalid value for '--backend'"),
        (["view"], "give a prompt, for example"),
        (["view", "text", "--id", "x"], "give either a prompt or --prompts and --id"),
        (["view", "--id", "ioi-111"], "there is no prompt 'ioi-111' in the shipped set; did you mean 'ioi-1'?"),
        (["view", "text", "-o", "x.gif"], "x.gif has the suffix '.gif'; expected .html, .png, .svg or .pdf"),
        (["validate", "nope.jsonl"], "there is no prompt file nope.jsonl"),
        (["frobnicate"], "No such command 'frobnicate'"),
    ],
)
def test_misuse_is_one_clear_line_and_exit_code_2(
    words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert expected in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if "rror" in line]
    assert len(errors) == 1


def test_an_output_that_cannot_be_written_is_told_before_the_model_is_loaded(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attndiag.models import load

    monkeypatch.setattr(load, "load", lambda *_args, **_more: pytest.fail("the model was loaded first"))
    (tmp_path / "file").write_text("")
    result = run("report", "--prompts", prompts, "-o", tmp_path / "file" / "out")
    assert result.exit_code == 2
    assert "part of that path is a file" in result.stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    result = run("report", "--prompts", prompts, "-o", tmp_path / "full", "--overwrite")
    assert (result.exit_code, (tmp_path / "full" / "thesis.tex").read_text()) == (2, "mine")


def test_a_disk_that_fills_up_keeps_what_was_computed(
    tiny_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RunFolder.write_shard

    def full_after_two(self: RunFolder, key: str, tables: dict) -> None:
        if key == "000002":
            monkeypatch.setattr(os, "fsync", fail)
        real(self, key, tables)

    def fail(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_shard", full_after_two)
        result = run("report", "--prompts", prompts, "-m", tiny_folder, "-o", tmp_path / "out", "--quiet")
        monkeypatch.undo()
    assert result.exit_code == 2
    assert "the disk is full; free some space, or give another folder. What was written before stays" in result.stderr
    assert RunFolder.open(tmp_path / "out").read("prompts").prompt.tolist() == ["p0", "p1"]


def test_ctrl_c_says_what_was_kept(
    tiny_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = weights_run._measure_prompt

    def interrupted(lm, prompt, index, *rest):
        if index == 2:
            raise KeyboardInterrupt
        return real(lm, prompt, index, *rest)

    monkeypatch.setattr(weights_run, "_measure_prompt", interrupted)
    out = tmp_path / "out"
    result = run("report", "--prompts", prompts, "-m", tiny_folder, "-o", out)
    assert result.exit_code == 130
    assert f"interrupted: 2 of 3 prompts are kept in {out}; `attndiag report {out}` renders them" in result.stderr
    monkeypatch.undo()
    rendered = run("report", out, "--json")
    assert rendered.exit_code == 1
    assert json.loads(rendered.stdout)["finished"] is False


def test_our_own_faults_are_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    from attndiag.models import fetch

    def breaks(_model: object) -> Path:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(fetch, "entry_path", breaks)
    result = run("models")
    assert result.exit_code == 3
    assert result.stderr.startswith("error: RuntimeError: two lines. This is a fault of attndiag; please report it")
    with pytest.raises(RuntimeError, match="two"):
        CliRunner().invoke(app, ["models", "--debug"], catch_exceptions=False)


def test_a_typed_error_shows_its_traceback_with_debug_only(tmp_path: Path) -> None:
    from attndiag.errors import PromptError

    result = run("validate", tmp_path / "no.jsonl", "--debug")
    assert isinstance(result.exception, PromptError)


def test_validate_lists_every_bad_entry(prompts: Path) -> None:
    good = run("validate", prompts)
    assert good.exit_code == 0
    assert "3 prompts in 3 clusters, 0 bad entries" in good.stdout
    with prompts.open("a") as file:
        file.write('{"promt": "x"}\n[]\n')
    bad = run("validate", prompts)
    assert bad.exit_code == 1
    assert f"{prompts}:4: key 'promt'" in bad.stdout and f"{prompts}:5: holds a list" in bad.stdout
    facts = json.loads(run("validate", prompts, "--json").stdout)
    assert [entry["line"] for entry in facts["bad"]] == [4, 5]
    assert facts["prompts"] == 3


def test_view_writes_a_page_and_figures(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    page = tmp_path / "sub" / "view.html"
    result = run("view", "When Mary and <script>", "-m", tiny_folder, "-o", page, "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{page}\n", "")
    # the data and the program of the page, nothing from the prompt
    assert page.read_text().count("<script") == 2
    figure = tmp_path / "view.png"
    result = run("view", "--prompts", prompts, "--id", "p1", "-m", tiny_folder, "-o", figure, "--layer", 1, "--json")
    facts = json.loads(result.stdout)
    assert (facts["prompt"], facts["layers"], facts["uncertified_layers"]) == ("p1", 2, [])
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_models_and_env() -> None:
    names = [row["name"] for row in json.loads(run("models", "--json").stdout)]
    assert {"default", "minilm", "smollm2"} <= set(names)
    assert all(name in run("models").stdout for name in names)
    facts = json.loads(run("env", "--json").stdout)
    assert facts["devices"][0] == "cpu" and facts["versions"]["torch"]
    assert "torch" in run("env").stdout


def test_every_command_has_examples_and_its_options_have_help() -> None:
    listed = run("--help").stdout
    for command in COMMANDS:
        assert f"  {command} " in listed
        text = run(command, "--help").stdout
        assert f"attndiag {command}" in text.split("Examples:")[1]
        assert "--debug" in text and "--json" in text
    text = run("report", "--help").stdout
    for flag in (
        "--model",
        "-m,",
        "--revision",
        "--device",
        "--dtype",
        "--attn-implementation",
        "--prompts",
        "--limit",
    ):
        assert flag in text
    for flag in ("--seed", "--output", "--offline", "--quiet", "--json", "--backend", "--overwrite", "--skip-bad"):
        assert flag in text
    assert "_" not in "".join(word for word in text.split() if word.startswith("--"))


def test_no_prompt_text_can_forge_a_line_of_an_error() -> None:
    assert console.one_line(ValueError("a\n\nerror: b")) == "a error: b"
    assert console.one_line(ValueError()) == "ValueError"
    assert console._finite({"a": [float("nan"), 1.5, None], 2: Path("x")}) == {"a": [None, 1.5, None], "2": "x"}


def test_a_process_answers_help_quickly_and_survives_a_closed_pipe() -> None:
    program = [sys.executable, "-m", "attndiag"]
    subprocess.run([*program, "--help"], capture_output=True, check=True, timeout=60)
    seconds = []
    for _ in range(3):
        # time of the processor: what else the machine does is no part of it
        begun = os.times()
        done = subprocess.run([*program, "report", "--help"], capture_output=True, text=True, check=True, timeout=60)
        ended = os.times()
        seconds.append(ended.children_user + ended.children_system - begun.children_user - begun.children_system)
    assert 0 < min(seconds) < 1.0
    assert "Examples:" in done.stdout and done.stderr == ""
    code = f"{sys.executable} -m attndiag models | true; exit ${{PIPESTATUS[0]}}"
    closed = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert "Traceback" not in closed.stderr
    assert closed.returncode in (0, 1)


def test_a_prompt_file_is_checked_without_torch(prompts: Path) -> None:
    code = (
        "import sys; from attndiag.cli import app\n"
        f"try:\n    app(['validate', {str(prompts)!r}])\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)

"""Progress on standard error: bars that end full in a terminal, lines with the time left elsewhere, right grammar."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attndiag.cli import app
from attndiag.commands import progress
from attndiag.commands.console import counted
from attndiag.commands.progress import PlainLines, progress_bar


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_lines_come_now_and_then_with_the_time_left() -> None:
    said: list[str] = []
    clock = Clock()
    lines = PlainLines(said.append, every=30, clock=clock)
    # ten were found by a resumed run and cost nothing: their time is not in the estimate
    for done in range(10, 90):
        lines.tell("measuring", done, 90)
        clock.now += 10
    assert len(said) == 26  # 790 s, one line each 30 s
    assert said[0] == "measuring: 13 of 90 prompts, 0:30 so far, about 12:50 left"
    assert said[-1] == "measuring: 88 of 90 prompts, 13:00 so far, about 0:20 left"


def test_short_work_and_work_of_unknown_length() -> None:
    said: list[str] = []
    clock = Clock()
    lines = PlainLines(said.append, every=30, clock=clock)
    for done in range(4):
        lines.tell("measuring", done, 3)
        clock.now += 5
    assert said == []
    lines.tell("layers", 0, 0)
    clock.now += 3700
    lines.tell("layers", 7, 0)
    assert said == ["layers: 7, 1:01:40 so far"]
    clock.now += 31
    lines.tell("measuring one", 1, 1)
    lines.tell("card", 0, 0)
    assert said[1:] == ["measuring one: 1 of 1, 0:00 so far"]


def test_no_terminal_gets_lines_and_quiet_gets_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress.PlainLines.__init__, "__kwdefaults__", {"every": 0.0, "clock": Clock()})
    for quiet in (False, True):
        with progress_bar(quiet=quiet) as tell:
            tell("measuring", 1, 1)
    assert capsys.readouterr() == ("", "measuring: 1 of 1 prompt, 0:00 so far\n")


def _drawn(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, int, int]], error: bool = False) -> list[str]:
    """The last state of each bar."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    try:
        with progress_bar(quiet=False) as tell:
            for call in calls:
                tell(*call)
            if error:
                raise RuntimeError("stopped")
    except RuntimeError:
        assert error
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n")
    lines = [line.rstrip() for line in plain.splitlines() if line.strip()]
    last = {line.split()[0]: line for line in lines}
    return list(last.values())


def test_bars_end_full(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [("card", 0, 0), ("measuring", 0, 2), ("measuring", 2, 2), ("layers", 30, 0), ("tables", 0, 0)]
    drawn = _drawn(monkeypatch, calls)
    assert [line.split()[0] for line in drawn] == ["card", "measuring", "layers", "tables"]
    assert not any("?" in line for line in drawn), drawn
    assert "2/2" in drawn[1] and re.search(r" 30 ", drawn[2])
    # a bar of a length that is not known is full when its work is done
    assert all(line.count("━") == 40 for line in drawn), drawn


def test_a_bar_that_an_error_stopped_does_not_end_full(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = _drawn(monkeypatch, [("measuring", 1, 2)], error=True)
    assert "1/2" in drawn[-1] and drawn[-1].count("━") < 40


def test_one_prompt_is_one_prompt(tmp_path: Path) -> None:
    assert (counted(1, "prompt"), counted(2, "prompt"), counted(0, "entry", "entries")) == (
        "1 prompt",
        "2 prompts",
        "0 entries",
    )
    path = tmp_path / "set.jsonl"
    path.write_text('{"id": "a", "prompt": "When Mary", "cluster": "c"}\n')
    result = CliRunner().invoke(app, ["validate", str(path)])
    assert "1 prompt in 1 cluster, 0 bad entries" in result.stdout and "1 cluster: enough" in result.stderr

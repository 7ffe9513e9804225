"""`scripts/demo` around a stand-in for the command: an estimate first, the page named once at the end, its status."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "scripts" / "demo"
REPORT = """#!/usr/bin/env bash
echo "measuring" >&2
[ "$1 $2" = "report -o" ] || exit 9
{made}
exit {status}
"""
PAGE = 'mkdir -p "$3"; echo "a headline"; echo "100 % certified"; echo "page: $3/report.html"'


@pytest.fixture
def demo(tmp_path: Path):
    """Runs the script in a tree of its own, where nothing is installed."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(DEMO, tmp_path / "scripts" / "demo")
    (tmp_path / "scripts" / "setup_env").write_text('setup_env() { PATH="$root/bin:$PATH"; }\n')
    (tmp_path / "bin").mkdir()

    def run(made: str, status: int) -> subprocess.CompletedProcess[str]:
        command = tmp_path / "bin" / "attndiag"
        command.write_text(REPORT.format(made=made, status=status))
        command.chmod(0o755)
        return subprocess.run(
            ["bash", tmp_path / "scripts" / "demo", "out"],
            cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


@pytest.mark.parametrize("status", [0, 1])
def test_the_page_is_named_once_at_the_end(demo, tmp_path: Path, status: int) -> None:
    for _ in range(2):
        done = demo(PAGE, status)
        assert done.returncode == status, done.stderr
        lines = done.stdout.splitlines()
        assert lines[:2] == ["a headline", "100 % certified"]
        assert lines[2].startswith("done in ") and lines[3:] == [str(tmp_path / "out" / "report.html")]
        assert done.stdout.count("report.html") == 1
        assert "minutes" in done.stderr.splitlines()[0]


def test_without_a_page_it_says_so_and_fails(demo) -> None:
    for status, left in ((2, 2), (0, 1)):
        done = demo("true", status)
        assert done.returncode == left and done.stdout == ""
        assert "no page was written in out" in done.stderr

"""The Python of the documentation runs, and prints what the page says it prints.

Blocks of one page share a namespace. A block of `text` right behind a block of `python` is its output; with
`ATTNDIAG_KEEP_DOCS=1` the outputs are written anew instead of compared.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if "```python\n" in path.read_text())
_BLOCK = re.compile(r"```python\n(?P<code>.*?)```(?:\n\n```text\n(?P<printed>.*?)```)?", re.DOTALL)


def test_the_pages_with_examples_are_found():
    assert {"tutorial.md", "verdicts.md", "how_to/own_attention.md"} <= set(PAGES)


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_print_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "example"}
    wrong: list[str] = []

    def run(match: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(match["code"], page, "exec"), names)
        got = printed.getvalue()
        if got.rstrip() != (match["printed"] or "").rstrip():
            wrong.append(f"this code\n{match['code']}\nprints\n{got}\nand not\n{match['printed']}")
        return f"```python\n{match['code']}```" + (f"\n\n```text\n{got.rstrip()}\n```" if got.strip() else "")

    renewed = _BLOCK.sub(run, text)
    if os.environ.get("ATTNDIAG_KEEP_DOCS"):
        (DOCS / page).write_text(renewed, encoding="utf-8")
        return
    assert not wrong, "\n\n".join(wrong)

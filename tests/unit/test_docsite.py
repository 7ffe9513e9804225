"""What the documentation site makes from the code: docstrings in another form, the methods page, notebook pages."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
DOCSITE = Path(__file__).parents[2] / "scripts" / "docsite"


@pytest.fixture(scope="module")
def docsite():
    """The modules of scripts/docsite by name; the import path is as before afterwards."""
    path, loaded = list(sys.path), set(sys.modules)
    found = {}
    sys.path.insert(0, str(DOCSITE))
    for name in ("docstrings", "formulas", "notebook_pages", "hooks"):
        spec = importlib.util.spec_from_file_location(f"docsite_{name}", DOCSITE / f"{name}.py")
        found[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[name])
    yield found
    sys.path[:] = path
    for name in ("formulas", "notebook_pages"):
        if name not in loaded:
            sys.modules.pop(name, None)


def test_every_method_has_a_formula_and_a_place_on_the_page(docsite):
    from attndiag.catalog import CATALOG

    assert set(docsite["formulas"].FORMULAS) == set(CATALOG), "scripts/docsite/formulas.py is stale"
    page = docsite["hooks"].methods_page()
    for name, entry in CATALOG.items():
        assert f"### `{name}`" in page
        assert entry.cost in page and entry.source in page


def test_every_public_name_is_on_a_reference_page(docsite, tmp_path):
    docsite["hooks"]._require_all_names(DOCSITE.parents[1] / "docs")
    with pytest.raises(docsite["hooks"].PluginError, match=r"no page of docs/reference/ has .*capture"):
        docsite["hooks"]._require_all_names(tmp_path)


def test_every_command_is_on_the_page(docsite):
    page = docsite["hooks"].cli_page()
    assert "Usage: attndiag report [OPTIONS] [RUN_DIR]" in page
    assert "Usage: attndiag env [OPTIONS]" in page
    assert max(map(len, page.splitlines())) < 130


def test_a_parameter_gets_its_text_below_and_returns_its_type(docsite):
    text = (
        "One line: <T_ij, o_i>, `a<b`.\n\nParameters\n----------\none, two : what they\n    are.\n\n"
        "Returns\n-------\n[row], what there is.\n\nRaises\n------\nShapeError : they do not fit.\n"
    )
    assert docsite["docstrings"].rewritten(text, "Tensor").splitlines() == [
        "One line: &lt;T_ij, o_i>, `a<b`.",
        "",
        "Parameters",
        "----------",
        "one, two",
        "    what they",
        "    are.",
        "",
        "Returns",
        "-------",
        "Tensor",
        "    [row], what there is.",
        "",
        "Raises",
        "------",
        "ShapeError",
        "    they do not fit.",
    ]


def _notebook(path: Path, outputs: list[dict]) -> Path:
    cells = [
        {"cell_type": "markdown", "source": ["# A question\n"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "1 + 1"], "outputs": outputs},
    ]
    path.write_text(json.dumps({"cells": cells}))
    return path


def test_a_notebook_becomes_a_page_with_its_pictures(docsite, tmp_path):
    table = "<div><style>td {}</style>\n<table border='1' class=\"dataframe\"><tr><td>2</td></tr></table></div>"
    outputs = [
        {"output_type": "stream", "text": ["said\n"]},
        {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": "figure"}},
        {"output_type": "execute_result", "data": {"text/html": [table], "text/plain": "2"}},
    ]
    made = docsite["notebook_pages"].notebook_files(_notebook(tmp_path / "q.ipynb", outputs))
    page = made["notebooks/q.md"]
    assert page.startswith("# A question\n\n```python\n1 + 1\n```\n\n```text\nsaid\n```")
    assert "![figure](q_0.png)" in page and made["notebooks/q_0.png"] == b"\x00\x00\x00"
    assert "<style" not in page and "dataframe" not in page and "<td>2</td>" in page


def test_a_notebook_without_outputs_is_refused(docsite, tmp_path):
    with pytest.raises(Exception, match="without its outputs"):
        docsite["notebook_pages"].notebook_files(_notebook(tmp_path / "q.ipynb", []))


def test_what_a_browser_would_fetch_elsewhere_is_found(docsite):
    found = docsite["hooks"]._Loads()
    found.feed(
        '<a href="https://a.example"></a><img src="a.png"><script src="https://b.example/x.js"></script>'
        '<link rel="stylesheet" href="//c.example/x.css">'
    )
    assert found.remote == ["https://b.example/x.js", "//c.example/x.css"]

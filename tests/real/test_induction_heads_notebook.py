"""The notebook about induction heads: its two files agree, and it runs and finds what it says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import jupytext
import nbclient
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "notebooks" / "induction_heads.py"


def test_script_and_notebook_are_a_pair():
    script, notebook = jupytext.read(SCRIPT), jupytext.read(SCRIPT.with_suffix(".ipynb"))
    assert [(c.cell_type, c.source) for c in script.cells] == [(c.cell_type, c.source) for c in notebook.cells]


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(1800)
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the notebook chooses its own
    notebook = jupytext.read(SCRIPT)
    client = nbclient.NotebookClient(
        notebook, timeout=1500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 4
    said = "".join(output.get("text", "") for output in outputs)
    start, end = map(int, re.search(r"steps (\d+) to (\d+)\.", said).groups())
    assert 475 <= start < end <= 650
    assert "6 pairs from 1 template(s)" in said
    if kept := os.environ.get("ATTNDIAG_KEEP_NOTEBOOK"):
        jupytext.write(notebook, kept)

"""The notebook about cross-attention: its two files agree, and it runs and answers with numbers."""

from __future__ import annotations

import os
import re
from pathlib import Path

import jupytext
import nbclient
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "notebooks" / "cross_attention_alignment.py"


def test_script_and_notebook_are_a_pair():
    script, notebook = jupytext.read(SCRIPT), jupytext.read(SCRIPT.with_suffix(".ipynb"))
    assert [(c.cell_type, c.source) for c in script.cells] == [(c.cell_type, c.source) for c in notebook.cells]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = jupytext.read(SCRIPT)
    client = nbclient.NotebookClient(
        notebook, timeout=800, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    said = "".join(output.get("text", "") for output in outputs)
    weights, contributions, edges, replaced = (float(found) for found in re.findall(r"([\d.]+)%", said)[:4])
    assert max(weights, contributions, edges) < 2
    assert replaced < 15
    assert "holds for summed layers and fails head by head" in said
    if kept := os.environ.get("ATTNDIAG_KEEP_NOTEBOOK"):
        jupytext.write(notebook, kept)

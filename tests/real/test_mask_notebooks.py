"""The notebooks about leaking masks and about forms of attention: pairs agree, both run and find what they say."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"


def executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[Any]]:
    """What a notebook printed, and its pictures; kept where ATTNDIAG_KEEP_NOTEBOOKS says."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("IPYTHONDIR", str(folder))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the notebook chooses its own
    notebook = jupytext.read(NOTEBOOKS / f"{name}.py")
    client = nbclient.NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    for cell in notebook.cells:  # remarks of libraries name files of this machine
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    if kept := os.environ.get("ATTNDIAG_KEEP_NOTEBOOKS"):
        jupytext.write(notebook, Path(kept) / f"{name}.ipynb")
    return (
        "".join(output.get("text", "") for output in outputs),
        [output for output in outputs if "image/png" in output.get("data", {})],
    )


@pytest.mark.parametrize("name", ["masks_and_leaks", "attention_variants"])
def test_script_and_notebook_are_a_pair(name: str) -> None:
    script, notebook = (jupytext.read(NOTEBOOKS / f"{name}.{ending}") for ending in ("py", "ipynb"))
    assert [(c.cell_type, c.source) for c in script.cells] == [(c.cell_type, c.source) for c in notebook.cells]
    assert all(cell.outputs for cell in notebook.cells if cell.cell_type == "code" and "print(" in cell.source)
    written = (NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8")
    assert str(ROOT) not in written
    assert not re.search(r"/(?:home|root|tmp|Users)/|site-packages", written)


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(1200)
def test_masks_and_leaks_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, pictures = executed("masks_and_leaks", tmp_path, monkeypatch)
    assert len(pictures) == 1
    leaky, sound = map(float, re.search(r"trains to ([\d.]+) nats.*?sound twin to ([\d.]+)\.\n", said, re.S).groups())
    assert leaky < 0.05 < 1.2 < sound < 1.45
    assert "1 fault of the leaky twin, future_leak in layer 0, and 0 of the sound one" in said
    assert "Of 11 models with and without planted faults it calls 11 rightly" in said
    assert "names the faulty layers in 11." in said
    assert "SmolLM2: 0 findings in" in said


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_attention_variants_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, pictures = executed("attention_variants", tmp_path, monkeypatch)
    assert len(pictures) == 1
    assert "(16 of 16 verified)" in said
    assert "1024 bytes of cache with one key/value head a query head, 512 with two, 256 with one, 192 latent" in said
    assert float(re.search(r"output to ([\d.e-]+) \(without", said).group(1)) < 1e-5

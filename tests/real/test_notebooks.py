"""The notebooks: script and notebook are a pair, each runs, and its numbers say what its last cell says."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"


def _number(pattern: str, said: str) -> float:
    """The number where `pattern` has NUMBER."""
    found = re.search(pattern.replace("NUMBER", r"(\d+(?:\.\d+)?(?:e[-+]\d+)?)"), said)
    assert found, f"{pattern!r} is not in: {said[-800:]}"
    return float(found.group(1))


def _quickstart(said: str) -> None:
    assert "first choice is the target: True" in said
    assert _number(r"remove +effect NUMBER", said) == pytest.approx(2.89, abs=0.03)
    assert _number(r"no such edge moves m by more than NUMBER", said) < 0.1


def _weights(said: str) -> None:
    assert "an effect of 0.009 in head 0, of 0.900 in head 1" in said
    weight, heads, layers = re.search(r"first token has (\d+)%[^,]*, (\d+)%[^,]*, (\d+)%", said).groups()
    assert int(weight) > int(heads) > int(layers)
    sink = _number(r"has an effect in NUMBER% of the cases", said)
    assert sink < 25
    assert _number(r"on another token, it has an effect in NUMBER%", said) > 60


def _checkpoint(said: str) -> None:
    assert said.count("30 of 30 certified") == 1
    assert "30 of 30 calls certified" in said
    assert "UnverifiedCaptureError: model.layers.23.self_attn" in said
    assert "NotApplicableError" in said and "contribution_norm (1, 14, 14) verified: True" in said
    assert "NothingCapturedError: no attention call of MambaForCausalLM" in said
    assert said.count("padded rows are nan: True") == 2
    assert _number(r"between the two sides: NUMBER", said) < 1e-4


def _minilm(said: str) -> None:
    assert 40 < _number(r"get NUMBER% of the weight", said) < 70
    assert _number(r"Mean tau with the effect: weight NUMBER", said) > 0
    assert _number(r"agrees with the first by NUMBER", said) > 0.2


def _compare(said: str) -> None:
    assert (
        "Most alike: weight and head_contribution" in said or "Most alike: head_contribution and contribution" in said
    )
    assert "Nearest to the effects of deletion: " in said
    assert _number(r"on one prompt, \|tau\| of about NUMBER is needed", said) < 0.8


CHECKS: dict[str, tuple[int, Callable[[str], None]]] = {
    "quickstart": (1, _quickstart),
    "weights_are_not_importance": (2, _weights),
    "your_checkpoint": (0, _checkpoint),
    "encoder_minilm": (2, _minilm),
    "compare_methods": (2, _compare),
}


def _outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def _said(outputs: list[Any]) -> str:
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.parametrize("name", CHECKS)
def test_script_and_notebook_are_a_pair(name):
    script, notebook = (jupytext.read(NOTEBOOKS / f"{name}.{kind}") for kind in ("py", "ipynb"))
    assert [(c.cell_type, c.source) for c in script.cells] == [(c.cell_type, c.source) for c in notebook.cells]


@pytest.mark.parametrize("name", CHECKS)
def test_what_was_committed_is_what_a_run_says_and_names_no_machine(name):
    notebook = jupytext.read(NOTEBOOKS / f"{name}.ipynb")
    pictures, check = CHECKS[name]
    outputs = _outputs(notebook)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == pictures
    check(_said(outputs))
    text = _said(outputs) + "".join(str(output.get("data", {}).get("text/plain", "")) for output in outputs)
    assert not re.search(r"(^|[\s'\"=])/(home|root|tmp|work|usr|Users)/|site-packages|0x[0-9a-f]{6}", text)


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CHECKS)
def test_the_notebook_runs(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:IProgress not found")  # progress bars are not what is looked at
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the notebook chooses its own
    notebook = jupytext.read(NOTEBOOKS / f"{name}.py")
    client = nbclient.NotebookClient(
        notebook, timeout=1100, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = _outputs(notebook)
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
    pictures, check = CHECKS[name]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == pictures
    check(_said(outputs))
    if os.environ.get("ATTNDIAG_KEEP_NOTEBOOKS"):
        notebook.metadata.pop("language_info", None)
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
        jupytext.write(notebook, NOTEBOOKS / f"{name}.ipynb")

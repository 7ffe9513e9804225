"""Models that cannot be read as they are: each is refused with what to do, and nothing of theirs runs unasked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import attndiag
from attndiag.errors import ModelLoadError, NothingCapturedError, ShapeError, UnsupportedModelError
from attndiag.hooks.adapters import Adapter

CODE = """
from pathlib import Path

Path(__file__).with_name("it_ran").touch()
Path({marker!r}).touch()

from transformers import LlamaConfig, LlamaForCausalLM


class StrangeConfig(LlamaConfig):
    model_type = "strange"


class StrangeModel(LlamaForCausalLM):
    config_class = StrangeConfig
"""


@pytest.fixture
def strange(tiny_folder, tmp_path) -> tuple[Path, Path]:
    """A checkpoint that brings its own code, and the file that the code leaves when it runs."""
    folder, marker = tmp_path / "strange", tmp_path / "it_ran"
    folder.mkdir()
    for file in tiny_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "strange",
        "architectures": ["StrangeModel"],
        "auto_map": {"AutoConfig": "strange.StrangeConfig", "AutoModelForCausalLM": "strange.StrangeModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "strange.py").write_text(CODE.format(marker=str(marker)))
    return folder, marker


def test_remote_code_is_refused_unless_allowed(strange, tmp_path, monkeypatch):
    folder, marker = strange
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(ModelLoadError, match=r"code of its own, which is not run unasked.*trust_remote_code=True"):
        attndiag.load(str(folder), device="cpu")
    assert not marker.exists()  # not even imported
    lm = attndiag.load(str(folder), device="cpu", trust_remote_code=True)
    assert marker.exists()
    assert type(lm.model).__name__ == "StrangeModel"
    with torch.no_grad(), attndiag.capture(lm) as captured:
        lm.forward("When Mary")
    for call in captured.calls:
        call.certificate.check()


class Mean(nn.Module):
    """Mixes tokens without any weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1, keepdim=True).expand_as(x)


def test_modules_that_are_not_attention():
    model = nn.Sequential(nn.Linear(4, 4), Mean())
    x = torch.randn(2, 5, 4)
    with (
        pytest.raises(NothingCapturedError, match="no attention call of Sequential was seen"),
        torch.no_grad(),
        attndiag.capture(model),
    ):
        model(x)
    adapter = Adapter(weights="output", values="argument:x", output="output", kind="self")
    with (
        pytest.raises(ShapeError, match="do not fit"),
        torch.no_grad(),
        attndiag.capture(model, modules={"1": adapter}),
    ):
        model(x)
    # three true statements make even a mean an attention: uniform weights
    uniform = Adapter(
        weights=lambda _run: torch.full((2, 5, 5), 0.2), values="argument:x", output="output", kind="self"
    )
    with torch.no_grad(), attndiag.capture(model, modules={"1": uniform}) as captured:
        model(x)
    captured.calls[0].certificate.check()


class NeedsMore(nn.Module):
    """Reads ids and, without a default, something else."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: torch.Tensor, speaker: torch.Tensor) -> torch.Tensor:
        return self.embed(input_ids) + speaker


def test_a_model_that_needs_another_input_names_it():
    for ask in (attndiag.card, attndiag.audit, attndiag.implied_maps):
        with pytest.raises(UnsupportedModelError, match=r"takes input_ids, speaker.*inputs="):
            ask(NeedsMore().eval())

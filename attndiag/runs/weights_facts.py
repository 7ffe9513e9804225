"""What a weights run is: its settings, its id, and what its row says before the work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt
from attndiag.runs.call_record import CallSettings
from attndiag.runs.keys import digest, model_identity, package_versions, plain, plain_prompt, with_ids

METHODS = ("weight", "head_contribution", "contribution")


@dataclass(frozen=True)
class RunSettings:
    """What a run measures.

    Parameters
    ----------
    calls : settings of the measures of one attention call.
    strongest : how many of the strongest disagreements of each direction and kind of key are kept a prompt.
    seed : written down; nothing is drawn here.
    """

    calls: CallSettings = field(default_factory=CallSettings)
    strongest: int = 5
    seed: int = 0


def run_facts(
    lm: LoadedModel,
    prompts: Sequence[Prompt],
    settings: RunSettings,
    prompt_file: str | Path | None,
    n_skipped: int,
) -> dict[str, Any]:
    """Columns of `runs` that are known before the work. The id follows from what is measured, on what, with what."""
    info, params, versions = lm.info, asdict(settings), package_versions()
    identity = model_identity(lm)
    return {
        "run": _identity(identity, prompts, settings),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "status": "unfinished",
        "model": info.name,
        "source": info.source,
        "location": info.location,
        "revision": info.revision,
        "weights": identity["weights"],
        "architecture": info.architecture,
        "parameters": info.n_parameters,
        "dtype": info.dtype,
        "device": info.device,
        "backend": settings.calls.backend,
        "tokenizer_hash": info.tokenizer_hash,
        "adds_bos": info.adds_bos,
        "prompt_file": None if prompt_file is None else str(prompt_file),
        "prompt_hash": _prompt_hash(prompts),
        "n_prompts": len(prompts),
        "n_skipped": n_skipped,
        "methods": ", ".join(METHODS),
        "params": json.dumps(params, sort_keys=True),
        "seed": settings.seed,
        "versions": json.dumps(versions, sort_keys=True),
        "threads": torch.get_num_threads(),
        "notes": "; ".join(info.notes) or None,
    }


def run_identity(lm: LoadedModel, prompts: Sequence[Prompt], settings: RunSettings) -> str:
    """The id of a run: what is measured, on what, with which weights. Device, batching, place and time have no part."""
    return _identity(model_identity(lm), prompts, settings)


def _identity(model: dict[str, Any], prompts: Sequence[Prompt], settings: RunSettings) -> str:
    return digest(
        {
            "model": {name: value for name, value in model.items() if name != "name"},
            "prompts": _prompt_hash(with_ids(prompts)),
            "methods": METHODS,
            "params": plain(asdict(settings)),
            "version": package_versions()["attndiag"],
        }
    )[:16]


def _prompt_hash(prompts: Sequence[Prompt]) -> str:
    return digest([plain_prompt(prompt) for prompt in prompts])[:16]

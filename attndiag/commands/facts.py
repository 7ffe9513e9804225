"""Commands that run no model: `env`, `models`, `validate`."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from attndiag.commands import options
from attndiag.commands.console import FINE, SOME_FAILED, counted, data, data_json, guarded, remark


@guarded
def env(json: options.Json = False) -> None:
    """Versions, devices, memory and caches of this machine.

    \b
    Examples:
      attndiag env
      attndiag env --json
    """
    import torch

    from attndiag.core.dispatch import available_bytes
    from attndiag.models.fetch import cache_dir
    from attndiag.runs.keys import package_versions

    devices = ["cpu"]
    devices += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    free = available_bytes(torch.device("cpu"))
    facts: dict[str, Any] = {
        "versions": package_versions(),
        "devices": devices,
        "cpu threads": torch.get_num_threads(),
        "free memory": None if free is None else f"{free / 1e9:.1f} GB",
        "model cache": str(cache_dir()),
        "hub": "off (HF_HUB_OFFLINE)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else "on",
        "chromium": shutil.which("chromium") or shutil.which("chromium-browser"),
    }
    if json:
        data_json(facts)
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {number}" for key, number in value.items())
        elif isinstance(value, list):
            value = ", ".join(value)
        data(f"{name:<13} {value if value is not None else 'not found'}")


@guarded
def models(json: options.Json = False) -> None:
    """Models with a short name, and whether they are here.

    Any hub id, folder or .gguf file works as well: attndiag report -m gpt2

    \b
    Examples:
      attndiag models
      attndiag models --json
    """
    from attndiag.models.fetch import damage, entry_path
    from attndiag.models.registry import SHORT_NAMES, PackagedModel

    rows = []
    for name, model in SHORT_NAMES.items():
        if isinstance(model, PackagedModel):
            entry = entry_path(model)
            state = "not here yet" if not entry.is_dir() else "damaged" if damage(entry) else "ready"
            source = f"package wheel {model.project} {model.version}, {model.megabytes} MB"
        else:
            state, source = "asked for at use", f"hub {model.repo}"
        row = {"name": name, "what": model.title, "from": source, "licence": model.licence, "state": state}
        rows.append(row)
    if json:
        data_json(rows)
        return
    for row in rows:
        data(f"{row['name']:<9} {row['what']}")
        data(f"{'':<9} {row['from']}; {row['licence']}; {row['state']}")


@guarded
def validate(
    file: Annotated[Path, typer.Argument(help="A prompt set: .jsonl, .txt, .csv or .parquet.", show_default=False)],
    json: options.Json = False,
) -> None:
    """Check a prompt file, without a model.

    Names every entry that cannot be used, with its line and what is wrong.

    Exit status: 0 every entry can be used; 1 some cannot; 2 the file cannot be read.

    \b
    Examples:
      attndiag validate my.jsonl
      attndiag validate my.csv --json
    """
    from attndiag.runs.prompt_files import scan_prompts

    found = scan_prompts(file)
    prompts = found.prompts
    clusters = Counter(prompt.cluster or "(none)" for prompt in prompts)
    facts: dict[str, Any] = {
        "file": str(file),
        "prompts": len(prompts),
        "bad": [{"line": entry.line, "reason": entry.reason} for entry in found.bad],
        "clusters": dict(clusters),
        "with_target": sum(prompt.target is not None for prompt in prompts),
        "with_foil": sum(prompt.foil is not None for prompt in prompts),
        "with_pair": sum(prompt.pair is not None for prompt in prompts),
    }
    if json:
        data_json(facts)
    else:
        bad = counted(len(found.bad), "bad entry", "bad entries")
        data(f"{file}: {counted(len(prompts), 'prompt')} in {counted(len(clusters), 'cluster')}, {bad}")
        counts = (f"{facts[f'with_{name}']} with {name}" for name in ("target", "foil", "pair"))
        data(", ".join(counts))
        for entry in found.bad:
            data(f"{file}:{entry.line}: {entry.reason}")
    if len(clusters) < 12 and prompts:
        remark(f"{counted(len(clusters), 'cluster')}: enough to describe; statistics over clusters need 12 or more")
    raise typer.Exit(SOME_FAILED if found.bad else FINE)

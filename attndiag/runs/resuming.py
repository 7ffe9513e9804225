"""Going on with a weights run that was stopped: which prompts are there, whole and of this very run.

The shards of a prompt count when every table that its row promises can be read, and when every row of them names this
run and this prompt. A damaged one is measured again; one of another run is refused by name and not touched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attndiag.errors import RunFolderError
from attndiag.prompts import Prompt
from attndiag.runs.folder import LAST_TABLE, MARKER, RunFolder, explained, read_parquet
from attndiag.runs.plan import plan_differences
from attndiag.runs.schemas import TABLES

# facts of the marker that make a run another one; times and places do not
_DECIDE = (
    "model",
    "revision",
    "weights",
    "architecture",
    "dtype",
    "tokenizer_hash",
    "prompt_hash",
    "n_prompts",
    "methods",
    "seed",
)
# tables of a prompt on which attention was measured
_MEASURED = ("tokens", "heads", "scores", "checks", "disagreements")


def find_run(output: str | Path, facts: Mapping[str, Any]) -> RunFolder | None:
    """The run that is in a folder, when it is the one that is asked for; None for a folder without a run.

    Parameters
    ----------
    facts : columns of `runs` that are known before the work; `run` among them.

    Raises
    ------
    RunFolderError : another run is there; the text says in what it differs.
    """
    folder = Path(output)
    if not (folder / MARKER).is_file():
        return None
    there = RunFolder.open(folder)
    if there.run_id == facts["run"]:
        return there
    raise RunFolderError(
        f"{folder} already holds a run; render it with `attndiag report {folder}`, give another folder, or replace it "
        f"with overwrite=True (--overwrite). It differs: {'; '.join(_differences(there.about.get('runs', {}), facts))}"
    )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found = plan_differences({k: old.get(k) for k in _DECIDE}, {k: new.get(k) for k in _DECIDE})
    params = [json.loads(one.get("params") or "{}") for one in (old, new)]
    found += plan_differences(params[0], params[1])
    versions = [json.loads(one.get("versions") or "{}").get("attndiag") for one in (old, new)]
    if versions[0] != versions[1]:
        found.append(f"version of attndiag: {versions[0]} there, {versions[1]} now")
    # the hash says no more than that
    return [text if not text.startswith("prompt_hash") else "the prompts" for text in found] or ["its id"]


def whole_prompts(
    folder: RunFolder, prompts: Sequence[Prompt], say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Key of the shard -> row of `prompts`, for every prompt that is done.

    Raises
    ------
    RunFolderError : a shard of another run lies in the place of one of this run.
    """
    found: dict[str, dict[str, Any]] = {}
    again: list[str] = []
    for index, prompt in enumerate(prompts):
        key = f"{index:06d}"
        there = [table for table in TABLES if folder.shard(table, key).is_file()]
        if not there:
            continue
        try:
            row = _whole(folder, key, str(prompt.id), there)
        except DamagedShardError as error:
            say(f"measuring again: {error}")
            again.append(key)
            continue
        if row is None:
            again.append(key)
        else:
            found[key] = row
    # once nothing was refused: what is measured again must find none of its old shards
    for key in again:
        for table in TABLES:
            path = folder.shard(table, key)
            with explained(path):
                path.unlink(missing_ok=True)
    if found:
        say(f"{len(found)} of {len(prompts)} prompts are in {folder.path} already")
    return found


class DamagedShardError(RunFolderError):
    """A shard cannot be read or lacks something."""


def _whole(folder: RunFolder, key: str, prompt: str, there: Sequence[str]) -> dict[str, Any] | None:
    """The row of `prompts`; None where the prompt was never done, or lacked memory. Every shard is read."""
    damage: DamagedShardError | None = None
    rows: list[dict[str, Any]] = []
    for table in there:
        try:
            read = _own_rows(folder, table, key, prompt)
        except DamagedShardError as error:
            # the others may be foreign, which is refused
            damage = damage or error
            continue
        rows = read if table == LAST_TABLE else rows
    if damage is not None:
        raise damage
    if LAST_TABLE not in there:
        return None
    if len(rows) != 1:
        raise DamagedShardError(f"{folder.shard(LAST_TABLE, key)} has {len(rows)} rows; expected one")
    for table in (*(_MEASURED if rows[0]["n_calls"] else ()), "timings"):
        if table not in there:
            raise DamagedShardError(f"{folder.shard(table, key)} is gone")
    return None if rows[0].get("transient") else rows[0]


def _own_rows(folder: RunFolder, table: str, key: str, prompt: str) -> list[dict[str, Any]]:
    path = folder.shard(table, key)
    try:
        found = read_parquet(path)
        names = found.select(["run", "prompt"]).to_pydict()
    except (RunFolderError, KeyError) as error:
        raise DamagedShardError(str(error)) from error
    runs, prompts = set(names["run"]), set(names["prompt"])
    if not runs <= {folder.run_id} or not prompts <= {prompt}:
        raise RunFolderError(
            f"{path} holds prompt {sorted(prompts)} of run {sorted(runs)}, not {prompt!r} of {folder.run_id}; move it "
            "away, or give another folder. It was not touched"
        )
    return found.to_pylist() if table == LAST_TABLE else []

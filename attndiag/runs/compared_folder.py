"""The folder of a compared run: which plan it holds, one result a prompt, and nothing lost or taken for something else.

    OUT/
      run.json                       model, plan, prompts with their keys, whether it is finished
      results/<key>.parquet          one whole result a prompt; kept, so that the run can go on, grow and be read again
      results/model-<key>.parquet    what is measured once for the model
      tables/<table>.parquet, .csv   made anew from the results; `columns.csv` says what is in them

A result is found by its key alone: whatever the order of the prompts, and whichever process made it. A broken result is
measured again; one that belongs to another piece of work is refused by name and never touched.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attndiag.errors import RunFolderError
from attndiag.runs.clearing import RENDERED, RESULTS, clear_run, remove
from attndiag.runs.folder import (
    COMPARISON,
    MARKER,
    RunFolder,
    explained,
    kind_of,
    load_marker,
    locked,
    remove_leftovers,
    write_atomically,
)
from attndiag.runs.plan import plan_differences
from attndiag.runs.result_files import BrokenResultError, read_result, write_result

SCHEMA = 2


@dataclass(frozen=True)
class Identity:
    """What a compared run is: two runs with equal identities share their results.

    Parameters
    ----------
    model, plan : as plain values.
    version : of attndiag.
    """

    model: Mapping[str, Any]
    plan: Mapping[str, Any]
    version: str

    def differences(self, marker: Mapping[str, Any]) -> list[str]:
        """What is different in a folder's `run.json`; the name of the model is none."""
        now = {"model": self.model, "plan": self.plan, "version": self.version}
        there = {name: marker.get(name) for name in now}
        found = plan_differences(there, now)
        return [text.removeprefix("plan.") for text in found if not text.startswith("model.name:")]


class ComparedFolder:
    """Results of one compared run. `ComparedFolder.begin` opens it for writing, `ComparedFolder.open` for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # ---------------------------------------------------------------------------------------------- opening
    @classmethod
    @contextlib.contextmanager
    def begin(cls, path: str | Path, identity: Identity, *, overwrite: bool = False) -> Iterator[ComparedFolder]:
        """Hold the folder for writing: a new run, or one with the same identity that goes on.

        Raises
        ------
        RunFolderError : it cannot be written, another run is writing to it, it holds something else, or a run that
            differs; the text says in what.
        """
        folder = Path(path)
        RunFolder.require_place(folder)
        with locked(folder):
            found = cls(folder)
            remove_leftovers(folder)
            if (folder / MARKER).is_file():
                _require_same(folder, identity, overwrite)
            if overwrite or not (folder / MARKER).is_file():
                # from now on it is this plan's folder, whatever happens next
                found.mark({"run": "", **asdict(identity), "prompts": [], "facts": {}}, finished=False)
            yield found

    @classmethod
    def open(cls, path: str | Path) -> ComparedFolder:
        """A run that is there, finished or not.

        Raises
        ------
        RunFolderError : no compared run in `path`, or one of another version.
        """
        folder = Path(path)
        kind = kind_of(folder) if folder.is_dir() else None
        if kind != COMPARISON:
            what = f"a {kind} run" if kind is not None else "no run"
            raise RunFolderError(f"{folder} holds {what}; give the output folder of `attndiag run`")
        schema = load_marker(folder / MARKER).get("schema")
        if schema != SCHEMA:
            raise RunFolderError(
                f"{folder / MARKER} has schema {schema!r}, this version reads {SCHEMA}; run it into another folder"
            )
        return cls(folder)

    @property
    def about(self) -> dict[str, Any]:
        """What `run.json` says."""
        return load_marker(self.path / MARKER)

    # ---------------------------------------------------------------------------------------------- writing
    def mark(self, about: Mapping[str, Any], *, finished: bool) -> None:
        """Write `run.json`."""
        facts = {**about, "kind": COMPARISON, "schema": SCHEMA, "finished": finished}
        text = json.dumps(facts, indent=2, ensure_ascii=False, default=str) + "\n"
        self.write(MARKER, lambda file: file.write(text.encode("utf-8", errors="replace")))

    def write(self, relative: str, fill: Callable[[Any], object]) -> Path:
        """A file inside the folder, whole or not at all."""
        path = self.path / relative
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, fill)
        return path

    def drop_rendered(self) -> None:
        """Remove page and figures, before the tables become others than those that they show."""
        remove(self.path, RENDERED)

    def keep(self, name: str, key: str, record: Any) -> None:
        """Write one result.

        Raises
        ------
        RunFolderError : disk full or folder not writable; earlier results stay.
        """
        write_result(self._path(name), key, record)

    # ---------------------------------------------------------------------------------------------- reading
    def find(self, name: str, key: str) -> tuple[Any | None, str]:
        """The result, or None with the reason: empty where there is none yet, else why it cannot be used.

        Raises
        ------
        ForeignResultError : its place is taken by the result of another piece of work, which is not touched.
        """
        path = self._path(name)
        if not path.exists():
            return None, ""
        try:
            return read_result(path, key), ""
        except BrokenResultError as error:
            return None, str(error)

    def strangers(self, names: Sequence[str]) -> list[str]:
        """Files among the results that belong to none of `names`: of other prompts, or of nobody here."""
        mine = {f"{name}.parquet" for name in names}
        folder = self.path / RESULTS
        found = (thing.name for thing in folder.iterdir()) if folder.is_dir() else ()
        return sorted(name for name in found if name not in mine)

    def _path(self, name: str) -> Path:
        return self.path / RESULTS / f"{name}.parquet"


def _require_same(folder: Path, identity: Identity, overwrite: bool) -> None:
    marker = load_marker(folder / MARKER)
    kind = marker.get("kind", "weights")
    if overwrite:
        clear_run(folder, marker)
        return
    ways = "go on with the old plan, give another folder, or replace the run with overwrite=True (--overwrite)"
    if kind != COMPARISON:
        raise RunFolderError(f"{folder} holds a {kind} run, made by `attndiag report`; {ways}")
    if marker.get("schema") != SCHEMA:
        raise RunFolderError(f"{folder} holds a run of another version (schema {marker.get('schema')!r}); {ways}")
    differ = identity.differences(marker)
    if differ:
        raise RunFolderError(f"{folder} holds a run with another plan: {'; '.join(differ)}. To resolve it, {ways}")

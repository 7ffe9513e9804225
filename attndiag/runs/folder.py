"""A run folder: what was computed, written so that nothing already there is ever lost or half-written.

    OUT/
      run.json                 what this is, its id, whether it is finished
      shards/<table>/<key>.parquet   while the run goes on: one per table and prompt
      tables/<table>.parquet   once it is finished: the shards in the order of their keys
      tables/<table>.csv

Every file is written under a temporary name and renamed, so a reader sees the old file or the whole new one. The shard
of `prompts` is written last: a prompt counts as done when that one is there. A full disk or a folder that cannot be
written raises `RunFolderError`; the shards that are there stay, and `read` works on them as on a finished run.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import gzip
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from attndiag.errors import RunFolderError
from attndiag.runs.measures import MEASURES
from attndiag.runs.schemas import SCHEMA_VERSION, TABLES, describe_columns, require_table

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

MARKER = "run.json"
LOCK = ".attndiag.lock"
# kinds of runs, as `run.json` names them
WEIGHTS, COMPARISON = "weights", "comparison"
# the shard that says that a prompt is done
LAST_TABLE = "prompts"
# larger tables are exported as .csv.gz, which pandas and R read like .csv
PLAIN_CSV_ROWS = 100_000


@dataclass(frozen=True, eq=False)
class RunFolder:
    """A folder that holds one run. Made by `RunFolder.create` or `RunFolder.open`."""

    path: Path
    run_id: str

    # ------------------------------------------------------------------ making and opening
    @classmethod
    def create(cls, path: str | Path, run_id: str, *, about: Mapping[str, Any], overwrite: bool = False) -> RunFolder:
        """Start a run in a new or empty folder.

        Parameters
        ----------
        path : made with its parents.
        run_id : joins the tables.
        about : facts that `run.json` keeps beside the id.
        overwrite : remove the run that is there. A folder that holds anything but a run is never emptied.

        Raises
        ------
        RunFolderError : the folder cannot be written, holds a run (without `overwrite`), or holds something else.
        """
        folder = Path(path)
        cls.require_place(folder)
        with explained(folder):
            if occupied(folder):
                _clear(folder, overwrite)
            run = cls(folder, run_id)
            run._mark(about, finished=False)
        return run

    @staticmethod
    def require_place(path: str | Path) -> None:
        """Raise `RunFolderError` where no run can go: a file, a folder with other things in it, no right to write.

        Cheap, so that nobody loads a model first. The folder is made.
        """
        folder = Path(path)
        with explained(folder):
            if folder.exists() and not folder.is_dir():
                raise RunFolderError(f"{folder} is a file; give a folder for the output")
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / MARKER).is_file() and occupied(folder):
                raise RunFolderError(f"{folder} is not empty and holds no run; give a new or empty folder")
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"attndiag")

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open a run that is there.

        Raises
        ------
        RunFolderError : there is no run in `path`, or another version of attndiag wrote it.
        """
        folder = Path(path)
        marker = folder / MARKER
        if not folder.is_dir():
            raise RunFolderError(f"there is no folder {folder}; make a run first: attndiag report -o {folder}")
        if not marker.is_file():
            raise RunFolderError(f"{folder} holds no run ({MARKER} is missing); give the output folder of one")
        facts = load_marker(marker)
        if facts.get("kind", WEIGHTS) != WEIGHTS:
            raise RunFolderError(
                f"{folder} holds a {facts['kind']} run, made by `attndiag run`; read it with read_compared_run"
            )
        if facts.get("schema") != SCHEMA_VERSION:
            raise RunFolderError(
                f"{marker} has table schema {facts.get('schema')!r}, this version reads {SCHEMA_VERSION}; "
                "run it again, or read it with the version that wrote it"
            )
        return cls(folder, str(facts["run"]))

    @property
    def about(self) -> dict[str, Any]:
        """What `run.json` says."""
        return load_marker(self.path / MARKER)

    @property
    def finished(self) -> bool:
        """True once every prompt was worked through and the tables were merged."""
        return bool(self.about.get("finished"))

    # ------------------------------------------------------------------ writing
    def write_shard(self, key: str, tables: Mapping[str, pa.Table]) -> None:
        """Keep what one piece of work gave; `key` sorts like the work (a number with leading zeros).

        Raises
        ------
        RunFolderError : disk full or folder not writable; earlier shards stay.
        """
        # the marker of completeness goes last
        for name in sorted(tables, key=lambda name: name == LAST_TABLE):
            require_table(name)
            self.write_table(self.shard(name, key), tables[name])

    def shard(self, table: str, key: str) -> Path:
        """Where a table of one piece of work lies while the run goes on."""
        return self.path / "shards" / table / f"{key}.parquet"

    def note(self, facts: Mapping[str, Any]) -> None:
        """Add facts to the row of the run in `run.json`."""
        about = dict(self.about)
        self._mark({**about, "runs": {**about.get("runs", {}), **facts}}, finished=self.finished)

    def finish(self, tables: Mapping[str, pa.Table]) -> None:
        """Merge the shards, add the tables that belong to the whole run, and mark the run as finished.

        Every table of the schema gets a Parquet and a CSV file, empty ones too. The shards are removed once everything
        is in place.
        """
        self.merge_shards(tables)
        about = dict(self.about)
        if "runs" in tables and tables["runs"].num_rows:
            about["runs"] = about.get("runs", {}) | {"status": tables["runs"].column("status")[0].as_py()}
        self._mark(about, finished=True)
        shards = self.path / "shards"
        with explained(shards):
            if shards.is_dir():
                shutil.rmtree(shards)

    def merge_shards(self, tables: Mapping[str, pa.Table] | None = None) -> None:
        """Write `tables/` from the shards that are there and from `tables`, which belong to the whole run.

        In an unfinished run the shards stay the source: the next call merges again.
        """
        given = tables or {}
        merged = {name: given[name] if name in given else self._from_shards(name) for name in TABLES}
        for name, table in merged.items():
            self.write_table(self._merged(name), table)
        self.export_csv(merged)

    def export_csv(self, merged: Mapping[str, pa.Table]) -> None:
        """Each table as CSV (gzipped above 100,000 rows); `columns.csv` and `measures.csv` say what is in them."""
        for name, table in merged.items():
            plain, packed = (self.path / "tables" / f"{name}.csv{end}" for end in ("", ".gz"))
            wanted, other = (plain, packed) if table.num_rows <= PLAIN_CSV_ROWS else (packed, plain)
            self._write(wanted, lambda file, table=table, path=wanted: write_csv(file, table, path.suffix == ".gz"))
            with explained(other):
                other.unlink(missing_ok=True)
        self.write_rows("tables/columns.csv", list(describe_columns()))
        self.write_rows("tables/measures.csv", [asdict(measure) for measure in MEASURES.values()])

    def write_rows(self, relative: str, rows: list[dict[str, str]]) -> Path:
        """A small CSV file from dictionaries that share their keys."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return self.write_text(relative, text.getvalue())

    def write_text(self, relative: str, text: str) -> Path:
        """A UTF-8 file inside the folder. Lone surrogates, which no file can hold, become question marks."""
        return self.write_bytes(relative, text.encode("utf-8", errors="replace"))

    def write_bytes(self, relative: str, data: bytes) -> Path:
        """A file inside the folder."""
        path = self.path / relative
        self._write(path, lambda file: file.write(data))
        return path

    def write_table(self, path: Path, table: pa.Table) -> None:
        """A Parquet file (zstd)."""
        import pyarrow.parquet as pq

        self._write(path, lambda file: pq.write_table(table, file, compression="zstd"))

    def _write(self, path: Path, fill: Callable[[IO[bytes]], object]) -> None:
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, fill)

    def _mark(self, about: Mapping[str, Any], *, finished: bool) -> None:
        facts = {**about, "run": self.run_id, "schema": SCHEMA_VERSION, "finished": finished}
        self.write_text(MARKER, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")

    # ------------------------------------------------------------------ reading
    def read(self, table: str) -> pd.DataFrame:
        """A table as a pandas frame, from the merged file or, in an unfinished run, from the shards.

        Raises
        ------
        RunFolderError : a file is damaged.
        ShapeError : there is no table of that name.
        """
        return self.arrow(table).to_pandas()

    def arrow(self, table: str) -> pa.Table:
        """The same as a pyarrow table."""
        require_table(table)
        return read_parquet(self._merged(table)) if self.finished else self._from_shards(table)

    def done(self) -> list[str]:
        """Keys of the pieces of work that are completely written."""
        return [path.stem for path in self._shards(LAST_TABLE)]

    def files(self) -> list[Path]:
        """Every file of the run, in order; temporary ones left out."""
        found = (path for path in self.path.rglob("*") if path.is_file() and not path.name.endswith(".tmp"))
        return sorted(path.relative_to(self.path) for path in found)

    def _merged(self, table: str) -> Path:
        return self.path / "tables" / f"{table}.parquet"

    def _shards(self, table: str) -> list[Path]:
        return sorted((self.path / "shards" / table).glob("*.parquet"))

    def _from_shards(self, table: str) -> pa.Table:
        import pyarrow as pa

        done = set(self.done())
        whole = [read_parquet(path) for path in self._shards(table) if path.stem in done]
        return pa.concat_tables(whole) if whole else TABLES[table].empty()


def write_atomically(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Let `fill` write to a temporary file beside `path`, flush it to the disk, and rename it over `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        # the first error is the one to report, not one about a leftover on a broken disk
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_csv(file: IO[bytes], table: pa.Table, packed: bool) -> None:
    """A table as CSV, gzipped with `packed`."""
    import pyarrow.csv as pa_csv

    if not packed:
        pa_csv.write_csv(table, file)
        return
    # no time stamp inside, so that equal tables make equal files
    with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=5, mtime=0) as stream:
        pa_csv.write_csv(table, stream)


def read_parquet(path: Path) -> pa.Table:
    """A Parquet file, or `RunFolderError` naming the one that is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise RunFolderError(f"{path} is damaged or cannot be read: {str(error).splitlines()[0]}") from error


def load_marker(marker: Path) -> dict[str, Any]:
    try:
        facts = json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{marker} cannot be read: {error}") from error
    if not isinstance(facts, dict) or "run" not in facts:
        raise RunFolderError(f"{marker} is not what a run writes; expected an object with the run's id")
    return facts


def kind_of(path: str | Path) -> str | None:
    """`"weights"` or `"comparison"`: what kind of run a folder holds; None for a folder without a run.

    Raises
    ------
    RunFolderError : its `run.json` cannot be read.
    """
    marker = Path(path) / MARKER
    return str(load_marker(marker).get("kind", WEIGHTS)) if marker.is_file() else None


def occupied(folder: Path) -> bool:
    """True where a folder holds anything but a lock and what a killed run left half-written."""
    return any(thing.name != LOCK and not is_leftover(thing) for thing in folder.iterdir())


def is_leftover(path: Path) -> bool:
    """True for a temporary file of `write_atomically`."""
    return re.fullmatch(r"\..+\.\d+\.tmp", path.name) is not None


def remove_leftovers(folder: Path) -> None:
    """Remove what killed runs left half-written. Only with the folder held: nobody else writes to it then."""
    patterns = (".*.tmp", *(f"{name}/.*.tmp" for name in ("tables", "results", "figures", "summary", "shards/*")))
    for thing in [found for pattern in patterns for found in folder.glob(pattern)]:
        if is_leftover(thing):
            with explained(thing):
                thing.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder, so that no second run writes to it. A killed run's lock is free again at once.

    Raises
    ------
    RunFolderError : another run holds it.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK, timeout=0)
    with explained(folder):
        try:
            lock.acquire()
        except Timeout as error:
            raise RunFolderError(
                f"another run is writing to {folder}; wait until it is done, or give another folder"
            ) from error
    try:
        yield
    finally:
        lock.release()


def _clear(folder: Path, overwrite: bool) -> None:
    """Remove the run in `folder`, or say why not."""
    if not overwrite:
        raise RunFolderError(
            f"{folder} already holds a run; render it with `attndiag report {folder}`, give another folder, "
            "or replace it with overwrite=True (--overwrite)"
        )
    # results are read to know whose they are, by a module that writes through this one
    from attndiag.runs.clearing import clear_run

    clear_run(folder, load_marker(folder / MARKER))


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what the system says into what a person can do."""
    try:
        yield
    except OSError as error:
        remedies = {
            errno.ENOSPC: "the disk is full; free some space, or give another folder",
            errno.EDQUOT: "your disk quota is used up; free some space, or give another folder",
            errno.EACCES: "you may not write there; give another folder",
            errno.EPERM: "you may not write there; give another folder",
            errno.EROFS: "that file system is read-only; give another folder",
            errno.ENOTDIR: "part of that path is a file; give another folder",
            errno.EEXIST: "part of that path is a file; give another folder",
        }
        why = remedies.get(error.errno or 0, str(error))
        raise RunFolderError(f"{path} cannot be written: {why}. What was written before stays") from error

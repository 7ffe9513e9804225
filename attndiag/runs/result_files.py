"""One result, one file: plain records and arrays in a Parquet file that can be read back without loss, or not at all.

A file holds a row for the tree of the record (JSON) and one for each array (dtype, shape, bytes), compressed with zstd.
Beside them stand the key of the work and a checksum over everything, so a file that was cut off, changed or put in the
place of another is told from a whole one. There is no pickle: only the record types listed in `RECORDS` come back, with
no field that they do not have and none missing that they need.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attndiag.comparison.axis import PromptTokens
from attndiag.comparison.edge_measuring import EdgeResult
from attndiag.comparison.methods import TokenScores
from attndiag.comparison.one_prompt import PromptResult
from attndiag.errors import RunFolderError
from attndiag.runs.folder import explained, write_atomically
from attndiag.stats.nulls import Null
from attndiag.stats.two_methods import Agreement

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "attndiag result 1"
_TREE = "tree"


class BrokenResultError(RunFolderError):
    """A file is not a whole result: cut off, changed, or of records that this version does not have."""


class ForeignResultError(RunFolderError):
    """A file is a whole result, but of another piece of work than its place says."""


@dataclasses.dataclass(frozen=True)
class Check:
    """A self-check and how it came out. `name` says what is checked, `detail` what was found."""

    name: str
    passed: bool
    detail: str = ""


# self-checks of a prompt -> whose verdicts stand on them; those of a method's own scores stand with the scores
UNTOUCHED = "capture leaves the output as it is"
RESTARTED = "restarted runs reproduce the model"
SAME_M = "edges and tokens measure the same m"
BLOCKS: Mapping[str, tuple[str, ...]] = {
    UNTOUCHED: ("tokens", "edges"),
    RESTARTED: ("edges",),
    SAME_M: ("tokens", "edges"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class PromptWork:
    """All that a run measures on one prompt. Plain data.

    Parameters
    ----------
    label, cluster, text, target, foil : of the prompt.
    compared : None where the prompt failed.
    edges : None where they were not asked for, or could not be measured.
    checks : self-checks.
    failure : why there is nothing; empty where there is.
    transient : something failed for lack of memory and may not again: such a prompt is tried anew.
    edge_failure : why there are no edges.
    kernels : attention functions that ran.
    seconds : what was done -> wall time.
    """

    label: str
    cluster: str
    text: str
    target: str
    foil: str
    compared: PromptResult | None
    edges: EdgeResult | None
    checks: tuple[Check, ...]
    failure: str = ""
    transient: bool = False
    edge_failure: str = ""
    kernels: tuple[str, ...] = ()
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def broken(self, about: str) -> tuple[str, ...]:
        """Self-checks that failed and on which verdicts about `"tokens"` or `"edges"` stand."""
        return tuple(one.name for one in self.checks if not one.passed and about in BLOCKS.get(one.name, ()))


@dataclasses.dataclass(frozen=True, eq=False)
class ModelWork:
    """What a run measures once for the model. Plain data.

    Parameters
    ----------
    card : of `attndiag.card`, as plain values; None where it could not be made.
    heads : column -> values, one entry a head (`layer`, `head`, scores of the probes); empty where not asked for.
    problems : what could not be measured -> why.
    seconds : what was done -> wall time.
    """

    card: Mapping[str, Any] | None
    heads: Mapping[str, NDArray[Any]]
    problems: Mapping[str, str]
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


RECORDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (PromptWork, ModelWork, Check, PromptResult, PromptTokens, TokenScores, Agreement, Null, EdgeResult)
}


# -------------------------------------------------------------------------------------------------- records <-> trees
def to_tree(value: Any, arrays: list[NDArray[Any]]) -> Any:
    """A record as JSON-like values; its arrays are appended to `arrays` and stand in the tree by number.

    Raises
    ------
    TypeError : something that is neither plain nor one of `RECORDS`.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError(f"an array of {value.dtype} is not plain; expected numbers, booleans or text")
        arrays.append(value)
        return {"$array": len(arrays) - 1}
    if isinstance(value, list):
        return [to_tree(part, arrays) for part in value]
    if isinstance(value, tuple):
        return {"$tuple": [to_tree(part, arrays) for part in value]}
    if isinstance(value, Mapping):
        return {"$pairs": [[to_tree(key, arrays), to_tree(part, arrays)] for key, part in value.items()]}
    name = type(value).__name__
    if RECORDS.get(name) is not type(value):
        raise TypeError(f"a {name} cannot be stored; expected plain values or one of {', '.join(RECORDS)}")
    fields = {field.name: to_tree(getattr(value, field.name), arrays) for field in dataclasses.fields(value)}
    return {"$record": name, "fields": fields}


def from_tree(tree: Any, arrays: list[NDArray[Any]]) -> Any:
    """The inverse of `to_tree`.

    Raises
    ------
    BrokenResultError : a record that is not known, or with other fields.
    """
    if isinstance(tree, list):
        return [from_tree(part, arrays) for part in tree]
    if not isinstance(tree, dict):
        return tree
    if "$array" in tree:
        return arrays[tree["$array"]]
    if "$tuple" in tree:
        return tuple(from_tree(part, arrays) for part in tree["$tuple"])
    if "$pairs" in tree:
        return {from_tree(key, arrays): from_tree(part, arrays) for key, part in tree["$pairs"]}
    kind = RECORDS.get(tree.get("$record", ""))
    given = tree.get("fields", {})
    known = {field.name: field for field in dataclasses.fields(kind)} if kind is not None else {}
    needed = {name for name, field in known.items() if _required(field)}
    if kind is None or not needed <= set(given) <= set(known):
        differ = sorted(set(known) ^ set(given))
        raise BrokenResultError(
            f"it holds a record {tree.get('$record')!r} of another version of attndiag (fields that differ: {differ})"
        )
    return kind(**{name: from_tree(part, arrays) for name, part in given.items()})


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


# --------------------------------------------------------------------------------------------------------- the files
def write_result(path: Path, key: str, record: Any) -> None:
    """Write a record under a temporary name and rename it to `path`.

    Raises
    ------
    RunFolderError : disk full, or the folder cannot be written. What was there before stays.
    """
    import pyarrow.parquet as pq

    table = _packed(key, record)
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: pq.write_table(table, file, compression="zstd"))


def read_result(path: Path, key: str) -> Any:
    """The record in `path`, whole and of the right key.

    Raises
    ------
    BrokenResultError : cut off, changed, no result at all, or of another version.
    ForeignResultError : a whole result of another key.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, partitioning=None)
        told = {name.decode(): value.decode() for name, value in (table.schema.metadata or {}).items()}
        columns, rows = table.column_names, table.to_pylist()
    except (OSError, pa.ArrowException, ValueError, MemoryError) as error:
        # a changed byte can turn up anywhere: in a name, a length, a page
        told_by = (str(error).splitlines() or [type(error).__name__])[0]
        raise BrokenResultError(f"{path} is damaged or cannot be read: {told_by}") from error
    if told.get("format") != FORMAT or columns != ["name", "dtype", "shape", "data"]:
        raise BrokenResultError(f"{path} is not a result of a run, or one of another version")
    if told.get("sha256") != _checksum(told.get("key", ""), rows):
        raise BrokenResultError(f"{path} was changed after it was written: its checksum is not that of its content")
    if told["key"] != key:
        raise ForeignResultError(
            f"{path} holds the result of another piece of work ({told['key'][:12]}...); move it away, or give another "
            "folder. It was not touched"
        )
    arrays = [np.frombuffer(row["data"], dtype=np.dtype(row["dtype"])).reshape(row["shape"]).copy() for row in rows[1:]]
    try:
        return from_tree(json.loads(rows[0]["data"]), arrays)
    except BrokenResultError as error:
        raise BrokenResultError(f"{path}: {error}") from error


def _packed(key: str, record: Any) -> pa.Table:
    import pyarrow as pa

    arrays: list[NDArray[Any]] = []
    tree = json.dumps(to_tree(record, arrays), ensure_ascii=True)
    rows: list[dict[str, Any]] = [{"name": _TREE, "dtype": "", "shape": [], "data": tree.encode()}]
    for index, array in enumerate(arrays):
        whole = np.ascontiguousarray(array)
        rows.append({"name": str(index), "dtype": array.dtype.str, "shape": list(array.shape), "data": whole.tobytes()})
    schema = pa.schema(
        {"name": pa.string(), "dtype": pa.string(), "shape": pa.list_(pa.int64()), "data": pa.binary()},
        metadata={"format": FORMAT, "key": key, "sha256": _checksum(key, rows)},
    )
    return pa.Table.from_pylist(rows, schema=schema)


def _checksum(key: str, rows: list[dict[str, Any]]) -> str:
    found = hashlib.sha256(key.encode())
    for row in rows:
        found.update(f"{row['name']} {row['dtype']} {row['shape']} {len(row['data'])}".encode())
        found.update(row["data"])
    return found.hexdigest()

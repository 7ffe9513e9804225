"""Prompt sets from files: JSONL, text, CSV or Parquet -> list of `Prompt`, with errors that name file and line.

| suffix | form |
|---|---|
| `.jsonl`, `.ndjson` | one object a line, keys as below |
| `.txt` | one prompt a line, nothing else; its id is `line-<number>` |
| `.csv` | a header with the keys below; `spans`, `meta` and `messages` as JSON text; an empty cell is an absent key |
| `.parquet` | columns named by the keys below; null is an absent key |

Keys: `id`, `prompt` or `messages`, `target`, `foil`, `pair`, `spans`, `cluster`, `meta`, `decoder_text`,
`continuation`. White space inside a prompt is significant and kept; blank lines of JSONL and text files are passed
over. `scan_prompts` goes through the whole file and collects what is wrong; `read_prompts` insists on a file without
problems, unless told to skip the bad lines.
"""

from __future__ import annotations

import csv
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from attndiag.errors import PromptError
from attndiag.prompts import Prompt

KEYS = (
    "id",
    "prompt",
    "messages",
    "target",
    "foil",
    "pair",
    "spans",
    "cluster",
    "meta",
    "decoder_text",
    "continuation",
)
_TEXTS = ("prompt", "target", "foil", "pair", "decoder_text", "continuation")
# what other tools call the same thing
_OTHER_NAMES = {
    "text": "prompt",
    "input": "prompt",
    "question": "prompt",
    "clean": "prompt",
    "conversation": "messages",
    "chat": "messages",
    "answer": "target",
    "label": "target",
    "completion": "target",
    "wrong_answer": "foil",
    "distractor": "foil",
    "corrupted": "pair",
    "counterfactual": "pair",
    "template": "cluster",
    "group": "cluster",
    "category": "cluster",
    "name": "id",
    "idx": "id",
    "metadata": "meta",
}
SUFFIXES = (".jsonl", ".ndjson", ".txt", ".csv", ".parquet")
SHIPPED = Path(str(files("attndiag"))) / "data" / "prompts.jsonl"


@dataclass(frozen=True)
class BadLine:
    """One entry of a prompt file that cannot be used: its line (or row, from 1) and what is wrong with it."""

    line: int
    reason: str


@dataclass(frozen=True)
class PromptFile:
    """What a prompt file holds: the prompts that can be used, and every entry that cannot."""

    path: Path
    prompts: tuple[Prompt, ...]
    bad: tuple[BadLine, ...]

    def require_clean(self) -> list[Prompt]:
        """The prompts, or `PromptError` with the first problem, and how many more there are."""
        if not self.bad:
            return list(self.prompts)
        first = self.bad[0]
        more = f" ({len(self.bad) - 1} more such entries in this file)" if len(self.bad) > 1 else ""
        raise PromptError(
            f"{self.path}:{first.line}: {first.reason}{more}. Mend it, or skip such entries with skip_bad=True "
            "(--skip-bad on the command line)"
        )

    def require_any(self) -> list[Prompt]:
        """The usable prompts, or `PromptError` where not one is left."""
        if self.prompts:
            return list(self.prompts)
        first = self.bad[0]
        raise PromptError(
            f"{self.path}: not one of its {len(self.bad)} entries can be used; line {first.line}: {first.reason}"
        )


def read_prompts(path: str | Path, *, skip_bad: bool = False) -> list[Prompt]:
    """Read a prompt set.

    Parameters
    ----------
    path : a `.jsonl`, `.ndjson`, `.txt`, `.csv` or `.parquet` file; the module's docstring tells the forms.
    skip_bad : leave out entries that cannot be used. `scan_prompts` tells which they are and why.

    Returns
    -------
    Prompts in the order of the file, each with an id that is unique in it.

    Raises
    ------
    PromptError : the file is missing, of another kind or without prompts; or, with file and line, an entry is not
        JSON, has unknown keys (a near name is suggested), lacks what it needs, is empty or repeats an id.
    """
    found = scan_prompts(path)
    return found.require_any() if skip_bad else found.require_clean()


def shipped_prompts() -> list[Prompt]:
    """The prompt set of the package: each with target, foil and cluster, checked on the default model."""
    return read_prompts(SHIPPED)


def scan_prompts(path: str | Path) -> PromptFile:
    """Read a prompt file to its end and say what is wrong with every entry that cannot be used.

    Raises
    ------
    PromptError : the file as a whole is unreadable, of an unknown kind, or holds no entry at all.
    """
    path = Path(path)
    _require_file(path)
    prompts: list[Prompt] = []
    bad: list[BadLine] = []
    seen: dict[str, int] = {}
    for line, entry in _entries(path):
        try:
            prompt = _prompt(_parsed(entry), line)
            name = str(prompt.id)
            if name in seen:
                raise PromptError(f"id {name!r} is already that of line {seen[name]}; ids must differ within a file")
        except PromptError as error:
            bad.append(BadLine(line, str(error)))
            continue
        seen[name] = line
        prompts.append(prompt)
    if not prompts and not bad:
        raise PromptError(f"{path} holds no prompts; expected one a line, for example {_EXAMPLE}")
    return PromptFile(path, tuple(prompts), tuple(bad))


_EXAMPLE = '{"id": "paris", "prompt": "The capital of France is", "target": " Paris", "foil": " Rome"}'


def _require_file(path: Path) -> None:
    if path.is_dir():
        raise PromptError(f"{path} is a folder; expected a prompt file ({', '.join(SUFFIXES)})")
    if not path.exists():
        names = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise PromptError(f"there is no prompt file {path}{hint}")
    if path.suffix.lower() not in SUFFIXES:
        raise PromptError(
            f"{path} has the suffix {path.suffix or '(none)'!r}; expected one of {', '.join(SUFFIXES)} "
            "(JSONL holds one JSON object a line)"
        )


def _entries(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | PromptError]]:
    """(line, keys and values) of each entry; an entry that cannot even be parsed comes as its error."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        yield from _parquet_rows(path)
    elif suffix == ".csv":
        yield from _csv_rows(path)
    elif suffix == ".txt":
        for line, text in _lines(path):
            yield line, text if isinstance(text, PromptError) else {"prompt": text}
    else:
        for line, text in _lines(path):
            yield line, text if isinstance(text, PromptError) else _json_object(text)


def _lines(path: Path) -> Iterator[tuple[int, str | PromptError]]:
    """(number, text) of each line that is not blank. Only line feeds end a line: JSON may hold other separators."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror or error}") from error
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        try:
            text = raw.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError as error:
            yield number, PromptError(f"byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8")
            continue
        if text.strip():
            yield number, text


def _json_object(text: str) -> Mapping[str, Any] | PromptError:
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        shown = text if len(text) <= 60 else text[:57] + "..."
        return PromptError(f"not JSON ({error.msg} at column {error.colno}): {shown!r}; expected {_EXAMPLE}")
    except PromptError as error:
        return error
    if not isinstance(value, dict):
        return PromptError(f"holds {_kind(value)}; expected an object such as {_EXAMPLE}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise PromptError(f"key {twice!r} appears twice; expected each key once")
    return dict(pairs)


def _csv_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | PromptError]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            _require_columns(path, header)
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(header):
                    yield (
                        reader.line_num,
                        PromptError(
                            f"{len(cells)} cells under {len(header)} columns; quote cells with a comma or line break"
                        ),
                    )
                    continue
                filled = {key: cell for key, cell in zip(header, cells, strict=True) if cell != ""}
                yield reader.line_num, _with_json(filled)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PromptError(f"{path} cannot be read as CSV in UTF-8: {error}") from error


def _with_json(row: dict[str, str]) -> Mapping[str, Any] | PromptError:
    """Cells of the structured keys, parsed."""
    parsed: dict[str, Any] = dict(row)
    for key in ("spans", "meta", "messages"):
        if key in row:
            try:
                parsed[key] = json.loads(row[key])
            except json.JSONDecodeError as error:
                return PromptError(f"column {key!r} holds {row[key]!r}, which is not JSON ({error.msg})")
    return parsed


def _parquet_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | PromptError]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise PromptError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from error
    _require_columns(path, table.column_names)
    for number, row in enumerate(table.to_pylist(), 1):
        filled = {key: _without_nulls(value) for key, value in row.items() if value is not None}
        # a struct column has every key in every row
        if isinstance(filled.get("meta"), str) or isinstance(filled.get("spans"), str):
            yield number, _with_json(filled)
        else:
            yield number, {key: value for key, value in filled.items() if value != {}}


def _without_nulls(value: Any) -> Any:
    return {key: part for key, part in value.items() if part is not None} if isinstance(value, dict) else value


def _require_columns(path: Path, columns: Sequence[str]) -> None:
    """A wrong header is one problem of the file, not one of every row."""
    if len(set(columns)) != len(columns):
        raise PromptError(f"{path}: two columns bear the same name among {', '.join(columns)}")
    _require_known_keys(columns, f"{path}: column", "columns")
    if "prompt" not in columns and "messages" not in columns:
        raise PromptError(f"{path} has the columns {', '.join(columns) or '(none)'}; expected `prompt` or `messages`")


def _require_known_keys(keys: Sequence[str], where: str, what: str) -> None:
    for key in keys:
        if key not in KEYS:
            near = difflib.get_close_matches(key.lower(), KEYS, n=1, cutoff=0.7)
            name = _OTHER_NAMES.get(key.lower()) or next(iter(near), None)
            hint = f"; did you mean {name!r}?" if name else ""
            put = "" if name else "; put anything else into `meta`."
            raise PromptError(f"{where} {key!r} is unknown{hint}{put} Known {what}: {', '.join(KEYS)}".strip())


def _parsed(entry: Mapping[str, Any] | PromptError) -> Mapping[str, Any]:
    if isinstance(entry, PromptError):
        raise entry
    return entry


def _prompt(row: Mapping[str, Any], line: int) -> Prompt:
    _require_known_keys(list(row), "key", "keys")
    for key in _TEXTS:
        if key in row and not isinstance(row[key], str):
            raise PromptError(f"{key!r} is {_kind(row[key])}; expected a string")
        if key in row and not row[key].strip():
            raise PromptError(f"{key!r} is {'empty' if not row[key] else 'only white space'}; expected some text")
    if "prompt" not in row and "messages" not in row:
        given = ", ".join(row) or "nothing"
        raise PromptError(f"there is neither `prompt` nor `messages` (it has {given}); expected exactly one of them")
    for key in ("id", "cluster"):
        if key in row and (not isinstance(row[key], str | int) or isinstance(row[key], bool) or row[key] == ""):
            raise PromptError(f"{key!r} is {_kind(row[key])}; expected a name that is not empty")
    if not isinstance(row.get("meta", {}), Mapping):
        raise PromptError(f"'meta' is {_kind(row['meta'])}; expected an object")
    return Prompt(
        row.get("prompt"),
        id=str(row.get("id", f"line-{line}")),
        messages=_messages(row["messages"]) if "messages" in row else None,
        decoder_text=row.get("decoder_text"),
        target=row.get("target"),
        foil=row.get("foil"),
        pair=row.get("pair"),
        spans=_spans(row.get("spans", {})),
        cluster=None if row.get("cluster") is None else str(row["cluster"]),
        meta=dict(row.get("meta", {})),
        continuation=row.get("continuation"),
    )


def _messages(value: Any) -> tuple[Mapping[str, str], ...]:
    turns = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else None
    if not turns:
        raise PromptError(f"'messages' is {_kind(value)}; expected a list of {{'role', 'content'}} that is not empty")
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping) or not all(isinstance(turn.get(key), str) for key in ("role", "content")):
            raise PromptError(f"turn {number} of 'messages' is {turn!r}; expected texts under 'role' and 'content'")
    return tuple(dict(turn) for turn in turns)


def _spans(value: Any) -> dict[str, tuple[int, int]]:
    if not isinstance(value, Mapping):
        raise PromptError(f"'spans' is {_kind(value)}; expected an object of name: [start, end]")
    spans = {}
    for name, span in value.items():
        ends = list(span) if isinstance(span, Sequence) and not isinstance(span, str) else []
        if [type(end) for end in ends] != [int, int]:
            raise PromptError(f"span {name!r} is {span!r}; expected [start, end] in characters")
        spans[str(name)] = (ends[0], ends[1])
    return spans


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    if value == "":
        return "empty"
    names: dict[type, str] = {bool: "a boolean", int: "a number", float: "a number", str: "a string", dict: "an object"}
    return f"{names.get(type(value), 'a list')} ({json.dumps(value, default=str)[:40]})"

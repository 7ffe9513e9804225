"""Files and tables of scores that were made elsewhere, for `comparison.own_scores`: reading and checking them."""

from __future__ import annotations

import base64
import difflib
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attndiag.comparison.one_prompt import Own
from attndiag.comparison.token_matching import OwnTokens, TokenisationError, plain
from attndiag.errors import AttnDiagError

Missing = Literal["error", "undefined"]
Array = NDArray[np.float64]
TABLES = (".csv", ".parquet", ".jsonl", ".ndjson")


class OwnScoresError(AttnDiagError, ValueError):
    """Scores made elsewhere cannot be used; the text says where and why."""


def is_array(thing: Any) -> bool:
    """True for arrays and tensors."""
    return isinstance(thing, np.ndarray) or (hasattr(thing, "detach") and hasattr(thing, "shape"))


def as_array(thing: Any, where: str) -> Array:
    """A tensor, array or nested list as float64; bf16 too."""
    try:
        given = thing.detach().cpu().double().numpy() if hasattr(thing, "detach") else thing
        return np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise OwnScoresError(f"{where}: expected numbers in a rectangular array, got {_short(thing)}") from error


def _short(thing: Any) -> str:
    text = repr(thing)
    return text if len(text) < 80 else text[:77] + "..."


# ----------------------------------------------------------------------------------------------------------- files
def from_file(path: Path) -> Any:
    """What a file holds: a table, or what its JSON says, arrays decoded."""
    if not path.is_file():
        raise OwnScoresError(f"{path} does not exist")
    suffix = path.suffix.lower()
    if suffix in TABLES:
        return _table(path, suffix)
    if suffix == ".json" or path.name.lower().endswith(".json.gz"):
        data = path.read_bytes()
        try:
            # Inseq compresses whole files under any name
            text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
            return json.loads(text, object_hook=_decoded)
        except (TypeError, ValueError, OSError, EOFError) as error:
            raise OwnScoresError(f"{path} is no JSON: {error}") from error
    raise OwnScoresError(f"{path.name} ends in {suffix!r}; expected {', '.join(TABLES)}, .json or .json.gz")


def _table(path: Path, suffix: str) -> Any:
    import pandas as pd

    try:
        if suffix == ".csv":
            # everything stays text: a token "1" or "nan" is a token
            return pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8-sig")
        if suffix == ".parquet":
            return pd.read_parquet(path)
        lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        rows = [json.loads(line) for line in lines]
    except (ValueError, OSError) as error:
        raise OwnScoresError(f"{path} cannot be read as {suffix}: {error}") from error
    if not all(isinstance(row, dict) for row in rows):
        raise OwnScoresError(f"{path}: every line must be an object with prompt and score")
    return pd.DataFrame(rows)


def _decoded(found: dict[str, Any]) -> Any:
    """Instances as their attributes and arrays as arrays, in the way in which Inseq writes both."""
    if "__instance_type__" in found:
        return found.get("attributes", {})
    if "__ndarray__" not in found:
        return found
    data, shape = found["__ndarray__"], tuple(found.get("shape", ()))
    dtype = np.dtype(str(found.get("dtype", "float64")))
    if dtype.hasobject:
        raise ValueError("an array of objects")
    if isinstance(data, str):
        head, _, body = data.partition(":")
        raw = base64.b64decode(body, validate=True)
        if head not in ("b64", "b64.gz"):
            raise ValueError(f"an array that is written as {head!r}")
        array = np.frombuffer(gzip.decompress(raw) if head == "b64.gz" else raw, dtype=dtype)
        return array.reshape(shape, order="C" if found.get("Corder", True) else "F")
    return np.asarray(data, dtype=dtype).reshape(shape)


# ---------------------------------------------------------------------------------------------------------- tables
def from_table(frame: Any, own: Sequence[OwnTokens], where: str, method: str | None, missing: Missing) -> list[Own]:
    """Entries of `compare(own=...)` from a pandas table; `where` names it in errors."""
    columns = [str(column) for column in frame.columns]
    spans = {"char_start", "char_end"} <= set(columns)
    needed = {"prompt", "score"} | ({"char_start", "char_end"} if spans else {"position"})
    if not needed <= set(columns) or (spans and "position" in columns):
        raise OwnScoresError(
            f"{where} has the columns {columns}; expected prompt, score and either position or char_start and char_end"
        )
    rows = frame.to_dict("records")
    if "method" in columns:
        there = list(dict.fromkeys(str(row["method"]) for row in rows))
        if method is None and len(there) > 1:
            raise OwnScoresError(f"{where} holds the methods {there}; name one with method=")
        if method is not None and method not in there:
            raise OwnScoresError(f"{where} has no method {method!r}; it holds {there}")
        rows = [row for row in rows if method is None or str(row["method"]) == method]
    elif method is not None:
        raise OwnScoresError(f"{where} has no column method; leave method out")
    by_prompt: dict[str, list[tuple[int, Mapping[str, Any]]]] = {one.label: [] for one in own}
    for number, row in enumerate(rows, start=1):
        label = str(row["prompt"])
        if label not in by_prompt:
            near = difflib.get_close_matches(label, by_prompt, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {list(by_prompt)[:5]}"
            raise OwnScoresError(f"{where}, row {number}: there is no prompt {label!r}; {hint}")
        by_prompt[label].append((number, row))
    return [_one_prompt(by_prompt[one.label], one, where, spans, missing) for one in own]


def _one_prompt(
    rows: Sequence[tuple[int, Mapping[str, Any]]], own: OwnTokens, where: str, spans: bool, missing: Missing
) -> Own:
    if not rows:
        return nothing(own, where, missing)
    if spans:
        found: list[tuple[int, int, float]] = []
        for number, row in rows:
            start, end = (_whole(row[name], f"{where}, row {number}: {name}") for name in ("char_start", "char_end"))
            if not 0 <= start < end <= len(own.text):
                raise OwnScoresError(
                    f"{where}, row {number}: characters {start} to {end} of prompt {own.label!r}, which has "
                    f"{len(own.text)}"
                )
            score = _number(row["score"], f"{where}, row {number}")
            if not math.isnan(score):
                found.append((start, end, score))
        return found or np.full(len(own), np.nan)
    values = np.full(len(own), np.nan)
    seen: set[int] = set()
    for number, row in rows:
        place = _whole(row["position"], f"{where}, row {number}: position")
        if not 0 <= place < len(own):
            raise TokenisationError(
                f"{where}, row {number}: position {place} of prompt {own.label!r}, whose {len(own)} tokens are "
                f"{list(own.texts)}; another tokenisation? Give char_start and char_end instead"
            )
        if place in seen:
            raise OwnScoresError(f"{where}, row {number}: position {place} of prompt {own.label!r} stands there twice")
        seen.add(place)
        token = row.get("token")
        named = isinstance(token, str) and token != ""
        if named and token != own.entries[place] and plain(token) != plain(own.texts[place]):
            raise TokenisationError(
                f"{where}, row {number}: position {place} of prompt {own.label!r} is called {token!r}, and there "
                f"stands {own.texts[place]!r} in {list(own.texts)}"
            )
        values[place] = _number(row["score"], f"{where}, row {number}")
    return values


def nothing(own: OwnTokens, where: str, missing: Missing) -> Own:
    """All nan for a prompt that the source leaves out, or an error."""
    if missing == "error":
        raise OwnScoresError(
            f"{where} says nothing about prompt {own.label!r}; give its scores, or missing='undefined'"
        )
    return np.full(len(own), np.nan)


def _number(given: Any, where: str) -> float:
    """A score; an empty cell and nan are undefined."""
    if given is None or (isinstance(given, str) and given.strip().lower() in ("", "nan")):
        return math.nan
    try:
        number = float(given)
    except (TypeError, ValueError):
        raise OwnScoresError(f"{where}: score is {given!r}, not a number") from None
    if math.isinf(number):
        raise OwnScoresError(f"{where}: score is {given!r}, which cannot be ranked or shared")
    return number


def _whole(given: Any, what: str) -> int:
    number = _number(given, what)
    if math.isnan(number) or number != int(number):
        raise OwnScoresError(f"{what} is {given!r}, not a whole number")
    return int(number)


def checked(values: Array, where: str, own: OwnTokens) -> Array:
    """The scores themselves; infinite ones are refused."""
    if np.isinf(values).any():
        raise OwnScoresError(f"{where}: prompt {own.label!r} has infinite scores, which cannot be ranked or shared")
    return values

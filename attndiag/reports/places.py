"""Paths as a page shows them: the files beside it, and places on somebody's machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def without_home(path: str) -> str:
    """A path as it may be shown to others."""
    home = str(Path.home())
    return "~" + path[len(home) :] if path.startswith(home) and home != "/" else path


def file_entries(root: Path, paths: Iterable[Path], meaning: Callable[[str], str]) -> list[dict[str, Any]]:
    """One entry a table or figure: `name`, `what`, `bytes`, and `files` with the `path` and `kind` of each format.

    Parameters
    ----------
    root : where the page lies.
    paths : of files, from there.
    meaning : name without the kind -> what it is.
    """
    entries: dict[str, dict[str, Any]] = {}
    for path in paths:
        stem, _, kind = path.as_posix().partition(".")
        entry = entries.setdefault(stem, {"name": stem, "what": meaning(stem), "files": [], "bytes": 0})
        entry["files"].append({"path": path.as_posix(), "kind": kind})
        entry["bytes"] += (root / path).stat().st_size
    return list(entries.values())

"""What runs put into their folder, and how it is removed: that alone, whichever kind of run is replaced by which.

Results of a comparison are removed one by one, for a folder of results may hold those of others.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from attndiag.runs.folder import COMPARISON, LOCK, MARKER, WEIGHTS, explained, kind_of, load_marker, locked
from attndiag.runs.result_files import BrokenResultError, ForeignResultError, read_result

RESULTS = "results"
# made from results or shards, by a report too
TABLES = "tables"
RENDERED = ("report.html", "figures", "summary")
# a weights run may lie in this folder of a comparison, and stand on its page
WEIGHTS_FOLDER = "weights"
_MADE = ("shards", TABLES, *RENDERED)
_RESULT_NAME = re.compile(r"(model-)?[0-9a-f]{64}\.parquet")


def clear_run(folder: Path, marker: Mapping[str, Any]) -> None:
    """Remove the run that is there but for its marker, which the next one overwrites; what is not its own stays.

    With a comparison goes the weights run below it.

    Parameters
    ----------
    marker : what its `run.json` says.

    Raises
    ------
    RunFolderError : something cannot be removed, or a weights run is being written below.
    """
    below = folder / WEIGHTS_FOLDER
    if marker.get("kind") == COMPARISON and below.is_dir() and kind_of(below) == WEIGHTS:
        _remove_run(below)
    with explained(folder):
        remove(folder, _MADE)
        listed = {str(one.get("key")) for one in marker.get("prompts", [])} | {str(marker.get("model_key"))}
        results = folder / RESULTS
        if results.is_dir():
            for thing in results.iterdir():
                if _RESULT_NAME.fullmatch(thing.name) and _is_own(thing, listed):
                    thing.unlink()
            if not any(results.iterdir()):
                results.rmdir()


def _remove_run(folder: Path) -> None:
    """Remove a run and its marker, and the folder where nothing else is in it."""
    with locked(folder):
        clear_run(folder, load_marker(folder / MARKER))
        # while it is held: whoever waits for it finds no run
        remove(folder, (MARKER, LOCK))
    with explained(folder):
        if not any(folder.iterdir()):
            folder.rmdir()


def remove(folder: Path, names: Collection[str]) -> None:
    """Remove files and folders by their names; those that are not there are no error."""
    with explained(folder):
        for name in names:
            thing = folder / name
            if thing.is_dir():
                shutil.rmtree(thing)
            else:
                thing.unlink(missing_ok=True)


def _is_own(path: Path, listed: Collection[str]) -> bool:
    """True for a whole result in its own place, and for a broken one in a place of this run; others are somebody's."""
    key = path.stem.removeprefix("model-")
    try:
        read_result(path, key)
    except BrokenResultError:
        return key in listed
    except ForeignResultError:
        return False
    return True

"""What runs put into their folder, and how it is removed: that alone, whichever kind of run is replaced by which.

Results of a comparison are removed one by one, for a folder of results may hold those of others.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from attndiag.runs.folder import explained
from attndiag.runs.result_files import BrokenResultError, ForeignResultError, read_result

RESULTS = "results"
# made from results or shards, by a report too
TABLES = "tables"
RENDERED = ("report.html", "figures", "summary")
_MADE = ("shards", TABLES, *RENDERED)
_RESULT_NAME = re.compile(r"(model-)?[0-9a-f]{64}\.parquet")


def clear_run(folder: Path, marker: Mapping[str, Any]) -> None:
    """Remove the run that is there but for its marker, which the next one overwrites; what is not its own stays.

    Parameters
    ----------
    marker : what its `run.json` says.
    """
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

"""Files of scores made elsewhere, as `--own` names them, and their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from attndiag.comparison.one_prompt import Own
    from attndiag.models.load import LoadedModel
    from attndiag.prompts import Prompt

OwnFiles = dict[str, tuple[Path, str | None]]


def own_files(given: Sequence[str]) -> OwnFiles:
    """Name -> file and method of the scores made elsewhere; `FILE:METHOD` or `FILE`."""
    found: OwnFiles = {}
    for one in given:
        path, method = Path(one), None
        if not path.is_file() and ":" in one:
            head, _, method = one.rpartition(":")
            path = Path(head)
        if not path.is_file():
            raise typer.BadParameter(f"--own {one}: there is no file {path}")
        name = method or path.stem
        if name in found:
            raise typer.BadParameter(f"--own: two sets of scores are called {name!r}; rename a file, or name a method")
        found[name] = (path, method)
    return found


def given_scores(
    lm: LoadedModel, prompts: Sequence[Prompt], files: Mapping[str, tuple[Path, str | None]]
) -> dict[str, list[Own]]:
    """Their scores on the tokens of this model, by name, one entry a prompt."""
    from attndiag.comparison.own_scores import read_own_scores

    return {name: read_own_scores(lm, prompts, path, method=method) for name, (path, method) in files.items()}

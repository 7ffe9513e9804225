"""What a command is about: a prompt that was typed, a set, or one of a set; lists of names; edges."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from attndiag.commands.console import remark
from attndiag.errors import PromptError

if TYPE_CHECKING:
    from attndiag.prompts import Prompt


class EdgeChoice(StrEnum):
    """Which edges of the last query are taken away."""

    auto = "auto"
    all = "all"
    screen = "screen"
    none = "none"


def comma_names(values: Sequence[str] | None) -> tuple[str, ...] | None:
    """Names given with commas, with the option again, or both; `none` is the empty list."""
    if values is None:
        return None
    found = tuple(name.strip() for value in values for name in value.split(",") if name.strip())
    return () if found == ("none",) else found


def read_set(path: Path | None, *, skip_bad: bool, quiet: bool) -> tuple[list[Prompt], int]:
    """The prompts of a file (of the shipped set when None), and how many entries were skipped; each of those is named.

    Raises
    ------
    PromptError : an entry cannot be used and is not to be skipped, or none can.
    """
    from attndiag.runs.prompt_files import SHIPPED, scan_prompts

    found = scan_prompts(SHIPPED if path is None else path)
    if not skip_bad:
        return list(found.require_clean()), 0
    for entry in found.bad:
        remark(f"skipped {found.path}:{entry.line}: {entry.reason}", quiet=quiet)
    return list(found.require_any()), len(found.bad)


def choose_prompts(
    text: str | None,
    path: Path | None,
    prompt_id: str | None,
    *,
    example: str,
    target: str | None = None,
    foil: str | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
    quiet: bool = False,
) -> tuple[list[Prompt], int]:
    """The prompts, and how many entries of the file were skipped; each of those is named.

    A typed prompt has no id: what it is called is its text.
    """
    from attndiag.prompts import Prompt

    if foil is not None and target is None:
        raise typer.BadParameter("a foil needs a target to be compared with; add --target")
    if text is not None:
        if path is not None or prompt_id is not None:
            raise typer.BadParameter("give either a prompt or --prompts and --id, not both")
        return [Prompt(text, target=target, foil=foil)], 0
    if path is None and prompt_id is None:
        raise typer.BadParameter(f"give a prompt, for example: {example}")
    chosen, n_skipped = read_set(path, skip_bad=skip_bad, quiet=quiet)
    if prompt_id is not None:
        chosen = [named(chosen, prompt_id, str(path or "the shipped set"))]
    if target is not None:
        chosen = [replace(prompt, target=target, foil=foil) for prompt in chosen]
    return chosen[:limit], n_skipped


def named(prompts: Sequence[Prompt], prompt_id: str, place: str) -> Prompt:
    """The prompt with an id, or an error with the nearest one."""
    known = {str(prompt.id): prompt for prompt in prompts}
    if prompt_id not in known:
        near = difflib.get_close_matches(prompt_id, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it holds {', '.join(list(known)[:5])}, ..."
        raise PromptError(f"there is no prompt {prompt_id!r} in {place}; {hint}")
    return known[prompt_id]

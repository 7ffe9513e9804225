"""Which prompts a command is about: one that was typed, a set, or one of a set."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from attndiag.commands.console import remark
from attndiag.errors import PromptError

if TYPE_CHECKING:
    from attndiag.prompts import Prompt


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
    from attndiag.runs.prompt_files import SHIPPED, scan_prompts

    found = scan_prompts(SHIPPED if path is None else path)
    if skip_bad:
        for entry in found.bad:
            remark(f"skipped {found.path}:{entry.line}: {entry.reason}", quiet=quiet)
    chosen = list(found.require_any() if skip_bad else found.require_clean())
    if prompt_id is not None:
        chosen = [named(chosen, prompt_id, str(path or "the shipped set"))]
    if target is not None:
        chosen = [replace(prompt, target=target, foil=foil) for prompt in chosen]
    return chosen[:limit], len(found.bad) if skip_bad else 0


def named(prompts: Sequence[Prompt], prompt_id: str, place: str) -> Prompt:
    """The prompt with an id, or an error with the nearest one."""
    known = {str(prompt.id): prompt for prompt in prompts}
    if prompt_id not in known:
        near = difflib.get_close_matches(prompt_id, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it holds {', '.join(list(known)[:5])}, ..."
        raise PromptError(f"there is no prompt {prompt_id!r} in {place}; {hint}")
    return known[prompt_id]

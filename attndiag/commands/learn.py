"""`attndiag learn`: attention small enough to check by hand, on one page with sliders."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attndiag.commands import options
from attndiag.commands.console import data, data_json, guarded, remark


class Language(StrEnum):
    """Languages in which the page opens; it can be switched there."""

    en = "en"
    zh = "zh"


@guarded
def learn(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="An .html file.", rich_help_panel=options.OUTPUT),
    ] = Path("attndiag-worked-examples.html"),
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Show the page in the browser.")] = False,
    lang: Annotated[Language, typer.Option(help="Language of the page at first; it has a switch.")] = Language.en,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Worked examples of attention, with sliders.

    Two items and one query, masks of three positions, why scores are divided by the root of the width, rows without a
    key, shared heads, other scores. No model, no network: one page that computes its own numbers.

    \b
    Examples:
      attndiag learn --open
      attndiag learn -o attention.html --lang zh
    """
    if output.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"--output {output}: expected a file ending in .html")
    from attndiag.reports.worked_examples import worked_examples

    path = worked_examples(lang.value).save(output)
    if json:
        data_json({"page": str(path), "lang": lang.value, "bytes": path.stat().st_size})
    else:
        data(str(path))
    if open_page:
        import webbrowser

        if not webbrowser.open(path.resolve().as_uri()):
            remark(f"no browser could be started; open {path} yourself", quiet=quiet)

"""The command line: `attndiag COMMAND`. Thin on purpose; the commands live in `attndiag.commands`.

To add a command, write it in a module of `attndiag.commands` and list it below. Nothing heavy may be imported before a
command runs: `attndiag --help` answers in well under a second.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from attndiag.commands.card import audit, card
from attndiag.commands.compare import compare
from attndiag.commands.console import INTERRUPTED, data
from attndiag.commands.explain import explain, methods
from attndiag.commands.facts import env, models, validate
from attndiag.commands.heads import heads
from attndiag.commands.learn import learn
from attndiag.commands.report import report
from attndiag.commands.run import run
from attndiag.commands.view import view

app = typer.Typer(
    name="attndiag",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
# in the order in which --help lists them
for command in (report, run, compare, view, explain, heads, card, audit, learn, validate, methods, models, env):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            data(version("attndiag"))
        except PackageNotFoundError:
            data("unknown (run from a source tree)")
        raise typer.Exit


@app.callback(
    help="""What attention in a transformer really does: weights, value-aware contributions, side by side and checked.

    \b
    Examples:
      attndiag report -o out            tables, figures and one page: default model, shipped prompts
      attndiag view "The capital of France is" -o view.html
      attndiag validate prompts.jsonl
    """
)
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    del version  # the callback has answered


def main() -> None:
    """Entry point of the command `attndiag`."""
    # idle torch threads that spin cost ten times the work itself where other programs want the cores too
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)

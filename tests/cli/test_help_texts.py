"""What --help says: examples that can be typed, a default for everything that takes a value, no bare type as a name."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer.main

from attndiag.cli import app

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
READ_CLOSELY = ("run", "compare", "report", "view")


def examples(name: str) -> list[str]:
    """The lines below `Examples:` without their remarks."""
    _, _, block = (COMMANDS[name].help or "").partition("Examples:\n")
    lines = [line.strip() for line in block.splitlines() if line.strip().startswith("attndiag ")]
    return [re.split(r"\s{3,}", line)[0] for line in lines]


@pytest.mark.parametrize("name", [*COMMANDS])
def test_every_example_can_be_typed(name: str) -> None:
    found = examples(name)
    assert found or name in ("env", "models", "learn")
    for line in found:
        program, command, *words = shlex.split(line)
        assert (program, command) == ("attndiag", name)
        # refuses what is no option, and values that are none
        COMMANDS[name].make_context(name, words)


@pytest.mark.parametrize("name", READ_CLOSELY)
def test_every_value_has_a_default_that_is_said(name: str) -> None:
    for option in COMMANDS[name].params:
        if (
            option.param_type_name != "option"
            or (option.is_flag and not option.secondary_opts)
            or option.name == "help"
        ):
            continue
        told = option.show_default and option.default is not None
        assert told or re.search(r"default|nothing is kept", option.help or ""), f"{name} {option.opts}: {option.help}"
        # a type alone does not say what to give
        shown = COMMANDS[name].get_help(COMMANDS[name].make_context(name, [], resilient_parsing=True))
        assert not re.search(r"^  -.*<(str|int|path|list)", shown, re.MULTILINE), shown


def test_both_commands_of_a_comparison_say_the_same() -> None:
    run, compare = ({max(o.opts, key=len): o for o in COMMANDS[name].params} for name in ("run", "compare"))
    shared = ("--methods", "--set", "--metrics", "--own", "--primary", "--revision", "--limit")
    assert all(run[option].help == compare[option].help for option in shared)

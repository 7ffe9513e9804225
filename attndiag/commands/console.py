"""Where a command's words go, and how it ends.

Data on standard output, progress and remarks on standard error. Errors are one line that says what, where and what to
do; `--debug` shows the traceback too.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Collection
from typing import Any, TypeVar, get_type_hints

import typer

from attndiag.commands.options import Debug
from attndiag.errors import AttnDiagError

R = TypeVar("R")

FINE, SOME_FAILED, MISUSE, OUR_FAULT, INTERRUPTED = 0, 1, 2, 3, 130


def data(text: str) -> None:
    """One line of what the command was asked for."""
    typer.echo(text)


def data_json(value: Any) -> None:
    """The same as JSON; what is not finite becomes null."""
    typer.echo(json.dumps(_finite(value), indent=2, ensure_ascii=False))


def remark(text: str, *, quiet: bool = False) -> None:
    """One line beside the data."""
    if not quiet:
        typer.echo(text, err=True)


def counted(number: int, word: str, plural: str = "") -> str:
    """`1 prompt`, `2 prompts`; `plural` where an s does not make it."""
    return f"{number} {word if number == 1 else plural or f'{word}s'}"


def given_options(context: typer.Context, but: Collection[str] = ()) -> list[str]:
    """Options that the user gave, without those named in `but`, as they are written."""
    sources = {
        option.name: context.get_parameter_source(option.name) for option in context.command.params if option.name
    }
    given = {name for name, source in sources.items() if source is not None and not source.name.startswith("DEFAULT")}
    return [max(one.opts, key=len) for one in context.command.params if one.name in given and one.name not in but]


def guarded(command: Callable[..., R]) -> Callable[..., R]:
    """Turn what a command raises into one line on standard error and an exit status; gives it the option `--debug`."""

    @functools.wraps(command)
    def run(*args: Any, debug: bool = False, **kwargs: Any) -> R:
        try:
            return command(*args, **kwargs)
        except AttnDiagError as error:
            if debug:
                raise
            remark(f"error: {one_line(error)}")
            raise typer.Exit(MISUSE) from error
        except KeyboardInterrupt as error:
            remark("interrupted")
            raise typer.Exit(INTERRUPTED) from error
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except BrokenPipeError:
            # the reader has seen enough: `attndiag models | head -1`
            sys.stdout = None
            raise typer.Exit(FINE) from None
        except Exception as error:
            # the parser's own errors have a status of their own
            if debug or hasattr(error, "exit_code"):
                raise
            remark(
                f"error: {type(error).__name__}: {one_line(error)}. This is a fault of attndiag; please report it with "
                "what `--debug` shows"
            )
            raise typer.Exit(OUR_FAULT) from error

    # what typer reads: the command's own parameters, and one more
    hints = get_type_hints(command, include_extras=True) | {"debug": Debug}
    own = [p.replace(annotation=hints[name]) for name, p in inspect.signature(command).parameters.items()]
    extra = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    run.__signature__ = inspect.Signature([*own, extra])  # type: ignore[attr-defined]
    run.__annotations__ = hints
    return run


def one_line(error: BaseException) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    return value if value is None or isinstance(value, str | int) else str(value)

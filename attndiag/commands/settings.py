"""Parameters of methods, as `--set` takes them: NAME=VALUE of one method, METHOD.NAME=VALUE where there are several."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import typer


def parameters(given: Sequence[str]) -> dict[str, Any]:
    """`name=value` pairs: numbers, true/false/none, lists of whole numbers or heads, else text as it stands."""
    found: dict[str, Any] = {}
    for pair in given:
        name, separator, value = pair.partition("=")
        if not separator or not name.isidentifier():
            raise typer.BadParameter(f"--set {pair!r} is not NAME=VALUE")
        found[name] = _value(name, value)
    return found


def method_parameters(given: Sequence[str], but: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """`method.name=value` triples by method, on top of those that were told otherwise.

    Raises
    ------
    UnknownMethodError, UnknownParameterError : with the nearest name, before any model is loaded.
    """
    found = {method: dict(params) for method, params in but.items()}
    for triple in given:
        left, separator, value = triple.partition("=")
        method, dot, name = left.rpartition(".")
        if not separator or not dot or not method or not name.isidentifier():
            example = "integrated_gradients.max_steps=512"
            raise typer.BadParameter(f"--set {triple!r} is not METHOD.NAME=VALUE, as in {example}")
        _require_parameter(method, name)
        found.setdefault(method, {})[name] = _value(name, value)
    return found


def _require_parameter(method: str, name: str) -> None:
    from attndiag.catalog import UnknownParameterError, method_named
    from attndiag.comparison.methods import ACROSS_LAYERS, parse_method

    # a comparison makes these from maps that it holds already
    known = () if method in ACROSS_LAYERS else tuple(method_named(parse_method(method)[0]).parameters)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UnknownParameterError(
            f"--set: {method} has no parameter {name!r}; {hint}it takes {', '.join(sorted(known)) or 'none'}"
        )


def _value(name: str, value: str) -> Any:
    if name == "heads":
        heads = [re.fullmatch(r"L(\d+)H(\d+)", part.strip()) for part in value.split(",")]
        if not all(heads):
            raise typer.BadParameter(f"--set heads={value} is not a list such as L23H3,L17H4")
        return [(int(head[1]), int(head[2])) for head in heads if head]
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words and name != "keep":
        return words[value.lower()]
    parts = value.split(",")
    if all(part.strip().lstrip("-").isdigit() for part in parts):
        numbers = [int(part) for part in parts]
        return numbers if len(numbers) > 1 or name in ("layers", "queries", "keep") else numbers[0]
    try:
        return float(value)
    except ValueError:
        return value

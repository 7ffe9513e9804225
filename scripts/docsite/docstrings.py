"""Griffe extension: the docstrings of this project as numpydoc has them.

Here a parameter is `name : what it is`; numpydoc wants `name : type` and what it is on the next lines. Types stand in
the signatures, so the text moves to the next line. `Returns` is free text here and goes below the type that the
signature gives. `<` outside code would open an HTML tag (`<T_ij, o_i>`), so it is escaped.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

NAMED = ("Parameters", "Attributes", "Raises", "Warns")
FREE = ("Returns", "Yields")
_ITEM = re.compile(r"^(?P<names>[\w*`\"'.]+(?:, [\w*`\"'.]+)*)\s+: (?P<text>.+)$")


class HouseDocstrings(Extension):
    """Rewrites every docstring that is loaded."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if not obj.is_alias and obj.docstring is not None:
            returns = getattr(obj, "returns", None)
            obj.docstring.value = rewritten(obj.docstring.value, str(returns or "value"))


def rewritten(text: str, returns: str = "value") -> str:
    """One docstring in numpydoc's form; `returns` is the annotation of what a function returns."""
    lines = _escaped(text).splitlines()
    out: list[str] = []
    index = 0
    while index < len(lines):
        title = lines[index].strip()
        underlined = index + 1 < len(lines) and re.fullmatch(r"-{3,}", lines[index + 1].strip() or "x")
        if not underlined or title not in (*NAMED, *FREE):
            out.append(lines[index])
            index += 1
            continue
        end = index + 2
        while end < len(lines) and not (
            end + 1 < len(lines) and lines[end].strip() and re.fullmatch(r"-{3,}", lines[end + 1].strip() or "x")
        ):
            end += 1
        body = lines[index + 2 : end]
        out += [lines[index], lines[index + 1], *(_named(body) if title in NAMED else _free(body, returns))]
        index = end
    return "\n".join(out)


def _named(body: list[str]) -> list[str]:
    found: list[str] = []
    for line in body:
        match = _ITEM.match(line)
        found += [match["names"], f"    {match['text']}"] if match else [line]
    return found


def _free(body: list[str], returns: str) -> list[str]:
    """The text below its type; a first line `Type` with the rest indented stays as it is."""
    head = [line for line in body if line.strip()]
    if len(head) > 1 and all(line.startswith("    ") for line in head[1:]):
        return body
    return [returns, *(f"    {line}" if line.strip() else line for line in body)]


def _escaped(text: str) -> str:
    """`<` as `&lt;` outside code spans and indented code."""
    parts = re.split(r"(`+[^`]+`+)", text)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)

"""Token texts as a page or a terminal may show them: nothing invisible, nothing that turns the line around.

A token may be a space, a line break, half a character, a control character, a bidirectional override or a piece of
mark-up. Escaping of mark-up is the template's work; this module makes the rest visible.
"""

from __future__ import annotations

import unicodedata

_NAMED = {"\n": "⏎", "\r": "␍", "\t": "⇥"}
# no-break space, soft hyphen, zero-width characters, and what changes the direction of what follows
_ESCAPED_CATEGORIES = {"Cc", "Cf", "Co", "Cn", "Cs", "Zl", "Zp"}


def visible(text: str, *, mark_spaces: bool = True) -> str:
    """`text` with every character visible.

    Parameters
    ----------
    text : of one token, or of several.
    mark_spaces : show leading and trailing spaces as `·`; those inside stay.

    Returns
    -------
    Line breaks and tabs as signs, control and format characters (bidirectional overrides among them) as `\\u202e`,
    odd spaces as `\\u00a0`; `∅` for an empty text.
    """
    if text == "":
        return "∅"
    shown = "".join(_shown(character) for character in text)
    if not mark_spaces:
        return shown
    inner = shown.strip(" ")
    before = len(shown) - len(shown.lstrip(" "))
    after = len(shown) - before - len(inner) if inner else 0
    return "·" * before + inner + "·" * after


def _shown(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    category = unicodedata.category(character)
    if category in _ESCAPED_CATEGORIES or (category == "Zs" and character != " "):
        code = ord(character)
        return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}"
    return character


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters, the middle left out."""
    if len(text) <= limit:
        return text
    head = (limit - 1 + 1) // 2
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"

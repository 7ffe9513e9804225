"""Pages that need nothing but themselves: templates, escaping, figures inside, no remote loads.

Every page carries a content security policy that forbids loading anything, so what works here works offline. Texts of
prompts and tokens go through jinja2's escaping; data for scripts through `script_data`, which no `</script>` in a token
can close.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from attndiag.reports.figure_style import GRID, HEAD, INK, LAYER, MUTED, PAPER, WEIGHT
from attndiag.reports.token_text import shortened, visible

TEMPLATES = Path(__file__).parent / "templates"
# what a page may weigh, in bytes
BUDGET = 8 * 2**20
DASH, MINUS = "\u2013", "\u2212"

# px a pt at most: a figure of 7.2 inches fills the page
_LARGEST = 1.9
# colours of the figures -> variables of the page, so that a drawing follows light, dark and print
_COLOURS = {
    INK: "--ink",
    GRID: "--rule",
    MUTED: "--muted",
    PAPER: "--paper",
    WEIGHT: "--weight",
    HEAD: "--head-fill",
    LAYER: "--layer",
}


def environment() -> Environment:
    """Templates with escaping on for every variable and an error for every misspelt one."""
    env = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters.update(
        num=number,
        fixed=fixed,
        percent=percent,
        small=scientific,
        size=file_size,
        token=visible,
        short=shortened,
        seconds=seconds,
    )
    return env


def render(template: str, **values: Any) -> str:
    """One page. Lone surrogates, which a file cannot hold, become question marks."""
    page = environment().get_template(template).render(**values)
    return page.encode("utf-8", errors="replace").decode("utf-8")


def part(template: str, **values: Any) -> Markup:
    """A piece of a page, escaped like a page, to stand inside another one."""
    return Markup(render(template, **values))


def asset(name: str) -> Markup:
    """A style sheet or script of this package, to stand inside a page as it is."""
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


def script_data(value: Any) -> Markup:
    """JSON for a `<script type="application/json">`: no `<`, `>` or `&` survives to be read as mark-up."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def inline_svg(svg: str, name: str, alt: str) -> Markup:
    """A matplotlib SVG as part of a page: labelled, ids its own, colours those of the page."""
    start = svg.index("<svg")
    drawing = re.sub(r"<metadata>.*?</metadata>", "", svg[start:], flags=re.DOTALL)
    # ids are shared by a whole page: two figures would steal each other's clip paths
    drawing = re.sub(r'\bid="', f'id="{name}-', drawing)
    drawing = re.sub(r"url\(#", f"url(#{name}-", drawing)
    drawing = re.sub(r'href="#', f'href="#{name}-', drawing)
    for colour, variable in _COLOURS.items():
        drawing = drawing.replace(colour, f"var({variable})")
    drawing = drawing.replace("DejaVu Sans", "system-ui")
    head, rest = drawing.split(">", 1)
    # the size comes from the page, the proportions from the view box; a narrow figure keeps the letters of a wide one
    wide = re.search(r' width="([\d.]+)pt"', head)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    if wide is not None:
        head += f' style="max-width: {float(wide.group(1)) * _LARGEST:.0f}px"'
    label = escape(alt)
    return Markup(f'{head} role="img" aria-label="{label}">{rest}')


def number(value: Any, digits: int = 3) -> str:
    """`digits` significant places, at most as many after the point, but never so few that a number looks like 0; a
    dash for what is undefined.
    """
    if _undefined(value):
        return DASH
    value = float(value)
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        text = f"{value:.{digits - 1}g}"
    else:
        first = -math.floor(math.log10(abs(value)))
        places = max(0, digits - 1 + first)
        text = f"{value:,.{min(places, max(digits, first))}f}"
    return text.replace("-", MINUS, 1)


def fixed(value: Any, digits: int = 2) -> str:
    """`digits` places after the point; a dash for what is undefined, and no minus sign before a zero."""
    if _undefined(value):
        return DASH
    text = f"{float(value):.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text.replace("-", MINUS, 1)


def percent(value: Any, digits: int = 1) -> str:
    """A share as percent; a dash for what is undefined."""
    return DASH if _undefined(value) else f"{100 * float(value):.{digits}f}\u00a0%".replace("-", MINUS)


def scientific(value: Any) -> str:
    """A small number such as an error: 4.2e-07."""
    return DASH if _undefined(value) else f"{float(value):.1e}"


def seconds(value: Any) -> str:
    """A wall time."""
    if _undefined(value):
        return DASH
    value = float(value)
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def file_size(value: int) -> str:
    """Bytes in the unit that reads best."""
    for limit, unit in ((1e6, "MB"), (1e3, "kB")):
        if value >= limit:
            return f"{value / limit:.1f}\u00a0{unit}"
    return f"{value}\u00a0B"


def _undefined(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value)) or value != value


def notebook_frame(page: str, title: str, height: int = 640) -> str:
    """A page inside a notebook: a frame of its own, so that several on one page cannot clash.

    It may run its own script and offer files to keep; it may not read the notebook around it.
    """
    attributes: Mapping[str, str] = {
        "srcdoc": page,
        "title": title,
        "sandbox": "allow-scripts allow-downloads",
        "style": f"width:100%;height:{height}px;border:1px solid #8884",
    }
    return "<iframe " + " ".join(f'{key}="{escape(value)}"' for key, value in attributes.items()) + "></iframe>"

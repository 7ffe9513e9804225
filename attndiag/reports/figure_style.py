"""How the figures look: sizes, colours, fonts, and an empty canvas. `style` undoes itself, so nothing is global."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

INK, GRID, MUTED, PAPER = "#1b1b1f", "#d4d4da", "#6b6b76", "#fefefe"
WEIGHT, HEAD, LAYER = "#0072b2", "#e69f00", "#cc79a7"
STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "pdf.fonttype": 42,
    "svg.hashsalt": "attndiag",
    "savefig.dpi": 200,
}


@contextmanager
def style(**more: Any) -> Iterator[None]:
    """The report's look, undone on leaving."""
    with mpl.rc_context({**STYLE, **more}):
        yield


def canvas(width: float, height: float, **grid: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06, wspace=0.04, hspace=0.04)  # type: ignore[union-attr]
    return figure, figure.subplots(**grid)

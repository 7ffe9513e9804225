"""The figures of a comparison page, drawn from its tables.

Signed numbers are PuOr around 0, rates cividis from 0 to 1, verdicts Okabe-Ito with a hatch each, so that no reading
hangs on hue. What is undefined is grey and says so; it is never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.ticker import MaxNLocator

from attndiag.reports.compared_tables import Cell, Row
from attndiag.reports.figure_style import GRID, HEAD, LAYER, MUTED, WEIGHT, canvas
from attndiag.reports.html import fixed
from attndiag.reports.token_text import shortened, visible
from attndiag.stats.rates import Rate
from attndiag.stats.verdicts import VERDICTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNKNOWN = "#e9e9ee"
# inside coloured cells: these do not follow the page into its dark dress, since the cells do not
ON_LIGHT, ON_DARK = "#1b1b1e", "#ffffff"
# colour, hatch
VERDICT_LOOK = {
    "agree": ("#0072b2", ""),
    "disagree": ("#e69f00", "////"),
    "inconclusive": ("#b8b8c2", ""),
    "replacement_dependent": ("#cc79a7", "...."),
    "undefined": ("#fefefe", "xxxx"),
}
# beyond this the matrix has no room for numbers in its cells
_NUMBERED = 12
_LABELLED_LAYERS = 40
_LINES = ((WEIGHT, "o", "-"), (HEAD, "s", "--"), (LAYER, "^", "-."))
_VECTOR_CELLS = 2000


@dataclass(frozen=True)
class Drawn:
    """A figure of the page: title, caption, what it shows for those who cannot see it, and how to draw it."""

    title: str
    caption: str
    alt: str
    draw: Callable[[], Figure]


def short_name(method: str, limit: int = 26) -> str:
    """A method's name on an axis."""
    return shortened(visible(method, mark_spaces=False), limit).replace("$", r"\$")


def draw_agreement(
    methods: Sequence[str], order: Mapping[tuple[str, str], Cell], top: Mapping[tuple[str, str], Cell]
) -> Figure:
    """Left: mean tau-b of every pair; right: overlap of the three strongest, adjusted for chance."""
    panels = [("Same order of tokens?", "tau-b, mean over prompts", order)]
    if top:
        panels.append(("Same three strongest?", "overlap, adjusted for chance", top))
    n = len(methods)
    side = float(np.clip(0.34 * n + 0.9, 2.0, 5.0))
    figure, axes = canvas(1.3 + len(panels) * side, side + 1.5, nrows=1, ncols=len(panels), sharey=True, squeeze=False)
    for axis, (title, unit, cells) in zip(axes[0], panels, strict=True):
        grid = np.full((n, n), np.nan)
        for i, one in enumerate(methods):
            for j, two in enumerate(methods):
                if i != j and (one, two) in cells:
                    grid[i, j] = cells[one, two].value
        image = axis.imshow(
            np.ma.masked_invalid(grid),
            cmap=mpl.colormaps["PuOr"].with_extremes(bad=UNKNOWN),
            vmin=-1,
            vmax=1,
            interpolation="none",
        )
        for i, one in enumerate(methods):
            for j, two in enumerate(methods):
                if i == j or (one, two) not in cells or n > _NUMBERED:
                    continue
                _write_cell(axis, j, i, cells[one, two])
        axis.set_title(title)
        axis.set_xticks(range(n), [short_name(name) for name in methods], rotation=90)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=axis, orientation="horizontal", shrink=0.8, aspect=22, pad=0.02)
        bar.set_ticks([-1, -0.5, 0, 0.5, 1])
        bar.set_label(unit)
        bar.outline.set_visible(False)  # type: ignore[operator]
    axes[0][0].set_yticks(range(n), [short_name(name) for name in methods])
    return figure


def _write_cell(axis: Axes, x: int, y: int, cell: Cell) -> None:
    if cell.undefined:
        axis.text(x, y, "undef.", ha="center", va="center", fontsize=5, color=ON_LIGHT)
        return
    dark = abs(cell.value) > 0.65
    outside = math.isfinite(cell.low) and not cell.low <= cell.value <= cell.high
    axis.text(
        x,
        y,
        fixed(cell.value),
        ha="center",
        va="center",
        fontsize=6,
        color=ON_DARK if dark else ON_LIGHT,
        fontweight="bold" if outside else "normal",
    )


def draw_faithfulness(groups: Sequence[tuple[str, Sequence[Row]]]) -> Figure:
    """Paired difference of every method to the random orders, with its interval, one panel a metric."""
    shown = [(metric, [row for row in rows if row["paired"] is not None]) for metric, rows in groups]
    shown = [(metric, rows) for metric, rows in shown if rows]
    across = min(2, max(1, len(shown)))
    down = max(1, -(-len(shown) // across))
    longest = max((len(rows) for _, rows in shown), default=1)
    height = float(np.clip(down * (0.85 + 0.2 * longest), 1.8, 12))
    # names once, where every panel holds the same methods
    same = len({tuple(row["method"] for row in rows) for _, rows in shown}) == 1
    figure, axes = canvas(7.2, height, nrows=down, ncols=across, squeeze=False)
    for index, axis in enumerate(axes.flat):
        if index >= len(shown):
            axis.set_axis_off()
            continue
        metric, rows = shown[index]
        better = rows[0]["direction"]
        for place, row in enumerate(rows):
            found = row["paired"]
            colour = MUTED if row["circular"] else WEIGHT
            if math.isfinite(found["difference"]):
                if math.isfinite(found["low"]) and math.isfinite(found["high"]):
                    axis.hlines(place, found["low"], found["high"], color=colour, lw=1.2)
                face = "none" if row["circular"] else colour
                marker = "s" if row["circular"] else "o"
                axis.plot(found["difference"], place, marker=marker, mfc=face, mec=colour, ms=4.5)
            else:
                axis.text(0, place, " undefined", va="center", fontsize=6, color=MUTED)
        axis.axvline(0, color=MUTED, lw=0.8)
        names = [short_name(row["method"], 22) + (" (ceiling)" if row["circular"] else "") for row in rows]
        axis.set_yticks(range(len(rows)), names if not same or index % across == 0 else [""] * len(rows))
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.tick_params(axis="y", length=0)
        axis.grid(True, axis="x")
        # the replacement, which is part of the name, on a line of its own
        name, bracket, rest = visible(metric, mark_spaces=False).partition("[")
        # the same metric in another unit is another panel, over other prompts
        apart = f", {rows[0]['prompts']} prompts" if sum(one == metric for one, _ in shown) > 1 else ""
        title = name.replace("_", " ") + apart + (f"\n{bracket}{shortened(rest, 34)}" if bracket else "")
        axis.set_title(title.replace("$", r"\$"), fontsize=7.5)
        unit = rows[0]["unit"]
        arrow = "right is better" if better == "higher" else "left is better"
        axis.set_xlabel(f"minus random orders ({'no unit' if unit == '1' else unit}); {arrow}", fontsize=7)
    return figure


def draw_verdicts(rows: Sequence[Row]) -> Figure:
    """Share of items with each verdict, one bar a level and method, with the number of items beside it."""
    figure, axis = canvas(7.2, float(np.clip(0.9 + 0.23 * len(rows), 1.6, 9)))
    names = []
    for place, row in enumerate(rows):
        total = sum(row[verdict] for verdict in VERDICTS)
        left = 0.0
        for verdict in VERDICTS:
            share = row[verdict] / total if total else 0.0
            colour, hatch = VERDICT_LOOK[verdict]
            axis.barh(
                place, share, left=left, color=colour, hatch=hatch, edgecolor=MUTED, linewidth=0.4, height=0.72,
                label=verdict.replace("_", " ") if place == 0 else None,
            )  # fmt: skip
            left += share
        axis.text(1.01, place, f"{total:,}", va="center", fontsize=6.5, color=MUTED)
        names.append(f"{row['level']}: {short_name(row['method'])}" + (" (ceiling)" if row["ceiling"] else ""))
    axis.set_yticks(range(len(rows)), names)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlim(0, 1)
    axis.set_xlabel("share of the judged items (their number at the right)")
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, handlelength=1.6)
    return figure


def draw_head_maps(rows: Sequence[Row], methods: Sequence[str]) -> Figure:
    """Layers by heads: on which part of the decided prompts each method misleads; grey where nothing is decided."""
    layers = sorted({row["layer"] for row in rows})
    n_heads = max(row["head"] for row in rows) + 1
    height = float(np.clip(1.2 + 0.125 * len(layers), 2.0, 9.0))
    across = max(1, len(methods))
    figure, axes = canvas(min(7.2, 1.2 + 2.6 * across), height, nrows=1, ncols=across, sharey=True, squeeze=False)
    place = {layer: index for index, layer in enumerate(layers)}
    for axis, method in zip(axes[0], methods, strict=True):
        grid = np.full((len(layers), n_heads), np.nan)
        for row in rows:
            found = row["by_method"].get(method)
            if found is not None and found.decided:
                grid[place[row["layer"]], row["head"]] = found.share
        mesh = axis.pcolormesh(
            np.arange(n_heads + 1) - 0.5,
            np.arange(len(layers) + 1) - 0.5,
            np.ma.masked_invalid(grid),
            cmap=mpl.colormaps["cividis"].with_extremes(bad=UNKNOWN),
            vmin=0,
            vmax=1,
            rasterized=grid.size > _VECTOR_CELLS,
            edgecolors="face",
            linewidth=0.2,
        )
        axis.set_title(short_name(method))
        axis.set_xlabel("head")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9))
        axis.tick_params(length=2)
        axis.spines[:].set_visible(False)
        bar = figure.colorbar(mesh, ax=axis, orientation="horizontal", shrink=0.9, aspect=25, pad=0.02)
        bar.set_label("misleads, share of decided prompts")
        bar.outline.set_visible(False)  # type: ignore[operator]
        bar.ax.tick_params(length=2)
    axes[0][0].invert_yaxis()
    step = max(1, -(-len(layers) // _LABELLED_LAYERS))
    axes[0][0].set_yticks(range(0, len(layers), step), [str(layers[i]) for i in range(0, len(layers), step)])
    axes[0][0].set_ylabel("layer")
    return figure


def draw_replacements(rows: Sequence[Row], threshold: float) -> Figure:
    """Smallest tau-b between two replacements on every prompt, against what a verdict needs."""
    known = [row for row in rows if math.isfinite(row["replacement_tau"])]
    known.sort(key=lambda row: row["replacement_tau"])
    figure, axis = canvas(7.2, float(np.clip(0.9 + 0.16 * len(rows), 1.5, 8)))
    values = [row["replacement_tau"] for row in known]
    axis.axvspan(-1, threshold, color=GRID, alpha=0.35, lw=0)
    axis.axvline(threshold, color=MUTED, lw=0.9, ls=(0, (4, 3)))
    for below, face, label in ((True, "none", "no verdict"), (False, WEIGHT, "verdict")):
        places = [i for i, value in enumerate(values) if (value < threshold) == below]
        axis.plot([values[i] for i in places], places, ls="", marker="o", mfc=face, mec=WEIGHT, label=label)
    undefined = len(rows) - len(known)
    axis.set_xlim(-1.02, 1.02)
    axis.set_ylim(-0.8, max(len(known), 1) - 0.2)
    # names only where they can be read
    axis.set_yticks(range(len(known)), [short_name(row["prompt"], 24) for row in known] if len(known) <= 50 else [])
    axis.set_xlabel(f"smallest tau-b between two replacements; a verdict needs {threshold:g}")
    axis.grid(True, axis="x")
    axis.tick_params(axis="y", length=0)
    if undefined:
        axis.text(-0.98, -0.6, f"undefined on {undefined} more", fontsize=6.5, color=MUTED, va="center")
    figure.legend(loc="outside lower center", ncols=2, handletextpad=0.2)
    return figure


def draw_score_against_effect(
    rows: Sequence[Row],
    method: str,
    axes_of: tuple[str, str, str],
    by_layer: Mapping[str, Mapping[int, Rate]],
) -> Figure:
    """Left: each head, what a probe says of it against what it is worth. Right: how often methods mislead, by layer.

    Parameters
    ----------
    axes_of : columns of the probes: score, effect; and the unit of the effect.
    by_layer : method -> layer -> how often it misleads.
    """
    score, effect, unit = axes_of
    some = [row for row in rows if _finite(row["probes"].get(score)) and _finite(row["probes"].get(effect))]
    figure, (left, right) = canvas(7.2, 2.9, nrows=1, ncols=2)
    place = [(float(row["probes"][score]), float(row["probes"][effect])) for row in some]
    colours = [row["by_method"][method].share if method in row["by_method"] else math.nan for row in some]
    unknown = [xy for xy, colour in zip(place, colours, strict=True) if not _finite(colour)]
    known = [(*xy, colour) for xy, colour in zip(place, colours, strict=True) if _finite(colour)]
    if unknown:
        x, y = zip(*unknown, strict=True)
        left.scatter(x, y, s=13, facecolor="none", edgecolor=MUTED, lw=0.6, label="no decided prompt")
        left.legend(loc="best")
    if known:
        x, y, shade = zip(*known, strict=True)
        dots = left.scatter(x, y, c=shade, cmap="cividis", vmin=0, vmax=1, s=16, edgecolor=MUTED, lw=0.3)
        bar = figure.colorbar(dots, ax=left, shrink=0.8, aspect=22)
        bar.set_label(f"{short_name(method, 16)} misleads, share")
        bar.outline.set_visible(False)  # type: ignore[operator]
    left.axhline(0, color=MUTED, lw=0.8)
    left.set_xlabel(score.replace("_", " "))
    left.set_ylabel(f"{effect.partition('[')[0].replace('_', ' ')} ({unit})")
    left.set_title("What a head looks like, what it is worth")
    left.grid(True)
    for (name, counts), (colour, marker, line) in zip(by_layer.items(), _LINES, strict=False):
        decided = {layer: rate for layer, rate in counts.items() if rate.decided}
        layers, rates = list(decided), [rate.share for rate in decided.values()]
        ends = [[rate.low for rate in decided.values()], [rate.high for rate in decided.values()]]
        right.fill_between(layers, *ends, color=colour, alpha=0.16, lw=0)
        right.plot(layers, rates, color=colour, marker=marker, ls=line, label=short_name(name), mew=0)
    right.set_ylim(-0.02, 1.02)
    right.set_xlabel("layer")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_ylabel("misleads, share of decided rows")
    right.set_title("Where they mislead")
    right.grid(True, axis="y")
    if by_layer:
        right.legend(loc="best")
    return figure


def _finite(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and math.isfinite(float(value))

"""The figures of a report, drawn from its summary.

Each is a matplotlib `Figure` without pyplot (no global state), and is saved as PNG, SVG and PDF. Colours: viridis and
cividis for amounts, PuOr centred at 0 for differences, Okabe-Ito blue, orange and purple for the three methods, each
with a marker and a line style of its own, so that no reading hangs on hue.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from attndiag.reports.figure_style import GRID, HEAD, LAYER, MUTED, PAPER, WEIGHT, canvas, style
from attndiag.reports.tables import Summary
from attndiag.runs.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# heat maps with more cells than this are drawn as pictures inside the SVG
_VECTOR_CELLS = 2000
# layers with a tick label each
_LABELLED_LAYERS = 40


@dataclass(frozen=True)
class Drawing:
    """One figure: its file name, what it shows, and the function that draws it."""

    name: str
    title: str
    caption: str
    draw: Callable[[Summary], Figure]
    alt: str


def _layer_axis(axis: Axes, summary: Summary, *, vertical: bool = False) -> None:
    """Ticks at the places, labelled by layer."""
    labels = list(summary.places.label)
    step = max(1, -(-len(labels) // _LABELLED_LAYERS)) if vertical else max(1, -(-len(labels) // 15))
    ticks = np.arange(0, len(labels), step)
    if vertical:
        axis.set_yticks(ticks, [labels[i] for i in ticks])
        axis.set_ylabel("layer")
    else:
        axis.set_xticks(ticks, [labels[i] for i in ticks])
        axis.set_xlabel("layer")
        axis.set_xlim(-0.5, len(labels) - 0.5)


def draw_sink_by_layer(summary: Summary) -> Figure:
    """Left: a dot for each head, weight on the sink against its share of the head's writing. Right: by layer."""
    figure, (left, right) = canvas(7.2, 3.3, nrows=1, ncols=2)
    heads = summary.heads
    n_places = len(summary.places)
    left.plot([0, 1], [0, 1], color=MUTED, lw=0.8, ls=(0, (4, 3)), zorder=1)
    left.text(
        0.66, 0.685, "equal", rotation=45, ha="center", va="bottom", color=MUTED, fontsize=7, rotation_mode="anchor"
    )
    dots = left.scatter(
        heads.sink_weight,
        heads.sink_head_contribution_share,
        c=heads.place,
        cmap="viridis",
        vmin=0,
        vmax=max(1, n_places - 1),
        s=13,
        lw=0.3,
        edgecolor=MUTED,
        zorder=2,
    )
    _name_extremes(left, summary)
    left.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    left.set_xlabel("attention weight on position 0 (mass)")
    left.set_ylabel("its share of what the head writes")
    left.set_title("Each head")
    left.grid(True)
    bar = figure.colorbar(dots, ax=left, shrink=0.75, pad=0.02, aspect=22)
    bar.set_label("layer")
    ticks = np.unique(np.linspace(0, max(1, n_places - 1), min(6, max(2, n_places))).round().astype(int))
    ticks = ticks[ticks < n_places]
    bar.set_ticks(ticks.tolist(), labels=[summary.places.label[i] for i in ticks])
    bar.outline.set_visible(False)  # type: ignore[operator]

    layers, x = summary.layers, np.arange(n_places)
    for name, label, colour, marker, line in (
        ("sink_weight", "weight, mean over heads", WEIGHT, "o", "-"),
        ("sink_head_contribution_share", "share of head contribution", HEAD, "s", "--"),
        ("sink_contribution_share", "share of contribution (all heads)", LAYER, "^", "-."),
    ):
        right.plot(x, layers[name], color=colour, marker=marker, ls=line, label=label, zorder=3, mew=0)
    if "sink_weight" in summary.spread.columns.get_level_values(0):
        for name, colour in (("sink_weight", WEIGHT), ("sink_head_contribution_share", HEAD)):
            low, high = (summary.spread[(name, q)].reindex(x) for q in (0.1, 0.9))
            right.fill_between(x, low, high, color=colour, alpha=0.13, lw=0)
    right.set_ylim(0, 1.02)
    right.set_ylabel("part that position 0 takes")
    right.set_title("Each layer")
    right.grid(True, axis="y")
    _layer_axis(right, summary)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=3, handlelength=2.6)
    return figure


def _name_extremes(axis: Axes, summary: Summary) -> None:
    """Label the heads farthest from the diagonal on either side, where there is room."""
    heads = summary.heads.dropna(subset=["sink_gap"])
    order = heads.sink_gap.argsort()
    told: list[tuple[float, float]] = []
    for index in [*order[:3], *order[::-1][:2]]:
        head = heads.iloc[index]
        x, y = head.sink_weight, head.sink_head_contribution_share
        if abs(head.sink_gap) < 0.05 or any(abs(x - a) < 0.16 and abs(y - b) < 0.06 for a, b in told):
            continue
        told.append((x, y))
        below = head.sink_gap < 0
        axis.annotate(
            f"L{head.label}H{head['head']:.0f}",
            (x, y),
            # down and to the right, away from the diagonal, unless the axis is there
            xytext=(9, -11 if y > 0.12 else 11) if below else (-9, 9),
            textcoords="offset points",
            ha="left" if below else "right",
            va="center",
            arrowprops={"arrowstyle": "-", "lw": 0.5, "color": MUTED, "shrinkA": 1, "shrinkB": 2},
            fontsize=6.5,
            path_effects=[withStroke(linewidth=1.8, foreground=PAPER)],
        )


def draw_sink_heatmaps(summary: Summary) -> Figure:
    """Three maps, layers by heads: weight on the sink, its share of the writing, and the difference."""
    n_places, n_heads = len(summary.places), int(summary.heads["head"].max()) + 1
    height = float(np.clip(0.9 + 0.125 * n_places, 2.4, 9.0))
    figure, axes = canvas(7.2, height, nrows=1, ncols=3, sharey=True)
    grids = [
        _grid(summary, name, n_places, n_heads) for name in ("sink_weight", "sink_head_contribution_share", "sink_gap")
    ]
    worst = np.nanmax(np.abs(grids[2])) if np.isfinite(grids[2]).any() else 1.0
    limit = max(0.05, float(np.ceil(worst * 20) / 20))
    panels = (
        ("Weight on position 0", "mass", "viridis", 0.0, 1.0),
        ("Its share of the writing", "share", "viridis", 0.0, 1.0),
        ("Share minus weight", "difference", "PuOr", -limit, limit),
    )
    for axis, grid, (title, unit, colours, low, high) in zip(axes, grids, panels, strict=True):
        cmap = mpl.colormaps[colours].with_extremes(bad="#e9e9ee")
        mesh = axis.pcolormesh(
            np.arange(n_heads + 1) - 0.5,
            np.arange(n_places + 1) - 0.5,
            np.ma.masked_invalid(grid),
            cmap=cmap,
            vmin=low,
            vmax=high,
            rasterized=grid.size > _VECTOR_CELLS,
            edgecolors="face",
            linewidth=0.2,
        )
        axis.invert_yaxis() if axis is axes[0] else None
        axis.set_title(title)
        axis.set_xlabel("head")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9))
        axis.tick_params(length=2)
        axis.spines[:].set_visible(False)
        bar = figure.colorbar(mesh, ax=axis, orientation="horizontal", pad=0.02, shrink=0.9, aspect=25)
        bar.set_label(unit)
        bar.outline.set_visible(False)  # type: ignore[operator]
        bar.ax.tick_params(length=2)
    _layer_axis(axes[0], summary, vertical=True)
    return figure


def _grid(summary: Summary, measure: str, n_places: int, n_heads: int) -> np.ndarray:
    grid = np.full((n_places, n_heads), np.nan)
    grid[summary.heads.place.to_numpy(int), summary.heads["head"].to_numpy(int)] = summary.heads[measure]
    return grid


def draw_norms(summary: Summary) -> Figure:
    """What a heat map never shows: the length of the sink's value and of what it can write, beside other tokens'."""
    figure, axes = canvas(7.2, 2.7, nrows=1, ncols=2)
    x = np.arange(len(summary.places))
    for axis, kind, title, unit in (
        (axes[0], "v", "Values  ‖v‖", "value norm"),
        (axes[1], "f", "What a key can write  ‖f‖ = ‖v W_O‖", "residual norm"),
    ):
        for of, label, colour, marker, line in (
            ("other", "median other token", HEAD, "s", "--"),
            ("sink", "position 0", WEIGHT, "o", "-"),
        ):
            name = f"{of}_{kind}_norm"
            axis.plot(x, summary.layers[name], color=colour, marker=marker, ls=line, label=label, mew=0)
            low, high = (summary.spread[(name, q)].reindex(x) for q in (0.1, 0.9))
            axis.fill_between(x, low, high, color=colour, alpha=0.13, lw=0)
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.set_title(title)
        axis.set_ylabel(f"{unit} (log)")
        axis.grid(True, axis="y", which="major")
        _layer_axis(axis, summary)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, handlelength=2.6)
    return figure


def draw_ranks(summary: Summary) -> Figure:
    """Left: rank agreement by layer. Right: how often weight and contribution name different tokens."""
    figure, (left, right) = canvas(7.2, 2.8, nrows=1, ncols=2)
    x = np.arange(len(summary.places))
    for name, label, colour, marker, line in (
        ("rank_agreement", "weight and head contribution, by head", HEAD, "s", "--"),
        ("layer_rank_agreement", "mean weight and contribution, by layer", LAYER, "^", "-."),
    ):
        left.plot(x, summary.layers[name], color=colour, marker=marker, ls=line, label=label, mew=0)
    low, high = (summary.spread[("rank_agreement", q)].reindex(x) for q in (0.1, 0.9))
    left.fill_between(x, low, high, color=HEAD, alpha=0.15, lw=0)
    left.axhline(0, color=MUTED, lw=0.8)
    lowest = np.nanmin([*summary.layers.layer_rank_agreement, *low, 0.0])
    left.set_ylim(min(-0.05, lowest - 0.05), 1.02)
    left.set_ylabel("Kendall's tau-b")
    left.set_title("Same order of keys?")
    left.grid(True, axis="y")
    _layer_axis(left, summary)
    for name, colour, marker, line in (
        ("top_key_differs", HEAD, "s", "--"),
        ("layer_top_key_differs", LAYER, "^", "-."),
    ):
        right.plot(x, summary.layers[name], color=colour, marker=marker, ls=line, mew=0)
    right.set_ylim(0, 1.02)
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    right.set_ylabel("another top key (last query)")
    right.set_title("Same top key?")
    right.grid(True, axis="y")
    _layer_axis(right, summary)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, handlelength=2.6)
    return figure


def draw_clusters(summary: Summary) -> Figure:
    """Left: what position 0 takes, by cluster of prompts. Right: the task check, one dot a prompt."""
    clusters = summary.clusters.sort_values("sink_weight", ignore_index=True)
    y = np.arange(len(clusters))
    figure, (left, right) = canvas(
        7.2, float(np.clip(1.3 + 0.2 * len(clusters), 2.2, 9)), nrows=1, ncols=2, sharey=True
    )
    left.hlines(y, clusters.sink_contribution_share, clusters.sink_weight, color=GRID, lw=1.2, zorder=1)
    for name, label, colour, marker in (
        ("sink_weight", "weight", WEIGHT, "o"),
        ("sink_head_contribution_share", "head contribution", HEAD, "s"),
        ("sink_contribution_share", "contribution", LAYER, "^"),
    ):
        left.plot(clusters[name], y, ls="", marker=marker, color=colour, ms=5, label=label, mew=0)
    left.set_xlim(0, 1)
    left.set_xlabel("part that position 0 takes")
    left.set_title("Position 0 by cluster")
    left.set_yticks(y, [_short(name) for name in clusters.cluster])
    left.set_ylim(-0.7, len(clusters) - 0.3)
    left.grid(True, axis="x")
    left.tick_params(axis="y", length=0)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=3, handletextpad=0.2)

    prompts = summary.by_prompt.assign(cluster=summary.by_prompt.cluster.fillna("(none)"))
    row = prompts.cluster.map({name: i for i, name in enumerate(clusters.cluster)})
    known = prompts.logit_diff.notna()
    for right_answer, face, label in (
        (True, WEIGHT, "target is top-1 and beats the foil"),
        (False, "none", "it does not"),
    ):
        some = known & (prompts.task_ok == right_answer)
        if some.any() or right_answer:
            right.plot(
                prompts.logit_diff[some],
                row[some],
                ls="",
                marker="o",
                ms=4.2,
                mfc=face,
                mec=WEIGHT,
                mew=0.9,
                label=label,
            )
    right.axvline(0, color=MUTED, lw=0.8)
    right.set_xlabel("logit(target) \u2212 logit(foil)")
    right.set_title("Task check, one dot a prompt")
    right.grid(True, axis="x")
    right.tick_params(axis="y", length=0)
    if not known.any():
        right.set_axis_off()
        message = "no logit difference was measured:\nno target and foil, or no next-token output"
        right.text(0.5, 0.5, message, transform=right.transAxes, ha="center", va="center", color=MUTED)
    else:
        figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=2, handletextpad=0.2)
    return figure


def _short(name: str, limit: int = 24) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


DRAWINGS = (
    Drawing(
        "sink_by_layer",
        "Weight on position 0 against what it contributes",
        "Left: one dot a head; below the dashed line a head gives position 0 more weight than position 0 writes. "
        "Right: by layer; bands hold 80 % of the heads.",
        draw_sink_by_layer,
        "Scatter of weight on position 0 against its share of head contribution, and both by layer",
    ),
    Drawing(
        "sink_heatmaps",
        "Every layer and head",
        "Weight on position 0, its share of what the head writes, and the difference (orange: more weight than "
        "writing; purple: more writing than weight). Grey: not measured.",
        draw_sink_heatmaps,
        "Three heat maps, layers by heads: weight on position 0, its share of the writing, the difference",
    ),
    Drawing(
        "norms",
        "What a heat map of weights never shows: the norms",
        "Length of the value at position 0 and of the vector that it can write, beside the median other token of the "
        "same prompt. Mean over prompts and heads; bands hold 80 % of the heads.",
        draw_norms,
        "Norms of values and of transformed values by layer, position 0 against the median other token",
    ),
    Drawing(
        "ranks",
        "How alike weight and contribution order the keys",
        "With sinks and special tokens set aside, the future left out. 1 is the same order, 0 unrelated, "
        "\u22121 reversed. Band: 80 % of the heads. Right: share of prompts and heads (or layers) in which the "
        "largest weight and the largest contribution of the last query fall on different keys, all keys included.",
        draw_ranks,
        "Rank agreement by layer, and how often weight and contribution name different top keys",
    ),
    Drawing(
        "clusters",
        "By kind of prompt",
        "Left: the same three numbers by cluster. Right: whether the model does what the prompts ask; numbers about "
        "prompts that it gets wrong describe something else.",
        draw_clusters,
        "Position 0 by cluster of prompts, and the logit difference of every prompt",
    ),
)


def save_figures(folder: RunFolder, summary: Summary) -> dict[str, str]:
    """Write every figure as PNG, SVG and PDF into `figures/`; return {name: SVG for a page}."""
    inline = {}
    for drawing in DRAWINGS:
        with style():
            figure = drawing.draw(summary)
            # the layout is most of the work of a save; it is the same for every format
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            for kind, metadata in (("png", {}), ("svg", {"Date": None}), ("pdf", {"CreationDate": None})):
                folder.write_bytes(f"figures/{drawing.name}.{kind}", _rendered(figure, kind, metadata))
        with style(**{"svg.fonttype": "none"}):
            inline[drawing.name] = _rendered(figure, "svg", {"Date": None}, transparent=True).decode("utf-8")
    return inline


def _rendered(figure: Figure, kind: str, metadata: dict[str, Any], *, transparent: bool = False) -> bytes:
    target = io.BytesIO()
    figure.savefig(target, format=kind, metadata=metadata, transparent=transparent)
    return target.getvalue()

"""Figures about heads: maps of scores and of effects, score against effect, and a relation against its controls.

Grey cells were not measured. Scores that are masses or shares run from 0 to 1 on viridis; signed numbers are PuOr
around 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from attndiag.errors import NotApplicableError
from attndiag.explanations.head_composition import KINDS
from attndiag.reports.figure_style import GRID, HEAD, LAYER, MUTED, PAPER, WEIGHT, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attndiag.explanations.head_table import HeadTable

EFFECTS = ("ablation_effect", "mean_ablation_effect", "ablation_effect_patterns_kept")
TITLES = {
    "prefix_matching_score": "Prefix matching",
    "duplicate_token_score": "Duplicate token",
    "previous_token_score": "Previous token",
    "current_token_score": "Current token",
    "sink_mass": "Mass on sinks",
    "sink_contribution_share": "Sinks' share written",
    "sink_norm_ratio": "Sink ‖f‖ / other",
    "entropy": "Entropy",
    "effective_support": "Effective support",
    "relative_output_norm": "Output / layer mean",
    "largest_similarity": "Most similar head",
    "copying_score": "Copying (eigenvalues)",
    "ablation_effect": "Effect, zero",
    "mean_ablation_effect": "Effect, mean",
    "ablation_effect_patterns_kept": "Effect, patterns kept",
    "q_composition": "By queries",
    "k_composition": "By keys",
    "v_composition": "By values",
    "relation_mass": "Mass on the related token",
    "relation_mass_best_offset": "Best fixed offset",
    "relation_mass_shuffled": "Shuffled pairs",
}
_ACROSS = 4
# heat maps with more cells than this are drawn as pictures inside the SVG
_VECTOR_CELLS = 2000
_LABELLED_LAYERS = 40


@dataclass(frozen=True)
class Panel:
    """One heat map: a title, the unit, and [layer, head] values."""

    title: str
    unit: str
    values: np.ndarray
    signed: bool
    limits: tuple[float, float]


def measures_of_heads(table: HeadTable) -> list[str]:
    """Measures with one number a head, effects and relations left out, in their usual order."""
    return [
        name
        for name, scores in table.scores.items()
        if scores.axes == ("layer", "head") and name not in EFFECTS and not name.startswith("relation_")
    ]


def draw_score_maps(table: HeadTable) -> Figure:
    """A heat map, layers by heads, for each score.

    Raises
    ------
    NotApplicableError : nothing was measured for single heads.
    """
    names = measures_of_heads(table)
    if not names:
        raise NotApplicableError("no measure of single heads was made; see not_measurable")
    return draw_maps([panel(table, name) for name in names], layer_labels(table, names[0]))


def draw_effect_maps(table: HeadTable) -> Figure:
    """Maps of the effects of single heads: zero, mean, later patterns kept, and the first copy as control.

    Raises
    ------
    NotApplicableError : no head was ablated.
    """
    names = [name for name in EFFECTS if name in table.scores]
    if not names:
        raise NotApplicableError("no head was ablated; ask `attndiag.heads` for ablate=20")
    panels = [panel(table, name) for name in names]
    control = _array(table[names[0]].checks["first_copy_effect"])
    panels.append(Panel("First copy (control)", "nats", control, True, (0.0, 0.0)))
    widest = max(float(np.nanmax(np.abs(each.values), initial=0.0)) for each in panels)
    limit = max(0.05, widest)
    same = [Panel(each.title, each.unit, each.values, True, (-limit, limit)) for each in panels]
    return draw_maps(same, layer_labels(table, names[0]))


def panel(table: HeadTable, name: str) -> Panel:
    """One measure as a heat map."""
    scores = table[name]
    values = _array(scores.values)
    largest = float(np.nanmax(np.abs(values), initial=0.0)) if np.isfinite(values).any() else 1.0
    if scores.sign == "signed":
        limit = 1.0 if scores.unit in ("share", "cosine") else max(largest, 1e-9)
        return Panel(TITLES.get(name, name), scores.unit, values, True, (-limit, limit))
    high = 1.0 if scores.unit in ("mass", "share") else max(largest, 1e-9)
    return Panel(TITLES.get(name, name), scores.unit, values, False, (0.0, high))


def draw_maps(panels: Sequence[Panel], labels: Sequence[Any]) -> Figure:
    """Heat maps side by side, at most four in a row, layer 0 on top."""
    n_layers, n_heads = panels[0].values.shape
    rows, columns = -(-len(panels) // _ACROSS), min(_ACROSS, len(panels))
    height = float(np.clip(1.15 + 0.11 * n_layers, 1.9, 7.0)) * rows
    figure, grid = canvas(max(3.2, 1.8 * columns), height, nrows=rows, ncols=columns, sharey=True, squeeze=False)
    for axis in grid.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, each in zip(grid.flat, panels, strict=False):
        mesh = axis.pcolormesh(
            np.arange(n_heads + 1) - 0.5,
            np.arange(n_layers + 1) - 0.5,
            np.ma.masked_invalid(each.values),
            cmap=mpl.colormaps["PuOr" if each.signed else "viridis"].with_extremes(bad=GRID),
            vmin=each.limits[0],
            vmax=each.limits[1],
            rasterized=each.values.size > _VECTOR_CELLS,
            edgecolors="face",
            linewidth=0.5,
        )
        axis.set_title(each.title, fontsize=8)
        axis.set_xlabel("head")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axis.tick_params(length=2)
        axis.spines[:].set_visible(False)
        bar = figure.colorbar(mesh, ax=axis, orientation="horizontal", pad=0.02, shrink=0.9, aspect=20)
        bar.set_label(each.unit)
        bar.outline.set_visible(False)  # type: ignore[operator]
        bar.ax.tick_params(length=2)
        bar.locator = MaxNLocator(nbins=4)
        bar.update_ticks()
    first = grid[0][0]
    first.set_ylim(n_layers - 0.5, -0.5)
    step = max(1, -(-n_layers // _LABELLED_LAYERS), 2 if n_layers > 16 else 1)
    for row in grid[:, 0]:
        row.set_yticks(np.arange(0, n_layers, step), [str(labels[i]) for i in range(0, n_layers, step)])
        row.set_ylabel("layer")
    return figure


def draw_composition(table: HeadTable) -> Figure:
    """For each kind of composition a map, layer by earlier layer, of the strongest pair of heads.

    Raises
    ------
    NotApplicableError : composition was not measured.
    """
    names = [kind for kind in KINDS if kind in table.scores]
    if not names:
        raise NotApplicableError("composition was not measured; ask `attndiag.heads` for the probe composition")
    maps = []
    for name in names:
        values = table[name].values.nan_to_num(nan=-np.inf).amax(dim=(1, 3))
        maps.append(_array(values.masked_fill(values.isinf(), np.nan)))
    largest = max(float(np.nanmax(each, initial=0.0)) for each in maps) or 1.0
    labels = table[names[0]].labels["layer"]
    count = len(labels)
    figure, axes = canvas(7.2, 2.9, nrows=1, ncols=len(names), sharey=True, squeeze=False)
    mesh = None
    step = max(1, -(-count // 10))
    ticks = np.arange(0, count, step)
    for axis, name, values in zip(axes[0], names, maps, strict=True):
        mesh = axis.pcolormesh(
            np.arange(count + 1) - 0.5, np.arange(count + 1) - 0.5, np.ma.masked_invalid(values),
            cmap=mpl.colormaps["viridis"].with_extremes(bad=GRID), vmin=0.0, vmax=largest, edgecolors="face",
            linewidth=0.5, rasterized=values.size > _VECTOR_CELLS,
        )  # fmt: skip
        axis.set_title(TITLES[name])
        axis.set_xlabel("layer that writes")
        axis.set_xticks(ticks, [str(labels[i]) for i in ticks])
        axis.tick_params(length=2)
        axis.spines[:].set_visible(False)
    first = axes[0][0]
    first.set_ylim(count - 0.5, -0.5)
    first.set_yticks(ticks, [str(labels[i]) for i in ticks])
    first.set_ylabel("layer that reads")
    if mesh is not None:
        below = any(float(np.nanmin(each, initial=0.0)) < 0 for each in maps)
        bar = figure.colorbar(mesh, ax=list(axes[0]), pad=0.02, aspect=25, extend="min" if below else "neither")
        bar.set_label("ratio above chance")
        bar.outline.set_visible(False)  # type: ignore[operator]
        bar.ax.tick_params(length=2)
    return figure


def draw_score_against_effect(table: HeadTable, name: str = "prefix_matching_score") -> Figure:
    """Left: what a head scores against what it is worth. Right: the set together, beside random sets of its size.

    Raises
    ------
    NotApplicableError : no head was ablated.
    """
    if EFFECTS[0] not in table.scores:
        raise NotApplicableError("no head was ablated; ask `attndiag.heads` for ablate=20")
    figure, (left, right) = canvas(7.2, 3.3, nrows=1, ncols=2)
    _single_heads(left, table, name)
    _sets(right, table)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, handletextpad=0.2)
    return figure


def _single_heads(axis: Axes, table: HeadTable, name: str) -> None:
    frame = table.to_frame()
    effect = EFFECTS[0]
    frame = frame[frame[effect].notna() & frame[name].notna()]
    axis.axhline(0, color=MUTED, lw=0.8)
    axis.vlines(frame[name], frame[f"{effect}_low"], frame[f"{effect}_high"], color=WEIGHT, lw=0.8, alpha=0.6)
    axis.plot(frame[name], frame[effect], ls="", marker="o", color=WEIGHT, mew=0, label="second copy, zero")
    axis.plot(
        frame[name], frame[f"{effect}_first_copy_effect"], ls="", marker="x", color=MUTED, ms=4,
        label="first copy (control)",
    )  # fmt: skip
    axis.plot(
        frame[name], frame[EFFECTS[1]], ls="", marker="s", mfc="none", color=HEAD, ms=3.5, label="second copy, mean"
    )
    share = table[name].unit in ("mass", "share") and table[name].sign != "signed"
    widest = 1.0 if share else max(float(frame[name].abs().max()), 1e-9)
    told: list[tuple[float, float]] = []
    span = float(frame[effect].max() - frame[effect].min()) or 1.0
    largest = frame.reindex(frame[effect].abs().sort_values(ascending=False).index).head(8)
    for layer, head, x, y in zip(largest["layer"], largest["head"], largest[name], largest[effect], strict=True):
        if any(abs(x - a) < 0.16 * widest and abs(y - b) < 0.07 * span for a, b in told):
            continue
        told.append((x, y))
        inward = x > 0.8 * widest
        axis.annotate(
            head_name(layer, head), (x, y), xytext=(-5 if inward else 5, 3), textcoords="offset points",
            ha="right" if inward else "left", fontsize=6.5, path_effects=[withStroke(linewidth=1.8, foreground=PAPER)],
        )  # fmt: skip
    if share:
        axis.set_xlim(-0.03, 1.03)
    axis.set_xlabel(f"{TITLES.get(name, name).lower()} ({table[name].unit})")
    axis.set_ylabel("effect of the head (nats)")
    axis.set_title("One head at a time")
    axis.grid(True)


def _sets(axis: Axes, table: HeadTable) -> None:
    """Sets as rows: effect with its interval, the first copy beside it; random sets as a cloud."""
    named = [item for item in table.sets if item.name != "random"]
    drawn = [item for item in table.sets if item.name == "random"]
    rows = [f"{len(item.heads)} heads {item.name}\n({item.way})" for item in named]
    for y, item in enumerate(named):
        axis.hlines(y, item.low, item.high, color=WEIGHT, lw=1.2)
        axis.plot(item.effect, y, marker="o", color=WEIGHT, ms=5, mew=0)
        axis.plot(item.first_copy_effect, y, marker="x", color=MUTED, ms=5, ls="")
    if drawn:
        y = len(named)
        shift = np.linspace(-0.22, 0.22, len(drawn)) if len(drawn) > 1 else np.zeros(1)
        axis.plot([item.effect for item in drawn], y + shift, ls="", marker="o", color=WEIGHT, ms=3, mew=0, alpha=0.6)
        axis.plot([item.first_copy_effect for item in drawn], y + shift, ls="", marker="x", color=MUTED, ms=3)
        rows.append(f"{len(drawn)} random sets\nof {len(drawn[0].heads)} (zero)")
    axis.axvline(0, color=MUTED, lw=0.8)
    axis.set_yticks(range(len(rows)), rows)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel("effect (nats)")
    axis.set_title("Together")
    axis.grid(True, axis="x")
    if not named:
        axis.text(0.5, 0.5, "no head is above the threshold", transform=axis.transAxes, ha="center", color=MUTED)


def draw_relation(table: HeadTable, *, count: int = 12) -> Figure:
    """The heads with the most mass on the related token: mass against both rules, and what the edge is worth."""
    top = table.top("relation_mass", count)
    names = [head_name(layer, head) for layer, head in zip(top["layer"], top["head"], strict=True)]
    y = np.arange(len(top))
    with_effect = "relation_effect" in top
    figure, axes = canvas(
        7.2 if with_effect else 4.5, 1.3 + 0.2 * len(top), nrows=1, ncols=1 + with_effect, sharey=True, squeeze=False
    )
    left = axes[0][0]
    left.hlines(y, top["relation_mass_low"], top["relation_mass_high"], color=WEIGHT, lw=1)
    for column, label, colour, marker in (
        ("relation_mass", "related token, mass", WEIGHT, "o"),
        ("relation_share", "related token, share of writing", HEAD, "s"),
        ("relation_mass_best_offset", "best fixed offset", LAYER, "^"),
        ("relation_mass_shuffled", "shuffled pairs", MUTED, "x"),
    ):
        if column in top:
            left.plot(top[column], y, ls="", marker=marker, color=colour, ms=4.5, label=label)
    left.set_yticks(y, names)
    left.set_ylim(len(top) - 0.4, -0.6)
    left.set_xlim(-0.02, 1.02)
    left.set_xlabel("mass or share")
    left.set_title("Where it looks")
    left.grid(True, axis="x")
    left.tick_params(axis="y", length=0)
    if with_effect:
        right = axes[0][1]
        right.axvline(0, color=MUTED, lw=0.8)
        right.hlines(y, top["relation_effect_low"], top["relation_effect_high"], color=WEIGHT, lw=1)
        right.plot(top["relation_effect"], y, ls="", marker="o", color=WEIGHT, ms=4.5)
        if "relation_effect_shuffled" in top:
            right.plot(top["relation_effect_shuffled"], y, ls="", marker="x", color=MUTED, ms=4.5)
        right.set_xlabel(f"effect of the edge ({table['relation_effect'].unit})")
        right.set_title("What it is worth")
        right.grid(True, axis="x")
        right.tick_params(axis="y", length=0)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, handletextpad=0.2)
    return figure


def head_name(layer: Any, head: Any) -> str:
    """L18H6; layers that are named and not numbered keep their name."""
    return f"{layer} H{int(head)}" if isinstance(layer, str) else f"L{int(layer)}H{int(head)}"


def layer_labels(table: HeadTable, name: str) -> Sequence[Any]:
    """Labels of the layer axis."""
    return list(table[name].labels["layer"])


def _array(values: Any) -> np.ndarray:
    return np.asarray(values.detach().cpu().double().numpy(), dtype=float)

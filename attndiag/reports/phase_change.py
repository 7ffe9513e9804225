"""The phase change of induction heads on one page: scores, losses, in-context learning and effects against step.

`shipped_phase_change()` measures the training series that comes with the package and its one-layer control: no
training, seconds. `draw_phase_change` draws it, or any other history from `attndiag.heads_over_checkpoints`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attndiag.core.phases import PhaseWindow, phase_window
from attndiag.explanations.head_history import HeadHistory, heads_over_checkpoints
from attndiag.models.series import load_series
from attndiag.reports.figure_style import HEAD, INK, LAYER, MUTED, WEIGHT, canvas
from attndiag.reports.html import MINUS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class PhaseChange:
    """A run, its control where there is one, and their in-context-learning scores.

    Parameters
    ----------
    run, control : histories from `heads_over_checkpoints`.
    icl, control_icl : loss late minus loss early in the context, nats, one a checkpoint of each; empty if not measured.
    positions : (early, late) of those scores.
    about : what else is known, for the caption.
    """

    run: HeadHistory
    control: HeadHistory | None = None
    icl: tuple[float, ...] = ()
    control_icl: tuple[float, ...] = ()
    positions: tuple[int, int] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def window(self) -> PhaseWindow:
        """When the prefix-matching score rose from 20 % to 80 % of its final value."""
        return self.run.window()

    @property
    def learning_window(self) -> PhaseWindow:
        """The same for the in-context-learning score beyond the control's, or for the copies' losses without one."""
        if self.control is None or not self.icl or not self.control_icl:
            return self.run.learning_window(self.control)
        control = _interpolated(self.run.steps, self.control.steps, self.control_icl)
        return phase_window(self.run.steps, [theirs - mine for mine, theirs in zip(self.icl, control, strict=True)])

    def frame(self) -> pd.DataFrame:
        """One row a step and run: `run` (`run` or `control`), `step`, and each curve of the figure."""
        import pandas as pd

        parts = [_curves(self.run, self.icl).assign(run="run")]
        if self.control is not None:
            parts.append(_curves(self.control, self.control_icl).assign(run="control"))
        whole = pd.concat(parts, ignore_index=True)
        whole.insert(0, "run", whole.pop("run"))
        return whole


def shipped_phase_change(*, rows: int = 16, ablate: int = 8, progress: Progress | None = None) -> PhaseChange:
    """Measure the shipped series and its control: every head scored and ablated at every checkpoint."""
    found = []
    for name in ("induction", "control"):
        series = load_series(name)
        found.append((series, heads_over_checkpoints(series, rows=rows, ablate=ablate, progress=progress)))
    (series, run), (other, control) = found
    return PhaseChange(
        run,
        control,
        series.measured["icl"],
        other.measured["icl"],
        (int(series.notes["early"]), int(series.notes["late"])),
        {
            "control": "a control (one layer, same rows)",
            "seed": series.notes["seed"],
            "rows": rows,
            "checkpoints": len(series),
        },
    )


def lag_sentence(change: PhaseChange) -> str:
    """The two windows and the lag between them, in words."""
    window, learning = change.window, change.learning_window
    if not window.found:
        return f"No induction window: {window.reason}."
    said = f"Induction window (20 % to 80 % of the final score): steps {window.start:.0f} to {window.end:.0f}."
    if not learning.found:
        return f"{said} No in-context-learning window: {learning.reason}."
    beyond = " beyond the control" if change.control is not None else ""
    at_start, at_end = (
        f"{a - b:+.0f}".replace("-", MINUS) for a, b in ((learning.start, window.start), (learning.end, window.end))
    )
    return (
        f"{said} In-context learning{beyond}: steps {learning.start:.0f} to {learning.end:.0f}, a lag of {at_start} at "
        f"its start and {at_end} at its end."
    )


def draw_phase_change(change: PhaseChange) -> Figure:
    """Four panels against the training step; solid is the run, thin and dashed the control; grey is the window."""
    figure, axes = canvas(7.2, 5.2, nrows=2, ncols=2, sharex=True)
    run = _curves(change.run, change.icl)
    control = None if change.control is None else _curves(change.control, change.control_icl)
    window = change.window
    for axis in axes.flat:
        if window.found:
            axis.axvspan(window.start, window.end, color=MUTED, alpha=0.16, lw=0)
        axis.grid(True)
    scores, losses, learning, effects = axes.flat
    _lines(scores, run, control, [("prefix_matching", "prefix matching", WEIGHT, "o"),
                                  ("previous_token", "previous token", HEAD, "s")])  # fmt: skip
    scores.set(ylim=(-0.02, 1.0), ylabel="best head (mass)", title="Scores")
    _lines(losses, run, control, [("first_copy_loss", "first copy", MUTED, "s"),
                                  ("second_copy_loss", "second copy", WEIGHT, "o")])  # fmt: skip
    losses.set(ylabel="loss (nats)", title="Loss on the probe's two copies")
    losses.set_ylim(bottom=0)
    if _known(run, "icl"):
        _lines(learning, run, control, [("icl", "in-context learning", LAYER, "^")])
        early, late = change.positions or ("early", "late")
        learning.set_ylabel(f"loss at {late} minus at {early} (nats)")
        found = change.learning_window
        if found.found and control is not None:
            learning.hlines(
                learning.get_ylim()[0],
                found.start,
                found.end,
                color=LAYER,
                lw=4,
                label="beyond the control, 20\u201380 %",
            )
    else:
        learning.text(0.5, 0.5, "not measured", transform=learning.transAxes, ha="center", color=MUTED)
    learning.set_title("In-context-learning score")
    wanted = [("effect_together", "heads above the threshold, together", WEIGHT, "o")]
    layers = [column for column in run.columns if column.startswith("effect_layer_")]
    colours, marks = (HEAD, LAYER, INK, MUTED), "s^vD"
    # more curves than this cannot be told apart; the table has all layers
    for index, column in enumerate(layers[:4]):
        name = f"best single head of layer {column.removeprefix('effect_layer_')}"
        wanted.append((column, name, colours[index], marks[index]))
    effects.axhline(0, color=MUTED, lw=0.8)
    _lines(effects, run, control, [each for each in wanted if _known(run, each[0])])
    if _known(run, "first_copy_together"):
        effects.plot(
            run["step"], run["first_copy_together"], ls=":", color=WEIGHT, lw=1.2, label="together, on first copy"
        )
    effects.set(ylabel="effect of zero ablation (nats)", title="What the heads are worth")
    for axis in axes.flat:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="best", handlelength=1.8)
    for axis in axes[1]:
        axis.set_xlabel("training step")
    said = f"solid: the run; dashed: {change.about.get('control', 'the control')}; grey: induction window"
    figure.suptitle(said if control is not None else "grey: induction window", fontsize=7.5, color=MUTED)
    return figure


def _lines(
    axis: Axes, run: pd.DataFrame, control: pd.DataFrame | None, wanted: list[tuple[str, str, str, str]]
) -> None:
    for column, label, colour, marker in wanted:
        axis.plot(run["step"], run[column], color=colour, marker=marker, mew=0, ms=2.8, label=label)
        if control is not None and _known(control, column):
            axis.plot(control["step"], control[column], color=colour, ls="--", lw=1.0)


def _known(frame: pd.DataFrame, column: str) -> bool:
    """Whether a curve has any number."""
    return column in frame and bool(frame[column].notna().to_numpy().any())


def _curves(history: HeadHistory, icl: tuple[float, ...]) -> pd.DataFrame:
    """One row a step: best scores, losses, in-context-learning score and effects; nan where not measured."""
    import pandas as pd

    missing = [math.nan] * len(history.steps)
    if not icl and all("icl_score" in table.facts for table in history.tables):
        icl = tuple(history.curve("icl_score"))
    columns: dict[str, list[float]] = {"step": list(history.steps)}
    for name, measure in (("prefix_matching", "prefix_matching_score"), ("previous_token", "previous_token_score")):
        measured = all(measure in table.scores for table in history.tables)
        columns[name] = history.curve(measure) if measured else missing
    for name in ("first_copy_loss", "second_copy_loss"):
        columns[name] = [float(table.facts.get(name, math.nan)) for table in history.tables]
    columns["icl"] = list(icl) or missing
    together = [[s for s in t.sets if s.name != "random" and s.way == "zero"] for t in history.tables]
    columns["effect_together"] = [found[0].effect if found else math.nan for found in together]
    columns["first_copy_together"] = [found[0].first_copy_effect if found else math.nan for found in together]
    if all("ablation_effect" in table.scores for table in history.tables):
        for index, label in enumerate(history.tables[0]["ablation_effect"].labels["layer"]):
            best = []
            for table in history.tables:
                values = table["ablation_effect"].values[index]
                there = values[~values.isnan()]
                best.append(there.max().item() if there.numel() else math.nan)
            columns[f"effect_layer_{label}"] = best
    return pd.DataFrame(columns)


def _interpolated(steps: tuple[int, ...], known: tuple[int, ...], values: tuple[float, ...]) -> list[float]:
    import numpy as np

    return np.interp(steps, known, values).tolist()

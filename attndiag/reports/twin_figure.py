"""The figure of the leaky twins: training curves on the left, what they are worth on the right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from attndiag.reports.figure_style import HEAD, INK, MUTED, WEIGHT, canvas, style

_COLOURS = {"sound": WEIGHT, "leaky": HEAD}
_MARKS = {"sound": "-", "leaky": "--"}


def draw_twins(twins: Mapping[str, tuple[Sequence[float], float, float]], entropy: float) -> Figure:
    """Two panels: training loss against steps, and teacher-forced against free-running loss.

    Parameters
    ----------
    twins : by name (`"sound"`, `"leaky"`): training losses by step, teacher-forced loss and free-running loss on
        held-out rows, all in nats per token.
    entropy : of the language, in nats per token; no honest model goes below.
    """
    with style():
        figure, (left, right) = canvas(6.6, 2.7, ncols=2, width_ratios=(1.5, 1))
        for name, (curve, _, _) in twins.items():
            left.plot(range(1, len(curve) + 1), curve, _MARKS[name], color=_COLOURS[name], label=f"{name} twin")
        left.axhline(entropy, color=INK, linewidth=0.8, linestyle=":")
        left.annotate(
            f"entropy of the language, {entropy:.2f}", (1, entropy), xytext=(-2, -9), textcoords="offset points",
            xycoords=("axes fraction", "data"), ha="right", color=MUTED, fontsize=7,
        )  # fmt: skip
        left.set(title="What training shows", xlabel="step", ylabel="training loss, nats per token")
        left.set_ylim(0)
        left.legend(loc="upper right")
        for place, (name, (_, forced, free)) in enumerate(twins.items()):
            for offset, value, filled in ((-0.2, forced, False), (0.2, free, True)):
                right.bar(
                    place + offset, value, 0.36, color=_COLOURS[name] if filled else "none", edgecolor=_COLOURS[name],
                    hatch=None if filled else "////",
                )  # fmt: skip
                right.annotate(
                    f"{value:.2f}", (place + offset, value), xytext=(0, 2), textcoords="offset points", ha="center",
                    fontsize=7,
                )  # fmt: skip
        right.axhline(entropy, color=INK, linewidth=0.8, linestyle=":")
        right.set_xticks(range(len(twins)), [f"{name} twin" for name in twins])
        right.set(title="What it is worth", ylabel="held-out loss, nats per token")
        right.margins(y=0.12)
        shapes = [
            Patch(facecolor="none", edgecolor=MUTED, hatch="////", label="whole rows"),
            Patch(facecolor=MUTED, edgecolor=MUTED, label="free running"),
        ]
        right.legend(handles=shapes, loc="upper left")
    return figure

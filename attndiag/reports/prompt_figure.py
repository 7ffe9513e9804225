"""One layer of one prompt as a figure: weight beside contribution, heads joined, and their difference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np

from attndiag.reports.figure_style import MUTED, canvas
from attndiag.reports.token_text import shortened, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from attndiag.reports.prompt_view import PromptView

_LABELLED_TOKENS = 40


def draw_layer(view: PromptView, index: int) -> Figure:
    """Mean weight over heads, row shares of the layer's contribution, and the difference, queries by keys."""
    layer = view.layers[index]
    weight = layer.weight.mean(axis=0)
    maps = [("Weight, mean over heads", "mass", weight, "viridis", 0.0, 1.0)]
    if layer.together is not None:
        difference = layer.together - weight
        limit = max(0.05, float(np.nanmax(np.abs(difference))))
        maps.append(("Contribution, share of row", "share", layer.together, "viridis", 0.0, 1.0))
        maps.append(("Contribution minus weight", "difference", difference, "PuOr", -limit, limit))
    n_queries, n_keys = weight.shape
    side = float(np.clip(0.13 * max(n_queries, n_keys), 2.2, 5.0))
    figure, axes = canvas(len(maps) * side + 1.0, side + 1.5, nrows=1, ncols=len(maps), sharey=True, squeeze=False)
    # the future has no number: blank, not zero
    hidden = (layer.weight == 0).all(axis=0)
    for axis, (title, unit, values, colours, low, high) in zip(axes[0], maps, strict=True):
        image = axis.imshow(
            np.ma.masked_array(values, hidden),
            cmap=mpl.colormaps[colours].with_extremes(bad="#00000000"),
            vmin=low,
            vmax=high,
            interpolation="none",
            aspect="equal",
        )
        axis.set_title(title)
        axis.set_xlabel("key")
        axis.spines[:].set_visible(False)
        _label(axis, view.key_tokens, vertical=False)
        bar = figure.colorbar(image, ax=axis, orientation="horizontal", shrink=0.8, aspect=22, pad=0.02)
        bar.set_label(unit)
        bar.outline.set_visible(False)
    axes[0][0].set_ylabel("query")
    _label(axes[0][0], view.tokens, vertical=True)
    state = "certified" if layer.certified else f"NOT certified: {layer.note}"
    figure.suptitle(f"layer {layer.label}, {view.about['model']}, {state}", fontsize=8, color=MUTED)
    return figure


def _label(axis: mpl.axes.Axes, tokens: tuple[str, ...], *, vertical: bool) -> None:
    if len(tokens) > _LABELLED_TOKENS:
        return
    places = np.arange(len(tokens))
    # $ would start mathematics
    names = [shortened(visible(token), 12).replace("$", r"\$") for token in tokens]
    if vertical:
        axis.set_yticks(places, names)
    else:
        axis.set_xticks(places, names, rotation=90)
    axis.tick_params(length=0, labelsize=6)

"""The page of a view: what its script needs as data, and what the page says in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attndiag.comparison.axis import SINK_MASS
from attndiag.reports.html import asset, render, script_data
from attndiag.reports.token_text import shortened, visible
from attndiag.reports.view_pack import pack_layers

if TYPE_CHECKING:
    from attndiag.reports.prompt_view import PromptView

_TITLE = 90


def title_of(view: PromptView) -> str:
    """The text of the prompt, shortened; of a conversation, its last turn."""
    prompt = view.prompt
    if prompt.text is not None:
        said = prompt.text
    else:
        said = str(prompt.messages[-1].get("content", "")) if prompt.messages else ""
    return shortened(visible(" ".join(said.split()) or said, mark_spaces=False), _TITLE)


def view_page(view: PromptView) -> str:
    """The page as text, within the budget."""
    effects = [view.effects_of(index) for index in range(len(view.layers))]
    packed, kept, coarse = pack_layers(view.layers, effects)
    left_out = [layer.label for index, layer in enumerate(view.layers) if index not in kept]
    window, edges = view.window, view.edges
    target_row = -1
    if edges is not None and edges.query in window.queries:
        target_row = int(np.flatnonzero(window.queries == edges.query)[0])
    data = {
        "queries": window.queries.tolist(),
        "keys": window.keys.tolist(),
        "queryTokens": [visible(view.tokens[i]) for i in window.queries],
        "keyTokens": [visible(view.key_tokens[j]) for j in window.keys],
        "tokens": len(view.key_tokens),
        "layers": packed,
        # opens where weight and contribution differ most
        "start": max(range(len(kept)), key=lambda place: view.layers[kept[place]].difference),
        "sinks": _sinks(view),
        "grid": _grid(view, kept, effects, target_row),
        "rows": [_row(row) for row in view.rows],
        "target": target_row,
        "unit": edges.unit if edges else "",
        "exact": bool(edges is not None and edges.exact is not None),
        "firstOrder": bool(edges is not None and edges.first_order is not None),
    }
    strong = {pair for i in kept if (over := view.layers[i].overview) for one in over.strongest
              for pair in (one.query, one.key)}  # fmt: skip
    if strong:
        data["names"] = {str(place): visible(view.tokens[place]) for place in sorted(strong)}
    return render(
        "prompt_view.html.j2",
        title=title_of(view),
        prompt_id=visible(view.prompt.id, mark_spaces=False) if view.prompt.id else "",
        about=view.about,
        omitted=_omitted(view, left_out, coarse),
        notes=view.notes,
        uncertified=[layer.label for layer in view.layers if not layer.certified],
        n_layers=len(view.layers),
        rows=view.rows,
        has_effects=any(effect is not None for effect in effects),
        effect_text=_effect_text(view),
        is_long=window.cut,
        judged=any(row.verdicts is not None for row in view.rows),
        data=script_data(data),
        base_css=asset("base.css"),
        base_js=asset("base.js"),
        view_css=asset("prompt_view.css"),
        view_js=asset("prompt_view.js"),
    )


def _omitted(view: PromptView, left_out: list[str], coarse: list[str]) -> list[str]:
    """What the page does not hold, in sentences."""
    texts: list[str] = []
    window = view.window
    if window.cut:
        texts.append(
            f"The text has {len(view.tokens)} tokens. Exact are its last {len(window.queries)} queries, with their "
            f"last {len(window.keys) - 1} keys and key 0; everything else is in the overview, pooled, and in the "
            "strongest pairs of each head."
        )
    if left_out:
        texts.append(f"Left out to keep the page below 8 MB: layers {', '.join(left_out)}.")
    if coarse:
        texts.append(f"In coarse steps (at most .004 off) for the same reason: layers {', '.join(coarse)}.")
    return texts


def _effect_text(view: PromptView) -> str:
    edges = view.edges
    if edges is None or (edges.first_order is None and edges.exact is None):
        return ""
    parts = []
    if edges.first_order is not None:
        parts.append("first-order estimates A·dm/dA of what removing an edge does to m")
    if edges.exact is not None:
        parts.append(f"exact effects of removing each edge of the query at {edges.query}")
    return "Effects are " + ", and ".join(parts) + ". Positive: the edge helped the target."


def _sinks(view: PromptView) -> list[int]:
    """Places among the window's keys that draw mass whatever they say: key 0, and a mean mass above .3."""
    of_self = [layer.weight.mean(axis=0) for layer in view.layers if layer.kind == "self"]
    mean = np.mean(of_self or [np.zeros((1, 1))], axis=0)
    found: list[int] = []
    for place, key in enumerate(view.window.keys.tolist()):
        later = view.window.queries > key
        strong = place < mean.shape[1] and later.any() and float(mean[later, place].mean()) > SINK_MASS
        if key == 0 or strong:
            found.append(place)
    return found


def _grid(
    view: PromptView, kept: list[int], effects: list[NDArray[np.float64] | None], target_row: int
) -> list[dict[str, Any]]:
    """What the grid of layers and heads can be coloured by."""
    later = view.window.queries > 0
    difference = [view.layers[i].differences for i in kept]
    sink = [view.layers[i].weight[:, later, 0].mean(axis=-1) if later.any() else None for i in kept]
    stats = [
        _stat("weight against contribution", "total variation, mean over queries", difference),
        _stat("weight on position 0", "mass, mean over queries", sink),
    ]
    at_target = [
        None if (effect := effects[i]) is None or target_row < 0 else np.abs(effect[:, target_row]) for i in kept
    ]
    if any(one is not None and np.isfinite(one).any() for one in at_target):
        largest = [None if one is None else np.where(np.isfinite(one), one, 0.0).max(axis=-1) for one in at_target]
        unit = view.edges.unit if view.edges else ""
        stats.append(_stat("largest effect of an edge on the target", unit, largest))
    return stats


def _stat(name: str, unit: str, values: Sequence[NDArray[np.floating] | None]) -> dict[str, Any]:
    top = max((float(one.max()) for one in values if one is not None and len(one)), default=0.0) or 1.0
    rows = [None if one is None else [round(float(v), 5) for v in one] for one in values]
    return {"name": name, "unit": unit, "top": top, "values": rows}


def _row(row: Any) -> dict[str, Any]:
    values = [float(f"{v:.6g}") if np.isfinite(v) else None for v in row.values]
    return {
        "name": visible(row.name, mark_spaces=False),
        "unit": row.unit,
        "signed": row.signed,
        "values": values,
        "verdicts": row.verdicts,
    }

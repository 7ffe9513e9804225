"""One prompt, every head: what is read, what is written, what it does, in a page that needs nothing but itself.

Steps: one forward under capture, a layer at a time (`view_maps`); the first-order effect of every edge on the target
(A_ij dm/dA_ij, one backward), and the exact effects of the last query's edges where asked for; token methods side by
side; everything as bytes, deflated (`view_pack`); canvases draw the maps of the chosen layer and head.

Above 256 tokens the maps are a window with an overview, and first-order effects and token methods are left out: the
page says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from attndiag.core.dispatch import require_memory
from attndiag.errors import AttnDiagError, UnsupportedModelError
from attndiag.hooks.capture_context import capture
from attndiag.prompts import Prompt
from attndiag.reports.html import notebook_frame
from attndiag.reports.view_maps import MOST_BLOCKS, MOST_TOKENS, LayerMaps, Window, maps_of, window_of
from attndiag.reports.view_tokens import TokenRow, token_rows
from attndiag.runs.folder import explained, write_atomically

if TYPE_CHECKING:
    from attndiag.explanations.replacement import Replacement
    from attndiag.hooks.record import AttentionCall
    from attndiag.models.encoding import Encoded
    from attndiag.models.load import LoadedModel
    from attndiag.prompts import Target

Progress = Callable[[str, int, int], None]
Array = NDArray[np.float64]
# read off the model in one forward or two
METHODS = ("weight", "contribution", "rollout", "input_x_gradient")


@dataclass(frozen=True, eq=False)
class EdgeNumbers:
    """Effects of edges on the target.

    Parameters
    ----------
    first_order : [layer, head, query, key] A dm/dA, nan where there is no edge; None where not made.
    exact : [layer, head, key] effects of removing the edges of `query`, nan where not measured; None likewise.
    query : position at which the target is read.
    layers : numbers of the layers.
    target, unit, m : what the effects are about.
    note : why something is missing.
    """

    first_order: Array | None
    exact: Array | None
    query: int
    layers: tuple[int, ...]
    target: str
    unit: str
    m: float
    note: str = ""


@dataclass(frozen=True, eq=False)
class PromptView:
    """Maps, effects and token methods of one prompt; shows itself in a notebook, saves itself as a page or figure.

    Parameters
    ----------
    prompt : what was read.
    tokens, key_tokens : texts of all queries and keys.
    layers : maps over `window`.
    window : which queries and keys the maps hold.
    about : facts for the page.
    edges : effects of edges; None where the model has no target.
    rows : token methods.
    notes : what was left out, and why.
    """

    prompt: Prompt
    tokens: tuple[str, ...]
    key_tokens: tuple[str, ...]
    layers: tuple[LayerMaps, ...]
    window: Window
    about: dict[str, str]
    edges: EdgeNumbers | None = None
    rows: tuple[TokenRow, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The text, shortened: never an id that somebody made up."""
        from attndiag.reports.view_page import title_of

        return title_of(self)

    def effects_of(self, index: int) -> Array | None:
        """[head, query, key] of `layers[index]`: first-order effects, with exact ones on the row that has them."""
        layer, edges = self.layers[index], self.edges
        if edges is None or layer.kind != "self" or layer.layer not in edges.layers:
            return None
        place = edges.layers.index(layer.layer)
        found = np.full(layer.weight.shape, np.nan)
        if edges.first_order is not None and edges.first_order.shape[1:] == layer.weight.shape:
            found = edges.first_order[place].copy()
        if edges.exact is not None and edges.query in self.window.queries:
            row = int(np.flatnonzero(self.window.queries == edges.query)[0])
            exact = edges.exact[place][:, self.window.keys]
            found[:, row] = np.where(np.isfinite(exact), exact, found[:, row])
        return found if np.isfinite(found).any() else None

    def to_html(self) -> str:
        """The page: at most 8 MB, loads nothing."""
        from attndiag.reports.view_page import view_page

        return view_page(self)

    def save(self, path: str | Path, *, layer: int | None = None) -> Path:
        """Write `x.html` (everything), or `x.png`, `x.svg`, `x.pdf` (one layer: weight and contribution, heads joined).

        Parameters
        ----------
        path : the suffix decides.
        layer : index into `layers`, for figures; the one with the largest difference when None.

        Raises
        ------
        AttnDiagError : another suffix, or a layer that is not there.
        RunFolderError : the file cannot be written.
        """
        path = Path(path)
        kind = require_saveable(path)
        if kind == "html":
            page = self.to_html().encode("utf-8", errors="replace")
            self._write(path, lambda file: file.write(page))
            return path
        if layer is None:
            layer = max(range(len(self.layers)), key=lambda index: self.layers[index].difference)
        if not 0 <= layer < len(self.layers):
            raise AttnDiagError(f"layer {layer} is not among the {len(self.layers)} that were captured")
        from attndiag.reports.figure_style import style
        from attndiag.reports.prompt_figure import draw_layer

        with style(), warnings.catch_warnings():
            # a token may hold a character that the figure's font lacks; it is drawn as a box
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure = draw_layer(self, layer)
            self._write(path, lambda file: figure.savefig(file, format=kind))
        return path

    @staticmethod
    def _write(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, fill)

    def _repr_html_(self) -> str:
        return notebook_frame(self.to_html(), "attention weight, contribution and effect", height=760)

    def __repr__(self) -> str:
        return f"PromptView({self.title!r}: {len(self.tokens)} tokens, {len(self.layers)} layers)"


def view_prompt(
    lm: LoadedModel,
    prompt: Prompt | str,
    *,
    target: Target | None = None,
    methods: Sequence[str] = METHODS,
    replacements: Sequence[Replacement | str] = (),
    exact_effects: bool = False,
    backend: Literal["auto", "reference"] = "auto",
    progress: Progress | None = None,
) -> PromptView:
    """Capture one prompt and keep the maps of every head, with what its edges and tokens do for the target.

    Parameters
    ----------
    lm : from `attndiag.load`.
    prompt : what the model reads.
    target : what effects are about; the prompt's own, or the log-probability of the model's top-1, when None.
    methods : token methods shown side by side, as in `attndiag.compare`; one that does not fit is noted on the page.
    replacements : the same by replacing each token.
    exact_effects : also remove every edge of the query at which the target is read (a restarted forward for each).
    backend : of `attndiag.contributions`.
    progress : called with (what is being done, steps done, 0: the number of steps is not known before).

    Raises
    ------
    PromptError : the prompt is empty or too long for the model.
    UnsupportedModelError : the model has no attention that could be captured.
    InsufficientMemoryError : the maps would not fit.
    """
    prompt = Prompt(prompt) if isinstance(prompt, str) else prompt
    encoded = lm.encode(prompt)
    _require_memory_for_maps(lm, encoded)
    layers: list[LayerMaps] = []

    def keep(call: AttentionCall) -> None:
        # queries of the view are those of the side that the model writes on
        layers.append(maps_of(call, len(layers), backend))
        if progress is not None:
            progress("measuring", len(layers), 0)

    with capture(lm, on_call=keep):
        lm.run(encoded.inputs)
    side = encoded.tokens[0] if encoded.decoder is None else encoded.decoder.tokens[0]
    window = window_of(len(side), len(side))
    shape = (len(window.queries), len(window.keys))
    fitting = tuple(layer for layer in layers if layer.weight.shape[1:] == shape)
    if not fitting:
        shapes = sorted({layer.weight.shape[1:] for layer in layers})
        raise UnsupportedModelError(f"no attention call is {len(side)} tokens by {len(side)}; the calls are {shapes}")
    notes: list[str] = []
    edges, rows = None, ()
    if progress is not None:
        progress("effects and token methods", 0, 0)
    edges, why = _edges(lm, prompt, target, exact=exact_effects, first_order=not window.cut)
    notes += [why] if why else []
    if window.cut:
        notes.append(
            f"First-order effects and token methods keep maps of all {len(side)} tokens, so they are left out above "
            f"{MOST_TOKENS}; attndiag.explain and attndiag.compare give them as tables."
        )
    else:
        rows, problems = token_rows(lm, prompt, target, methods, replacements)
        notes += problems
    info = lm.info
    about = {
        "model": f"{info.name} ({info.architecture})",
        "revision": info.revision or "not pinned",
        "computed": f"{info.dtype} on {info.device}, {info.attn_implementation}",
        "tokens": str(len(side)),
        "certified": f"{sum(layer.certified for layer in fitting)} of {len(fitting)} layers",
    }
    if edges is not None:
        about["target"] = f"{edges.target}: m = {edges.m:.4g} {edges.unit}, read at position {edges.query}"
    return PromptView(prompt, side, side, fitting, window, about, edges, rows, tuple(notes))


def _edges(
    lm: LoadedModel, prompt: Prompt, target: Target | None, *, exact: bool, first_order: bool
) -> tuple[EdgeNumbers | None, str]:
    """Effects of edges on the target, and why something is missing."""
    from attndiag.catalog import explain
    from attndiag.comparison.axis import token_axis
    from attndiag.explanations.edge_truth import edge_effects
    from attndiag.explanations.target import score

    try:
        axis = token_axis(lm, prompt, target)
        m = float(score(lm, prompt, axis.resolved).values[0])
    except AttnDiagError as error:
        return None, f"No effects: {' '.join(str(error).split())}"
    if len(axis.queries) != 1:
        return None, "No effects: the target is read at several positions."
    fixed, plain = axis.resolved.targets[0], axis.plain
    said = plain.kind.replace("_", " ") + (f" of {plain.answer!r}" if plain.answer else "")
    said += f" against {plain.foil!r}" if plain.foil else ""
    table = measured = None
    layers: tuple[int, ...] = ()
    why: list[str] = []
    if first_order:
        try:
            found = explain(lm, prompt, fixed, method="pattern_attribution")
            table = found.numpy().astype(np.float64)
            layers = tuple(int(layer) for layer in found.labels["layer"])
        except AttnDiagError as error:
            why.append(f"No first-order effects: {' '.join(str(error).split())}")
    if exact:
        try:
            found = edge_effects(lm, prompt, fixed, queries=list(axis.queries))
            measured = found.numpy().astype(np.float64)[:, :, axis.queries[0]]
            mine = tuple(int(layer) for layer in found.labels["layer"])
            if layers not in ((), mine):
                table = None
            layers = mine
        except AttnDiagError as error:
            why.append(f"No exact effects: {' '.join(str(error).split())}")
    note = " ".join(why)
    numbers = EdgeNumbers(table, measured, axis.queries[0], layers, said, axis.resolved.unit, m, note)
    return numbers, note


def _require_memory_for_maps(lm: LoadedModel, encoded: Encoded) -> None:
    """Refuse a text whose maps of every head would not fit, before anything runs."""
    config, length = lm.config, int(encoded.lengths.max())
    layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    if isinstance(layers, int) and isinstance(heads, int):
        # kept: weight and head contribution of each head, contribution of the layer, of the window and pooled
        side = min(length, MOST_TOKENS)
        kept = layers * (2 * heads + 1) * (side * side + (MOST_BLOCKS**2 if length > MOST_TOKENS else 0))
        # at work: one call, in float64 too; of a long text, a block of its rows
        at_work = 16 * heads * side * length
        remedy = f"the text has {length} tokens, and every map is kept; shorten it, or take attndiag.top_contributions"
        require_memory(4 * (kept + at_work), None, lm.device, remedy)


def require_saveable(path: Path) -> str:
    """The kind of file that a view can be saved as, from the suffix; raises `AttnDiagError` for any other."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in ("html", "png", "svg", "pdf"):
        raise AttnDiagError(f"{path} has the suffix {path.suffix!r}; expected .html, .png, .svg or .pdf")
    return kind


def with_run(view: PromptView, rows: Sequence[TokenRow], edges: EdgeNumbers | None, run: str) -> PromptView:
    """The view of a prompt of a compared run: its methods and its exact effects beside the maps."""
    from dataclasses import replace

    own = view.edges
    if edges is not None and own is not None and own.layers == edges.layers:
        edges = replace(edges, first_order=own.first_order)
    about = {**view.about, "methods and exact effects": f"of run {run}"}
    return replace(view, rows=tuple(rows), edges=edges if edges is not None else own, about=about)


def facts_of(view: PromptView) -> dict[str, Any]:
    """What the command says of a view."""
    return {
        "prompt": view.prompt.id,
        "title": view.title,
        "tokens": len(view.tokens),
        "layers": len(view.layers),
        "methods": [row.name for row in view.rows],
        "uncertified_layers": [each.label for each in view.layers if not each.certified],
        "notes": list(view.notes),
    }

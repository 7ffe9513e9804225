"""One prompt, every head: weight and contribution maps in a page that needs nothing but itself.

Steps: one forward under capture, a layer at a time; for each call the pattern, each head's row shares of
A_ij ||f_j|| and the layer's row shares of ||T_ij||, as bytes; deflate and base64; a canvas draws the map of the chosen
layer and head, and the token strip shows one query's row in full.

A byte holds the square root of a number in [0, 1]: steps are finest near 0, at most .004 near 1. Above 256 tokens the
page keeps the last 256 queries and keys and key 0, and says how much of a row lies outside. Whole layers are left out,
those with the smallest difference first, when the page would pass its budget.
"""

from __future__ import annotations

import base64
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from attndiag.core.dispatch import require_memory
from attndiag.errors import AttnDiagError, UnsupportedModelError
from attndiag.explanations.contributions import contributions
from attndiag.hooks.capture_context import capture
from attndiag.prompts import Prompt
from attndiag.reports.html import BUDGET, asset, notebook_frame, render, script_data
from attndiag.reports.token_text import visible
from attndiag.runs.folder import explained, write_atomically

if TYPE_CHECKING:
    from attndiag.hooks.record import AttentionCall
    from attndiag.models.encoding import Encoded
    from attndiag.models.load import LoadedModel

Progress = Callable[[str, int, int], None]
MOST_TOKENS = 256
# of the budget, what maps may take: base64 adds a third, the rest of the page needs some 100 kB
_MAP_BYTES = (BUDGET - 2**18) * 3 // 4


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """The maps of one attention call, as shares in [0, 1].

    Parameters
    ----------
    label, kind : of the layer.
    weight : [head, query, key], the pattern.
    written : [head, query, key], row shares of A_ij ||f_j||; None where contributions are not defined.
    together : [query, key], row shares of ||T_ij||; None likewise.
    row_written, row_together : [head, query] and [query], what the shares are shares of, in residual norm.
    certified : whether the call's certificate and completeness hold.
    note : why something is missing, or which check failed.
    """

    label: str
    kind: str
    weight: NDArray[np.float32]
    written: NDArray[np.float32] | None
    together: NDArray[np.float32] | None
    row_written: NDArray[np.float32] | None
    row_together: NDArray[np.float32] | None
    certified: bool
    note: str = ""

    @property
    def difference(self) -> float:
        """Mean over rows of the total variation distance of weight and head contribution; 0 without contributions."""
        if self.written is None:
            return 0.0
        return float(np.nan_to_num(np.abs(self.weight - self.written)).sum(-1).mean() / 2)


@dataclass(frozen=True, eq=False)
class PromptView:
    """Weight and contribution maps of one prompt; shows itself in a notebook, saves itself as a page or figure."""

    prompt: Prompt
    tokens: tuple[str, ...]
    key_tokens: tuple[str, ...]
    layers: tuple[LayerMaps, ...]
    about: dict[str, str]

    def to_html(self) -> str:
        """The page: at most 8 MB, loads nothing."""
        kept = self._layers_within_budget()
        window = _window(len(self.tokens), len(self.key_tokens))
        data = {
            "queries": window.queries.tolist(),
            "keys": window.keys.tolist(),
            "queryTokens": [visible(self.tokens[i]) for i in window.queries],
            "keyTokens": [visible(self.key_tokens[j]) for j in window.keys],
            "layers": [_packed(layer, window) for layer in kept],
            # opens where the two differ most
            "start": max(range(len(kept)), key=lambda index: kept[index].difference),
        }
        omitted = []
        if len(kept) < len(self.layers):
            names = ", ".join(layer.label for layer in self.layers if layer not in kept)
            omitted.append(f"Layers {names} are left out to keep the page below 8 MB.")
        if window.cut:
            omitted.append(
                f"The text has {len(self.tokens)} tokens; the last {len(window.queries)} queries are here, with their "
                f"last {len(window.keys) - 1} keys and key 0. What a row gives to other keys is shown as a number."
            )
        uncertified = [layer.label for layer in self.layers if not layer.certified]
        return render(
            "prompt_view.html.j2",
            title=visible(self.prompt.id or "prompt", mark_spaces=False),
            about=self.about,
            omitted=omitted,
            n_layers=len(self.layers),
            uncertified=uncertified,
            data=script_data(data),
            base_css=asset("base.css"),
            base_js=asset("base.js"),
            view_css=asset("prompt_view.css"),
            view_js=asset("prompt_view.js"),
        )

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
        return notebook_frame(self.to_html(), "attention weight and contribution", height=720)

    def _layers_within_budget(self) -> list[LayerMaps]:
        """As many layers as fit, those with the largest difference first, in their own order."""
        window = _window(len(self.tokens), len(self.key_tokens))
        room = _MAP_BYTES
        kept: set[int] = set()
        for index in sorted(range(len(self.layers)), key=lambda i: -self.layers[i].difference):
            size = sum(len(part) for part in _compressed(self.layers[index], window).values()) * 3 // 4
            if size <= room or not kept:
                kept.add(index)
                room -= size
        return [layer for index, layer in enumerate(self.layers) if index in kept]


def view_prompt(
    lm: LoadedModel,
    prompt: Prompt | str,
    *,
    backend: Literal["auto", "reference"] = "auto",
    progress: Progress | None = None,
) -> PromptView:
    """Capture one prompt and keep the maps of every head.

    Parameters
    ----------
    lm : from `attndiag.load`.
    prompt : what the model reads.
    backend : of `attndiag.contributions`.
    progress : called with (what is being done, layers done, 0: the number of layers is not known before).

    Raises
    ------
    PromptError : the prompt is empty or too long for the model.
    UnsupportedModelError : the model has no attention that could be captured.
    """
    prompt = Prompt(prompt) if isinstance(prompt, str) else prompt
    encoded = lm.encode(prompt)
    _require_memory_for_maps(lm, encoded)
    layers: list[LayerMaps] = []

    def keep(call: AttentionCall) -> None:
        # queries of the view are those of the side that the model writes on
        layers.append(_maps(call, len(layers), backend))
        if progress is not None:
            progress("measuring", len(layers), 0)

    with capture(lm, on_call=keep):
        lm.run(encoded.inputs)
    queries, keys = _axes(encoded, layers)
    layers = [layer for layer in layers if layer.weight.shape[1:] == (len(queries), len(keys))]
    info = lm.info
    about = {
        "model": f"{info.name} ({info.architecture})",
        "revision": info.revision or "not pinned",
        "computed": f"{info.dtype} on {info.device}, {info.attn_implementation}",
        "tokens": str(len(queries)),
        "certified": f"{sum(layer.certified for layer in layers)} of {len(layers)} layers",
    }
    return PromptView(prompt, queries, keys, tuple(layers), about)


def _require_memory_for_maps(lm: LoadedModel, encoded: Encoded) -> None:
    """Refuse a text whose maps of every head would not fit, before anything runs."""
    config, length = lm.config, int(encoded.lengths.max())
    layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    if isinstance(layers, int) and isinstance(heads, int):
        # kept: weight and head contribution of each head, contribution of the layer; at work: one call in float64 too
        maps = layers * (2 * heads + 1) + 16 * heads
        remedy = f"the text has {length} tokens, and every map is kept; shorten it, or take attndiag.top_contributions"
        require_memory(4 * maps * length * length, None, lm.device, remedy)


def _axes(encoded: Encoded, layers: list[LayerMaps]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Token texts of the axes that most calls have: the decoder's for an encoder-decoder, else the input's."""
    side = encoded.tokens[0] if encoded.decoder is None else encoded.decoder.tokens[0]
    if not any(layer.weight.shape[1:] == (len(side), len(side)) for layer in layers):
        shapes = sorted({layer.weight.shape[1:] for layer in layers})
        raise UnsupportedModelError(f"no attention call is {len(side)} tokens by {len(side)}; the calls are {shapes}")
    return side, side


def _maps(call: AttentionCall, index: int, backend: Literal["auto", "reference"]) -> LayerMaps:
    label = str(index) if call.layer is None else str(call.layer)
    weight = contributions(call, "weight")
    failures = list(weight.failures)
    written = together = row_written = row_together = None
    if call.output is None:
        failures_of_parts: list[str] = []
        note = call.output_reason
    else:
        by_head = contributions(call, "head_contribution", backend=backend)
        by_layer = contributions(call, "contribution", backend=backend)
        failures_of_parts = [*by_head.failures, *by_layer.failures]
        written, row_written = _row_shares(by_head.values[0].float().cpu().numpy())
        together, row_together = _row_shares(by_layer.values[0].float().cpu().numpy())
        note = ""
    failures = list(dict.fromkeys([*failures, *failures_of_parts]))
    return LayerMaps(
        label=label if call.kind == "self" else f"{label} cross",
        kind=call.kind,
        weight=weight.values[0].float().cpu().numpy(),
        written=written,
        together=together,
        row_written=row_written,
        row_together=row_together,
        certified=not failures,
        note="; ".join([*failures, *([note] if note else [])]),
    )


def _row_shares(values: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    total = values.sum(axis=-1)
    shares = np.divide(values, total[..., None], out=np.zeros_like(values), where=total[..., None] > 0)
    return shares, total


@dataclass(frozen=True, eq=False)
class _Window:
    """Which queries and keys are shown."""

    queries: NDArray[np.int64]
    keys: NDArray[np.int64]
    cut: bool


def _window(n_queries: int, n_keys: int) -> _Window:
    if max(n_queries, n_keys) <= MOST_TOKENS:
        return _Window(np.arange(n_queries), np.arange(n_keys), False)
    queries = np.arange(max(0, n_queries - MOST_TOKENS), n_queries)
    keys = np.concatenate([[0], np.arange(max(1, n_keys - MOST_TOKENS + 1), n_keys)])
    return _Window(queries, keys, True)


def _compressed(layer: LayerMaps, window: _Window) -> dict[str, str]:
    rows, columns = window.queries, window.keys
    maps = {"weight": layer.weight, "written": layer.written, "together": layer.together}
    return {
        name: _base64(np.round(255 * np.sqrt(np.clip(m[..., rows, :][..., columns], 0, 1))).astype(np.uint8))
        for name, m in maps.items()
        if m is not None
    }


def _packed(layer: LayerMaps, window: _Window) -> dict[str, Any]:
    """A layer for the page: maps as bytes, row totals as float32."""
    packed: dict[str, Any] = {
        "label": layer.label,
        "heads": int(layer.weight.shape[0]),
        "certified": layer.certified,
        "note": layer.note,
        **_compressed(layer, window),
    }
    if layer.row_written is not None and layer.row_together is not None:
        packed["rowWritten"] = _base64(layer.row_written[:, window.queries].astype("<f4"))
        packed["rowTogether"] = _base64(layer.row_together[window.queries].astype("<f4"))
    return packed


def _base64(array: NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode("ascii")


def require_saveable(path: Path) -> str:
    """The kind of file that a view can be saved as, from the suffix; raises `AttnDiagError` for any other."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in ("html", "png", "svg", "pdf"):
        raise AttnDiagError(f"{path} has the suffix {path.suffix!r}; expected .html, .png, .svg or .pdf")
    return kind

"""A figure as files: PNG, SVG and PDF with nothing in them that changes from run to run, and as SVG for a page."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attndiag.reports.figure_style import style
from attndiag.runs.folder import explained, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_METADATA: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


def save_drawing(draw: Callable[[], Figure], stem: Path) -> str:
    """Draw once, write `stem` with .png, .svg and .pdf, and return the SVG that goes into a page.

    Raises
    ------
    RunFolderError : the files cannot be written.
    """
    with style(), missing_glyphs_allowed():
        figure = draw()
        # the layout is most of the work of a save; it is the same for every format
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        with explained(stem.parent):
            stem.parent.mkdir(parents=True, exist_ok=True)
            for kind in _METADATA:
                content = rendered(figure, kind)
                write_atomically(stem.with_suffix(f".{kind}"), lambda file, content=content: file.write(content))
    with style(**{"svg.fonttype": "none"}), missing_glyphs_allowed():
        return rendered(figure, "svg", transparent=True).decode("utf-8")


@contextmanager
def missing_glyphs_allowed() -> Iterator[None]:
    """A token or a name may hold a character that the figure's font lacks; it is drawn as a box."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def page_svg(draw: Callable[[], Figure]) -> str:
    """The SVG of a drawing that is kept in no file."""
    with style(**{"svg.fonttype": "none"}), missing_glyphs_allowed():
        return rendered(draw(), "svg", transparent=True).decode("utf-8")


def rendered(figure: Figure, kind: str, *, transparent: bool = False) -> bytes:
    """The bytes of a figure in one format."""
    target = io.BytesIO()
    figure.savefig(target, format=kind, metadata=_METADATA[kind], transparent=transparent)
    return target.getvalue()

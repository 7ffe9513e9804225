"""The report of a comparison run: its page and figures in the run folder.

A weights run on the same model in the subfolder `weights` (`attndiag report -o OUT/weights`) stands below it on the
same page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attndiag.errors import RunFolderError
from attndiag.reports import compared_words as words
from attndiag.reports.compared_figures import Drawn
from attndiag.reports.compared_page import page
from attndiag.reports.compared_tables import Row
from attndiag.reports.figure_files import save_drawing
from attndiag.reports.html import BUDGET, file_size, notebook_frame
from attndiag.reports.page import PAGE, weights_part
from attndiag.runs.compared_folder import RESULTS
from attndiag.runs.compared_run import ComparedRun, read_compared_run
from attndiag.runs.compared_schemas import COMPARED_TABLES
from attndiag.runs.folder import WEIGHTS, RunFolder, explained, is_leftover, kind_of, write_atomically

if TYPE_CHECKING:
    from markupsafe import Markup

Progress = Callable[[str, int, int], None]
# where a weights run may lie beside a comparison
WEIGHTS_FOLDER = "weights"


@dataclass(frozen=True, eq=False)
class ComparisonReport:
    """A rendered comparison: where it is and what it says. Shows itself in a notebook."""

    folder: Path
    page: Path
    headline: str
    run: ComparedRun

    @property
    def passed(self) -> bool:
        """Every prompt was measured and no self-check blocked a verdict."""
        return self.run.passed

    def to_html(self) -> str:
        """The page."""
        return self.page.read_text(encoding="utf-8")

    def _repr_html_(self) -> str:
        return notebook_frame(self.to_html(), "attndiag compare")

    def __repr__(self) -> str:
        return f"ComparisonReport({self.page}: {self.headline})"


def render_comparison(folder: str | Path, *, progress: Progress | None = None) -> ComparisonReport:
    """Figures (PNG, SVG, PDF) and page of the comparison in a folder; of an unfinished one, what is there.

    Raises
    ------
    RunFolderError : the folder holds no comparison, one of its results is damaged, or it cannot be written.
    """
    place = Path(folder)
    steps = ("reading results", "drawing figures", "writing the page")

    def tell(step: int) -> None:
        if progress is not None:
            progress(steps[min(step, 2)], step, len(steps))

    tell(0)
    run = read_compared_run(place)
    tell(1)
    below = _weights_below(place)
    made = write_page(run, place, below)
    tell(3)
    return made


def write_page(run: ComparedRun, place: Path, below: tuple[str, Markup] | None = None) -> ComparisonReport:
    """The page and its figures, into any folder.

    Raises
    ------
    RunFolderError : the files cannot be written, or the page would pass its budget.
    """
    where = f" {place}" if run.folder is None else f" {run.folder}"
    commands = [("This page again, from the results in its folder:", f"attndiag report{where}")] if run.folder else []

    def draw(name: str, drawn: Drawn) -> str:
        return save_drawing(drawn.draw, place / "figures" / name)

    headline, body = below if below is not None else ("", None)
    text = page(
        run,
        draw,
        in_folder=True,
        files=file_rows(place),
        commands=commands,
        weights=body,
        weights_headline=headline,
    )
    content = text.encode("utf-8", errors="replace")
    if len(content) > BUDGET:
        raise RunFolderError(
            f"the page would have {file_size(len(content))}, above the {file_size(BUDGET)} that a page may have; "
            "please report this run's model and prompt set"
        )
    path = place / PAGE
    with explained(path):
        place.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(content))
    return ComparisonReport(place, path, words.headline(run.comparison, run.edges), run)


def _weights_below(place: Path) -> tuple[str, Markup] | None:
    beside = place / WEIGHTS_FOLDER
    if not beside.is_dir() or kind_of(beside) != WEIGHTS:
        return None
    return weights_part(RunFolder.open(beside), f"{WEIGHTS_FOLDER}/")


def file_rows(place: Path) -> list[Row]:
    """What lies beside the page: one entry a table or figure, with a link for each format; results as one entry."""
    meanings = {f"tables/{name}": schema.meaning for name, schema in COMPARED_TABLES.items()}
    meanings["tables/columns"] = "every column of every table: unit and meaning"
    meanings["run"] = "model, plan and prompts of this run"
    entries: dict[str, Row] = {}
    results = 0
    for path in sorted(place.rglob("*")):
        inside = path.relative_to(place)
        hidden = inside.name.startswith(".") or is_leftover(inside)
        if not path.is_file() or hidden or inside.name == PAGE or inside.parts[0] == WEIGHTS_FOLDER:
            continue
        if inside.parts[0] == RESULTS:
            results += path.stat().st_size
            continue
        stem, _, kind = inside.as_posix().partition(".")
        what = meanings.get(stem, "figure of this page" if stem.startswith("figures/") else "")
        row = entries.setdefault(stem, {"name": stem, "what": what, "files": [], "bytes": 0})
        row["files"].append({"path": inside.as_posix(), "kind": kind})
        row["bytes"] += path.stat().st_size
    if results:
        what = "one result a prompt: the run goes on from these, and everything else is made from them"
        entries[RESULTS] = {"name": f"{RESULTS}/", "what": what, "files": [], "bytes": results}
    return list(entries.values())

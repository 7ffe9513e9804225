"""The report of a comparison run: its page and figures in the run folder.

A weights run on the same model in the subfolder `weights` (`attndiag report -o OUT/weights`) stands below it on the
same page.
"""

from __future__ import annotations

import re
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
from attndiag.reports.places import file_entries
from attndiag.reports.token_text import visible
from attndiag.runs.clearing import RESULTS, WEIGHTS_FOLDER
from attndiag.runs.compared_run import ComparedRun, read_compared_run
from attndiag.runs.compared_schemas import COMPARED_TABLES
from attndiag.runs.folder import (
    COMPARISON,
    LOCK,
    MARKER,
    WEIGHTS,
    RunFolder,
    explained,
    is_leftover,
    kind_of,
    load_marker,
    occupied,
    write_atomically,
)

if TYPE_CHECKING:
    from markupsafe import Markup

Progress = Callable[[str, int, int], None]

# what tells a page of ours, and how far from its beginning it stands at most
_GENERATOR, _HEAD = '<meta name="generator" content="attndiag">', 2000
_FIGURE = re.compile(r"compared_\w+\.(png|svg|pdf)")


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
    below = _weights_below(run, place)
    made = write_page(run, place, below)
    tell(3)
    return made


def write_page(run: ComparedRun, place: Path, below: tuple[str, Markup | None] | None = None) -> ComparisonReport:
    """The page and its figures, into any folder.

    Raises
    ------
    RunFolderError : the files cannot be written, or the page would pass its budget.
    """
    where = f" {place}" if run.folder is None else f" {run.folder}"
    commands = [("This page again, from the results in its folder:", f"attndiag report{where}")] if run.folder else []

    drawn_now: set[str] = set()

    def draw(name: str, drawn: Drawn) -> str:
        drawn_now.add(name)
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
        # figures of an earlier page that this one does not have
        for old in (place / "figures").glob("compared_*"):
            if old.stem not in drawn_now:
                old.unlink()
    return ComparisonReport(place, path, words.headline(run.comparison, run.edges), run)


def require_page_place(run: ComparedRun, place: Path) -> None:
    """Raise `RunFolderError` where the page of this run would lie among other things: anything but its own folder, a
    new or empty one, or one that holds such a page and nothing else.
    """
    with explained(place):
        if not place.exists() or (place.is_dir() and not occupied(place)):
            return
        if not place.is_dir():
            raise RunFolderError(f"{place} is a file; give a folder for the page")
        mine = kind_of(place) == COMPARISON and load_marker(place / MARKER).get("run") == run.facts["run"]
        if not mine and not _only_a_page(place, str(run.facts["run"])):
            what = "another run" if (place / MARKER).is_file() else "other things"
            raise RunFolderError(
                f"{place} holds {what}; give a new or empty folder for the page and its figures, or the run's own"
            )


def _only_a_page(place: Path, run: str) -> bool:
    """True for a folder in which `write_page` put everything there is for this run: page, figures, or both."""
    for thing in place.iterdir():
        if thing.name == PAGE and thing.is_file():
            text = thing.read_text(encoding="utf-8", errors="replace")
            if _GENERATOR not in text[:_HEAD] or run not in text:
                return False
        elif thing.name == "figures" and thing.is_dir():
            if not all(one.is_file() and _FIGURE.fullmatch(one.name) for one in thing.iterdir()):
                return False
        elif thing.name != LOCK and not is_leftover(thing):
            return False
    return True


def _weights_below(run: ComparedRun, place: Path) -> tuple[str, Markup | None] | None:
    """Headline and part of the weights run in the subfolder; without the part, the headline says why it is left out."""
    beside = place / WEIGHTS_FOLDER
    if not beside.is_dir() or kind_of(beside) != WEIGHTS:
        return None
    folder = RunFolder.open(beside)
    why = foreign_weights(run, folder)
    if why:
        return f"The weights run in {WEIGHTS_FOLDER}/ is left out: {why}.", None
    return weights_part(folder, f"{WEIGHTS_FOLDER}/")


def foreign_weights(run: ComparedRun, weights: RunFolder) -> str:
    """Why a weights run is not about the model and the prompts of a comparison; empty where it is.

    It may have fewer prompts. Prompts that the comparison could not measure are known by their names alone.
    """
    there = weights.about.get("runs", {})
    same = ("architecture", "parameters", "revision", "tokenizer_hash")
    differ = [name for name in same if there.get(name) != run.facts.get(name)]
    if there.get("model") != run.facts["model"] and there.get("location") != run.facts.get("location"):
        differ.insert(0, "model")
    if differ:
        told = "; ".join(
            f"{name.replace('_', ' ')} {there.get(name)} there, {run.facts.get(name)} here" for name in differ
        )
        return f"it is of another model ({told})"
    read = weights.read("tokens")
    read = read[read["part"] == "input"]
    failed = run.comparison.problems
    unmeasured = set(failed[failed["method"] == ""]["prompt"])
    mine = {str(label): tuple(rows["token_id"]) for label, rows in run.tokens.sort_values("pos").groupby("prompt")}
    for label, rows in read.sort_values("pos").groupby("prompt", sort=False):
        if str(label) not in unmeasured and mine.get(str(label)) != tuple(rows["token_id"]):
            known = "reads other tokens" if str(label) in mine else "is not in the comparison"
            return f"it is of other prompts (its prompt {visible(str(label), mark_spaces=False)!r} {known})"
    return ""


def file_rows(place: Path) -> list[Row]:
    """What lies beside the page: one entry a table or figure, with a link for each format; results as one entry.

    Only what belongs to a run: whatever else somebody keeps in the folder is nobody's business.
    """
    meanings = {f"tables/{name}": schema.meaning for name, schema in COMPARED_TABLES.items()}
    meanings["tables/columns"] = "every column of every table: unit and meaning"
    meanings["run"] = "model, plan and prompts of this run"

    def meaning(stem: str) -> str:
        return meanings.get(stem, "figure of this page" if stem.startswith("figures/") else "")

    def inside(name: str) -> list[Path]:
        found = (path for path in (place / name).glob("*") if path.is_file() and not path.name.startswith("."))
        return sorted(path.relative_to(place) for path in found)

    marker = [Path(MARKER)] if (place / MARKER).is_file() else []
    entries: list[Row] = file_entries(place, [*inside("figures"), *marker, *inside("tables")], meaning)
    results = sum((place / path).stat().st_size for path in inside(RESULTS))
    if results:
        what = "one result a prompt: the run goes on from these, and everything else is made from them"
        entries.append({"name": f"{RESULTS}/", "what": what, "files": [], "bytes": results})
    return entries

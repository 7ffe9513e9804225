"""`save_heads`: what `attndiag.heads` measured, as tables, figures and one page.

In the folder: `heads.html`; `heads.csv` and `.parquet` (one row a head), `measures.*` (one row a head and measure, with
unit), `sets.*`, `relations.*`, `phase_change.*` where there are any; `not_measurable.csv`; `figures/`; `heads.json`,
which also marks the folder as one of these.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attndiag.errors import RunFolderError
from attndiag.explanations.head_composition import KINDS, strongest_pairs
from attndiag.reports.figure_files import save_drawing
from attndiag.reports.head_figures import (
    draw_composition,
    draw_effect_maps,
    draw_relation,
    draw_score_against_effect,
    draw_score_maps,
)
from attndiag.reports.head_words import (
    EFFECT,
    SCORE,
    composition_view,
    every_head,
    phase_headline,
    ranked_by,
    relation_name,
    relation_view,
    score_of_effects,
    table_view,
)
from attndiag.reports.html import BUDGET, asset, file_size, inline_svg, notebook_frame, render
from attndiag.reports.phase_change import PhaseChange, draw_phase_change, lag_sentence
from attndiag.runs.folder import explained, write_atomically
from attndiag.runs.keys import package_versions

if TYPE_CHECKING:
    import pandas as pd

    from attndiag.explanations.head_table import HeadTable

PAGE, MARKER = "heads.html", "heads.json"
SCHEMA = 1
# what this module writes; nothing else is ever removed
_TABLES = ("heads", "measures", "sets", "pairs", "relations", "phase_change", "not_measurable")
_OURS = (PAGE, MARKER, "figures", *(f"{name}.{kind}" for name in _TABLES for kind in ("csv", "parquet")))
_PAIRS_KEPT = 5000
_WHAT = {
    "heads": "one row a head: every measure with its interval, baseline and sink mass",
    "measures": "one row a head and measure, with unit",
    "sets": "sets of heads ablated together",
    "pairs": "pairs of heads that compose, the strongest first",
    "relations": "one row a head and relation",
    "phase_change": "one row a checkpoint: the curves of the figure",
    "not_measurable": "what is missing, and why",
}


@dataclass(frozen=True)
class Drawn:
    """A figure of the page: title and caption."""

    title: str
    caption: str


@dataclass(frozen=True, eq=False)
class HeadsPage:
    """Where the page is, and what it says. Shows itself in a notebook."""

    folder: Path
    page: Path
    headline: str
    failures: tuple[str, ...]

    def to_html(self) -> str:
        """The page."""
        return self.page.read_text(encoding="utf-8")

    def _repr_html_(self) -> str:
        return notebook_frame(self.to_html(), "attndiag heads")

    def __repr__(self) -> str:
        return f"HeadsPage({self.page}: {self.headline})"


def save_heads(
    folder: str | Path,
    table: HeadTable | None = None,
    *,
    relations: Sequence[HeadTable] = (),
    phase: PhaseChange | None = None,
    about: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> HeadsPage:
    """Write tables, figures and page.

    Parameters
    ----------
    folder : new or empty, or one that this function wrote and `overwrite`.
    table : from `attndiag.heads`.
    relations : from `explain.relation_probe.probe_relation`.
    phase : from `reports.phase_change`.
    about : facts for the page and `heads.json` (model, revision, seconds, ...).
    overwrite : replace what an earlier call wrote there.

    Raises
    ------
    RunFolderError : the folder cannot be written or holds something else.
    ValueError : nothing to write.
    """
    if table is None and not relations and phase is None:
        raise ValueError("there is nothing to write; give a table, relations or a phase change")
    place = prepare(folder, overwrite=overwrite)
    facts = dict(about or {})
    # what was run, not how long it took
    asked = {name: value for name, value in facts.items() if name != "seconds"}
    run = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:12]
    tables = _tables(table, relations, phase)
    for name, frame in tables.items():
        _write_table(place, name, frame.assign(run=run))
    figures, drawings = _figures(place, table, relations, phase)
    values = _values(table, relations, phase, facts, tables, run)
    page = render("heads.html.j2", figures=figures, drawings=drawings, **values)
    size = len(page.encode("utf-8"))
    if size > BUDGET:
        raise RunFolderError(f"the page would have {file_size(size)}, above the {file_size(BUDGET)} that it may have")
    everything = {"run": run, "schema": SCHEMA, **facts} | ({} if table is None else {"facts": dict(table.facts)})
    _write(place / PAGE, page)
    _write(place / MARKER, json.dumps(everything, indent=2, default=str, ensure_ascii=False))
    return HeadsPage(place, place / PAGE, values["headline"], tuple(values["failures"]))


def prepare(folder: str | Path, *, overwrite: bool) -> Path:
    """Make the folder, or say why it cannot be used. Cheap, so that nobody loads a model first."""
    place = Path(folder)
    with explained(place):
        if place.exists() and not place.is_dir():
            raise RunFolderError(f"{place} is a file; give a folder for the output")
        place.mkdir(parents=True, exist_ok=True)
        if any(place.iterdir()):
            if not (place / MARKER).is_file():
                raise RunFolderError(f"{place} is not empty and holds no head table; give a new or empty folder")
            if not overwrite:
                raise RunFolderError(
                    f"{place} holds a head table already; give another folder, or overwrite=True (--overwrite)"
                )
            for name in _OURS:
                thing = place / name
                if thing.is_dir():
                    shutil.rmtree(thing)
                elif name != MARKER:
                    thing.unlink(missing_ok=True)
    return place


def _tables(
    table: HeadTable | None, relations: Sequence[HeadTable], phase: PhaseChange | None
) -> dict[str, pd.DataFrame]:
    import pandas as pd

    found: dict[str, pd.DataFrame] = {}
    missing = []
    if table is not None:
        measures = table.tidy()
        if len(measures):
            found["heads"] = _plain(table.to_frame())
            found["measures"] = _plain(measures)
        if table.sets:
            sets = table.sets_frame()
            sets["heads"] = [" ".join(f"L{layer}H{head}" for layer, head in heads) for heads in sets["heads"]]
            found["sets"] = sets.assign(unit="nats")
        if any(kind in table.scores for kind in KINDS):
            pairs = strongest_pairs(table, _PAIRS_KEPT)
            found["pairs"] = pairs.astype({"earlier_layer": "string", "layer": "string"})
        missing += [vars(item) for item in table.not_measurable]
    if relations:
        frames = [each.to_frame().assign(relation=each.facts["relation"]) for each in relations]
        found["relations"] = _plain(pd.concat(frames, ignore_index=True))
        missing += [vars(item) for each in relations for item in each.not_measurable]
    if phase is not None:
        found["phase_change"] = phase.frame()
    if missing:
        found["not_measurable"] = pd.DataFrame(missing).astype({"layer": "string"})
    return found


def _plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Layer labels as one type: numbers where all are numbers, else text."""
    numbers = all(isinstance(label, int) for label in frame["layer"])
    return frame if numbers else frame.astype({"layer": "string"})


def _write_table(place: Path, name: str, frame: pd.DataFrame) -> None:
    with explained(place):
        write_atomically(place / f"{name}.csv", lambda file: frame.to_csv(file, index=False, lineterminator="\n"))
        write_atomically(place / f"{name}.parquet", lambda file: frame.to_parquet(file, compression="zstd"))


def _write(path: Path, text: str) -> None:
    with explained(path.parent):
        write_atomically(path, lambda file: file.write(text.encode("utf-8", errors="replace")))


def _figures(
    place: Path, table: HeadTable | None, relations: Sequence[HeadTable], phase: PhaseChange | None
) -> tuple[dict[str, Any], dict[str, Drawn]]:
    """Everything that can be drawn: SVG for the page, and what it is."""
    wanted: dict[str, tuple[Any, Drawn]] = {}
    if phase is not None:
        caption = (
            "Solid: the run. Dashed: the control. Grey: the window in which the prefix-matching score goes from 20 % "
            "to 80 % of its final value. Effects are those of zero ablation on the second copy, nats."
        )
        wanted["phase_change"] = (lambda: draw_phase_change(phase), Drawn("Induction heads form", caption))
    if table is not None:
        if any(s.axes == ("layer", "head") and s.provenance.get("input") for s in table.scores.values()):
            caption = "Layers by heads. Grey: not measured."
            wanted["scores"] = (lambda: draw_score_maps(table), Drawn("Every layer and head, by score", caption))
        if EFFECT in table.scores:
            # PuOr around 0 is orange below and purple above
            caption = (
                "Purple: the loss rises without the head, so it helped; orange: it falls. Grey: not ablated; only the "
                f"heads that come first by {ranked_by(table)} are."
            )
            wanted["effects"] = (lambda: draw_effect_maps(table), Drawn("Every layer and head, by effect", caption))
            caption = (
                "Left: one dot a head. A head may score high and be worth little, because others do the same, or score "
                "low and be worth much, because others read what it writes. Right: heads taken away together, beside "
                "random sets of the same size."
            )
            wanted["score_effect"] = (
                lambda: draw_score_against_effect(table, score_of_effects(table)),
                Drawn("Score against effect", caption),
            )
        if any(kind in table.scores for kind in KINDS):
            caption = (
                "The strongest pair of every two layers, as a ratio above that of random matrices. Rows read, columns "
                "write. Darkest: at chance or below. Grey: no such pair, or not measured."
            )
            wanted["composition"] = (lambda: draw_composition(table), Drawn("Which layers read which", caption))
    for index, relation in enumerate(relations, start=1):
        caption = (
            "The related token against two rules that know nothing of the relation. Right: what the target loses when "
            "that edge, or an edge of the same head to a shuffled place (cross), is taken away."
        )
        wanted[f"relation_{index}"] = (
            lambda relation=relation: draw_relation(relation),
            Drawn(f"Relation {relation_name(relation)}", caption),
        )
    figures = {}
    for name, (draw, drawn) in wanted.items():
        figures[name] = inline_svg(save_drawing(draw, place / "figures" / name), name, drawn.title)
    return figures, {name: drawn for name, (_, drawn) in wanted.items()}


def _values(
    table: HeadTable | None,
    relations: Sequence[HeadTable],
    phase: PhaseChange | None,
    facts: dict[str, Any],
    tables: Mapping[str, pd.DataFrame],
    run: str,
) -> dict[str, Any]:
    """What the template needs."""
    view = table_view(table)
    missing = [] if table is None else list(table.not_measurable)
    missing += [item for each in relations for item in each.not_measurable]
    checked = [s for t in (table, *relations) if t is not None for s in t.scores.values()]
    failures = list(dict.fromkeys(text for scores in checked for text in scores.failures))
    headline, lead = view["headline"], view["lead"]
    if table is None or not headline:
        headline = phase_headline(phase) if phase is not None else f"Relation {relation_name(relations[0])}"
    sections = [
        ("phase", "Phase change", phase is not None),
        ("maps", "Scores", bool(view["columns"])),
        ("composition", "Composition", "pairs" in tables),
        ("effects", "Effects", table is not None and EFFECT in table.scores),
        *((f"relation-{i}", f"Relation {relation_name(each)}", True) for i, each in enumerate(relations, start=1)),
        ("heads", "Every head", bool(view["columns"])),
        ("missing", "Not measurable", bool(missing)),
        ("reading", "How to read this", True),
        ("run", "What was run", True),
    ]
    shown = {"run": run, **facts}
    if table is not None:
        shown |= {name.replace("_", " "): value for name, value in table.facts.items()}
    if phase is not None:
        shown |= {f"series: {name}": value for name, value in phase.about.items()}
    return {
        **view,
        **every_head(table),
        "composition": composition_view(table),
        "model": facts.get("model", "the shipped training series" if table is None else "a model"),
        "headline": headline,
        "lead": lead,
        "failures": failures,
        "verified": bool(checked) and not failures,
        "missing": missing,
        "phase": None if phase is None else {"sentence": lag_sentence(phase), "shipped": "seed" in phase.about},
        "relations": [relation_view(each) for each in relations],
        "sections": [(name, title) for name, title, there in sections if there],
        "facts": [(name, _shown(value)) for name, value in shown.items() if value is not None],
        "files": [(f"{name}.{kind}", _WHAT[name]) for name in tables for kind in ("csv", "parquet")],
        "ranked_by": SCORE,
        "base_css": asset("base.css"),
        "base_js": asset("base.js"),
        "version": package_versions()["attndiag"],
    }


def _shown(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value

"""`report`: a run folder -> figures, summary tables and one self-contained page; with a model, the run before it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from attndiag.errors import RunFolderError
from attndiag.prompts import Prompt
from attndiag.reports.figures import DRAWINGS, save_figures
from attndiag.reports.html import BUDGET, asset, file_size, inline_svg, notebook_frame, part, render
from attndiag.reports.places import file_entries, without_home
from attndiag.reports.tables import Summary, summarise
from attndiag.reports.token_text import shortened, visible
from attndiag.reports.wording import headline, norm_sentence, second_sentence, task_sentence
from attndiag.runs.folder import COMPARISON, RunFolder, kind_of
from attndiag.runs.measures import MEASURES
from attndiag.runs.schemas import RUNS, TABLES

if TYPE_CHECKING:
    from attndiag.models.load import LoadedModel
    from attndiag.reports.compared_report import ComparisonReport
    from attndiag.runs.weights_run import RunSettings

Progress = Callable[[str, int, int], None]
PAGE = "report.html"
# more heads than this are left to the summary table
_HEADS_SHOWN = 600
# longer rows of tokens leave out what gets next to nothing
_TOKENS_SHOWN, _NEXT_TO_NOTHING = 48, 0.01

_PAIR_TITLES = (
    ("contribution_over_weight", "content", "Little weight, much contribution"),
    ("weight_over_contribution", "content", "Much weight, little contribution"),
    ("weight_over_contribution", "sink", "Position 0 and other sinks: much weight, little contribution"),
)


@dataclass(frozen=True, eq=False)
class Report:
    """A rendered report: where it is and what it says. Shows itself in a notebook."""

    folder: Path
    page: Path
    headline: str
    summary: Summary

    @property
    def passed(self) -> bool:
        """Every prompt was measured and every self-check passed."""
        return self.summary.passed

    def to_html(self) -> str:
        """The page."""
        return self.page.read_text(encoding="utf-8")

    def _repr_html_(self) -> str:
        return notebook_frame(self.to_html(), "attndiag report")

    def __repr__(self) -> str:
        return f"Report({self.page}: {self.headline})"


def report(
    folder: str | Path,
    *,
    lm: LoadedModel | None = None,
    prompts: Sequence[Prompt] | None = None,
    settings: RunSettings | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report | ComparisonReport:
    """Render the run that is in a folder, of weights or a comparison, or make one of weights first.

    Parameters
    ----------
    folder : a run folder, of `attndiag.report` or of `attndiag.run`. With `lm` it is made here, so it has to be new or
        empty. A weights run in the subfolder `weights` of a comparison stands below it on the same page.
    lm : a model from `attndiag.load`; None renders the run that is there.
    prompts : what to measure; the shipped set when None. Only with `lm`.
    settings : of the run. Only with `lm`.
    overwrite : replace the run that is in the folder. Only with `lm`.
    progress : called with (what is being done, steps done, steps in all).

    Returns
    -------
    Report, or ComparisonReport for a comparison. In the folder: `report.html` (at most 8 MB, loads nothing), `figures/`
    (PNG, SVG, PDF), `tables/` (the run's own), `summary/` (of weights: means by head, layer, cluster and prompt, CSV).

    Raises
    ------
    RunFolderError : the folder holds no run, cannot be written, or none of its prompts was measured.
    ValueError : prompts, settings or `overwrite` without a model.
    """
    if lm is None:
        if prompts is not None or settings is not None or overwrite:
            raise ValueError("prompts, settings and overwrite are about making a run; give lm= too")
        return render_any(folder, progress=progress)
    from attndiag.runs.prompt_files import SHIPPED, shipped_prompts
    from attndiag.runs.weights_run import measure_prompts

    outcome = measure_prompts(
        lm,
        shipped_prompts() if prompts is None else prompts,
        folder,
        settings=settings,
        prompt_file=SHIPPED.name if prompts is None else None,
        overwrite=overwrite,
        progress=progress,
    )
    return render_run(outcome.folder, progress=progress)


def render_any(folder: str | Path, *, progress: Progress | None = None) -> Report | ComparisonReport:
    """The page of whichever run is in a folder; see `report`."""
    # it puts a weights run below a comparison, so it reads this module
    from attndiag.reports.compared_report import render_comparison

    if Path(folder).is_dir() and kind_of(folder) == COMPARISON:
        return render_comparison(folder, progress=progress)
    return render_run(RunFolder.open(folder), progress=progress)


def render_run(folder: RunFolder, *, progress: Progress | None = None) -> Report:
    """Figures, summary tables and page of the run in a folder; see `report`."""
    steps = ("reading tables", "drawing figures", "writing the page")

    def tell(step: int) -> None:
        if progress is not None:
            progress(steps[min(step, 2)], step, len(steps))

    tell(0)
    summary = summarise(folder)
    _write_summary(folder, summary)
    _merge_unfinished(folder)
    tell(1)
    drawn = save_figures(folder, summary)
    tell(2)
    figures = {d.name: inline_svg(drawn[d.name], d.name, d.alt) for d in DRAWINGS}
    page = _page(summary, figures, folder)
    size = len(page.encode("utf-8"))
    if size > BUDGET:
        raise RunFolderError(
            f"the page would have {file_size(size)}, above the {file_size(BUDGET)} that a page may have; "
            "please report this run's model and prompt set"
        )
    path = folder.write_text(PAGE, page)
    tell(3)
    return Report(folder.path, path, headline(summary), summary)


def _merge_unfinished(folder: RunFolder) -> None:
    """The tables of a run that was stopped, from what is there: whoever reads its page wants them too."""
    if folder.finished:
        return
    facts = folder.about.get("runs")
    # a folder that was made without facts has none for its table either
    folder.merge_shards({"runs": RUNS.table(facts)} if facts else None)


def _write_summary(folder: RunFolder, summary: Summary) -> None:
    for name, table in (
        ("heads", summary.heads),
        ("layers", summary.layers),
        ("clusters", summary.clusters),
        ("prompts", summary.by_prompt),
    ):
        labelled = table.assign(run=summary.run["run"])
        folder.write_text(f"summary/{name}.csv", labelled.to_csv(index=False, lineterminator="\n"))


def _page(summary: Summary, figures: dict[str, Any], folder: RunFolder) -> str:
    return render(
        "report.html.j2",
        **_values(summary, figures, folder, "", ""),
        headline=headline(summary),
        second=second_sentence(summary),
        task=task_sentence(summary),
        failed_checks=int((~summary.checks.ok).sum()),
        sections=(
            ("sink", "Position 0"),
            ("norms", "Norms"),
            ("ranks", "Rank agreement"),
            ("pairs", "Strongest disagreements"),
            ("clusters", "By kind of prompt"),
            ("heads", "Every head"),
            ("checks", "Self-checks"),
            ("run", "What was run"),
            ("files", "Files"),
            ("reading", "How to read this"),
        ),
        base_css=asset("base.css"),
        report_css=asset("report.css"),
        base_js=asset("base.js"),
        version=json.loads(summary.run["versions"]).get("attndiag", ""),
    )


def weights_part(folder: RunFolder, base: str) -> tuple[str, Markup]:
    """Headline and body of a weights run, to stand below another page; writes its figures and summary tables.

    Parameters
    ----------
    base : path from that page's folder to the run's, with a slash at its end.

    Raises
    ------
    RunFolderError : none of its prompts was measured.
    """
    summary = summarise(folder)
    _write_summary(folder, summary)
    _merge_unfinished(folder)
    drawn = save_figures(folder, summary)
    figures = {d.name: inline_svg(drawn[d.name], d.name, d.alt) for d in DRAWINGS}
    return headline(summary), part("weights_part.html.j2", **_values(summary, figures, folder, "w-", base))


def _values(summary: Summary, figures: dict[str, Any], folder: RunFolder, prefix: str, base: str) -> dict[str, Any]:
    """What `weights_part.html.j2` needs; `prefix` keeps its ids apart from the page's, `base` leads to its files."""
    heads = summary.heads
    left_out = max(0, len(heads) - _HEADS_SHOWN)
    if left_out:
        strongest = heads.sink_gap.abs().sort_values(ascending=False, kind="stable").index[:_HEADS_SHOWN]
        heads = heads.loc[strongest]
    return {
        "prefix": prefix,
        "base": base,
        "s": summary,
        "coverage": str(summary.coverage),
        "norm_text": norm_sentence(summary),
        "chance_text": _chance_text(summary),
        "position_note": _position_note(folder),
        "figures": figures,
        "drawings": {drawing.name: drawing for drawing in DRAWINGS},
        "pair_groups": _pair_groups(summary),
        "heads": heads.to_dict("records"),
        "heads_left_out": left_out,
        "facts": _facts(summary),
        "files": _files(folder),
        "measures": list(MEASURES.values()),
    }


def _chance_text(summary: Summary) -> str:
    above = summary.overall("rank_agreement_above_chance")
    if not np.isfinite(above):
        return ""
    return (
        f"In {100 * above:.0f} % of the rows that are long enough to tell (5 keys), weight and head contribution "
        "agree more than unrelated orders do in 95 % of cases."
    )


def _position_note(folder: RunFolder) -> str:
    tokens = folder.read("tokens")
    first = tokens[(tokens.pos == 0) & (tokens.part == "input")]
    special = int(first.is_special.astype(bool).sum())
    if special == 0:
        return "Position 0 is the first word of the text: this model reads no start token."
    if special == len(first):
        return f"Position 0 is a special token, {visible(str(first.text.iloc[0]))}."
    return f"Position 0 is a special token in {special} of {len(first)} prompts."


def _pair_groups(summary: Summary) -> list[tuple[str, list[tuple[dict[str, Any], list[dict[str, Any]]]]]]:
    records = summary.pairs.to_dict("records")
    groups = []
    for direction, key_class, title in _PAIR_TITLES:
        group = [
            (pair, _strip(pair, row))
            for pair, row in zip(records, summary.rows, strict=True)
            if pair["direction"] == direction and pair["key_class"] == key_class
        ]
        groups.append((title, group))
    return groups


def _strip(pair: dict[str, Any], row: pd.DataFrame) -> list[dict[str, Any]]:
    """Tokens of one row for the template: bars, classes, and gaps in place of long stretches of nothing."""
    same_axis = pair["kind"] == "self"
    strip: list[dict[str, Any]] = []
    for token in row.itertuples():
        is_key, is_query = token.pos == pair["key_pos"], same_axis and token.pos == pair["query_pos"]
        weight, contribution = token.weight_share, token.contribution_share
        # nan compares as False: a token without a number gets next to nothing
        large = weight >= _NEXT_TO_NOTHING or contribution >= _NEXT_TO_NOTHING
        if len(row) > _TOKENS_SHOWN and not (is_key or is_query or large):
            if strip and strip[-1].get("gap"):
                strip[-1]["gap"] += 1
            else:
                strip.append({"gap": 1})
            continue
        classes = [
            name
            for name, holds in (
                ("key", is_key),
                ("query", is_query),
                ("special", bool(token.is_special) if token.is_special == token.is_special else False),
                ("after", same_axis and token.pos > pair["query_pos"] and not weight > 0),
            )
            if holds
        ]
        strip.append(
            {
                "gap": 0,
                "pos": token.pos,
                "text": shortened(visible(str(token.text)), 24),
                "weight": weight,
                "contribution": contribution,
                "w": f"{100 * weight:.1f}" if weight == weight else "0",
                "c": f"{100 * contribution:.1f}" if contribution == contribution else "0",
                "classes": " ".join(classes),
            }
        )
    return strip


def _facts(summary: Summary) -> list[tuple[str, str]]:
    run = summary.run
    versions = json.loads(run["versions"])
    measured = len(summary.measured)
    facts = {
        "model": f"{run['model']} ({run['architecture']}, {run['parameters']:,} parameters)",
        "from": f"{run['source']}: {without_home(run['location'])}" if run["location"] else run["source"],
        "revision": run["revision"],
        "dtype, device": f"{run['dtype']} on {run['device']}",
        "attention function": run["kernel"],
        "backend": run["backend"],
        "tokenizer": f"{run['tokenizer_hash']} ({'adds' if run['adds_bos'] else 'adds no'} start token)",
        "prompts": f"{measured} of {run['n_prompts']} measured"
        + (f", {run['n_skipped']} unusable entries skipped" if run["n_skipped"] else "")
        + (f", from {run['prompt_file']}" if run["prompt_file"] else "")
        + f", hash {run['prompt_hash']}",
        "methods": run["methods"],
        "settings": run["params"],
        "seed": f"{run['seed']} (nothing is drawn at random here)",
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "run": run["run"],
        "loader's notes": run["notes"],
    }
    return [(name, str(value)) for name, value in facts.items() if value is not None]


def _files(folder: RunFolder) -> list[dict[str, Any]]:
    """What lies beside the page: one entry a table or figure, with a link for each format."""
    what = {f"tables/{name}": schema.meaning for name, schema in TABLES.items()}
    what |= {
        "tables/columns": "every column of every table: unit and meaning",
        "tables/measures": "every measure of the table `heads`: unit, direction and meaning",
    }
    what |= {f"figures/{drawing.name}": drawing.title for drawing in DRAWINGS}

    def meaning(stem: str) -> str:
        other = f"means by {stem.rpartition('/')[2].removesuffix('s')}" if "/" in stem else "what this folder is"
        return what.get(stem, other)

    listed = (path for path in folder.files() if path.name != PAGE and path.parts[0] != "shards")
    return file_entries(folder.path, listed, meaning)

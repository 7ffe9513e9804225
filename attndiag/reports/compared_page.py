"""The page of a comparison: ten points from what was run to the files, opened by a headline in words.

What a page says comes from `compared_tables` (numbers) and `compared_words` (sentences); here they are put together.
The same page is written for a run folder, with its figures as files beside it, and for a comparison in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from attndiag.comparison.misled import rates_by_layer
from attndiag.reports import compared_figures as drawing
from attndiag.reports import compared_tables as tables
from attndiag.reports import compared_words as words
from attndiag.reports.compared_facts import (
    card_caption,
    card_rows,
    check_rows,
    fact_rows,
    failed_checks,
    package_version,
    problem_rows,
    version_text,
)
from attndiag.reports.compared_figures import Drawn
from attndiag.reports.compared_tables import TOP, Row
from attndiag.reports.html import asset, inline_svg, percent, render
from attndiag.stats.inference import LEAST_CLUSTERS
from attndiag.stats.verdicts import VERDICTS, Thresholds

if TYPE_CHECKING:
    import pandas as pd

    from attndiag.comparison.edges import EdgeVerdicts
    from attndiag.runs.compared_run import ComparedRun
    from attndiag.stats.rates import Rate

Draw = Callable[[str, Drawn], str]
# what probes say of a head and what it is worth, as far as they were measured: column, title, unit (None: the target's)
_PROBES = (
    ("prefix_matching_score", "induction", "mass"),
    ("previous_token_score", "previous token", "mass"),
    ("sink_mass", "sink", "mass"),
    ("head_effect", "effect of the head", None),
    ("mean_edge_effect", "mean size of its edges' effects", None),
    ("largest_edge_effect", "largest of them", None),
)
_SCORE, _EFFECTS = "prefix_matching_score", ("head_effect", "mean_edge_effect")
_PROBLEMS_SHOWN, _PROMPTS_SHOWN = 200, 500


def page(
    run: ComparedRun,
    draw: Draw,
    *,
    in_folder: bool = False,
    files: Sequence[Row] = (),
    commands: Sequence[tuple[str, str]] = (),
    weights: Markup | None = None,
    weights_headline: str = "",
) -> str:
    """The page as text.

    Parameters
    ----------
    run : what was compared.
    draw : name, drawing -> the SVG; writes the figure's files where there is a folder.
    in_folder, files, commands : what lies beside the page, and how to make it again.
    weights, weights_headline : the part of a weights run on the same prompts, already rendered.
    """
    drawings = figures_of(run)
    figures = {name: inline_svg(draw(name, drawn), name, drawn.alt) for name, drawn in drawings.items()}
    comparison, edges = run.comparison, run.edges
    matrix = tables.agreement_matrix(comparison)
    methods = tables.methods_of(comparison)
    subject = words.subject(comparison, edges)
    heads = tables.head_rows(edges, run.heads)
    facts = dict(run.facts)
    shown = fact_rows(facts)
    return render(
        "compare.html.j2",
        model=str(facts["model"]),
        created=str(facts.get("created") or ""),
        headline=words.headline(comparison, edges),
        where=words.where_sentences(comparison, edges),
        clusters=words.cluster_sentence(comparison) + _unfinished(facts),
        blocking=words.blocking_sentence(comparison, edges),
        blocked=run.blocked,
        failed_checks=failed_checks(run),
        facts=shown,
        card=card_rows(run.card or {}),
        card_caption=card_caption(run.card or {}),
        checks=check_rows(run),
        problems=problem_rows(run)[:_PROBLEMS_SHOWN],
        task_text=_task_text(comparison.prompts),
        prompts=tables.prompt_rows(comparison, edges, subject)[:_PROMPTS_SHOWN],
        several_replacements=_replacements(run) > 1,
        sinks_text=words.sinks_sentence(comparison),
        agreement_text=words.agreement_sentence(subject, matrix, methods),
        methods=methods,
        ceiling=tables.ceilings(comparison),
        matrix=_matrix(methods, matrix),
        agreement=tables.agreement_rows(comparison),
        faithfulness=tables.faithfulness_rows(comparison),
        primary=tables.primary_rows(comparison),
        replacement_text=_replacement_text(run),
        replacements=tables.replacement_rows(comparison),
        cases=_cases(run, subject),
        least_clusters=LEAST_CLUSTERS,
        heads=heads[: tables.HEADS_SHOWN],
        heads_left_out=max(0, len(heads) - tables.HEADS_SHOWN),
        layers=tables.layer_rows(edges),
        heads_text=_heads_text(run),
        too_narrow=_unknown_correlation(heads, edges),
        edge_methods=list(edges.judged) if edges is not None else [],
        probe_columns=_probe_columns(heads, run),
        verdicts=VERDICTS,
        verdict_text=verdict_text(run),
        token_methods=tables.method_rows(comparison),
        edge_table=tables.edge_rows(edges),
        counts=tables.level_counts(comparison, edges),
        no_verdicts="no replacement gave evidence" if methods else "no prompt could be measured",
        commands=commands,
        files=files,
        versions=version_text(facts),
        plan=json.dumps(facts.get("plan"), indent=1, ensure_ascii=False) if facts.get("plan") else "",
        in_folder=in_folder,
        sections=_sections(weights is not None),
        figures=figures,
        drawings=drawings,
        weights=weights,
        weights_headline=weights_headline,
        base_css=asset("base.css"),
        compare_css=asset("compare.css"),
        report_css=asset("report.css"),
        base_js=asset("base.js"),
        version=package_version(),
    )


def _unfinished(facts: Mapping[str, Any]) -> str:
    """That prompts are missing because the run was stopped; empty otherwise."""
    if facts.get("status") != "unfinished":
        return ""
    return f" The run is unfinished: {facts['n_done']} of {facts['n_prompts']} prompts are done."


def figures_of(run: ComparedRun) -> dict[str, Drawn]:
    """The figures that there is something to draw for, by name."""
    comparison, edges = run.comparison, run.edges
    methods = tables.methods_of(comparison)
    matrix = tables.agreement_matrix(comparison)
    found: dict[str, Drawn] = {}
    if matrix:
        top = tables.agreement_matrix(comparison, *TOP, adjusted=True)
        found["compared_agreement"] = Drawn(
            "Agreement of every pair of methods",
            "Means over prompts. Sinks and special tokens are set aside; faithfulness ranks sinks too. Purple: alike; "
            "orange: reversed; white: unrelated. Bold: outside the band of chance. Grey: undefined, or no pair.",
            "Two matrices of methods: mean tau-b, and overlap of the three strongest tokens adjusted for chance",
            lambda: drawing.draw_agreement(methods, matrix, top),
        )
    groups = tables.faithfulness_rows(comparison)
    if any(row["paired"] is not None for _, rows in groups for row in rows):
        found["compared_faithfulness"] = Drawn(
            "Faithfulness against random orders",
            "Paired differences, mean over prompts, sinks ranked like other tokens; lines are 95 % intervals over "
            "clusters of prompts. Open squares: the method shares its replacement with the metric.",
            "Difference of every method to random orders, one panel a metric",
            lambda: drawing.draw_faithfulness(groups),
        )
    if _replacements(run) > 1 and len(comparison.prompts):
        rows = tables.prompt_rows(comparison, None, None)
        found["compared_replacements"] = Drawn(
            "How alike replacements order the tokens",
            "One dot a prompt: the smallest tau-b between two replacements. Open dots left of the dashed line get no "
            "verdict.",
            "Smallest tau-b between replacements, one dot a prompt",
            lambda: drawing.draw_replacements(rows, thresholds_of(run).replacement_tau),
        )
    heads = tables.head_rows(edges, run.heads)
    if edges is not None:
        names = list(edges.judged)
        found["compared_heads"] = Drawn(
            "Where each method misleads",
            "Share of the decided prompts on which a head's verdict is \u201cdisagree\u201d. Grey: no decided prompt.",
            "Heat maps, layers by heads: how often each method misleads",
            lambda: drawing.draw_head_maps(heads, names[:3]),
        )
    effect = _effect_column(heads, run)
    if effect is not None:
        method = next(iter(edges.judged), "weight") if edges is not None else "weight"
        whole = effect["name"].startswith("head_effect")
        what = "the mean effect of the whole head" if whole else "the mean size of its edges' effects"
        units = tables.units_of(edges)
        over = f" ({effect['unit']}, over the {units[effect['unit']]} prompts that have it)" if len(units) > 1 else ""
        by_layer = {} if edges is None else {name: rates_by_layer(edges, name) for name in edges.judged}
        found["compared_head_scores"] = Drawn(
            "Induction score against effect",
            f"Left, one dot a head: prefix-matching score, {what}{over}, and how often the method misleads there. "
            "Right: share of the decided rows (a head on a prompt) of each layer on which a method misleads; bands are "
            "95 % intervals over clusters of prompts.",
            "Scatter of heads: prefix-matching score against effect; share of misleading rows by layer",
            lambda: drawing.draw_score_against_effect(
                heads, method, (_SCORE, effect["name"], effect["unit"]), by_layer
            ),
        )
    counts = tables.level_counts(comparison, edges)
    if counts:
        found["compared_verdicts"] = Drawn(
            "Verdicts by level and method",
            "Shares of the judged tokens, edges and heads. The ceiling is the replacement that gives the evidence.",
            "Stacked bars: shares of verdicts by level and method",
            lambda: drawing.draw_verdicts(counts),
        )
    return found


def verdict_text(run: ComparedRun) -> str:
    """What a verdict means here, with the thresholds that it depends on."""
    limits = thresholds_of(run)
    return (
        f"A score claims \u201chigh\u201d from {limits.high:g}/n of the method's mass over n judged items and "
        f"\u201clow\u201d up to {limits.low:g}/n. An effect is present when its interval lies outside \u00b1max(noise "
        f"floor, {limits.margin:g}\u00b7|m|, {limits.present_from:g}\u00b7mean effect size of the row), absent when it "
        f"lies inside the same with {limits.absent_below:g}\u00b7mean: small, not always zero. Level "
        f"{limits.level:g}, Benjamini-Hochberg over the items. High and present, or low and absent: agree. High and "
        "absent, or low and present: disagree. Else inconclusive. A method's own verdict is \u201cagree\u201d when "
        "more than half of what it marks or should mark is right, interval and all, and more than shuffled claims "
        "reach."
    )


def thresholds_of(run: ComparedRun) -> Thresholds:
    """The thresholds that the verdicts were given with."""
    judged = [*run.comparison.judged.values(), *(run.edges.judged.values() if run.edges is not None else ())]
    return judged[0].thresholds if judged else Thresholds()


def _replacements(run: ComparedRun) -> int:
    return sum(name.startswith("replacement[") for name in tables.methods_of(run.comparison))


def _replacement_text(run: ComparedRun) -> str:
    count, needs = _replacements(run), thresholds_of(run).replacement_tau
    if count == 0:
        return "No replacement was measured, so nothing is known about effects."
    if count == 1:
        return (
            "One replacement was used, so nothing is known about how far the effects depend on it; name a second one "
            "(--replacements) to find out."
        )
    taus = run.comparison.prompts["replacement_tau"]
    below, unknown = int((taus < needs).sum()), int(taus.isna().sum())
    text = (
        f"{count} replacements were measured. On {below} of {len(taus)} prompts two of them order the tokens with a "
        f"tau-b below {needs:g}: no verdict there."
    )
    return text + (f" On {unknown} they cannot be compared." if unknown else "")


def _heads_text(run: ComparedRun) -> str:
    if run.edges is None:
        return "No edges were measured in this run, so nothing is known about single heads."
    share = run.edges.measured_share
    screened = (
        f" This is a screen: {percent(share)} of the edges were measured exactly, those with the largest estimates or "
        "claims. How many of them are right is not to be compared with a run of all edges. A head with an unmeasured "
        "edge gets no verdict."
        if share < 1
        else ""
    )
    units = tables.units_of(run.edges)
    mixed = (
        " Effects have a mean within one unit only: "
        + ", ".join(f"{count} prompts in {unit}" for unit, count in units.items())
        + "."
        if len(units) > 1
        else ""
    )
    return (
        "Each row is one head of one layer at the query where the target is read; its items are the keys. A head "
        "misleads on a prompt when most of the method's mass is on keys whose effect is absent (within the margin, see "
        "Verdicts), or most of the effect on keys with a low score. A head can score high on a probe and be worth "
        "nothing, because others do the same." + screened + mixed
    )


def _unknown_correlation(heads: Sequence[Row], edges: EdgeVerdicts | None) -> list[str]:
    """Methods of which no head can tell how alike the prompts of a cluster are, though clusters have several."""
    found: list[str] = []
    for name in edges.judged if edges is not None else ():
        rates: list[Rate] = [row["by_method"][name] for row in heads if name in row["by_method"]]
        several = [rate for rate in rates if rate.decided > rate.clusters > 1]
        if several and all(rate.wrong in (0, rate.decided) for rate in several):
            found.append(name)
    return found


def _task_text(prompts: pd.DataFrame) -> str:
    if prompts.empty:
        return "No prompt was measured."
    passed = int((prompts["task"] == "").sum())
    everyone = f"all {len(prompts)} prompts" if passed == len(prompts) else f"{passed} of {len(prompts)} prompts"
    return f"The model passes the task check on {everyone}: the target is its first choice and beats the foil."


def _cases(run: ComparedRun, subject: str | None) -> list[Row]:
    """Catalogues: the subject's open, those of other methods folded."""
    groups: list[Row] = []
    ceiling = tables.ceilings(run.comparison)
    if run.edges is not None:
        for name in run.edges.cases:
            kinds = tables.edge_cases(run.edges, name)
            groups.append({"title": f"{name} on edges", "method": name, "kinds": kinds})
    for name in run.comparison.cases:
        kinds = tables.token_cases(run.comparison, name)
        tag = " (ceiling)" if name in ceiling else ""
        groups.append({"title": f"{name} on tokens{tag}", "method": name, "kinds": kinds})
    groups.sort(key=lambda group: group["method"] != subject)
    return [{**group, "open": group["method"] == subject} for group in groups]


def _matrix(methods: Sequence[str], cells: Mapping[tuple[str, str], tables.Cell]) -> list[Row]:
    if not cells:
        return []
    rows: list[Row] = []
    for one in methods:
        found: list[Row | None] = []
        for two in methods:
            cell = cells.get((one, two))
            derived = {} if cell is None else {"undefined": cell.undefined, "outside": _outside(cell)}
            found.append(None if cell is None else {**vars(cell), **derived})
        rows.append({"method": one, "cells": found})
    return rows


def _outside(cell: tables.Cell) -> bool:
    return math.isfinite(cell.low) and not cell.low <= cell.value <= cell.high


def _probe_columns(heads: Sequence[Row], run: ComparedRun) -> list[Row]:
    """What of `_PROBES` was measured; effects in several units as one column each."""
    units = tables.units_of(run.edges)
    found: list[Row] = []
    for name, title, fixed_unit in _PROBES:
        if fixed_unit is not None:
            found.append({"name": name, "title": title, "unit": fixed_unit})
            continue
        for unit in units or {"": 0}:
            own = f"{name}[{unit}]" if len(units) > 1 else name
            found.append({"name": own, "title": title, "unit": unit})
    return [one for one in found if any(_number(row["probes"].get(one["name"])) for row in heads)]


def _effect_column(heads: Sequence[Row], run: ComparedRun) -> Row | None:
    """What a head is worth, where probes scored it too: the whole head's effect, else that of its edges.

    Of several units, the one that most prompts have.
    """
    columns = _probe_columns(heads, run)
    both = (
        column
        for effect in _EFFECTS
        for column in columns
        if column["name"].partition("[")[0] == effect
        and any(_number(row["probes"].get(column["name"])) and _number(row["probes"].get(_SCORE)) for row in heads)
    )
    return next(both, None)


def _number(value: Any) -> bool:
    return isinstance(value, float | int) and math.isfinite(value)


def _sections(with_weights: bool) -> list[tuple[str, str]]:
    sections = [
        ("c-run", "What was run"),
        ("c-checks", "Self-checks"),
        ("c-task", "Task check"),
        ("c-agreement", "Agreement"),
        ("c-faithfulness", "Faithfulness"),
        ("c-replacement", "Replacements"),
        ("c-cases", "Cases"),
        ("c-heads", "Heads"),
        ("c-verdicts", "Verdicts"),
        ("c-files", "Files"),
    ]
    return [*sections, ("w-sink", "Weights against contributions")] if with_weights else sections

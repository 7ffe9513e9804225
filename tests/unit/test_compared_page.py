"""The page of a comparison: its numbers are those of the frames, and what went wrong is said, never shown as 0."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import attndiag
from attndiag.comparison.misled import rate_of_prompts
from attndiag.errors import AttnDiagError
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt, Target
from attndiag.reports import compared_tables as tables
from attndiag.reports import compared_words as words
from attndiag.reports.compared import Compared, compare
from attndiag.reports.compared_page import page
from attndiag.reports.compared_report import ComparisonReport, render_comparison
from attndiag.reports.html import BUDGET, fixed, number, percent
from attndiag.reports.page import report
from attndiag.runs.compared_run import ComparedRun, _heads
from attndiag.runs.compared_tables import tidy_tables
from attndiag.runs.comparing import run
from attndiag.runs.result_files import ModelWork

NASTY = "<script>alert(1)</script> John & \u202eMary {{7*7}}"
PROMPTS = [
    Prompt("When Mary and John went to the store, John gave a drink to", id="ioi", cluster="a"),
    Prompt(NASTY, id="<b>nasty</b>", cluster="</td><script>x</script>"),
    Prompt("When John and Mary went", id="failing", target=" store", foil=" Mary"),
    Prompt("x" * 400, id="long <i>"),
]
PLAN: dict[str, Any] = {
    "methods": ["weight", "input_x_gradient"],
    "replacements": ["uniform:draws=3", "delete"],
    "metrics": ["aopc_comprehensiveness", "effect_tau"],
    "primary": ("weight", "input_x_gradient"),
    "heads": False,
}


@pytest.fixture(scope="module")
def lm(tiny_folder: Path) -> LoadedModel:
    return attndiag.load(tiny_folder, device="cpu")


@pytest.fixture(scope="module")
def kept(lm: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> ComparedRun:
    return run(lm, PROMPTS, **PLAN, output=tmp_path_factory.mktemp("run") / "out")


@pytest.fixture(scope="module")
def made(kept: ComparedRun) -> ComparisonReport:
    assert kept.folder is not None
    found = report(kept.folder)
    assert isinstance(found, ComparisonReport)
    return found


def plain(kept: ComparedRun) -> str:
    """The page without figures, which are most of its time."""
    empty = '<svg width="1pt" height="1pt" viewBox="0 0 1 1"></svg>'
    return page(kept, lambda _name, _drawn: empty)


def text_of(source: str) -> str:
    """What a reader sees, in one line."""
    body = re.sub(r"<(script|style)[^>]*>.*?</\1>", " ", source, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_the_report_of_a_comparison_has_its_files_and_loads_nothing(made: ComparisonReport) -> None:
    source = made.to_html()
    assert len(source.encode()) < BUDGET
    assert "default-src 'none'" in source
    assert not made.passed and "Comparison" in repr(made) and "<iframe" in made._repr_html_()
    for address in re.findall(r'(?:href|src)="([^"]*)"', source):
        assert address.startswith(("#", "data:")) or (made.folder / address).is_file(), address
    ids = re.findall(r'\bid="([^"]+)"', source)
    assert len(ids) == len(set(ids))
    assert {a[1:] for a in re.findall(r'href="(#[^"]+)"', source)} <= set(ids)
    for name in ("agreement", "faithfulness", "replacements", "heads", "verdicts"):
        for kind in ("png", "svg", "pdf"):
            assert (made.folder / "figures" / f"compared_{name}.{kind}").stat().st_size > 1000


def test_every_one_of_the_ten_points_stands_on_the_page(made: ComparisonReport) -> None:
    source = made.to_html()
    for section in ("run", "checks", "task", "agreement", "faithfulness", "replacement", "cases", "heads", "verdicts"):
        assert f'<section aria-labelledby="c-{section}">' in source
    text = text_of(source)
    for name in ("query heads", "kv heads", "head dim", "kernel", "positions", "circular", "ceiling", "Versions:"):
        assert name in text
    assert made.run.facts["run"] in text


def test_prompts_and_names_are_text_never_markup(made: ComparisonReport) -> None:
    source = made.to_html()
    assert "<b>nasty" not in source and "alert(1)</script>" not in source and "\u202e" not in source
    assert source.count("<script>") == 1
    text = text_of(source)
    assert "<b>nasty</b>" in text and "{{7*7}}" in text.replace("* ", "*")


def test_agreement_on_the_page_is_that_of_the_frame(kept: ComparedRun) -> None:
    summary = kept.comparison.agreement_summary
    row = summary[(summary.measure == "tau_b") & (summary["first"] == "weight")].iloc[0]
    cell = tables.agreement_matrix(kept.comparison)[row["first"], row["second"]]
    assert cell.value == row["mean"] and (cell.low, cell.high) == (row.null_low, row.null_high)
    values = kept.comparison.agreement.query("measure == 'tau_b' and first == 'weight'")
    assert cell.value == pytest.approx(values[values.second == row["second"]].value.mean())
    shown = f"{fixed(cell.value)} chance {fixed(cell.low)} to {fixed(cell.high)} undefined"
    assert shown in text_of(plain(kept))


def test_the_page_says_that_agreement_alone_sets_sinks_aside(kept: ComparedRun) -> None:
    prompts = kept.comparison.prompts
    low, high = prompts.sinks.min(), prompts.sinks.max()
    assert high > 0
    counts = f"{low} to {high}" if low < high else f"{low}"
    said = f"Special tokens and attention sinks are set aside here: {counts} sink"
    text = text_of(plain(kept))
    assert said in text and "Faithfulness, replacements and verdicts keep sinks in." in text
    assert "Sinks are ranked like any other token, where agreement sets them aside." in text
    for row in prompts.to_dict("records"):
        assert f"{row['admissible']} / {row['tokens']} {row['sinks']} " in text
    none = replace(kept.comparison, prompts=prompts.assign(sinks=0))
    assert words.sinks_sentence(none).endswith("no prompt has a sink among its other tokens.")


def test_an_empty_list_of_cases_is_none_not_0_shown(kept: ComparedRun) -> None:
    text = text_of(plain(kept))
    assert " 0 shown" not in text
    # the other way round: totals without cases are said in words
    assert kept.edges is not None
    cases = kept.edges.cases["weight"]
    emptied = replace(cases, agreeing_high=cases.agreeing_high[:0], totals={**cases.totals, "agreeing_high": 7})
    edges = replace(kept.edges, cases={**kept.edges.cases, "weight": emptied})
    text = text_of(plain(replace(kept, edges=edges)))
    assert "There is none to set beside, so none is drawn." in text and " 0 shown" not in text


def test_faithfulness_on_the_page_is_that_of_the_frames(kept: ComparedRun) -> None:
    text = text_of(plain(kept))
    frame, paired = kept.comparison.faithfulness, kept.comparison.differences
    for metric, rows in tables.faithfulness_rows(kept.comparison):
        assert "[uniform(" in metric
        for row in rows:
            mine = frame[(frame.metric == metric) & (frame.method == row["method"]) & (frame.unit == row["unit"])]
            assert row["mean"] == pytest.approx(mine.value.mean()) and row["circular"] == mine.circular.any()
        weight = next(row for row in rows if row["method"] == "weight")
        here = paired[(paired.metric == metric) & (paired.unit == weight["unit"]) & (paired.second == "random")]
        found = here[here["first"] == "weight"].iloc[0]
        assert weight["paired"]["difference"] == found.difference
        # one cluster alone has no interval
        low = f"{number(found.low)} to" if found.clusters > 1 else "undefined"
        assert f"weight {number(weight['mean'])} {number(found.difference)} {low}" in text
        assert [row["control"] for row in rows] == sorted(row["control"] for row in rows)


def test_a_method_without_faithfulness_has_its_reason_on_the_page(lm: LoadedModel) -> None:
    count = [len(lm.encode(prompt).tokens[0]) for prompt in PROMPTS[:2]]
    own = {"mine": [[float("nan"), *range(1, count[0])], [*range(count[1])]]}
    found = run(lm, PROMPTS[:2], methods=["weight"], replacements=["delete"], edges=None, heads=False, own=own)
    text = text_of(plain(found))
    assert "mine undefined on 1: no score for 'When' (0), so it orders not all tokens" in text
    # one deterministic replacement has no interval, an estimate from draws has
    assert re.search(r"effect \S+ (logits|nats) \(exact\); absent below", text)


@pytest.fixture(scope="module")
def mixed(lm: LoadedModel) -> ComparedRun:
    """Two prompts with a target in logits, three in nats."""
    texts = [
        "Mary and John went to",
        "John gave a drink to",
        "the store and Mary went",
        "a drink to John",
        "went to the",
    ]
    prompts = [Prompt(text, id=f"p{i}", cluster=f"c{i}") for i, text in enumerate(texts)]
    targets = [Target.logit(" Mary")] * 2 + [Target.logprob(" Mary")] * 3
    plan = {**PLAN, "replacements": ["uniform:draws=3"], "edges": "auto"}
    return run(lm, prompts, **plan, target=targets)


def test_means_of_effects_stay_within_one_unit(mixed: ComparedRun) -> None:
    units = dict(zip(mixed.comparison.prompts.prompt, mixed.comparison.prompts.unit, strict=True))
    assert list(units.values()) == ["logits"] * 2 + ["nats"] * 3
    frame, paired = mixed.comparison.faithfulness, mixed.comparison.differences
    groups = [(metric.partition("[")[0], rows) for metric, rows in tables.faithfulness_rows(mixed.comparison)]
    assert [(metric, rows[0]["unit"], rows[0]["prompts"]) for metric, rows in groups] == [
        ("aopc_comprehensiveness", "logits", 2), ("aopc_comprehensiveness", "nats", 3), ("effect_tau", "1", 5),
    ]  # fmt: skip
    for metric, rows in groups:
        for row in rows:
            mine = frame[frame.metric.str.startswith(metric) & (frame.method == row["method"])]
            mine = mine[mine.unit == row["unit"]].set_index("prompt").value
            assert row["mean"] == pytest.approx(mine.mean(), nan_ok=True)
            if row["method"] != "weight":
                continue
            other = frame[
                frame.metric.str.startswith(metric) & (frame.method == "random") & (frame.unit == row["unit"])
            ]
            difference = (mine - other.set_index("prompt").value).mean()
            assert row["paired"]["difference"] == pytest.approx(difference)
            assert row["paired"]["clusters"] == row["prompts"] and row["paired"]["undefined_share"] == 0
    assert not paired.duplicated(["metric", "unit", "first", "second"]).any()
    assert len(paired[paired.primary]) == 3
    # heads: by hand, prompt by prompt
    assert mixed.edges is not None and mixed.heads is not None
    assert tables.units_of(mixed.edges) == {"nats": 3, "logits": 2}
    assert "mean_edge_effect" not in mixed.heads
    for unit in ("logits", "nats"):
        sizes = [
            np.abs(effects[np.isfinite(effects)])
            for (prompt, _, layer, head), effects in zip(mixed.edges.rows, mixed.edges.effects, strict=True)
            if (layer, head) == (1, 2) and units[prompt] == unit
        ]
        row = mixed.heads.set_index(["layer", "head"]).loc[(1, 2)]
        assert row[f"mean_edge_effect[{unit}]"] == pytest.approx(np.concatenate(sizes).mean())
        assert row[f"largest_edge_effect[{unit}]"] == pytest.approx(np.concatenate(sizes).max())
    text = text_of(plain(mixed))
    assert "in logits, over 2 prompts." in text and "in nats, over 3 prompts." in text
    assert "Effects have a mean within one unit only: 3 prompts in nats, 2 prompts in logits." in text
    assert "largest of them logits" in text and "largest of them nats" in text
    assert " or nats" not in text and "nats or" not in text
    figure = Compared(mixed).figures["compared_faithfulness"].draw()
    titles = [axis.get_title().partition("\n")[0] for axis in figure.axes]
    assert titles[:3] == ["aopc comprehensiveness, 2 prompts", "aopc comprehensiveness, 3 prompts", "effect tau"]


def test_the_long_table_of_heads_has_the_unit_of_each_number(mixed: ComparedRun) -> None:
    from attndiag.runs.compared_tables import tidy_tables

    rows = tidy_tables(mixed)["heads"].to_pandas()
    told = rows[rows.measure.str.startswith("mean_edge_effect")].groupby("measure").unit.unique()
    want = {"mean_edge_effect[logits]": ["logits"], "mean_edge_effect[nats]": ["nats"]}
    assert {name: list(units) for name, units in told.items()} == want


def test_verdict_counts_by_level_are_those_of_the_verdicts(kept: ComparedRun) -> None:
    assert kept.edges is not None
    counts = {(row["level"], row["method"]): row for row in tables.level_counts(kept.comparison, kept.edges)}
    verdicts = kept.comparison.verdicts
    for method in ("weight", "input_x_gradient"):
        mine = verdicts[verdicts.method == method].verdict.value_counts()
        assert {k: counts["token", method][k] for k in mine.index} == mine.to_dict()
    assert counts["edge", "weight"]["agree"] == kept.edges.judged["weight"].counts["agree"]
    heads = kept.edges.head_rows("weight").verdict.value_counts()
    assert {k: counts["head", "weight"][k] for k in heads.index} == heads.to_dict()


def test_the_page_judges_the_heads_of_each_method_once(kept: ComparedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    from attndiag.comparison import edges as module

    assert kept.edges is not None
    calls: list[object] = []
    inner = module.row_verdicts
    monkeypatch.setattr(module, "row_verdicts", lambda judged: calls.append(judged) or inner(judged))
    fresh = replace(kept.edges)
    plain(replace(kept, edges=fresh))
    assert len(calls) == len(fresh.judged)
    # row by row, from nothing
    table = fresh.head_rows("weight")
    for row, verdict in enumerate(table["verdict"]):
        whole = all(np.isfinite(e) or not p for e, p in zip(fresh.effects[row], fresh.present[row], strict=True))
        assert bool(fresh.complete[row]) == whole
        assert whole or verdict == "undefined"
    pd.testing.assert_frame_equal(table, replace(kept.edges).head_rows("weight"))
    # what a reader does to the table stays with the reader
    table["verdict"] = "changed"
    assert "changed" not in set(fresh.head_rows("weight")["verdict"])


def test_heads_and_layers_carry_how_often_they_mislead_with_an_interval_over_clusters(mixed: ComparedRun) -> None:
    assert mixed.edges is not None
    # the model does none of these tasks, so the verdicts are drawn; the first head misleads everywhere
    edges = replace(mixed.edges)
    rows = edges.head_rows("weight")
    rows["verdict"] = np.random.default_rng(3).choice(["agree", "disagree", "inconclusive"], len(rows))
    rows.loc[(rows.layer == 0) & (rows["head"] == 0), "verdict"] = "disagree"
    edges._head_rows["weight"] = rows
    mixed = replace(mixed, edges=edges)
    frame = edges.heads("weight").set_index(["layer", "head"])
    decided = rows[rows.verdict.isin(["agree", "disagree"])]
    assert len(decided)
    text = text_of(plain(mixed))
    for row in tables.head_rows(edges, mixed.heads):
        found, want = row["by_method"]["weight"], frame.loc[(row["layer"], row["head"])]
        assert (found.wrong, found.decided) == (want.disagree, want.agree + want.disagree)
        here = decided[(decided.layer == row["layer"]) & (decided["head"] == row["head"])]
        assert found.clusters == here.cluster.nunique()
        assert row["probes"]["largest_edge_effect[nats]"] > 0
        if found.clusters > 1:
            assert 0 <= found.low <= found.share <= found.high <= 1
            shown = f"{found.wrong} of {found.decided} {percent(found.low, 0)} to {percent(found.high, 0)} "
            assert f"L{row['layer']}H{row['head']} {shown.replace(chr(160), ' ')}{found.clusters} cluster" in text
    # the tables of a run hold the same ends
    exported = tidy_tables(replace(mixed, heads=_heads(edges, ModelWork(None, {}, {}))))["heads"].to_pandas()
    assert set(exported[exported.measure.str.contains("_misleads")].unit) == {"rate"}
    exported = exported.pivot(index=["layer", "head"], columns="measure", values="value")
    for row in tables.head_rows(edges, None):
        for name, rate in row["by_method"].items():
            ends = exported.loc[(row["layer"], row["head"]), [f"{name}_misleads{end}" for end in ("_low", "", "_high")]]
            np.testing.assert_array_equal(ends.to_numpy(dtype=float), [rate.low, rate.share, rate.high])
    for row in tables.layer_rows(edges):
        rate, here = row["by_method"]["weight"], decided[decided.layer == row["layer"]]
        assert (rate.wrong, rate.decided) == ((here.verdict == "disagree").sum(), len(here))
        assert f"{rate.wrong} of {rate.decided} {percent(rate.low, 0)} to".replace("\u00a0", " ") in text
    rates = tidy_tables(mixed)["misleading"].to_pandas().query("method == 'weight'")
    layers = rates[rates.by == "layer"].set_index("layer")
    assert (layers.decided == decided.groupby("layer").size().reindex(layers.index, fill_value=0)).all()
    assert (rates.by == "head").sum() == len(frame) and (rates.by == "prompts").sum() == 1
    prompts = rates[rates.by == "prompt"].set_index("prompt")
    assert prompts.decided.sum() == len(decided) and prompts.low.isna().all()
    over = rate_of_prompts(edges, "weight")
    share = decided.groupby("prompt").verdict.apply(lambda found: (found == "disagree").mean())
    assert (over.wrong, over.decided) == ((share > 0.5).sum(), len(share))
    assert f"Prompts: on {over.wrong} of {over.decided} they mislead in more than half of the decided heads" in text


def test_a_page_says_for_which_methods_nothing_is_known_of_the_clusters(mixed: ComparedRun) -> None:
    assert mixed.edges is not None
    edges = replace(
        mixed.edges, rows=tuple((p, "ab"[i % 2], la, h) for i, (p, _, la, h) in enumerate(mixed.edges.rows))
    )
    rows = edges.head_rows("weight").assign(verdict="disagree")
    for one, cluster in (("p0", "a"), ("p1", "a"), ("p2", "b"), ("p3", "b"), ("p4", "b")):
        rows.loc[rows["prompt"] == one, "cluster"] = cluster
    edges._head_rows["weight"] = rows
    said = "For weight every head says the same on all its prompts"
    assert said in text_of(plain(replace(mixed, edges=edges)))
    rows = rows.copy()
    rows.loc[rows["prompt"] == "p0", "verdict"] = "agree"
    other = replace(edges)
    other._head_rows["weight"] = rows
    assert said not in text_of(plain(replace(mixed, edges=other)))


def test_every_case_shows_its_prompt_with_the_token_marked(kept: ComparedRun) -> None:
    assert kept.edges is not None
    kinds = tables.edge_cases(kept.edges, "weight")
    assert [kind["kind"] for kind in kinds] == [name for name, _, _ in tables.KINDS]
    cases = [(kind, case) for kind in kinds for case in kind["cases"]]
    assert cases
    edges = kept.edges.edges("weight")
    for kind, case in cases:
        tokens = kept.edges.tokens[case["prompt"]]
        assert tokens[case["position"]] == case["token"]
        assert "".join(tokens).find(case["before"] + case["token"] + case["after"]) >= 0
        layer, head = map(int, re.findall(r"L(\d+)H(\d+)", case["place"])[0])
        here = (edges.prompt == case["prompt"]) & (edges.layer == layer) & (edges["head"] == head)
        row = edges[here & (edges.key == case["position"])].iloc[0]
        assert (case["share"], case["effect"]) == (row.share, row.effect)
        assert (row.claim, row.state) == {
            "weights_without_effect": ("high", "absent"),
            "effects_without_weight": ("low", "present"),
            "agreeing_high": ("high", "present"),
            "agreeing_low": ("low", "absent"),
        }[kind["kind"]]
    assert "<mark>" in plain(kept)


def test_what_has_no_verdict_is_said_with_its_reason(kept: ComparedRun) -> None:
    reasons = dict(tables.blocked_by(kept.comparison, kept.edges))
    assert reasons["task check failed"] == 1 and reasons["could not be measured"] == 1
    text = text_of(plain(kept))
    assert "Prompts without a verdict, of 4:" in text
    assert "has 400 tokens but the model has 128 positions" in text
    assert "the target is not the model's first choice" in text


def test_the_headline_names_verdict_and_interval(kept: ComparedRun) -> None:
    assert kept.edges is not None
    whole = kept.edges.whole["weight"]

    def said(verdict: str) -> str:
        turned = replace(whole, verdict=verdict)
        edges = replace(kept.edges, whole={"weight": turned})  # type: ignore[type-var]
        return words.headline(kept.comparison, edges)

    interval = f"{percent(whole.hit_rate.low, 0)} to {percent(whole.hit_rate.high, 0)}"
    assert said("disagree").startswith("Attention weights mislead: only") and interval in said("disagree")
    assert said("agree").startswith("Attention weights tell which edges the model needs:")
    assert said("inconclusive").startswith("Whether attention weights mislead is not decided:")
    assert said("undefined").startswith("No verdict on attention weights:")
    counted = whole.hits + whole.weights_without_effect + whole.effects_without_weight
    assert f" of the {counted:,} decided edges that they mark or should mark are right (" in said("disagree")
    # what is right of a screen is no rate of all edges
    some = kept.edges.effects.copy()
    some[0, 0] = np.nan
    screen = words.headline(kept.comparison, replace(kept.edges, effects=some))
    assert f" of the {counted:,} decided edges of a screen that they mark" in screen
    clusters = whole.hit_rate.n_clusters
    assert 2 <= clusters < 12 and f"over only {clusters} clusters of prompts)" in said("agree")


def test_the_sentence_on_tokens_counts_tokens_and_clusters(kept: ComparedRun) -> None:
    row = next(row for row in tables.method_rows(kept.comparison) if row["method"] == "weight")
    frame = kept.comparison.verdicts.query("method == 'weight' and verdict in ('agree', 'disagree', 'inconclusive')")
    high, present = frame.claim == "high", frame.state == "present"
    counted = frame[(high & frame.state.isin(["present", "absent"])) | ((frame.claim == "low") & present)]
    assert row["hits"] + row["weights_without_effect"] + row["effects_without_weight"] == len(counted)
    behind = kept.comparison.prompts.set_index("prompt").cluster[counted.prompt].nunique()
    assert words._clusters_behind(kept.comparison, None, "weight", "token") == behind
    sentence = words.headline(kept.comparison, None)
    assert len(counted) == 0 or f"{len(counted):,} decided token" in sentence


def test_a_failed_self_check_is_loud_and_blocks(kept: ComparedRun) -> None:
    checks = kept.checks.copy()
    checks.loc[0, ["passed", "detail"]] = [False, "off by <1>"]
    weight = kept.comparison.judged["weight"]
    judged = {**kept.comparison.judged, "weight": replace(weight, blocked=np.ones_like(weight.blocked))}
    broken = replace(kept, checks=checks, comparison=replace(kept.comparison, judged=judged))
    text = text_of(plain(broken))
    assert broken.blocked and not broken.passed
    assert "1 self-check failed. Verdicts that rest on these numbers are blocked." in text
    assert "off by <1>" in text and "No self-check failed" not in text


def test_undefined_agreement_is_undefined_not_a_number(kept: ComparedRun) -> None:
    summary = kept.comparison.agreement_summary.copy()
    hit = (summary["first"] == "weight") & (summary.second == "input_x_gradient")
    summary.loc[hit, ["mean", "null_low", "null_high", "beyond_chance"]] = np.nan
    summary.loc[hit, "undefined_share"] = 1.0
    broken = replace(kept, comparison=replace(kept.comparison, agreement_summary=summary))
    cell = tables.agreement_matrix(broken.comparison)["weight", "input_x_gradient"]
    assert cell.undefined
    source = plain(broken)
    assert '<span class="undefined">undefined</span><small>on all 3</small>' in source
    assert "nan" not in text_of(source).split()
    # the figure too: drawn without a complaint
    assert "undef." in Compared(broken).figures["compared_agreement"].draw().axes[0].texts[0].get_text()


def test_without_edges_replacements_or_metrics_the_page_says_what_is_missing(lm: LoadedModel) -> None:
    found = compare(lm, PROMPTS[:1], ["weight", "rollout"], replacements=[], metrics=[], edges=None)
    text = text_of(plain(found.run))
    assert "There is no evidence about attention weights" in text
    assert "No edges were measured in this run" in text and "Not measured in this run." in text
    assert "No verdicts: no replacement gave evidence." in text
    assert "No replacement was measured" in text
    assert list(found.figures) == ["compared_agreement"]
    assert found.verdicts.empty and found.run.passed


def test_a_run_in_which_every_prompt_failed(lm: LoadedModel) -> None:
    found = compare(lm, PROMPTS[3:], ["weight"], edges=None)
    assert found.headline == "Nothing could be compared: 1 prompt could not be measured."
    text = text_of(plain(found.run))
    assert found.headline in text and "No prompt was measured." in text
    assert found.figures == {}
    with pytest.raises(AttnDiagError, match="there are none: nothing was measured"):
        found.save("x.png")


def test_what_compare_returns_delegates_saves_and_shows(kept: ComparedRun, tmp_path: Path) -> None:
    found = Compared(kept)
    for name in ("agreement", "faithfulness", "verdicts", "methods", "prompts", "problems", "differences", "scores"):
        assert getattr(found, name) is getattr(kept.comparison, name)
    assert found.edges is kept.edges and found.blocked is kept.blocked and found.cases is kept.comparison.cases
    assert repr(found).startswith("Compared(3 prompts, 4 methods: ")
    saved = [found.save(tmp_path / f"new/x.{kind}") for kind in ("html", "png", "svg", "pdf")]
    starts = (b"<!doctype html>", b"\x89PNG", b"<?xml", b"%PDF")
    assert all(path.read_bytes().startswith(start) for path, start in zip(saved, starts, strict=True))
    assert found.save(tmp_path / "a.svg", figure="compared_agreement").stat().st_size > 1000
    with pytest.raises(AttnDiagError, match=r"there is no figure 'heads' of this comparison; there are compared_agree"):
        found.save(tmp_path / "a.svg", figure="heads")
    with pytest.raises(AttnDiagError, match=r"expected \.html, \.png, \.svg or \.pdf"):
        found.save(tmp_path / "a.doc")
    frame = found._repr_html_()
    assert frame.startswith("<iframe ") and 'sandbox="allow-scripts allow-downloads"' in frame


def test_show_opens_the_page_outside_of_a_notebook(kept: ComparedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    import webbrowser

    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    found = Compared(kept)
    found.__dict__["_page"] = "<!doctype html>short"
    path = found.show()
    assert path is not None and opened == [path.as_uri()] and path.read_text() == "<!doctype html>short"


def test_a_weights_run_in_the_folder_stands_below(
    kept: ComparedRun, lm: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attndiag.reports import compared_report
    from attndiag.reports import page as page_module
    from attndiag.reports.figures import DRAWINGS

    empty = '<svg width="1pt" height="1pt" viewBox="0 0 1 1"></svg>'
    monkeypatch.setattr(page_module, "save_figures", lambda *_: {drawing.name: empty for drawing in DRAWINGS})
    monkeypatch.setattr(compared_report, "save_drawing", lambda *_: empty)
    assert kept.folder is not None
    report(kept.folder / "weights", lm=lm, prompts=PROMPTS[:1])
    made = render_comparison(kept.folder)
    source = made.to_html()
    assert "Weights against contributions, every query" in source
    assert '<h2 id="w-sink">' in source and '<h2 id="c-run">' in source
    ids = re.findall(r'\bid="([^"]+)"', source)
    assert len(ids) == len(set(ids))
    assert 'href="weights/tables/runs.parquet"' in source
    # of another model, or of other prompts: left out, and said
    marker = kept.folder / "weights" / "run.json"
    facts = json.loads(marker.read_text())
    other = {**facts, "runs": {**facts["runs"], "tokenizer_hash": "another"}}
    marker.write_text(json.dumps(other))
    left_out = render_comparison(kept.folder).to_html()
    assert "it is of another model (tokenizer hash another there" in text_of(left_out)
    assert "Weights against contributions, every query" not in left_out
    marker.write_text(json.dumps(facts))
    report(kept.folder / "weights", lm=lm, prompts=[replace(PROMPTS[0], text="Mary gave")], overwrite=True)
    left_out = render_comparison(kept.folder).to_html()
    assert "left out: it is of other prompts (its prompt 'ioi' reads other tokens)" in text_of(left_out)
    report(kept.folder / "weights", lm=lm, prompts=[Prompt("Mary gave")], overwrite=True)
    assert "(its prompt 'prompt-1' is not in the comparison)" in text_of(render_comparison(kept.folder).to_html())


def test_card_rows_join_layers_that_are_alike(kept: ComparedRun) -> None:
    from attndiag.reports.compared_facts import card_rows

    assert kept.card is not None
    (row,) = card_rows(kept.card)
    assert (row["layers"], row["query_heads"], row["kv_heads"], row["d_head"]) == ("0\u20131", 4, 2, 8)
    other = {**kept.card, "layers": [kept.card["layers"][0], {**kept.card["layers"][1], "window_seen": 16}]}
    assert [(one["layers"], one["window"]) for one in card_rows(other)] == [("0", None), ("1", 16)]


def test_an_unfinished_run_says_so_and_facts_are_readable(kept: ComparedRun) -> None:
    assert "unfinished" not in text_of(plain(kept)) and "edges measured 100.0 % " in text_of(plain(kept))
    stopped = replace(kept, facts={**kept.facts, "status": "unfinished", "n_done": 3, "n_prompts": 9})
    assert "The run is unfinished: 3 of 9 prompts are done." in text_of(plain(stopped))


def test_a_small_p_is_never_written_as_zero(kept: ComparedRun) -> None:
    methods = kept.comparison.methods.copy()
    methods.loc[methods.method == "weight", "p_chance"] = 0.0037
    changed = replace(kept, comparison=replace(kept.comparison, methods=methods))
    assert "<td>0.004</td>" in plain(changed)


def test_fixed_never_writes_a_negative_zero() -> None:
    assert [fixed(x) for x in (-0.001, -0.5, 0.126, float("nan"))] == ["0.00", "\u22120.50", "0.13", "\u2013"]


def test_numbers_in_csv_are_the_frames(kept: ComparedRun) -> None:
    assert kept.folder is not None
    table = pd.read_csv(kept.folder / "tables" / "methods.csv")
    assert set(table[table.level == "token"].method if "level" in table else table.method) >= {"weight"}

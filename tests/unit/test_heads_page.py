"""The page about heads: numbers, files, what is missing, and folders that it must not touch."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import matplotlib.colors
import matplotlib.figure
import numpy as np
import pandas as pd
import pytest

from attndiag.errors import NotApplicableError, RunFolderError
from attndiag.explanations.head_history import heads_over_checkpoints
from attndiag.explanations.head_scores import heads
from attndiag.explanations.head_table import NotMeasurable
from attndiag.models.known import induction_gpt2
from attndiag.models.series import load_series
from attndiag.reports import heads_page as module
from attndiag.reports.figure_style import GRID
from attndiag.reports.head_figures import (
    draw_composition,
    draw_effect_maps,
    draw_maps,
    draw_score_against_effect,
    draw_score_maps,
    head_name,
    measures_of_heads,
    panel,
)
from attndiag.reports.head_words import claim
from attndiag.reports.heads_page import save_heads
from attndiag.reports.html import number
from attndiag.reports.phase_change import PhaseChange, draw_phase_change, lag_sentence

NASTY = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def table():
    return heads(load_series().at(900), probes=["induction", "previous", "copying"], ablate=8, rows=4)


@pytest.fixture(scope="module")
def change():
    run, control = load_series(), load_series("control")
    steps, control_steps = (0, 450, 550, 650, 900), (0, 450, 900)
    return PhaseChange(
        heads_over_checkpoints([(s, run.at(s)) for s in steps], rows=4, ablate=8, ablation_rows=2),
        heads_over_checkpoints([(s, control.at(s)) for s in control_steps], rows=4, ablate=4, ablation_rows=2),
        tuple(run.measured["icl"][run.steps.index(s)] for s in steps),
        tuple(control.measured["icl"][control.steps.index(s)] for s in control_steps),
        (8, 60),
    )


@pytest.fixture
def plain_figures(monkeypatch):
    """Empty drawings, for tests that are about something else."""
    empty = '<svg width="1pt" height="1pt" viewBox="0 0 1 1"></svg>'
    monkeypatch.setattr(module, "save_drawing", lambda *_: empty)


def test_the_page_says_what_the_tables_hold(table, change, tmp_path):
    made = save_heads(tmp_path / "out", table, phase=change, about={"model": NASTY})
    page = made.to_html()
    assert NASTY not in page and "&lt;script&gt;alert(1)" in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page
    frame = pd.read_parquet(made.folder / "heads.parquet")
    assert len(frame) == 8 and frame["run"].nunique() == 1
    best = frame.loc[frame["prefix_matching_score"].idxmax()]
    assert f"L{best['layer']}H{best['head']} ({best['prefix_matching_score']:.2f})" in made.headline
    together = next(item for item in table.sets if item.way == "zero" and item.name != "random")
    assert f"{together.effect:.2f} nats more" in made.headline
    for name in ("heads", "measures", "sets", "phase_change"):
        assert len(pd.read_csv(made.folder / f"{name}.csv")) == len(pd.read_parquet(made.folder / f"{name}.parquet"))
    tidy = pd.read_csv(made.folder / "measures.csv")
    assert set(tidy["unit"]) == {"mass", "share", "nats"}
    for name in ("phase_change", "scores", "effects", "score_effect"):
        assert {path.suffix for path in (made.folder / "figures").glob(f"{name}.*")} == {".png", ".svg", ".pdf"}
        assert f'id="figure-{name}"' in page
    assert json.loads((made.folder / "heads.json").read_text())["facts"]["length"] == table.facts["length"]
    assert lag_sentence(change).split(".")[0] in page
    assert "iframe" in made._repr_html_()


def test_figures_show_the_numbers(table):
    figure = draw_score_maps(table)
    maps = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title() for axis in maps] == [
        "Prefix matching",
        "Previous token",
        "Copying (eigenvalues)",
    ]
    drawn = maps[0].collections[0].get_array().reshape(2, 4)
    assert np.allclose(drawn, table["prefix_matching_score"].values)
    effects = draw_effect_maps(table)
    arrays = [axis.collections[0] for axis in effects.axes if axis.get_title()]
    assert np.allclose(arrays[0].get_array().reshape(2, 4), table["ablation_effect"].values)
    assert np.allclose(arrays[3].get_array().reshape(2, 4), table["ablation_effect"].checks["first_copy_effect"])
    # one colour scale for all, with 0 in its middle
    assert len({each.get_clim() for each in arrays}) == 1 and sum(arrays[0].get_clim()) == 0


def test_what_was_not_measured_is_grey_and_not_zero(table):
    scores = table["prefix_matching_score"]
    holed = scores.values.clone()
    holed[0, 1] = math.nan
    gap = replace(table, scores={**table.scores, "prefix_matching_score": replace(scores, values=holed)})
    figure = draw_maps([panel(gap, "prefix_matching_score")], [0, 1])
    cells = figure.axes[0].collections[0]
    assert cells.get_array().reshape(2, 4).mask.tolist()[0] == [False, True, False, False]
    # on a page the background of a drawing is see-through, so the cell itself has to be grey
    assert matplotlib.colors.to_hex(cells.cmap(np.ma.masked)) == GRID


def test_a_table_without_effects_has_no_effect_figures(tmp_path):
    plain = heads(load_series().at(900), probes=["previous"], rows=2)
    with pytest.raises(NotApplicableError, match="no head was ablated"):
        draw_effect_maps(plain)
    with pytest.raises(NotApplicableError, match="no head was ablated"):
        draw_score_against_effect(plain)
    made = save_heads(tmp_path / "out", plain)
    assert "Previous token is highest in L0H3" in made.headline
    assert [path.name for path in (made.folder / "figures").glob("*.png")] == ["scores.png"]


def test_reasons_and_failures_are_on_the_page(table, tmp_path, plain_figures):
    failed = replace(table["prefix_matching_score"], failures=("layer 1: formula is off by 1e-1",))
    bad = replace(
        table,
        scores={**table.scores, "prefix_matching_score": failed},
        not_measurable=(NotMeasurable("induction", 1, "its window of 4 keys is shorter than the shortest probe"),),
    )
    made = save_heads(tmp_path / "out", bad)
    page = made.to_html()
    assert made.failures == ("layer 1: formula is off by 1e-1",) and "do not believe their numbers" in page
    assert "All self-checks passed" not in page
    assert "its window of 4 keys" in page
    assert pd.read_csv(made.folder / "not_measurable.csv")["reason"].tolist() == [bad.not_measurable[0].reason]


def test_only_its_own_folder_is_replaced(table, tmp_path, plain_figures):
    with pytest.raises(ValueError, match="nothing to write"):
        save_heads(tmp_path / "none")
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match="is not empty and holds no head table"):
        save_heads(other, table, overwrite=True)
    assert (other / "thesis.tex").read_text() == "years of work"
    save_heads(tmp_path / "out", table)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="holds a head table already"):
        save_heads(tmp_path / "out", table)
    plain = heads(load_series().at(900), probes=["previous"], rows=2)
    save_heads(tmp_path / "out", plain, overwrite=True)
    assert not (tmp_path / "out" / "sets.csv").exists() and (tmp_path / "out" / "notes.txt").read_text() == "mine"
    with pytest.raises(RunFolderError, match="is a file"):
        save_heads(tmp_path / "out" / "notes.txt", table)


def test_the_phase_change_figure_has_run_and_control(change):
    figure = draw_phase_change(change)
    assert isinstance(figure, matplotlib.figure.Figure)
    scores, losses, learning, effects = figure.axes[:4]
    drawn = {line.get_label(): line.get_ydata() for line in scores.lines}
    assert list(drawn["prefix matching"]) == pytest.approx(change.run.curve())
    assert sum(line.get_linestyle() == "--" for line in scores.lines) == 2  # the control's two
    assert len(losses.lines) == 4 and len(learning.lines) == 2
    assert any(line.get_label() == "heads above the threshold, together" for line in effects.lines)
    assert change.window.found and change.learning_window.found
    frame = change.frame()
    assert frame.groupby("run").size().to_dict() == {"control": 3, "run": 5}
    alone = PhaseChange(change.run)
    assert "not measured" in {text.get_text() for axis in draw_phase_change(alone).axes for text in axis.texts}
    assert lag_sentence(PhaseChange(change.control)).startswith("No induction window: the final score")


def test_heads_have_names():
    assert head_name(18, 6.0) == "L18H6" and head_name(1.0, 0) == "L1H0"
    assert head_name("decoder.block.0", 2) == "decoder.block.0 H2"


@pytest.mark.parametrize(
    ("offset", "p", "low", "said"),
    [
        (0.3, 0.01, 0.1, "more than position; helps"),
        (0.3, 0.01, -0.1, "more than position; effect not different from 0"),
        (0.9, 0.01, math.nan, "a fixed offset does as well; effect not measured"),
        (0.3, 0.2, 0.1, "not told from shuffled pairs; helps"),
        (0.3, math.nan, -0.9, "cannot be told from a fixed offset here; hurts"),
    ],
)
def test_a_name_is_a_claim(offset, p, low, said):
    row = {"relation_mass": 0.8, "relation_mass_best_offset": offset, "relation_p_any": p}
    assert claim({**row, "relation_effect_low": low, "relation_effect_high": low + 0.5}) == said


def test_measures_of_heads_leave_effects_out(table):
    assert measures_of_heads(table) == ["prefix_matching_score", "previous_token_score", "copying_score"]


def test_composition_has_its_own_section(tmp_path):
    table = heads(induction_gpt2().model, probes=["composition"])
    page = save_heads(tmp_path / "out", table, about={"model": "known"})
    text = page.page.read_text()
    assert page.headline.startswith("Of all pairs, L1H0 reads L0H0 the most, with its keys")
    assert 'id="figure-composition"' in text and "<td>keys</td>" in text.replace(' class="text"', "")
    pairs = pd.read_csv(tmp_path / "out" / "pairs.csv")
    assert pairs.iloc[0][["kind", "earlier_layer", "layer"]].tolist() == ["k", 0, 1]
    assert "next most" not in page.headline  # nothing else is read by that head: no number to stand beside
    figure = draw_composition(table)
    shown = np.ma.filled(figure.axes[1].collections[0].get_array().reshape(2, 2), np.nan)
    assert shown[1, 0] == pytest.approx(table["k_composition"].values[1, 0, 0, 0].item())
    assert np.isnan(shown[0]).all() and np.isnan(shown[1, 1])


def test_the_next_pair_stands_beside_the_strongest(tiny_llama, tmp_path, plain_figures):
    page = save_heads(tmp_path / "out", heads(tiny_llama, probes=["composition"]))
    pairs = pd.read_csv(tmp_path / "out" / "pairs.csv")
    best = pairs.iloc[0]
    same = pairs[(pairs["kind"] == best["kind"]) & (pairs["layer"] == best["layer"]) & (pairs["head"] == best["head"])]
    assert best["next"] == sorted(same["score"])[-2]
    assert f"(the head that it reads next most: {number(best['next'], 2)})" in page.headline
    row = f"<td>{number(best['score'])}</td><td>{number(best['next'])}</td><td>{number(best['spreads'])}</td>"
    assert row in page.to_html() and "another writer" in page.to_html()

"""Edge and head verdicts on running models: the sink model, ragged prompt sets, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import attndiag
from attndiag.comparison.edges import EdgePlan, edge_verdicts, judge_edges, measure_edges
from attndiag.errors import NotApplicableError
from attndiag.models.known import KnownModel, duplicated_heads, randomised_sink, sink_against_value
from attndiag.models.load import LoadedModel
from attndiag.runs.plan import make_plan
from attndiag.runs.work import measure_prompt
from attndiag.stats.verdicts import Thresholds

TARGET = attndiag.Target.logit_diff("ANS", "FOIL")


def loaded(built: KnownModel) -> tuple[LoadedModel, attndiag.Prompt]:
    words = {index: word for word, index in built.vocab.items()}
    text = " ".join(words[int(index)] for index in built.prompt_ids[0])
    return attndiag.load(built.model, tokenizer=built.tokenizer()), attndiag.Prompt(text, id="p")


def test_weights_mislead_on_head_0_of_the_sink_model_and_contributions_nowhere() -> None:
    lm, prompt = loaded(sink_against_value())
    found = edge_verdicts(lm, prompt, target=TARGET)
    assert found.head_rows("weight").verdict.tolist() == ["disagree", "agree"]
    assert found.head_rows("head_contribution").verdict.tolist() == ["agree", "agree"]
    assert found.heads("weight").misleads.tolist() == [1.0, 0.0]
    edges = found.edges("weight").set_index(["head", "key"])
    assert edges.loc[(0, 0), "verdict"] == "disagree"
    assert edges.loc[(0, 0), "token"].strip() == "<bos>"
    assert edges.loc[(0, 1), "effect"] == pytest.approx(1.0, abs=1e-4)
    (case,) = found.cases["weight"].weights_without_effect.tolist()
    assert (found.rows[case[0]], case[1]) == (("p", "p", 0, 0), 0)
    assert not found.blocked


def test_edges_carry_the_planted_verdicts() -> None:
    for seed in (3, 11):
        built = randomised_sink(seed)
        lm, prompt = loaded(built)
        edges = edge_verdicts(lm, prompt, ["weight"], target=TARGET).edges("weight").set_index(["head", "key"])
        for (_, head, _, key), planted in built.expected["verdict"].items():
            assert edges.loc[(head, key), "verdict"] == planted


def test_the_plans_thresholds_decide_which_edges_are_removed_together() -> None:
    built = duplicated_heads()
    lm = attndiag.load(built.model, tokenizer=built.tokenizer())
    words = {index: word for word, index in built.vocab.items()}
    prompt = attndiag.Prompt(" ".join(words[int(index)] for index in built.prompt_ids[0]), target="ANS", foil="FOIL")
    usual = measure_edges(lm, prompt, None)
    assert usual.redundant is not None and usual.redundant.any()
    # with no claim high enough there are no candidates; with a margin above every effect nothing is present together
    for limits in (Thresholds(high=1e6), Thresholds(margin=1e3)):
        found = measure_edges(lm, prompt, None, thresholds=limits)
        assert found.redundant is not None and not found.redundant.any()
        table = edge_verdicts(lm, prompt, ["weight"], thresholds=limits).edges("weight")
        assert "redundant" not in set(table.state)
    plan = make_plan(["weight"], replacements=[], metrics=[], thresholds=Thresholds(high=1e6))
    work = measure_prompt(lm, prompt, plan)
    assert work.edges is not None and work.edges.redundant is not None and not work.edges.redundant.any()


@pytest.mark.parametrize("seed", [3, 5, 11])
def test_a_screen_judges_what_it_measures_as_all_edges_would(seed: int) -> None:
    lm, prompt = loaded(randomised_sink(seed))
    whole = judge_edges([measure_edges(lm, prompt, TARGET)]).judged["weight"]
    screened = measure_edges(lm, prompt, TARGET, EdgePlan(extent="screen", most=6))
    assert np.isfinite(screened.effect).sum() == 6
    some = judge_edges([screened]).judged["weight"]
    # estimates stand for the edges that were left out; the mean of those measured alone is several times as large
    np.testing.assert_allclose(some.shown.present_from, whole.shown.present_from, rtol=1e-5)
    known = some.verdict != ""
    np.testing.assert_array_equal(some.verdict[known], whole.verdict[known])


def test_prompts_of_different_length_stand_side_by_side(lm: LoadedModel) -> None:
    prompts = [
        attndiag.Prompt("<bos> w5 w9 w13 w30", id="a", cluster="x"),
        attndiag.Prompt("<bos> w7 w9 w13 w30 w8 w21", id="b", cluster="y"),
    ]
    both = edge_verdicts(lm, prompts, ["weight", "value_norm"], layers=[1])
    assert [row[0] for row in both.rows] == ["a"] * 4 + ["b"] * 4
    assert (both.judged["weight"].verdict[:4, 5:] == "").all()
    assert (both.judged["weight"].verdict[4:] != "").all()
    alone = edge_verdicts(lm, prompts[0], ["weight"], layers=[1])
    np.testing.assert_array_equal(alone.judged["weight"].verdict, both.judged["weight"].verdict[:4, :5])
    assert set(both.edges("weight").layer) == {1}
    assert len(both.heads("weight")) == 4


def test_what_cannot_be_measured_says_so(lm: LoadedModel) -> None:
    with pytest.raises(ValueError, match="expected some of weight, value_norm, head_contribution"):
        edge_verdicts(lm, "<bos> w5 w9", ["contribution"])
    with pytest.raises(ValueError, match="mode is 'zero'"):
        edge_verdicts(lm, "<bos> w5 w9", mode="zero")  # type: ignore[arg-type]
    whole = attndiag.Target.continuation_logprob(" w5 w9 w13")
    with pytest.raises(NotApplicableError, match="read at 3 positions"):
        edge_verdicts(lm, "<bos> w5 w9", target=whole)


def test_a_screen_judges_only_what_it_measured_exactly(lm: LoadedModel) -> None:
    prompt = attndiag.Prompt("<bos> w5 w9 w13 w30 w7 w21", id="p")
    every = measure_edges(lm, prompt, None, EdgePlan(("weight",), "all"))
    some = measure_edges(lm, prompt, None, EdgePlan(("weight",), "screen", most=10))
    assert (every.extent, some.extent) == ("all", "screen")
    measured = np.isfinite(some.effect)
    assert measured.sum() == 10 and every.present.sum() == some.present.sum() == 2 * 4 * 7
    np.testing.assert_allclose(some.effect[measured], every.effect[measured], atol=1e-9)
    assert every.estimate is not None and some.estimate is not None
    np.testing.assert_array_equal(every.estimate, some.estimate)
    # half by the size of the estimate, the rest by the share of the row
    strongest = np.argsort(-np.abs(every.estimate), axis=None, kind="stable")[:5]
    assert measured.flat[strongest].all()
    share = every.scores["weight"] / every.scores["weight"].sum(axis=1, keepdims=True)
    others = share.copy()
    others.flat[strongest] = -1
    heaviest = np.argsort(-others, axis=None, kind="stable")[:5]
    assert measured.flat[heaviest].all()
    found = judge_edges([some])
    judged = found.judged["weight"]
    assert ((judged.verdict != "") == measured).all()
    np.testing.assert_allclose(np.nansum(judged.share, axis=1), 1.0)
    assert len(found.edges("weight")) == 10
    assert found.measured_share == pytest.approx(10 / 56)
    # a head of which an edge is missing has no verdict
    rows = found.head_rows("weight").set_index(["layer", "head"])
    partial = rows[~found.complete]
    assert len(partial) and set(partial.verdict) == {"undefined"}
    assert partial.reason.str.contains("of 7 edges were measured exactly").all()


def test_many_edges_are_screened_unless_all_are_asked_for(lm: LoadedModel) -> None:
    prompt = attndiag.Prompt("<bos> w5 w9 w13", id="p")
    assert measure_edges(lm, prompt, None, EdgePlan(limit=32)).extent == "all"
    few = measure_edges(lm, prompt, None, EdgePlan(limit=31, most=6))
    assert few.extent == "screen" and np.isfinite(few.effect).sum() == 6
    everything = judge_edges([measure_edges(lm, prompt, None, EdgePlan(extent="all", limit=1))])
    assert everything.complete.all() and everything.measured_share == 1.0


def test_whole_heads_are_measured_on_demand() -> None:
    lm, prompt = loaded(sink_against_value())
    found = measure_edges(lm, prompt, TARGET, EdgePlan(whole_heads=True))
    assert found.head_effect is not None and found.head_effect.shape == (2,)
    # one layer, and the target is read at the last query: a head is worth its edges together
    np.testing.assert_allclose(found.head_effect, np.nansum(found.effect, axis=1), atol=1e-4)
    assert np.isnan(judge_edges([measure_edges(lm, prompt, TARGET)]).head_effects).all()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"methods": ("contribution",)}, "expected some of weight"),
        ({"extent": "few"}, "extent is 'few'"),
        ({"most": 1}, "most is 1"),
        ({"mode": "zero"}, "mode is 'zero'"),
    ],
)
def test_edge_plans_that_cannot_be(given: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        EdgePlan(**given)

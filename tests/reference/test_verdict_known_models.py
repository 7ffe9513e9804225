"""Verdicts where the answer is known: which heads and edges the induction model needs, what stands in, chance, order.

What is known of the sink model and of random methods on it is in `test_verdict_calibration.py`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import attndiag
from attndiag.comparison.edges import EdgePlan, edge_verdicts, judge_edges, measure_edges
from attndiag.comparison.one_prompt import Plan, compare_prompt
from attndiag.comparison.side_by_side import judge_method
from attndiag.explanations.replacement import Replacement
from attndiag.models.known import KnownModel, duplicated_heads, duplicated_induction, induction_gpt2
from attndiag.models.load import LoadedModel
from attndiag.stats.redundancy import stand_ins
from attndiag.stats.two_methods import agree, summarise


def at_second_copy(built: KnownModel) -> tuple[LoadedModel, attndiag.Prompt, attndiag.Target, int]:
    """`[BOS] s` and part of s again: the model, the prompt, the token that follows, and where that stood first."""
    words = {index: word for word, index in built.vocab.items()}
    ids = [int(index) for index in built.prompt_ids[0][:-5]]
    follower = ids.index(ids[-1]) + 1
    lm = attndiag.load(built.model, tokenizer=built.tokenizer())
    prompt = attndiag.Prompt(" ".join(words[index] for index in ids), id="p")
    return lm, prompt, attndiag.Target.logit(words[ids[follower]]), follower


def sinks_of_two(built: KnownModel) -> tuple[LoadedModel, attndiag.Prompt]:
    words = {index: word for word, index in built.vocab.items()}
    text = " ".join(words[int(index)] for index in built.prompt_ids[0])
    return attndiag.load(built.model, tokenizer=built.tokenizer()), attndiag.Prompt(text, id="p")


def test_the_heads_and_edges_of_the_induction_model_are_found() -> None:
    lm, prompt, target, follower = at_second_copy(induction_gpt2())
    for method in ("weight", "head_contribution"):
        found = edge_verdicts(lm, prompt, [method], target=target)
        rows = found.head_rows(method).set_index(["layer", "head"])
        assert rows.loc[(1, 0), "verdict"] == "agree"
        edges = found.edges(method)
        present = edges[edges.state == "present"]
        # of all edges of the last query one alone counts, and it is claimed
        assert present[["layer", "head", "key"]].values.tolist() == [[1, 0, follower]]
        assert present.verdict.tolist() == ["agree"]
        # the previous-token head's work was done at the key, not at the last query
        assert rows.loc[(0, 0), "verdict"] != "agree"
        effect = attndiag.edge_effects(lm, prompt, target, layers=[0], queries=[follower])
        assert int(np.nanargmax(effect.numpy()[0, 0, follower])) == follower - 1
        # idle heads look everywhere alike
        assert rows.loc[(1, 1), "verdict"] == rows.loc[(0, 1), "verdict"] == "undefined"


def test_a_planted_redundant_pair_is_redundant_in_the_rows_of_the_verdicts() -> None:
    lm, prompt = sinks_of_two(duplicated_heads())
    target = attndiag.Target.logit_diff("ANS", "FOIL")
    found = edge_verdicts(lm, prompt, target=target)
    edges = found.edges("weight").set_index(["head", "key"])
    for head in (0, 1):
        assert edges.loc[(head, 1), "token"].strip() == "MARK"
        assert edges.loc[(head, 1), "state"] == "redundant"
        assert edges.loc[(head, 1), "verdict"] == "inconclusive"
    # the idle head beside them is a weight without effect
    assert edges.loc[(2, 0), "state"] == "absent"
    assert edges.loc[(2, 0), "verdict"] == "disagree"
    without = judge_edges([measure_edges(lm, prompt, target, EdgePlan(stand_ins=0))]).edges("weight")
    assert (without.set_index(["head", "key"]).loc[(0, 1), ["state", "verdict"]] == ["absent", "disagree"]).all()


def test_two_copies_of_an_induction_head_stand_in_for_each_other() -> None:
    lm, prompt, _, follower = at_second_copy(duplicated_induction())
    # saturated: with one copy gone the loss does not move, so the target is the probability of the copied token
    target = attndiag.Target.prob(str(prompt.text).split()[follower])
    edges = edge_verdicts(lm, prompt, target=target).edges("weight")
    states = edges[edges.state == "redundant"]
    assert states[["layer", "head", "key"]].values.tolist() == [[1, 0, follower], [1, 1, follower]]
    assert not ((edges.layer == 1) & (edges.key == follower) & (edges.verdict == "disagree")).any()


def test_who_stands_in_and_who_is_idle() -> None:
    """A pair and an idle third: together they have an effect, and leaving the third in changes nothing of it."""
    assert stand_ins(np.zeros(3), 8.0, np.array([0.0, 0.0, 8.0]), 0.1, 0.1).tolist() == [True, True, False]
    # two pairs that read the same key
    assert stand_ins(np.zeros(4), 8.0, np.array([4.0, 4.0, 4.0, 4.0]), 0.1, 0.1).all()
    # nothing together, an effect of one alone, everything within the noise
    assert not stand_ins(np.zeros(2), 0.05, np.zeros(2), 0.1, 0.1).any()
    assert not stand_ins(np.array([0.2, 0.0]), 8.0, np.zeros(2), 0.1, 0.1).any()
    assert not stand_ins(np.zeros(2), 8.0, np.zeros(2), 0.1, 0.1, floor=0.2).any()
    # present is decided by an item's own row
    assert stand_ins(np.zeros(2), 8.0, np.zeros(2), 0.1, np.array([0.1, 9.0])).tolist() == [True, False]
    with pytest.raises(ValueError, match="one entry for each of >= 2"):
        stand_ins(np.zeros(1), 1.0, np.zeros(1), 0.1, 0.1)
    with pytest.raises(ValueError, match=r"without \(3,\)"):
        stand_ins(np.zeros(2), 1.0, np.zeros(3), 0.1, 0.1)


# ------------------------------------------------------------------------------------------------- tokens and chance
@pytest.fixture(scope="module")
def measured() -> list[object]:
    """Twelve prompts of twelve clusters on the induction model: the follower's place is what matters."""
    built = induction_gpt2()
    words = {index: word for word, index in built.vocab.items()}
    lm = attndiag.load(built.model, tokenizer=built.tokenizer())
    rng = np.random.default_rng(0)
    plan = Plan(("weight@L1H0",), (Replacement.parse("uniform:draws=3"),), ())
    results = []
    for row in range(12):
        segment = 1 + rng.permutation(len(words) - 2)[:8]
        ids = [0, *segment.tolist(), *segment[: int(rng.integers(2, 7))].tolist()]
        follower = ids.index(ids[-1]) + 1
        prompt = attndiag.Prompt(" ".join(words[int(i)] for i in ids), id=f"p{row}", cluster=f"c{row}")
        results.append(compare_prompt(lm, prompt, attndiag.Target.logit(words[ids[follower]]), plan))
    return results


def with_method(results: list, make: object) -> list:
    """The same prompts with one more method, `make(row, result) -> [position]`."""
    return [
        dataclasses.replace(
            one,
            scores={**one.scores, "made": dataclasses.replace(one.scores["weight@L1H0"], values=make(row, one))},  # type: ignore[operator]
        )
        for row, one in enumerate(results)
    ]


def test_the_tokens_that_the_induction_head_needs_and_looks_at(measured: list) -> None:
    """It looks at the follower and needs the match before it as well: one agreement, one effect without weight."""
    plan = Plan(("weight@L1H0",), (Replacement.parse("uniform:draws=3"),), ())
    found = judge_method(measured, "weight@L1H0", plan)
    assert found is not None
    for row, one in enumerate(measured):
        tokens = list(one.axis.tokens)
        follower, last = tokens.index(tokens[-1]) + 1, len(tokens) - 1
        assert (found.claim[row, follower], found.verdict[row, follower]) == ("high", "agree")
        assert (found.claim[row, follower - 1], found.verdict[row, follower - 1]) == ("low", "disagree")
        others = [place for place in range(1, last) if place not in (follower, follower - 1)]
        assert set(found.claim[row, others]) == {"low"}
        assert "disagree" not in found.verdict[row, others]


def test_a_random_method_on_tokens_is_right_by_chance_at_most(measured: list) -> None:
    """100 seeds over a prompt set: `agree` at most as often as the level of the test allows."""
    from attndiag.stats.verdict_sets import method_verdict

    plan = Plan(("weight@L1H0",), (Replacement.parse("uniform:draws=3"),), ())
    verdicts: list[str] = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        drawn = with_method(measured, lambda _row, one, rng=rng: np.exp(2 * rng.normal(size=len(one.axis))))
        found = judge_method(drawn, "made", plan)
        assert found is not None
        verdicts.append(method_verdict(found, [one.cluster for one in drawn]).verdict)
    assert verdicts.count("agree") <= 5
    assert set(verdicts) <= {"agree", "disagree", "inconclusive"}


@pytest.mark.parametrize("shared", ["masks", "sink", "both"])
def test_random_methods_that_share_masks_or_a_sink_agree_as_chance_does(shared: str) -> None:
    """12 pairs of random methods on 12 prompts each: outside the band of chance on 5 % of the prompts, not on more."""
    outside: dict[str, list[float]] = {}
    naive: list[float] = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        prompts, raw = [], []
        for _ in range(12):
            n = int(rng.integers(8, 16))
            a, b, keep = rng.random(n), rng.random(n), np.ones(n, dtype=bool)
            if shared in ("masks", "both"):
                a[n // 2 :], b[n // 2 :], keep[n // 2 :] = 0, 0, False
            if shared in ("sink", "both"):
                a[0], b[0], keep[0] = 20, 30, False
            prompts.append(agree(a, b, admissible=keep, draws=100))
            raw.append(next(one.value for one in agree(a, b, draws=20) if one.measure == "tau_b"))
        naive.append(float(np.mean(raw)))
        for summary in summarise(prompts):
            if summary.measure in ("tau_b", "spearman", "rbo"):
                outside.setdefault(summary.measure, []).append(summary.beyond_chance)
                assert summary.undefined_share == 0
    # three standard errors of 144 prompts; bands of few items hold more than 95 %
    assert all(np.mean(found) <= 0.05 + 3 * (0.05 * 0.95 / 144) ** 0.5 for found in outside.values())
    # what would have been said without setting them aside
    assert np.mean(naive) > (0.5 if shared != "sink" else 0.1)


def test_verdicts_and_tables_do_not_depend_on_the_order_of_prompts_or_methods(measured: list) -> None:
    plan = Plan(("weight@L1H0",), (Replacement.parse("uniform:draws=3"),), ())
    rng = np.random.default_rng(1)
    drawn = with_method(measured, lambda _row, one: rng.random(len(one.axis)))
    order = rng.permutation(len(drawn))
    for name in ("made", "weight@L1H0"):
        one, other = judge_method(drawn, name, plan), judge_method([drawn[index] for index in order], name, plan)
        assert one is not None and other is not None
        np.testing.assert_array_equal(one.verdict[order], other.verdict)
        np.testing.assert_array_equal(one.share[order], other.share)
    turned = [dataclasses.replace(one, scores=dict(reversed(one.scores.items()))) for one in drawn]
    again, plain = judge_method(turned, "made", plan), judge_method(drawn, "made", plan)
    assert again is not None and plain is not None
    np.testing.assert_array_equal(again.verdict, plain.verdict)


def test_edge_verdicts_do_not_depend_on_the_order_of_prompts() -> None:
    lm, prompt = sinks_of_two(duplicated_heads())
    target = attndiag.Target.logit_diff("ANS", "FOIL")
    other = attndiag.Prompt("<bos> a MARK b c Q", id="other")
    one = edge_verdicts(lm, [prompt, other], target=target).edges("weight")
    two = edge_verdicts(lm, [other, prompt], target=target).edges("weight")
    keys = ["prompt", "layer", "head", "key"]
    left, right = (table.sort_values(keys).reset_index(drop=True) for table in (one, two))
    assert left[[*keys, "verdict", "state"]].equals(right[[*keys, "verdict", "state"]])
    np.testing.assert_allclose(left.effect, right.effect, atol=1e-6)

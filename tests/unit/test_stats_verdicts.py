"""Verdicts: the table of claim and effect, the margin, what blocks, what is undefined, families, catalogues."""

from __future__ import annotations

import numpy as np
import pytest

from attndiag.errors import ShapeError
from attndiag.stats.evidence import from_draws, from_knockout, states
from attndiag.stats.redundancy import stand_ins
from attndiag.stats.verdict_sets import catalogues, method_verdict
from attndiag.stats.verdicts import (
    VERDICTS,
    Thresholds,
    claims,
    judge,
    replacement_agreement,
    row_verdicts,
    task_check,
)

# n = 6: high from 1/3, low up to 1/12; m = 10: margin .2; mean effect 4.15 / 6 = .69
SCORES = np.array([[0.5, 0.34, 0.05, 0.05, 0.03, 0.03]])
EFFECTS = np.array([[1.0, 0.05, 2.0, 0.0, -1.0, -0.1]])
M = np.array([10.0])


def test_the_table_of_claims_and_effects() -> None:
    found = judge(SCORES, from_knockout(EFFECTS), M)
    assert found.claim[0].tolist() == ["high", "high", "low", "low", "low", "low"]
    assert found.shown.state[0].tolist() == ["present", "absent", "present", "absent", "present", "absent"]
    assert found.verdict[0].tolist() == ["agree", "disagree", "disagree", "agree", "disagree", "agree"]
    assert found.counts == {
        "agree": 3,
        "disagree": 3,
        "inconclusive": 0,
        "replacement_dependent": 0,
        "undefined": 0,
    }
    np.testing.assert_allclose(found.shown.absent_below, [4.15 / 6 / 2])
    np.testing.assert_allclose(found.shown.present_from, [4.15 / 6])


def test_margins_are_the_largest_of_noise_floor_share_of_m_and_parts_of_the_mean_effect() -> None:
    effects = np.array([[3.0, -1.0, 0.0, np.nan], [0.1, 0.0, 0.0, np.nan], [0.01, 0.01, 0.01, 0.01]])
    shown = states(from_knockout(effects, np.array([0.1, 0.1, 0.3])), np.array([10.0, 10.0, 10.0]))
    np.testing.assert_allclose(shown.absent_below, [4 / 3 / 2, 0.2, 0.3])
    np.testing.assert_allclose(shown.present_from, [4 / 3, 0.2, 0.3])
    assert shown.state[0].tolist() == ["present", "unsure", "absent", ""]
    # an estimate stands for an item that a screen left out, and for no other
    expected = np.full(effects.shape, 9.0)
    expected[0, 3] = -0.4
    screened = states(from_knockout(effects), np.array([10.0, 10.0, 10.0]), expected=expected)
    np.testing.assert_allclose(screened.present_from, [4.4 / 4, (9 + 0.1) / 4, 0.2])
    with pytest.raises(ShapeError, match="expected has shape"):
        states(from_knockout(effects), np.ones(3), expected=expected[:1])
    with pytest.raises(ValueError, match="absent_below -1"):
        states(from_knockout(effects), np.ones(3), absent_below=-1.0)


@pytest.mark.parametrize(("size", "n"), [(0.1, 3), (0.7, 7), (0.1, 6), (0.3, 12), (0.5, 4)])
def test_equal_effects_are_present_whatever_the_rounding_of_their_mean(size: float, n: int) -> None:
    assert set(states(from_knockout(np.full((1, n), size)), np.array([1.0])).state[0]) == {"present"}


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_effects_do_not_disagree_with_themselves(spread: float) -> None:
    rng = np.random.default_rng(0)
    effects = np.exp(spread * rng.normal(size=(300, 12))) * rng.choice([-1, 1], (300, 12))
    found = judge(effects, from_knockout(effects), np.full(300, 1.0), thresholds=Thresholds(margin=0.0))
    assert found.counts["disagree"] == 0
    assert found.counts["agree"] > 0 or spread == 0.1
    # by the usual margin, only where twice the mean is still within it
    mean = np.abs(effects).mean(axis=1)
    m = 100 * float(np.median(mean))
    usual = judge(effects, from_knockout(effects), np.full(300, m))
    own = 2 * mean < 0.02 * m
    assert own.any() and not (usual.verdict[~own] == "disagree").any()
    # with draws, too
    draws = effects * rng.normal(1, 0.3, (16, 1, 12))
    drawn = judge(draws.mean(axis=0), from_draws(draws), np.full(300, 1.0))
    assert drawn.counts["disagree"] == 0 and (spread == 0.1 or drawn.counts["agree"] > 0)
    # a margin above all effects of a row: nothing in it is worth a high claim
    nothing = judge(effects, from_knockout(effects), np.full(300, 1e6))
    assert nothing.counts["disagree"] == (nothing.claim == "high").sum()


def test_many_small_effects_are_no_disagreement_with_a_method_that_shares_them_out() -> None:
    # each of 30 tokens is worth 3 % of m, one ten times that; the method says so in other proportions
    effects = np.full((1, 30), 0.3)
    effects[0, 3] = 3.0
    scores = np.full((1, 30), 1.0)
    scores[0, 3] = 40.0
    found = judge(scores, from_knockout(effects), M)
    assert found.counts["disagree"] == 0
    assert found.verdict[0, 3] == "agree"


def test_no_claim_is_inconclusive_whatever_the_effect() -> None:
    found = judge(np.array([[0.2, 0.3, 0.25, 0.25]]), from_knockout(np.array([[5.0, 0.0, 0.0, 5.0]])), M)
    assert found.claim[0].tolist() == ["none"] * 4
    assert found.verdict[0].tolist() == ["inconclusive"] * 4


def test_the_noise_floor_makes_an_effect_unsure() -> None:
    # margin .2: effect .25 +- .1 reaches over it, .5 +- .1 and .05 +- .1 do not
    found = judge(
        np.array([[0.8, 0.1, 0.1]]), from_knockout(np.array([[0.25, 0.5, 0.05]]), 0.1), M, thresholds=Thresholds()
    )
    assert found.shown.state[0].tolist() == ["unsure", "present", "absent"]
    assert found.verdict[0, 0] == "inconclusive"
    np.testing.assert_allclose(found.shown.low[0], [0.15, 0.4, -0.05])


def test_thresholds_are_parameters_and_travel_with_the_result() -> None:
    strict = Thresholds(high=4.0, margin=0.2)
    found = judge(SCORES, from_knockout(EFFECTS), M, thresholds=strict)
    assert found.claim[0, 0] == "none"
    assert found.shown.present_from[0] == 2.0
    assert found.shown.state[0].tolist() == ["absent", "absent", "present", "absent", "absent", "absent"]
    frame = found.to_frame()
    assert set(frame.threshold_high) == {4.0}
    assert set(frame.threshold_margin) == {0.2}
    assert len(frame) == 6
    with pytest.raises(ValueError, match="0 <= low < high"):
        Thresholds(low=3.0)
    with pytest.raises(ValueError, match="absent_below is 2"):
        Thresholds(absent_below=2.0)
    with pytest.raises(ValueError, match="margin is -1"):
        Thresholds(margin=-1)


def test_exact_thresholds_do_not_depend_on_rounding() -> None:
    for scale in (1.0, 0.1, 1 / 3, 7e-9):
        claim, share = claims(np.array([[6.0, 4.5, 0.75, 0.75]]) * scale)
        # 6 / 12 is 2 / 4, .75 / 12 is 1 / 16, below 1 / 8
        assert claim[0].tolist() == ["high", "none", "low", "low"]
        assert share.sum() == pytest.approx(1.0)
    claim, _ = claims(np.array([[1.0, 2.0, 1.0, 4.0]]))
    assert claim[0].tolist() == ["low", "none", "low", "high"]


def test_masked_items_take_no_share_and_get_no_verdict() -> None:
    keep = np.array([[True, True, True, True, False, False]])
    scores = SCORES.copy()
    scores[0, 5] = np.nan
    found = judge(scores, from_knockout(EFFECTS), M, admissible=keep)
    assert found.verdict[0].tolist()[4:] == ["", ""]
    assert found.share[0, :4].sum() == pytest.approx(1.0)
    assert np.isnan(found.share[0, 4:]).all()
    # n is 4 now: .34 / .94 is no longer high
    assert found.claim[0, 1] == "none"
    with pytest.raises(ValueError, match="is nan"):
        judge(scores, from_knockout(EFFECTS), M)


@pytest.mark.parametrize(
    ("scores", "m", "floor", "reason"),
    [
        (np.ones((1, 6)), 10.0, 0.0, "constant scores"),
        (np.zeros((1, 6)), 10.0, 0.0, "constant scores"),
        (SCORES, 0.05, 0.1, "|m| is 0.05, not above the noise floor 0.1"),
        (SCORES, np.nan, 0.0, "|m| is nan"),
        (SCORES[:, :2], 10.0, 0.0, "2 admissible items, at least 3 are needed"),
    ],
)
def test_undefined_rows_say_why(scores: np.ndarray, m: float, floor: float, reason: str) -> None:
    found = judge(scores, from_knockout(EFFECTS[:, : scores.shape[1]], floor), np.array([m]))
    assert set(found.verdict[0]) == {"undefined"}
    assert reason in found.reason[0]
    assert not found.blocked.any()
    assert row_verdicts(found)[0]["verdict"] == "undefined"


def test_a_failed_self_check_blocks_the_row_and_says_so() -> None:
    two = np.vstack([SCORES, SCORES])
    found = judge(
        two, from_knockout(np.vstack([EFFECTS, EFFECTS])), np.array([10.0, 10.0]), failed_checks=[["completeness"], []]
    )
    assert set(found.verdict[0]) == {"undefined"}
    assert found.reason == ("blocked by failed self-checks: completeness", "")
    assert found.blocked.tolist() == [True, False]
    assert "agree" in found.verdict[1]
    assert not found.where("high", "present")[0].any()


def test_a_failed_task_leaves_nothing_to_explain() -> None:
    reason = task_check(target_is_top1=False, margin=-0.5)
    assert reason == (
        "task check failed: the target is not the model's first choice and the margin over the foil is -0.5, "
        "not positive"
    )
    assert task_check(target_is_top1=True, margin=None) == ""
    assert task_check(target_is_top1=True, margin=0.1) == ""
    assert "not positive" in task_check(target_is_top1=True, margin=float("nan"))
    found = judge(SCORES, from_knockout(EFFECTS), M, task=[reason])
    assert set(found.verdict[0]) == {"undefined"}
    assert found.reason[0] == reason


def test_replacements_that_order_the_tokens_differently_give_no_verdict() -> None:
    one, two = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 4.0, 2.0, 3.0])
    tau = replacement_agreement({"pair": one, "sampled": two, "uniform": one})
    assert tau == pytest.approx(1 / 3)
    rows = np.vstack([SCORES] * 3)
    found = judge(
        rows,
        from_knockout(np.vstack([EFFECTS] * 3)),
        np.full(3, 10.0),
        replacement_tau=np.array([tau, 0.5, np.nan]),
    )
    assert set(found.verdict[0]) == {"replacement_dependent"}
    assert "tau 0.33" in found.reason[0]
    assert "disagree" in found.verdict[1]
    assert set(found.verdict[2]) == {"undefined"}
    assert [row["verdict"] for row in row_verdicts(found)] == ["replacement_dependent", "disagree", "undefined"]
    assert np.isnan(replacement_agreement({"a": one, "b": np.ones(4)}))
    with pytest.raises(ValueError, match="at least 2"):
        replacement_agreement({"pair": one})
    with pytest.raises(ShapeError, match="the same items"):
        replacement_agreement({"a": one, "b": np.ones(3)})


def test_items_that_stand_in_for_each_other_are_redundant_and_not_irrelevant() -> None:
    scores, single = np.array([[0.42, 0.42, 0.06, 0.05, 0.05]]), np.array([0.0, 0.0, 0.0, 3.0, 0.0])
    redundant = np.zeros(5, dtype=bool)
    redundant[:3] = stand_ins(single[:3], 8.0, np.array([0.0, 0.0, 8.0]), 0.2, 0.2, floor=0.01)
    assert redundant.tolist() == [True, True, False, False, False]
    evidence = from_knockout(single[None], 0.01)
    alone, together = (judge(scores, evidence, M, redundant=r) for r in (None, redundant[None]))
    assert alone.verdict[0].tolist() == ["disagree", "disagree", "agree", "disagree", "agree"]
    assert together.verdict[0].tolist() == ["inconclusive", "inconclusive", "agree", "disagree", "agree"]
    assert together.shown.state[0].tolist() == ["redundant", "redundant", "absent", "present", "absent"]
    assert not together.where("high", "absent").any()
    with pytest.raises(ShapeError, match="redundant"):
        judge(scores, evidence, M, redundant=redundant)


# ------------------------------------------------------------------------------------------------------- evidence
def test_intervals_of_draws_are_students() -> None:
    from scipy import stats

    draws = np.random.default_rng(0).normal(1, 0.5, (4, 1, 3))
    found = states(from_draws(draws), M, family=False)
    low, high = stats.t.interval(0.95, 3, draws.mean(axis=0), stats.sem(draws, axis=0))
    np.testing.assert_allclose(found.low, low)
    np.testing.assert_allclose(found.high, high)


def test_p_says_what_the_interval_says() -> None:
    rng = np.random.default_rng(1)
    draws = rng.normal(rng.normal(0, 0.4, (1, 1, 400)), 0.15, (5, 1, 400))
    found = states(from_draws(draws, 0.02), M, family=False)
    np.testing.assert_array_equal(found.state == "present", found.p_present <= 0.05)
    np.testing.assert_array_equal(found.state == "absent", found.p_absent <= 0.05)
    assert {"present", "absent", "unsure"} == set(found.state[0])


def test_a_wide_interval_is_unsure_and_never_absent() -> None:
    draws = np.array([-3.0, 3.0, 0.1, -0.1]).reshape(4, 1, 1)
    assert states(from_draws(draws), M).state[0, 0] == "unsure"


def test_the_family_correction_keeps_false_discoveries_rare() -> None:
    rng = np.random.default_rng(2)
    # no effect outside the margin of .2: each effect sits on its edge, the worst case
    draws = rng.normal(0.2, 0.5, (6, 1, 2000))
    plain, corrected = (states(from_draws(draws), M, family=family) for family in (False, True))
    assert 10 < (plain.state == "present").sum() < 120
    assert (corrected.state == "present").sum() <= 2
    # true effects survive
    draws[:, :, :500] += 3
    assert (states(from_draws(draws), M).state[0, :500] == "present").mean() > 0.95


def test_prompts_of_one_template_count_once() -> None:
    values = np.repeat(np.array([1.0, 1.4, 0.8]), 5).reshape(15, 1, 1)
    clustered = from_draws(values, clusters=np.repeat(list("abc"), 5).tolist(), source="prompts")
    naive = from_draws(values, source="prompts")
    assert clustered.freedom[0, 0] == 2
    assert clustered.half_width(0.05)[0, 0] > 3 * naive.half_width(0.05)[0, 0]


def test_missing_draws_are_left_out_and_a_single_one_is_no_evidence() -> None:
    draws = np.array([[1.0, 1.0, np.nan], [3.0, np.nan, np.nan], [2.0, np.nan, np.nan]])[:, None]
    found = from_draws(draws)
    assert found.effect[0, 0] == 2.0
    assert np.isnan(found.effect[0, 1:]).all()
    shown = states(found, M)
    assert shown.state[0].tolist()[1:] == ["", ""]
    assert np.isnan(shown.p_present[0, 1:]).all()
    verdicts = judge(np.array([[0.1, 0.8, 0.1]]), found, M)
    assert verdicts.verdict[0].tolist()[1:] == ["inconclusive", "inconclusive"]


def test_evidence_refuses_what_does_not_fit() -> None:
    with pytest.raises(ShapeError, match="use from_knockout"):
        from_draws(np.ones((1, 2, 3)))
    with pytest.raises(ShapeError, match="one for each"):
        from_draws(np.ones((2, 2, 3)), clusters="abc")
    with pytest.raises(ShapeError, match="for each of 2 rows"):
        from_knockout(np.ones((2, 3)), np.zeros(3))
    with pytest.raises(ValueError, match="not negative"):
        from_knockout(np.ones((2, 3)), -0.1)
    with pytest.raises(ShapeError, match=r"\[row, item\]"):
        from_knockout(np.ones(3))
    with pytest.raises(ShapeError, match="one for each of 1 rows"):
        states(from_knockout(EFFECTS), np.ones(2))
    with pytest.raises(ValueError, match="level is 1"):
        states(from_knockout(EFFECTS), M, level=1)
    with pytest.raises(ShapeError, match="the same items"):
        judge(SCORES[:, :4], from_knockout(EFFECTS), M)
    with pytest.raises(ShapeError, match="task has 2 entries"):
        judge(SCORES, from_knockout(EFFECTS), M, task=["", ""])


# --------------------------------------------------------------------------------------------- rows, methods, cases
def test_a_row_agrees_only_where_the_method_stands_out_and_is_right() -> None:
    scores = np.array([[0.9, 0.1, 0, 0, 0, 0], [0.9, 0.1, 0, 0, 0, 0], [0.2, 0.2, 0.2, 0.2, 0.1, 0.1]])
    effects = np.array([[0.9, 0.1, 0, 0, 0, 0], [0.009, 1.0, 0, 0, 0, 0], [0.9, 0.1, 0, 0, 0, 0]])
    found = row_verdicts(judge(scores, from_knockout(effects), np.full(3, 2.0)))
    assert [row["verdict"] for row in found] == ["agree", "disagree", "inconclusive"]
    assert found[1]["disagree"] == 1
    assert found[1]["idle_mass"] == pytest.approx(0.9)
    # one small edge that is overlooked does not make a head misleading; most of the effect there does
    small, large = (np.array([[2.0, 0.0, 0.0, 0.0, 0.0, effect]]) for effect in (0.5, 3.0))
    scores = np.array([[0.9, 0.02, 0.02, 0.02, 0.02, 0.02]])
    for effects, verdict in ((small, "agree"), (large, "disagree")):
        judged = judge(scores, from_knockout(effects), np.array([10.0]))
        assert judged.verdict[0, 5] == "disagree"
        (row,) = row_verdicts(judged)
        assert row["verdict"] == verdict
        assert row["missed_effect"] == pytest.approx(effects[0, 5] / effects.sum())


def rows_of(scores: np.ndarray, effects: np.ndarray) -> tuple[np.ndarray, object, np.ndarray]:
    return scores, from_knockout(effects), np.full(len(scores), 10.0)


def test_a_method_verdict_needs_to_beat_chance() -> None:
    rng = np.random.default_rng(3)
    effects = np.where(np.arange(8) == rng.integers(0, 8, (40, 1)), 2.0, 0.0)
    right = judge(effects + 0.01, from_knockout(effects), np.full(40, 10.0))
    found = method_verdict(right)
    assert found.verdict == "agree"
    assert (found.hits, found.weights_without_effect, found.effects_without_weight) == (40, 0, 0)
    assert found.p_chance < 0.001
    wrong = method_verdict(judge(np.roll(effects, 1, axis=1) + 0.01, from_knockout(effects), np.full(40, 10.0)))
    assert wrong.verdict == "disagree"
    assert wrong.hit_rate.value == 0.0
    # one row cannot show anything
    assert method_verdict(judge(effects[:1] + 0.01, from_knockout(effects[:1]), M)).verdict == "inconclusive"
    nothing = judge(np.ones((2, 8)), from_knockout(effects[:2]), np.full(2, 10.0))
    assert method_verdict(nothing).verdict == "undefined"
    with pytest.raises(ShapeError, match="one for each"):
        method_verdict(right, clusters="ab")


def test_p_chance_is_that_of_shuffled_claims() -> None:
    rng = np.random.default_rng(4)
    scores, effects = rng.exponential(size=(5, 6)) ** 2, rng.exponential(size=(5, 6)) * (rng.random((5, 6)) < 0.5)
    m = np.full(5, 10.0)

    def net(order: np.ndarray) -> int:
        counts = judge(np.take_along_axis(scores, order, axis=1), from_knockout(effects), m).counts
        return counts["agree"] - counts["disagree"]

    observed = net(np.tile(np.arange(6), (5, 1)))
    shuffled = [net(rng.permuted(np.tile(np.arange(6), (5, 1)), axis=1)) for _ in range(600)]
    expected = np.mean(np.array(shuffled) >= observed)
    assert method_verdict(judge(scores, from_knockout(effects), m)).p_chance == pytest.approx(expected, abs=0.06)


def test_catalogues_list_the_strongest_and_as_many_agreeing_cases() -> None:
    rng = np.random.default_rng(5)
    scores, effects = rng.exponential(size=(60, 8)) ** 3, rng.exponential(size=(60, 8)) * (rng.random((60, 8)) < 0.4)
    found = judge(scores, from_knockout(effects), np.full(60, 10.0))
    cases = catalogues(found, limit=10, seed=1)
    for listed, claim, state in (
        (cases.weights_without_effect, "high", "absent"),
        (cases.effects_without_weight, "low", "present"),
        (cases.agreeing_high, "high", "present"),
        (cases.agreeing_low, "low", "absent"),
    ):
        assert listed.shape == (10, 2)
        assert all(found.where(claim, state)[row, item] for row, item in listed)
    shares = [found.share[row, item] for row, item in cases.weights_without_effect]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == found.share[found.where("high", "absent")].max()
    assert cases.totals["effects_without_weight"] == found.where("low", "present").sum()
    again, other = catalogues(found, limit=10, seed=1), catalogues(found, limit=10, seed=2)
    np.testing.assert_array_equal(cases.agreeing_high, again.agreeing_high)
    assert not np.array_equal(cases.agreeing_high, other.agreeing_high)
    np.testing.assert_array_equal(cases.weights_without_effect, other.weights_without_effect)
    with pytest.raises(ValueError, match="limit is 0"):
        catalogues(found, limit=0)


def test_no_disagreement_gives_empty_catalogues() -> None:
    found = catalogues(judge(np.array([[8.0, 0, 0, 0]]), from_knockout(np.array([[1.0, 0, 0, 0]])), M))
    assert found.weights_without_effect.shape == found.agreeing_high.shape == (0, 2)
    assert found.totals["agreeing_high"] == 1


def test_every_verdict_has_its_place_in_the_counts() -> None:
    assert VERDICTS == ("agree", "disagree", "inconclusive", "replacement_dependent", "undefined")

"""Faithfulness metrics on callables whose answers are known: additive, saturated, constant, opposed."""

from __future__ import annotations

import numpy as np
import pytest

from attndiag.errors import ShapeError
from attndiag.stats import faithfulness as f
from attndiag.stats.controls import METRICS, Ranking, control_rankings, faithfulness_table
from attndiag.stats.masked import MaskedValues, top_masks
from attndiag.stats.order_bounds import order_bounds

# m = 1 + what the kept items say; 4 is best, then 2, then .5; one hurts, one is mute
WEIGHTS = np.array([4.0, -1.0, 0.5, 2.0, 0.0])


def additive(weights: np.ndarray = WEIGHTS, name: str = "delete") -> MaskedValues:
    return MaskedValues(lambda masks: 1 + masks @ weights, len(weights), name)


def test_golden_numbers_on_an_additive_model() -> None:
    m = additive()
    assert (m.full, m.empty) == (6.5, 1.0)
    np.testing.assert_allclose(m.single_effects(), WEIGHTS)
    # k of .01, .05, .1, .2 is 1, of .5 is 3: two bins
    assert f.sizes(5) == (1, 3)
    assert f.comprehensiveness(WEIGHTS, m, 0.2).value == 4.0
    assert f.sufficiency(WEIGHTS, m, 0.2).value == 5.5 - 4.0
    assert f.aopc(WEIGHTS, m).value == pytest.approx((4.0 + 6.5) / 2)
    assert f.aopc(WEIGHTS, m, convention="paper").value == pytest.approx((4.0 + 6.5) / 3)
    assert f.aopc(WEIGHTS, m, "sufficiency").value == pytest.approx((1.5 - 1.0) / 2)
    # best order: 4, 6, 6.5, 6.5, 5.5; worst: -1, -1, -.5, 1.5, 5.5
    bounds = order_bounds(m, "comprehensiveness")
    assert bounds.highest == pytest.approx(28.5 / 5)
    assert bounds.lowest == pytest.approx(4.5 / 5)
    assert f.naopc(WEIGHTS, m).value == pytest.approx(1.0)
    assert f.naopc(-WEIGHTS, m).value == pytest.approx(0.0)
    assert f.naopc(WEIGHTS, m, "sufficiency").value == pytest.approx(1.0)
    # heights of the curve 1, 1.5/5.5, -.5/5.5, -1/5.5, -1/5.5, 0
    assert f.deletion_auc(WEIGHTS, m).value == pytest.approx((0.5 + (1.5 - 0.5 - 1 - 1) / 5.5) / 5)
    assert f.insertion_auc(WEIGHTS, m).value == pytest.approx((4 + 6 + 6.5 + 6.5 + 2.75) / 5.5 / 5)
    assert f.effect_tau(WEIGHTS, m, signed=True).value == pytest.approx(1.0)
    assert f.faithfulness_correlation(WEIGHTS, m).value == pytest.approx(1.0)


def test_an_additive_model_has_lds_1_and_says_with_what() -> None:
    found = f.lds(WEIGHTS, additive(), masks=40, keep=0.3, seed=7)
    assert found.value == pytest.approx(1.0)
    assert {key: found.details[key] for key in ("masks", "keep", "seed", "level")} == {
        "masks": 40,
        "keep": 0.3,
        "seed": 7,
        "level": 0.95,
    }
    assert found.details["low"] == pytest.approx(1.0)
    noisy = f.lds(np.random.default_rng(0).normal(size=5), additive())
    assert noisy.details["low"] < noisy.value < noisy.details["high"]


def test_the_replacement_stands_in_the_name_and_an_arrow_in_the_header() -> None:
    found = f.deletion_auc(WEIGHTS, additive(name="pair"))
    assert found.name == "deletion_auc[pair]"
    assert found.header == "deletion_auc[pair] ↓"
    assert f.comprehensiveness(WEIGHTS, additive(name="pair")).header == "comprehensiveness[pair] ↑"
    assert set(METRICS) <= set(f.DIRECTIONS)


def test_naopc_does_not_change_with_the_scale_of_the_model() -> None:
    scores = np.array([3.0, 5.0, 1.0, 2.0, 4.0])
    small, large = additive(), additive(10 * WEIGHTS)
    assert f.aopc(scores, large).value == pytest.approx(10 * f.aopc(scores, small).value)
    assert f.naopc(scores, large).value == pytest.approx(f.naopc(scores, small).value)


def test_beam_search_finds_the_best_order_of_an_additive_model_and_holds_every_method() -> None:
    rng = np.random.default_rng(1)
    weights = rng.normal(size=12)
    m = additive(weights)
    found = order_bounds(m, "comprehensiveness")
    assert found.how == "beam search"
    ordered = np.sort(weights)
    assert found.highest == pytest.approx(np.cumsum(ordered[::-1]).sum() / 12)
    assert found.lowest == pytest.approx(np.cumsum(ordered).sum() / 12)
    # a bent model can fool the beam: the measured orders then widen the bounds
    values = rng.normal(size=2**9)

    def bent(masks: np.ndarray) -> np.ndarray:
        return values[(masks * 2 ** np.arange(9)).sum(axis=1)]

    rankings = [Ranking(f"r{i}", rng.random(9)) for i in range(40)]
    rows = faithfulness_table(rankings, MaskedValues(bent, 9, "none"), wanted=["naopc_comprehensiveness"], beam=1)
    assert all(-1e-9 <= row.value <= 1 + 1e-9 for row in rows)


def test_ties_are_averaged_over_and_not_broken_by_place() -> None:
    m = additive()
    # one of the first two goes first, 4 or -1
    tied = np.array([1.0, 1.0, 0.0, 0.0, 0.0])
    assert f.top_drop(tied, m, 1, "comprehensiveness") == pytest.approx((4 - 1) / 2)
    assert len(top_masks(np.zeros(20), 10)) == 32
    np.testing.assert_array_equal(top_masks(np.zeros(20), 10, seed=3), top_masks(np.zeros(20), 10, seed=3))


def test_constant_scores_rank_nothing() -> None:
    m = additive()
    for found in (
        f.comprehensiveness(np.ones(5), m),
        f.aopc(np.ones(5), m),
        f.naopc(np.ones(5), m),
        f.deletion_auc(np.ones(5), m),
        f.effect_tau(np.ones(5), m, signed=False),
        f.faithfulness_correlation(np.ones(5), m),
        f.lds(np.ones(5), m),
    ):
        assert np.isnan(found.value)
        assert found.undefined == "constant scores rank nothing"


def test_what_is_below_the_noise_floor_is_refused() -> None:
    m = additive(1e-3 * WEIGHTS)
    assert "noise floor" in f.deletion_auc(WEIGHTS, m, floor=0.01).undefined
    assert "noise floor" in f.naopc(WEIGHTS, m, floor=0.01).undefined
    assert not f.deletion_auc(WEIGHTS, m, floor=1e-4).undefined
    # an emptied prompt that speaks more for the target would turn the direction round
    assert "m_full - m_empty is -5.5" in f.insertion_auc(WEIGHTS, additive(-WEIGHTS)).undefined


def test_a_constant_model_leaves_nothing_to_correlate() -> None:
    m = MaskedValues(lambda masks: np.ones(len(masks)), 5, "none")
    for found in (f.lds(WEIGHTS, m), f.faithfulness_correlation(WEIGHTS, m), f.effect_tau(WEIGHTS, m, signed=True)):
        assert np.isnan(found.value)
        assert found.undefined


def test_each_mask_is_measured_once_and_in_batches() -> None:
    sizes: list[int] = []

    def value(masks: np.ndarray) -> np.ndarray:
        sizes.append(len(masks))
        return masks @ WEIGHTS

    m = MaskedValues(value, 5, "none", batch_size=8)
    rankings = [Ranking("a", WEIGHTS), Ranking("b", -WEIGHTS), *control_rankings(np.arange(5))]
    faithfulness_table(rankings, m)
    assert sum(sizes) == m.forwards == 32
    assert max(sizes) <= 8


@pytest.mark.parametrize("metric", METRICS)
def test_all_masks_of_a_metric_are_asked_for_at_once(metric: str) -> None:
    calls: list[int] = []

    def value(masks: np.ndarray) -> np.ndarray:
        calls.append(len(masks))
        return masks @ np.arange(1.0, 7.0)

    rankings = [
        Ranking("a", np.arange(6.0)),
        Ranking("tied", np.array([1.0, 1, 1, 0, 0, 0])),
        *control_rankings(np.arange(6)),
    ]
    rows = faithfulness_table(rankings, MaskedValues(value, 6, "none", batch_size=10_000), wanted=[metric])
    assert not any(row.undefined for row in rows)
    # the prompt itself, the emptied prompt and the bounds of NAOPC may come later
    assert len(calls) <= (2 if metric.startswith("naopc_") else 1) + (metric.endswith("_auc"))


def test_the_table_holds_methods_controls_and_circularity() -> None:
    frequencies = np.array([5.0, 1.0, 2.0, 3.0, 4.0])
    rankings = [
        Ranking("delete", WEIGHTS, signed=True, replacement="delete"),
        Ranking("weight", np.abs(WEIGHTS)),
        *control_rankings(np.arange(5), frequencies, seed=1),
    ]
    rows = faithfulness_table(rankings, additive(), wanted=["aopc_comprehensiveness", "lds"])
    assert [row.method for row in rows[:5]] == ["delete", "weight", "recency", "token_frequency", "random"]
    assert [row.circular for row in rows[:5]] == [True, False, False, False, False]
    assert [row.control for row in rows[:5]] == [False, False, True, True, True]
    assert {row.metric for row in rows} == {"aopc_comprehensiveness[delete]", "lds[delete]"}
    drawn = rows[4]
    assert drawn.low <= drawn.value <= drawn.high
    assert drawn.details["orders"] == 20
    assert rows[0].value > drawn.value
    other = faithfulness_table(rankings, additive(name="pair"), wanted=["lds"])
    assert not any(row.circular for row in other)


def test_bad_input_is_refused() -> None:
    m = additive()
    with pytest.raises(ShapeError, match="one for each of the 5 items"):
        f.aopc(np.ones(4), m)
    with pytest.raises(ValueError, match="is nan"):
        f.aopc(np.array([1.0, np.nan, 2, 3, 4]), m)
    with pytest.raises(ValueError, match="numbers above 0"):
        f.sizes(5, (0.0,))
    with pytest.raises(ShapeError, match=r"\[batch, item\] with 5 items"):
        m(np.ones((1, 4), dtype=bool))
    with pytest.raises(ShapeError, match="one m for each"):
        MaskedValues(lambda masks: masks[:1, 0], 5, "none")(np.eye(5, dtype=bool))
    with pytest.raises(ValueError, match="m must be finite"):
        MaskedValues(lambda masks: np.full(len(masks), np.nan), 5, "none")(np.eye(5, dtype=bool))
    with pytest.raises(ValueError, match="name of the replacement"):
        MaskedValues(lambda masks: masks[:, 0], 5, "")
    with pytest.raises(ValueError, match="each name once"):
        faithfulness_table([Ranking("a", WEIGHTS), Ranking("a", WEIGHTS)], m)
    with pytest.raises(ValueError, match=r"unknown metrics \['aoc'\]"):
        faithfulness_table([Ranking("a", WEIGHTS)], m, wanted=["aoc"])
    with pytest.raises(ShapeError, match="frequencies"):
        control_rankings(np.arange(5), np.ones(4))
    with pytest.raises(ValueError, match="at least 3 masks"):
        f.lds(WEIGHTS, m, masks=2)
    with pytest.raises(ValueError, match="beam is 0"):
        order_bounds(m, "sufficiency", beam=0)

"""Agreement of two methods: golden numbers, ties, undefined values, nulls, and what shared masks and sinks do."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
from scipy.stats import kendalltau, spearmanr

from attndiag.errors import NotApplicableError, ShapeError
from attndiag.stats import agreement, lists, masses, nulls
from attndiag.stats.two_methods import MEASURES, Agreement, agree, summarise

A = np.array([0.40, 0.25, 0.15, 0.10, 0.10])
B = np.array([0.05, 0.30, 0.30, 0.20, 0.15])
# the orders 01234 and 12340 as scores
FIRST = np.array([5.0, 4.0, 3.0, 2.0, 1.0])
ROTATED = np.array([1.0, 5.0, 4.0, 3.0, 2.0])


def by_name(found: tuple[Agreement, ...], name: str, **params: float) -> Agreement:
    (one,) = [x for x in found if x.measure == name and all(x.params[key] == v for key, v in params.items())]
    return one


def test_golden_numbers() -> None:
    assert agreement.tau_b(A, B) == pytest.approx(0.0, abs=1e-12)
    assert agreement.spearman(A, B) == pytest.approx(-0.105263, abs=5e-7)
    assert masses.jensen_shannon(A, B) == pytest.approx(0.102363, abs=5e-7)
    assert masses.total_variation(A, B) == pytest.approx(0.35, abs=1e-12)
    assert lists.rbo_ext(FIRST, ROTATED, 0.9) == pytest.approx(0.809775, abs=5e-7)
    assert lists.rbo_ext(FIRST, ROTATED, 0.5) == pytest.approx(0.317708, abs=5e-7)
    assert round(lists.rbo_ext(FIRST, FIRST[::-1], 0.9), 2) == 0.74


def test_agree_gives_the_golden_numbers_with_their_nulls() -> None:
    found = agree(A, B)
    assert by_name(found, "tau_b").value == pytest.approx(0.0, abs=1e-12)
    assert by_name(found, "spearman").value == pytest.approx(-0.105263, abs=5e-7)
    assert by_name(found, "jensen_shannon").value == pytest.approx(0.102363, abs=5e-7)
    assert by_name(found, "total_variation").value == pytest.approx(0.35)
    for one in found:
        assert one.null is not None
        assert one.null.kind == "exact"
        assert one.null.low <= one.null.mean <= one.null.high
        assert 0 < one.null.p <= 1
        low, high = MEASURES[one.measure].range
        assert low <= one.value <= high
    assert {one.params["k"] for one in found if one.measure == "top_k_overlap"} == {1, 3}


def test_equal_and_reversed_orders_reach_the_ends() -> None:
    rising = np.arange(1.0, 9.0)
    same, turned = agree(rising, 2 * rising), agree(rising, -rising, signed=(True, True))
    for name in ("tau_b", "spearman"):
        assert by_name(same, name).value == pytest.approx(1.0)
        assert by_name(turned, name).value == pytest.approx(-1.0)
    for name in ("top_k_overlap", "top_k_jaccard", "rbo"):
        one = next(x for x in same if x.measure == name)
        assert one.value == pytest.approx(1.0)
        assert one.adjusted == pytest.approx(1.0)
    assert by_name(same, "jensen_shannon").value == pytest.approx(0.0, abs=1e-12)
    assert by_name(turned, "sign_agreement").value == 0.0
    assert lists.rbo_adjusted(rising, -rising) < 0


def test_ties_at_the_cut_are_shared_out() -> None:
    tied = np.array([3.0, 2.0, 2.0, 1.0])
    np.testing.assert_allclose(lists.inclusion(tied, 2), [1.0, 0.5, 0.5, 0.0])
    assert lists.top_k_overlap(tied, tied, 2) == pytest.approx(0.75)
    # both orders pick item 1 or item 2: the same one (Jaccard 1) half of the time, else 1 of 3
    assert lists.top_k_jaccard(tied, tied, 2) == pytest.approx((1 + 1 / 3) / 2)


def test_divergence_is_at_most_ln_2_and_is_no_root() -> None:
    apart = masses.jensen_shannon(np.array([1.0, 0.0]), np.array([0.0, 1.0]))
    assert apart == pytest.approx(log(2))
    assert masses.total_variation(np.array([1.0, 0.0]), np.array([0.0, 3.0])) == 1.0


def test_signs_are_compared_between_signed_methods_only() -> None:
    a, b = np.array([1.0, -2.0, 0.0, 3.0]), np.array([2.0, 2.0, -1.0, 1.0])
    assert masses.sign_agreement(a, b, signed=(True, True)) == pytest.approx(2 / 3)
    with pytest.raises(NotApplicableError, match="b is non-negative"):
        masses.sign_agreement(a, b, signed=(True, False))
    assert not any(one.measure == "sign_agreement" for one in agree(a, b, signed=(True, False)))
    assert by_name(agree(a, b, signed=(True, True)), "sign_agreement").value == pytest.approx(2 / 3)


def test_a_method_without_sign_is_compared_by_size() -> None:
    signed, size = np.array([-5.0, 1.0, 2.0, -3.0]), np.array([5.0, 1.0, 2.0, 3.0])
    mixed = by_name(agree(signed, size, signed=(True, False)), "tau_b")
    assert (mixed.value, mixed.ranked_by) == (1.0, "magnitude")
    assert by_name(agree(signed, size, signed=(True, True)), "tau_b").ranked_by == "value"


def test_partial_tau_takes_the_position_out() -> None:
    rng = np.random.default_rng(0)
    place = np.arange(40.0)
    a, b = place + 8 * rng.normal(size=40), place + 8 * rng.normal(size=40)
    assert agreement.tau_b(a, b) > 0.4
    assert abs(agreement.partial_tau(a, b, place)) < 0.2
    assert np.isnan(agreement.partial_tau(place, b, place))


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (np.ones(5), np.arange(5.0), "constant scores of the first method"),
        (np.arange(5.0), np.full(5, 0.2), "constant scores of the second method"),
        (np.arange(2.0), np.arange(2.0), "2 admissible items, at least 3 are needed"),
    ],
)
def test_what_cannot_be_ranked_is_undefined_and_never_zero(a: np.ndarray, b: np.ndarray, reason: str) -> None:
    found = by_name(agree(a, b), "tau_b")
    assert np.isnan(found.value)
    assert found.null is None
    assert found.undefined == reason
    assert np.isnan(agreement.tau_b(a, b))


def test_all_zero_scores_have_no_distribution() -> None:
    found = by_name(agree(np.zeros(4), np.arange(4.0)), "jensen_shannon")
    assert found.undefined == "all scores of the first method are 0"
    assert np.isnan(masses.jensen_shannon(np.zeros(4), np.ones(4)))
    assert np.isnan(masses.total_variation(np.zeros(4), np.ones(4)))


def test_the_summary_counts_what_is_undefined() -> None:
    rng = np.random.default_rng(1)
    prompts = [agree(rng.random(9), rng.random(9), draws=200) for _ in range(3)] + [agree(np.ones(9), rng.random(9))]
    found = next(one for one in summarise(prompts) if one.measure == "tau_b")
    values = [by_name(prompt, "tau_b").value for prompt in prompts[:3]]
    assert found.mean == pytest.approx(np.mean(values))
    assert (found.n_prompts, found.n_undefined, found.undefined_share) == (4, 1, 0.25)
    assert found.reasons == {"constant scores of the first method": 1}
    with pytest.raises(ValueError, match="no prompts"):
        summarise([])


def test_shared_masks_inflate_and_masking_first_undoes_it() -> None:
    rng = np.random.default_rng(2)
    inflated, masked, bands = [], [], []
    for _ in range(100):
        a, b = (np.concatenate([rng.random(12), np.zeros(12)]) for _ in range(2))
        inflated.append(kendalltau(a, b).statistic)
        live = np.arange(24) < 12
        found = by_name(agree(a, b, admissible=live, top=(), draws=100), "tau_b")
        masked.append(found.value)
        bands.append(found.null is not None and found.null.covers(found.value))
    assert np.mean(inflated) == pytest.approx(0.69, abs=0.03)
    assert abs(np.mean(masked)) < 0.06
    assert np.mean(bands) > 0.88


def test_adjusted_agreement_of_random_methods_with_a_shared_sink_lies_in_its_band() -> None:
    rng = np.random.default_rng(3)
    inside: dict[str, list[bool]] = {}
    adjusted: dict[str, list[float]] = {}
    with_sink = []
    for seed in range(250):
        a, b = rng.random(13), rng.random(13)
        a[0] = b[0] = 10.0
        with_sink.append(np.corrcoef(a, b)[0, 1])
        for one in agree(a, b, admissible=np.arange(13) > 0, draws=200, seed=seed, top=(3,)):
            assert one.null is not None
            inside.setdefault(one.measure, []).append(one.null.covers(one.value))
            adjusted.setdefault(one.measure, []).append(one.adjusted)
    assert np.mean(with_sink) > 0.9
    for name in ("top_k_overlap", "top_k_jaccard", "rbo"):
        assert abs(np.mean(adjusted[name])) < 0.06
    # 95 % of the pairs, less three standard errors of 250 pairs
    assert all(np.mean(found) > 0.908 for found in inside.values()), {k: np.mean(v) for k, v in inside.items()}


@pytest.mark.parametrize("n", [6, 9])
def test_nulls_reject_random_pairs_as_often_as_they_promise(n: int) -> None:
    rng = np.random.default_rng(4)
    rejected: dict[str, list[bool]] = {}
    for seed in range(150):
        for one in agree(rng.integers(0, 5, n) + 0.0, rng.random(n), draws=300, seed=seed, top=(2,)):
            if one.null is not None:
                rejected.setdefault(one.measure, []).append(one.null.p <= 0.05)
    assert len(rejected) == 8
    assert all(np.mean(found) < 0.1 for found in rejected.values()), {k: np.mean(v) for k, v in rejected.items()}


def test_the_exact_null_without_ties_is_that_of_scipy() -> None:
    rng = np.random.default_rng(5)
    for n in (4, 8, 15):
        a, b = rng.random(n), rng.random(n)
        found = agreement.tau_null(a, b)
        assert found.kind == "exact"
        assert found.p == pytest.approx(kendalltau(a, b, method="exact").pvalue, abs=1e-9)
    assert agreement.spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)


def test_sampled_nulls_agree_with_the_full_list(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = agree(A, B)
    monkeypatch.setattr(nulls, "EXACT_UP_TO", 0)
    for one, full in zip(agree(A, B, draws=4000), exact, strict=True):
        assert one.null is not None
        assert full.null is not None
        assert one.null.kind == "permutation"
        assert one.null.mean == pytest.approx(full.null.mean, abs=0.03)
        assert one.null.p == pytest.approx(full.null.p, abs=0.04)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ShapeError, match="same items"):
        agree(np.arange(3.0), np.arange(4.0))
    with pytest.raises(ValueError, match="nan or infinite"):
        agree(np.array([1.0, np.nan, 2.0]), np.arange(3.0))
    # a nan that is not admissible does no harm
    masked = agree(np.array([1.0, np.nan, 2.0, 3.0]), np.arange(4.0), admissible=np.array([True, False, True, True]))
    assert by_name(masked, "tau_b").value == 1.0
    with pytest.raises(ValueError, match="k is 6"):
        lists.top_k_overlap(A, B, 6)
    with pytest.raises(ValueError, match="p is 1"):
        lists.rbo_ext(A, B, 1.0)
    with pytest.raises(ShapeError, match="two vectors"):
        masses.total_variation(np.ones((2, 2)), np.ones((2, 2)))
    with pytest.raises(ShapeError, match=r"\[item, item\]"):
        nulls.pair_sum_null(np.ones((2, 3)), tail="high")
    with pytest.raises(ValueError, match="every draw"):
        nulls.null_from_draws(0.0, np.array([np.nan]), tail="low", exact=True)
    with pytest.raises(ValueError, match="at least 2"):
        lists.rbo_adjusted(np.ones(1), np.ones(1))

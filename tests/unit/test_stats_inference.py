"""Intervals, tests and corrections over prompts: what is clustered, what is exact, what is undefined."""

from __future__ import annotations

import numpy as np
import pytest

from attndiag.errors import ShapeError
from attndiag.stats import inference
from attndiag.stats.inference import clustered_bootstrap, compare_pairs, sign_flip


def test_the_smallest_p_is_that_of_the_number_of_clusters() -> None:
    six = sign_flip(np.ones(6), range(6))
    assert six.p == pytest.approx(0.03125)
    assert six.smallest_p == six.p
    assert sign_flip(np.ones(12), range(12)).p == pytest.approx(2 / 2**12)
    # twelve prompts of one template are one observation
    one = sign_flip(np.ones(12), ["t"] * 12)
    assert (one.p, one.n_clusters) == (1.0, 1)


def test_many_clusters_are_sampled_and_p_is_never_zero() -> None:
    found = sign_flip(np.ones(40), range(40))
    assert found.kind == "permutation"
    assert found.p == pytest.approx(1 / 10_001)


def test_sign_flip_keeps_its_promise_under_the_null() -> None:
    rng = np.random.default_rng(0)
    p = np.array([sign_flip(rng.standard_t(3, 10), range(10)).p for _ in range(400)])
    assert 0.02 < np.mean(p <= 0.05) < 0.08
    assert p.mean() == pytest.approx(0.5, abs=0.05)


def test_clusters_widen_the_interval_of_prompts_that_resemble_each_other() -> None:
    rng = np.random.default_rng(1)
    template = rng.normal(size=15)
    values = np.repeat(template, 10) + 0.1 * rng.normal(size=150)
    clusters = np.repeat(np.arange(15), 10).tolist()
    honest, naive = clustered_bootstrap(values, clusters), clustered_bootstrap(values, range(150))
    assert honest.value == naive.value
    assert honest.high - honest.low > 2 * (naive.high - naive.low)
    assert (honest.n_prompts, honest.n_clusters, honest.draws) == (150, 15, 2000)


def test_the_interval_covers_the_mean_as_often_as_promised() -> None:
    rng = np.random.default_rng(2)
    covered = []
    for _ in range(200):
        values = np.repeat(rng.normal(size=20), 3) + rng.normal(size=60)
        found = clustered_bootstrap(values, np.repeat(np.arange(20), 3).tolist(), draws=400)
        covered.append(found.low <= 0 <= found.high)
    # percentile intervals of 20 clusters fall a little short of 95 %
    assert 0.88 < np.mean(covered) < 0.98


def test_undefined_prompts_are_counted_and_left_out() -> None:
    values = np.array([1.0, np.nan, 3.0, np.nan])
    found = clustered_bootstrap(values, "abcd")
    assert (found.value, found.n_prompts, found.n_undefined, found.undefined_share) == (2.0, 2, 2, 0.5)
    nothing = clustered_bootstrap(np.full(3, np.nan), "abc")
    assert np.isnan([nothing.value, nothing.low, nothing.high]).all()
    assert nothing.undefined_share == 1.0
    assert np.isnan(sign_flip(np.full(3, np.nan), "abc").p)


def test_one_cluster_has_no_interval() -> None:
    found = clustered_bootstrap(np.arange(5.0), ["t"] * 5)
    assert found.value == 2.0
    assert np.isnan([found.low, found.high]).all()


def test_any_statistic_can_be_bootstrapped() -> None:
    values = np.arange(30.0)
    median = clustered_bootstrap(values, range(30), statistic=lambda x: float(np.median(x)), draws=300)
    assert median.value == 14.5
    assert median.low < 14.5 < median.high


def test_holm_and_benjamini_hochberg_on_a_worked_example() -> None:
    p = np.array([0.01, 0.04, np.nan, 0.03, 0.005])
    np.testing.assert_allclose(inference.holm(p), [0.03, 0.06, np.nan, 0.06, 0.02])
    np.testing.assert_allclose(inference.benjamini_hochberg(p), [0.02, 0.04, np.nan, 0.04, 0.02])
    assert len(inference.holm(np.array([]))) == 0
    with pytest.raises(ValueError, match="expected 0 to 1"):
        inference.holm(np.array([0.5, 1.5]))


def test_the_noise_floor_is_the_spread_over_shuffled_batches() -> None:
    assert inference.noise_floor(np.array([[1.0, 2.0], [1.5, 2.0], [0.9, 2.0]])) == pytest.approx([0.6, 0.0])
    orders: list[list[int]] = []

    def measure(order: np.ndarray) -> np.ndarray:
        orders.append(order.tolist())
        # what a prompt gives depends on its place in the batch
        return order + 0.01 * np.arange(4)

    floor = inference.measure_noise_floor(measure, 4, repeats=6)
    assert len({tuple(order) for order in orders}) > 1
    for prompt in range(4):
        places = [order.index(prompt) for order in orders]
        assert floor[prompt] == pytest.approx(0.01 * (max(places) - min(places)))
    np.testing.assert_array_equal(
        inference.above_floor(np.array([0.2, -0.05, 0.1, np.nan]), 0.1), [0.2, 0.0, 0.0, np.nan]
    )
    with pytest.raises(ShapeError, match="at least 2 repeats"):
        inference.noise_floor(np.ones((1, 3)))
    with pytest.raises(ShapeError, match="one value for each"):
        inference.measure_noise_floor(lambda order: order[:3], 4)


def test_declared_comparisons_are_paired_and_corrected() -> None:
    rng = np.random.default_rng(3)
    base = rng.normal(size=48)
    values = {"a": base + 1 + 0.2 * rng.normal(size=48), "b": base, "c": base + np.tile([0.1, -0.1], 24)}
    values["c"][0] = np.nan
    clusters = np.repeat(np.arange(12), 4).tolist()
    first, second = compare_pairs(values, clusters, declared=[("a", "b"), ("b", "c")], primary=("b", "c"))
    assert first.difference.value == pytest.approx(1, abs=0.15)
    assert first.difference.low > 0
    assert first.test.p == pytest.approx(2 / 2**12)
    assert first.p_holm == pytest.approx(2 * first.test.p)
    assert second.p_holm > 0.5
    assert (second.difference.n_undefined, second.primary, first.primary) == (1, True, False)
    assert first.enough_clusters
    (few,) = compare_pairs(values, np.repeat(np.arange(6), 8).tolist(), declared=[("a", "b")])
    assert few.primary
    assert not few.enough_clusters


@pytest.mark.parametrize(
    ("declared", "primary", "text"),
    [
        ([], None, "at least one pair"),
        ([("a", "b"), ("b", "a")], None, "each pair once"),
        ([("a", "x")], None, r"unknown methods \['x'\]"),
        ([("a", "b")], ("a", "c"), "not among the declared"),
    ],
)
def test_undeclared_comparisons_are_refused(
    declared: list[tuple[str, str]], primary: tuple[str, str] | None, text: str
) -> None:
    values = {name: np.ones(3) for name in "abc"}
    with pytest.raises(ValueError, match=text):
        compare_pairs(values, "xyz", declared=declared, primary=primary)


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ShapeError, match="one cluster for each value"):
        clustered_bootstrap(np.ones(3), "ab")
    with pytest.raises(ShapeError, match="the same prompts"):
        compare_pairs({"a": np.ones(3), "b": np.ones(4)}, "xyz", declared=[("a", "b")])
    with pytest.raises(ValueError, match="level is 1"):
        clustered_bootstrap(np.ones(3), "abc", level=1.0)


def test_the_position_is_taken_out_of_both() -> None:
    rng = np.random.default_rng(4)
    place = np.arange(60.0)
    a, b = place + 10 * rng.normal(size=60), place + 10 * rng.normal(size=60)
    assert abs(inference.position_partialled(a, b)) < 0.3
    assert inference.position_partialled(a, a + 0.1 * rng.normal(size=60)) > 0.9
    assert np.isnan(inference.position_partialled(place, b))
    assert np.isnan(inference.position_partialled(np.ones(60), b))
    assert np.isnan(inference.position_partialled(a[:3], b[:3]))

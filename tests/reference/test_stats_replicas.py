"""Independent slow replicas: every way to break ties, every order of items, scipy's own tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations, product

import numpy as np
import pytest
from scipy import stats

from attndiag.stats import agreement, inference, lists, masses, nulls
from attndiag.stats.masked import MaskedValues
from attndiag.stats.order_bounds import order_bounds

TIED = [
    (np.array([2.0, 2.0, 1.0, 1.0, 0.0]), np.array([1.0, 3.0, 3.0, 3.0, 2.0])),
    (np.array([1.0, 1.0, 1.0, 0.0, 5.0]), np.array([0.0, 4.0, 4.0, 1.0, 1.0])),
    (np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.array([1.0, 1.0, 1.0, 1.0, 1.0])),
]


def broken(values: np.ndarray) -> Iterator[list[int]]:
    """Every order of the items that respects the scores."""
    groups = [np.flatnonzero(values == v).tolist() for v in sorted(set(values), reverse=True)]
    for parts in product(*(permutations(group) for group in groups)):
        yield [item for part in parts for item in part]


def over_ties(a: np.ndarray, b: np.ndarray, measure: Callable[[list[int], list[int]], float]) -> float:
    return float(np.mean([measure(x, y) for x in broken(a) for y in broken(b)]))


def plain_rbo(x: list[int], y: list[int], p: float) -> float:
    n = len(x)
    common = [len(set(x[:d]) & set(y[:d])) for d in range(1, n + 1)]
    return common[-1] / n * p**n + (1 - p) / p * sum(c / d * p**d for d, c in enumerate(common, start=1))


@pytest.mark.parametrize(("a", "b"), TIED)
@pytest.mark.parametrize("p", [0.5, 0.9])
def test_rank_biased_overlap_is_the_mean_over_broken_ties(a: np.ndarray, b: np.ndarray, p: float) -> None:
    assert lists.rbo_ext(a, b, p) == pytest.approx(over_ties(a, b, lambda x, y: plain_rbo(x, y, p)))


@pytest.mark.parametrize(("a", "b"), TIED)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_top_k_is_the_mean_over_broken_ties(a: np.ndarray, b: np.ndarray, k: int) -> None:
    def overlap(x: list[int], y: list[int]) -> float:
        return len(set(x[:k]) & set(y[:k])) / k

    def jaccard(x: list[int], y: list[int]) -> float:
        return len(set(x[:k]) & set(y[:k])) / len(set(x[:k]) | set(y[:k]))

    assert lists.top_k_overlap(a, b, k) == pytest.approx(over_ties(a, b, overlap))
    assert lists.top_k_jaccard(a, b, k) == pytest.approx(over_ties(a, b, jaccard))


@pytest.mark.parametrize(("a", "b"), TIED[:2])
def test_chance_is_the_mean_over_all_orders(a: np.ndarray, b: np.ndarray) -> None:
    values = [lists.rbo_ext(a, b[list(order)], 0.8) for order in permutations(range(5))]
    assert lists.rbo_chance(5, 0.8) == pytest.approx(np.mean(values))
    overlaps = [lists.top_k_overlap(a, b[list(order)], 2) for order in permutations(range(5))]
    assert np.mean(overlaps) == pytest.approx(2 / 5)


@pytest.mark.parametrize(("a", "b"), TIED[:2])
def test_pair_sums_are_the_measures_themselves_under_every_shuffle(a: np.ndarray, b: np.ndarray) -> None:
    orders = [list(order) for order in permutations(range(5))]
    p, q = masses.shares(a), masses.shares(b)
    for terms, tail, measure in (
        (lists.rbo_terms(a, b, 0.9), "high", lambda x, y: lists.rbo_ext(x, y, 0.9)),
        (masses.jensen_shannon_terms(p, q), "low", masses.jensen_shannon),
        (np.outer(agreement.centred_ranks(a), agreement.centred_ranks(b)), "both", agreement.spearman),
    ):
        null = nulls.pair_sum_null(terms, tail=tail)
        values = np.array([measure(a, b[order]) for order in orders])
        observed = measure(a, b)
        assert null.draws == 120
        assert null.mean == pytest.approx(values.mean())
        sided = {
            "high": values >= observed - 1e-9,
            "low": values <= observed + 1e-9,
            "both": np.abs(values - values.mean()) >= abs(observed - values.mean()) - 1e-9,
        }
        assert null.p == pytest.approx(sided[tail].mean())


def test_jensen_shannon_is_the_square_of_scipys_distance() -> None:
    from scipy.spatial.distance import jensenshannon

    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.random(7) * (rng.random(7) < 0.7) + 1e-3, rng.random(7)
        assert masses.jensen_shannon(a, b) == pytest.approx(jensenshannon(a, b) ** 2, abs=1e-12)


def test_partial_tau_from_scipys_taus() -> None:
    rng = np.random.default_rng(1)
    a, b, c = rng.integers(0, 6, (3, 12)).astype(float)
    ab, ac, bc = (stats.kendalltau(x, y).statistic for x, y in ((a, b), (a, c), (b, c)))
    expected = (ab - ac * bc) / np.sqrt((1 - ac**2) * (1 - bc**2))
    assert agreement.partial_tau(a, b, c) == pytest.approx(expected, abs=1e-6)


# ------------------------------------------------------------------------------------------------------ inference
def test_sign_flip_is_scipys_exact_permutation_test() -> None:
    rng = np.random.default_rng(2)
    d = rng.normal(0.4, 1, 9)
    expected = stats.permutation_test(
        (d,), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=False
    ).pvalue
    assert inference.sign_flip(d, range(9)).p == pytest.approx(expected)


def test_corrections_equal_other_implementations() -> None:
    rng = np.random.default_rng(3)
    for size in (1, 2, 7, 30):
        p = rng.random(size) ** 2
        np.testing.assert_allclose(inference.benjamini_hochberg(p), stats.false_discovery_control(p))
        order = sorted(range(size), key=lambda index: p[index])
        running, expected = 0.0, np.empty(size)
        for place, index in enumerate(order):
            running = max(running, min(1.0, (size - place) * p[index]))
            expected[index] = running
        np.testing.assert_allclose(inference.holm(p), expected)


def test_the_bootstrap_equals_scipys_for_single_prompts() -> None:
    values = np.random.default_rng(4).normal(1, 2, 60)
    own = inference.clustered_bootstrap(values, range(60), draws=8000)
    other = stats.bootstrap((values,), np.mean, n_resamples=8000, method="percentile", rng=5).confidence_interval
    assert own.value == pytest.approx(values.mean())
    assert own.low == pytest.approx(other.low, abs=0.03)
    assert own.high == pytest.approx(other.high, abs=0.03)


# --------------------------------------------------------------------------------------------------- order bounds
def listed_bounds(m: Callable[[np.ndarray], np.ndarray], n: int, kind: str) -> tuple[float, float]:
    """Smallest and largest AOPC over all n! orders, one by one."""
    full = float(m(np.ones((1, n), dtype=bool))[0])
    found = []
    for order in permutations(range(n)):
        total = 0.0
        for k in range(1, n + 1):
            top = np.isin(np.arange(n), order[:k])
            total += full - float(m((~top if kind == "comprehensiveness" else top)[None])[0])
        found.append(total / n)
    return min(found), max(found)


@pytest.mark.parametrize("kind", ["comprehensiveness", "sufficiency"])
@pytest.mark.parametrize("n", [1, 3, 5])
def test_exact_bounds_are_those_of_all_orders(kind: str, n: int) -> None:
    table = np.random.default_rng(n).normal(size=2**n)

    def m(masks: np.ndarray) -> np.ndarray:
        return table[(masks * 2 ** np.arange(n)).sum(axis=1)]

    low, high = listed_bounds(m, n, kind)
    found = order_bounds(MaskedValues(m, n, "none"), kind)
    assert (found.lowest, found.highest) == (pytest.approx(low), pytest.approx(high))
    assert found.how == "exact"
    # a beam wide enough to hold every set of a size is exact as well
    wide = order_bounds(MaskedValues(m, n, "none"), kind, beam=2**n, exact_items=0)
    assert (wide.lowest, wide.highest) == (pytest.approx(low), pytest.approx(high))
    narrow = order_bounds(MaskedValues(m, n, "none"), kind, beam=1, exact_items=0)
    assert low - 1e-9 <= narrow.lowest <= narrow.highest <= high + 1e-9

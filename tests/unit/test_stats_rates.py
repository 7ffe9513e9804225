"""Rates with intervals over clusters: exact where cases are independent, wide enough where they are not."""

from __future__ import annotations

import numpy as np
import pytest

from attndiag.stats.rates import binomial_interval, least_effects, rate_over_clusters


def test_intervals_of_rates_are_exact_for_independent_cases_and_wider_for_clusters() -> None:
    from scipy.stats import binomtest

    for wrong, n in ((50, 80), (79, 80), (80, 80), (0, 80)):
        exact = binomtest(wrong, n).proportion_ci(0.95, method="exact")
        found = rate_over_clusters([True] * wrong + [False] * (n - wrong), list(range(n)))
        assert (found.wrong, found.decided, found.clusters, found.enough_clusters) == (wrong, n, n, True)
        assert (found.low, found.high) == pytest.approx((exact.low, exact.high), abs=2e-3)
    # prompts of one cluster say the same: 80 of them are worth 8
    clusters = np.repeat(np.arange(8), 10).tolist()
    rate = rate_over_clusters([True] * 50 + [False] * 30, clusters)
    assert not rate.enough_clusters
    eight = binomtest(5, 8).proportion_ci(0.95, method="exact")
    assert rate.low < eight.low + 0.05 and rate.high > eight.high - 0.05
    # one prompt less that misleads is never surer to
    ends = [rate_over_clusters([True] * k + [False] * (80 - k), clusters).low for k in (80, 79, 78, 77)]
    assert ends == sorted(ends, reverse=True)
    # one cluster is one case, and nothing decided is nothing known
    one, none = rate_over_clusters([True, False], ["a", "a"]), rate_over_clusters([], [])
    assert np.isnan([one.low, one.high, none.low, none.high, none.share]).all() and none.clusters == 0


def test_intervals_of_rates_hold_the_true_rate_where_clusters_are_alike() -> None:
    rng = np.random.default_rng(5)
    for truth, n_clusters in ((0.9, 16), (0.6, 12)):
        # beta-binomial, correlation .2 within clusters of three prompts
        held, naive = 0, 0
        for _ in range(400):
            rates = rng.beta(4 * truth, 4 * (1 - truth), n_clusters)
            drawn = (rng.random((n_clusters, 3)) < rates[:, None]).ravel()
            found = rate_over_clusters(drawn.tolist(), np.repeat(np.arange(n_clusters), 3).tolist())
            held += found.low <= truth <= found.high
            low, high = binomial_interval(float(drawn.mean()), float(len(drawn)))
            naive += low <= truth <= high
        assert held / 400 >= 0.93 and held > naive


def drawn_groups(
    rng: np.random.Generator, truth: float, *, groups: int, cases: int, alike: float, n_clusters: int = 16
) -> list[tuple[list[bool], list[int]]]:
    """Rates of one kind, beta-binomial: the cases of a cluster are correlated by `alike`."""
    size = (1 - alike) / alike
    clusters = np.repeat(np.arange(n_clusters), cases).tolist()
    found: list[tuple[list[bool], list[int]]] = []
    for _ in range(groups):
        rates = rng.beta(size * truth, size * (1 - truth), n_clusters)
        found.append(((rng.random((n_clusters, cases)) < rates[:, None]).ravel().tolist(), clusters))
    return found


def test_groups_tell_together_how_alike_the_cases_of_a_cluster_are() -> None:
    # three cases a cluster, correlation .3: a design effect of 1 + .3 * 2
    groups = drawn_groups(np.random.default_rng(2), 0.8, groups=400, cases=3, alike=0.3)
    least = least_effects(groups)
    assert len(least) == 400 and set(least) == {least[0]} and least[0] == pytest.approx(1.6, abs=0.1)
    # by hand: two clusters, all alike within each; half of each in the other group
    split = ([True, True, False, False], ["a", "a", "b", "b"])
    mixed = ([True, False, True, False], ["a", "a", "b", "b"])
    assert least_effects([split]) == [2.0] and least_effects([mixed]) == [1.0]
    # (together / alone - 1) is 3 and -1, weighted alike; (s - 1) is 1
    assert least_effects([split, mixed, mixed]) == pytest.approx([1 + 1 / 3] * 3)
    # the effect follows the size of a group's own clusters; one case a cluster is independent
    sizes = least_effects([split, ([True] * 4, ["a"] * 3 + ["b"]), ([True] * 4, list("abcd")), ([], [])])
    assert sizes == [2.0, 2.5, 1.0, 1.0]
    # all of one kind, or one cluster: nobody can tell
    assert least_effects([([True] * 4, list("aabb")), ([True, False], ["a", "a"])]) == [1.0, 1.0]
    assert least_effects([]) == []
    for bad in (0.9, float("nan")):
        with pytest.raises(ValueError, match="least_effect is"):
            rate_over_clusters([True], ["a"], least_effect=bad)
    with pytest.raises(ValueError, match="shorter"):
        least_effects([([True, True], ["a"])])


def test_a_rate_of_one_kind_is_never_less_sure_than_a_mixed_one() -> None:
    clusters = np.repeat(np.arange(16), 3).tolist()
    # with 3 no rate can have a larger effect of its own, and ever more right cases lower the end; else up to a few
    for least, until in ((1.0, 45), (1.6, 45), (3.0, 24)):
        ends = [
            rate_over_clusters([True] * k + [False] * (48 - k), clusters, least_effect=least)
            for k in range(48, until, -1)
        ]
        lows = [rate.low for rate in ends]
        assert lows == sorted(lows, reverse=True) and len(set(lows)) == len(lows) and ends[0].high == 1
    # three heads of one prompt that always say the same: 16 cases, not 48
    alone, among = (rate_over_clusters([True] * 48, clusters, least_effect=least) for least in (1.0, 3.0))
    assert among.low < alone.low and among.low == pytest.approx(0.025 ** (1 / 16), abs=0.03)


def test_intervals_hold_the_true_rate_where_many_groups_are_of_one_kind() -> None:
    rng = np.random.default_rng(9)
    # 12 layers; 18 cases a cluster (heads of its prompts) with correlation .3
    held, alone_held, one_kind, truth = [], [], [], 0.98
    for _ in range(15):
        groups = drawn_groups(rng, truth, groups=12, cases=18, alike=0.3)
        for (wrong, clusters), least in zip(groups, least_effects(groups), strict=True):
            found, alone = rate_over_clusters(wrong, clusters, least_effect=least), rate_over_clusters(wrong, clusters)
            held.append(found.low <= truth <= found.high)
            alone_held.append(alone.low <= truth <= alone.high)
            one_kind.append(found.wrong == found.decided)
            assert found.low <= alone.low and found.high >= alone.high
    # taken as independent, groups of one kind shut the true rate out
    assert np.mean(one_kind) > 0.1 and not np.array(alone_held)[one_kind].any() and np.array(held)[one_kind].all()
    assert np.mean(held) >= 0.95 and np.mean(alone_held) < 0.9

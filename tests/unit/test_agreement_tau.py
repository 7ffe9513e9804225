"""Kendall's tau-b by rows: equal to scipy's, undefined where it must be, and the exact null."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import kendalltau

from attndiag.errors import ShapeError
from attndiag.stats import agreement
from attndiag.stats.agreement import kendall_tau_b, tau_needed


def rows(seed: int, n_rows: int, n_items: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random rows with many ties and a random mask."""
    rng = np.random.default_rng(seed)
    a = rng.integers(0, 6, (n_rows, n_items)).astype(np.float32)
    b = np.where(rng.random((n_rows, n_items)) < 0.5, a, rng.integers(0, 9, (n_rows, n_items))).astype(np.float32)
    return a, b, rng.random((n_rows, n_items)) < 0.7


@pytest.mark.parametrize("n_items", [3, 7, 20, 96, 97, 130])
def test_it_equals_scipy_row_by_row(n_items: int) -> None:
    a, b, keep = rows(n_items, 25, n_items)
    tau = kendall_tau_b(a, b, keep)
    assert np.isfinite(tau).sum() >= 5
    for row in range(len(a)):
        kept_a, kept_b = a[row, keep[row]], b[row, keep[row]]
        if len(kept_a) < 3 or len(set(kept_a)) == 1 or len(set(kept_b)) == 1:
            assert np.isnan(tau[row])
        else:
            assert tau[row] == pytest.approx(kendalltau(kept_a, kept_b).statistic, abs=1e-6)


def test_blocks_of_rows_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, keep = rows(1, 40, 12)
    whole = kendall_tau_b(a, b, keep)
    monkeypatch.setattr(agreement, "_PAIRS_IN_WORK", 200)
    np.testing.assert_array_equal(whole, kendall_tau_b(a, b, keep))


def test_the_worked_example() -> None:
    a, b = np.array([[0.40, 0.25, 0.15, 0.10, 0.10]]), np.array([[0.05, 0.30, 0.30, 0.20, 0.15]])
    assert kendall_tau_b(a, b, np.ones((1, 5), dtype=bool))[0] == pytest.approx(0.0, abs=1e-12)


def test_what_is_masked_has_no_say() -> None:
    a, b, keep = rows(2, 30, 15)
    before = kendall_tau_b(a, b, keep)
    a[~keep], b[~keep] = np.nan, 1e9
    np.testing.assert_array_equal(before, kendall_tau_b(a, b, keep))


@pytest.mark.parametrize("n_items", [5, 120])
def test_constant_and_short_rows_are_undefined(n_items: int) -> None:
    rising = np.arange(float(n_items))[None]
    everything = np.ones((1, n_items), dtype=bool)
    assert np.isnan(kendall_tau_b(np.zeros_like(rising), rising, everything)).all()
    assert np.isnan(kendall_tau_b(rising, np.ones_like(rising), everything)).all()
    two = everything & (rising < 2)
    assert np.isnan(kendall_tau_b(rising, rising, two)).all()
    three = everything & (rising < 3)
    assert kendall_tau_b(rising, -rising, three)[0] == -1.0


def test_the_null_is_that_of_the_tables() -> None:
    needed = {5: 1.0, 8: 0.643, 12: 0.455, 20: 0.326, 50: 0.192}
    assert {n: round(tau_needed(n), 3) for n in needed} == needed
    assert np.isnan(tau_needed(4))


def test_random_orders_pass_the_null_as_often_as_promised() -> None:
    rng = np.random.default_rng(0)
    a = rng.random((4000, 9))
    b = rng.random((4000, 9))
    passed = np.abs(kendall_tau_b(a, b, np.ones_like(a, dtype=bool))) >= tau_needed(9) - 1e-9
    assert 0.02 < passed.mean() < 0.06


def test_bad_rows_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\[row, item\]"):
        kendall_tau_b(np.zeros((2, 3)), np.zeros((2, 4)), np.ones((2, 3), dtype=bool))
    with pytest.raises(ValueError, match="has no rank"):
        kendall_tau_b(np.full((1, 4), np.nan), np.zeros((1, 4)), np.ones((1, 4), dtype=bool))

"""What must hold for every pair of methods and every ranking: order of the items, symmetry, ranges, monotone maps."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attndiag.stats import inference, lists, masses
from attndiag.stats.agreement import partial_tau, spearman, tau_b
from attndiag.stats.controls import Ranking, control_rankings, faithfulness_table
from attndiag.stats.evidence import from_draws, from_knockout
from attndiag.stats.masked import MaskedValues, top_masks
from attndiag.stats.two_methods import MEASURES, agree
from attndiag.stats.verdicts import VERDICTS, judge

few = settings(max_examples=25, deadline=None, derandomize=True)

# small whole numbers: many ties, zeros, both signs
scores = st.integers(-4, 4).map(float)


@st.composite
def pairs(draw: st.DrawFn, least: int = 3, most: int = 9) -> tuple[np.ndarray, np.ndarray, list[int]]:
    n = draw(st.integers(least, most))
    a, b = (np.array(draw(st.lists(scores, min_size=n, max_size=n))) for _ in range(2))
    return a, b, draw(st.permutations(range(n)))


def same(x: float, y: float) -> bool:
    return (math.isnan(x) and math.isnan(y)) or math.isclose(x, y, abs_tol=1e-9)


@few
@given(pairs(), st.booleans())
def test_agreement_does_not_depend_on_the_order_of_the_items(
    pair: tuple[np.ndarray, np.ndarray, list[int]], signed: bool
) -> None:
    a, b, order = pair
    place = np.arange(len(a), dtype=float)
    given_order = agree(a, b, signed=(signed, signed), position=place, draws=50)
    other = agree(a[order], b[order], signed=(signed, signed), position=place[order], draws=50)
    assert [(x.measure, x.params, x.undefined) for x in given_order] == [
        (x.measure, x.params, x.undefined) for x in other
    ]
    for one, two in zip(given_order, other, strict=True):
        assert same(one.value, two.value)
        # the nulls as well, though they are drawn
        assert one.null == two.null


@few
@given(pairs())
def test_plain_functions_do_not_depend_on_the_order_either(pair: tuple[np.ndarray, np.ndarray, list[int]]) -> None:
    a, b, order = pair
    k = len(a) // 2 + 1
    place = np.arange(len(a), dtype=float)
    for measure in (
        tau_b,
        spearman,
        lists.rbo_ext,
        masses.jensen_shannon,
        masses.total_variation,
        lambda x, y: lists.top_k_overlap(x, y, k),
        lambda x, y: lists.top_k_jaccard(x, y, k),
        lambda x, y: masses.sign_agreement(x, y, signed=(True, True)),
    ):
        assert same(measure(a, b), measure(a[order], b[order]))
        assert same(measure(a, b), measure(b, a))
    assert same(partial_tau(a, b, place), partial_tau(a[order], b[order], place[order]))
    assert same(
        inference.position_partialled(a, b, place), inference.position_partialled(a[order], b[order], place[order])
    )


@few
@given(pairs(), st.booleans())
def test_values_lie_in_their_range_and_undefined_ones_have_a_reason(
    pair: tuple[np.ndarray, np.ndarray, list[int]], signed: bool
) -> None:
    for one in agree(*pair[:2], signed=(signed, signed), draws=50):
        low, high = MEASURES[one.measure].range
        assert bool(one.undefined) == math.isnan(one.value) == (one.null is None)
        assert one.undefined or low - 1e-9 <= one.value <= high + 1e-9


@few
@given(pairs())
def test_rankings_see_the_order_alone(pair: tuple[np.ndarray, np.ndarray, list[int]]) -> None:
    a, b, _ = pair
    stretched = np.exp(a)
    assert same(tau_b(a, b), tau_b(stretched, b))
    assert same(spearman(a, b), spearman(stretched, b))
    assert same(lists.rbo_ext(a, b), lists.rbo_ext(stretched, b))
    assert same(masses.jensen_shannon(a, b), masses.jensen_shannon(7 * a, b))


@few
@given(pairs(), st.integers(0, 9))
def test_top_masks_hold_k_items_and_none_below_one_left_out(
    pair: tuple[np.ndarray, np.ndarray, list[int]], k: int
) -> None:
    a = pair[0]
    assume(k <= len(a))
    masks = top_masks(a, k)
    assert (masks.sum(axis=1) == k).all()
    assert len({row.tobytes() for row in masks}) == len(masks) or len(masks) == 32
    for row in masks:
        assert k in (0, len(a)) or a[row].min() >= a[~row].max()
    np.testing.assert_allclose(masks.mean(axis=0), lists.inclusion(a, k), atol=0.35 if len(masks) == 32 else 1e-9)


@few
@given(pairs(least=3, most=6))
def test_faithfulness_does_not_depend_on_the_order_of_the_items(
    pair: tuple[np.ndarray, np.ndarray, list[int]],
) -> None:
    a, w, order = pair
    chosen = np.array(order)
    wanted = ("aopc_comprehensiveness", "aopc_sufficiency", "naopc_comprehensiveness", "deletion_auc", "effect_tau")

    def table(scores: np.ndarray, weights: np.ndarray) -> list[float]:
        def m(masks: np.ndarray) -> np.ndarray:
            total = masks @ weights
            return total + 0.3 * total**2

        rows = faithfulness_table([Ranking("a", scores)], MaskedValues(m, len(scores), "none"), wanted=wanted)
        return [row.value for row in rows]

    for one, two in zip(table(a, w), table(a[chosen], w[chosen]), strict=True):
        assert same(one, two)


@settings(few, max_examples=12)
@given(st.integers(0, 2**20), st.integers(3, 8))
def test_an_oracle_beats_random_orders_in_the_printed_direction(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=n)
    # so that the whole prompt speaks for the target
    weights += 0.3 - min(0.0, weights.mean())
    rankings = [Ranking("oracle", weights, signed=True), *control_rankings(np.arange(n), seed=seed)]
    rows = faithfulness_table(rankings, MaskedValues(lambda masks: 1 + masks @ weights, n, "none"))
    by_metric: dict[str, dict[str, float]] = {}
    for row in rows:
        by_metric.setdefault(row.metric, {})[row.method] = row.value if row.direction == "higher" else -row.value
    assert len(by_metric) == 11
    for metric, found in by_metric.items():
        assert found["oracle"] >= found["random"] - 1e-9, metric
        assert found["oracle"] >= found["recency"] - 1e-9, metric


@few
@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 4)), min_size=3, max_size=20), st.randoms())
def test_inference_does_not_depend_on_the_order_of_the_prompts(
    prompts: list[tuple[float, int]], shuffler: object
) -> None:
    values, clusters = np.array([v for v, _ in prompts]), [c for _, c in prompts]
    order = list(range(len(prompts)))
    shuffler.shuffle(order)  # type: ignore[attr-defined]
    moved = [clusters[index] for index in order]
    one = inference.clustered_bootstrap(values, clusters, draws=100)
    two = inference.clustered_bootstrap(values[order], moved, draws=100)
    for x, y in ((one.value, two.value), (one.low, two.low), (one.high, two.high)):
        assert same(x, y)
    assert inference.sign_flip(values, clusters) == inference.sign_flip(values[order], moved)
    # a swap of the two methods turns the sign and nothing else
    assert inference.sign_flip(-values, clusters).p == inference.sign_flip(values, clusters).p


@few
@given(pairs(), st.floats(0.5, 20), st.booleans())
def test_verdicts_do_not_depend_on_the_order_of_items_or_rows(
    pair: tuple[np.ndarray, np.ndarray, list[int]], m: float, drawn: bool
) -> None:
    a, effect, order = pair
    rng = np.random.default_rng(0)
    draws = effect + 0.2 * rng.normal(size=(4, 1, len(a)))

    def verdicts(chosen: list[int]) -> np.ndarray:
        shown = from_draws(draws[:, :, chosen], 0.01) if drawn else from_knockout(effect[None, chosen], 0.01)
        return judge(a[None, chosen], shown, np.array([m])).verdict[0]

    plain = verdicts(list(range(len(a))))
    assert set(plain) <= set(VERDICTS)
    assert (plain[order] == verdicts(order)).all()
    # signs and scale of the scores make no claim
    np.testing.assert_array_equal(
        plain,
        judge(
            -3 * a[None], from_draws(draws, 0.01) if drawn else from_knockout(effect[None], 0.01), np.array([m])
        ).verdict[0],
    )

"""Different weights, same output: divergences, permutations, adversaries on models whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from torch import nn

import attndiag
from attndiag import Target
from attndiag.core.pattern_moves import entropy, jensen_shannon, permuted_rows, tempered_rows, uniform_rows
from attndiag.errors import NotApplicableError, PromptError, ShapeError
from attndiag.explanations.pattern_freedom import frozen_pattern, pattern_freedom, pattern_spread, temperature_sweep
from attndiag.models.known import dead_heads, sink_against_value
from attndiag.models.load import LoadedModel

TEXT = "<bos> w5 w9 w30 w7 w9 w12"
TARGET = Target.logit_diff("w10", "w20")


def known_lm(known: object) -> tuple[LoadedModel, str, Target]:
    answer, foil = known.expected["target"]  # type: ignore[attr-defined]
    lm = attndiag.load(known.model, tokenizer=known.tokenizer())  # type: ignore[attr-defined]
    return lm, known.text(), Target.logit_diff(answer, foil)  # type: ignore[attr-defined]


def test_a_dead_head_moves_as_far_as_a_pattern_can_and_a_live_one_hardly() -> None:
    """Heads 1, 2 and 3 write nothing that is read; head 0 carries the answer."""
    lm, text, target = known_lm(dead_heads())
    found = pattern_freedom(lm, text, target, heads=[(0, 0), (0, 1), (0, 3)], draws=20, steps=40)
    assert found.labels["head"] == ["L0H0", "L0H1", "L0H3"]
    live, *dead = found.values.tolist()
    assert min(dead) > 0.9 * math.log(2)
    assert found.checks["adversarial_effect"].abs().max() <= found.checks["epsilon"]
    assert found.checks["permuted_within"][1:].tolist() == [1.0, 1.0]
    assert found.checks["permuted_within"][0] < 1.0
    assert found.checks["uniform_effect"][0] > found.checks["epsilon"]
    assert found.checks["uniform_effect"][1:].abs().max() <= 1e-3
    # only the last query's row is read, so head 0 is free at the others, and no further
    assert live < min(dead)


def test_uniform_effects_are_what_the_values_say() -> None:
    """Head 1 writes 1 from BOS and 1 from MARK: .9 + .1 becomes 2 of 6 keys."""
    lm, text, target = known_lm(sink_against_value())
    keys = len(lm.encode(text).input_ids[0])
    found = pattern_freedom(lm, text, target, heads=[(0, 1)], draws=2, steps=1)
    assert float(found.checks["uniform_effect"][0]) == pytest.approx(1.0 - 2 / keys, abs=2e-3)


@pytest.mark.parametrize("epsilon", [0.01, 0.5])
def test_the_adversary_keeps_its_bound_and_a_looser_one_lets_it_go_further(lm: LoadedModel, epsilon: float) -> None:
    found = pattern_freedom(lm, TEXT, TARGET, heads=[(0, 1), (1, 2)], epsilon=epsilon, draws=4, steps=25)
    assert bool((found.checks["adversarial_effect"].abs() <= epsilon).all())
    assert bool((found.values >= 0).all())
    assert bool((found.values <= math.log(2)).all())
    assert float(found.values.max()) > 0
    if epsilon == 0.5:
        tight = pattern_freedom(lm, TEXT, TARGET, heads=[(0, 1), (1, 2)], epsilon=1e-4, draws=4, steps=25)
        assert bool((tight.values <= found.values + 1e-6).all())


def test_the_adversary_is_told_by_a_replayed_pattern(llama_lm: LoadedModel) -> None:
    """Same seed, same result; and no hook or gradient is left behind."""
    one = pattern_freedom(llama_lm, TEXT, TARGET, heads=[(1, 2)], draws=4, steps=10)
    two = pattern_freedom(llama_lm, TEXT, TARGET, heads=[(1, 2)], draws=4, steps=10)
    assert torch.equal(one.values, two.values)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in llama_lm.model.modules())
    assert all(weight.grad is None for weight in llama_lm.model.parameters())


def test_a_temperature_of_one_changes_nothing_and_entropy_grows(lm: LoadedModel) -> None:
    found = temperature_sweep(lm, TEXT, TARGET, heads=[(0, 0), (1, 3)], temperatures=[0.5, 1.0, 3.0])
    assert found.axes == ("head", "temperature")
    assert found.values[:, 1].abs().max() <= 1e-5
    entropies = found.checks["entropy"]
    assert bool((entropies[:, 1:] > entropies[:, :-1]).all())
    assert found.checks["distance"][:, 1].tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert float(found.values[:, [0, 2]].abs().max()) > 1e-4


def test_weights_of_another_prompt_are_frozen_in(lm: LoadedModel) -> None:
    other = "<bos> w40 w41 w42 w43 w44 w45"
    found = frozen_pattern(lm, TEXT, TARGET, other=other, heads=[(0, 0), (1, 1)])
    assert bool((found.checks["distance"] > 0).all())
    same = frozen_pattern(lm, TEXT, TARGET, other=TEXT, heads=[(0, 0), (1, 1)])
    torch.testing.assert_close(same.values, torch.zeros(2, dtype=torch.float64), atol=1e-5, rtol=0)
    assert same.checks["distance"].max() <= 1e-6
    swapped = frozen_pattern(lm, TEXT, TARGET.swapped(), other=other, heads=[(0, 0), (1, 1)])
    torch.testing.assert_close(swapped.values, -found.values, atol=1e-9, rtol=0)
    with pytest.raises(PromptError, match="has 7 tokens, the other prompt 3"):
        frozen_pattern(lm, TEXT, TARGET, other="<bos> w5 w6", heads=[(0, 0)])


def test_checkpoints_are_compared_head_by_head(
    llama_lm: LoadedModel, word_lm: Callable[[nn.Module], LoadedModel]
) -> None:
    import copy

    second = copy.deepcopy(llama_lm.model)
    with torch.no_grad():
        second.model.layers[1].self_attn.q_proj.weight.mul_(-1)
    found = pattern_spread([llama_lm, word_lm(second)], TEXT, heads=[(0, 0), (1, 0)])
    assert float(found.values[0]) == pytest.approx(0.0, abs=1e-6)
    assert float(found.values[1]) > 1e-3
    with pytest.raises(ValueError, match="1 model was given"):
        pattern_spread([llama_lm], TEXT, heads=[(0, 0)])


def test_what_cannot_be_moved_is_refused(llama_lm: LoadedModel) -> None:
    with pytest.raises(ShapeError, match="head 9 does not exist at layer 1: it has 4 heads"):
        pattern_freedom(llama_lm, TEXT, TARGET, heads=[(1, 9)])
    with pytest.raises(ValueError, match="expected one or more different"):
        pattern_freedom(llama_lm, TEXT, TARGET, heads=[])
    with pytest.raises(NotApplicableError, match="no query of L0H0 sees two keys"):
        pattern_freedom(llama_lm, "w5", TARGET, heads=[(0, 0)])
    with pytest.raises(ValueError, match="epsilon is -1"):
        pattern_freedom(llama_lm, TEXT, TARGET, heads=[(0, 0)], epsilon=-1)


# ------------------------------------------------------------------------------------------------ pure parts
def rows(seed: int, count: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal-like rows: random weights over the visible keys, some rows with less than all the mass."""
    generator = torch.Generator().manual_seed(seed)
    visible = torch.arange(keys) <= torch.randint(0, keys, (count, 1), generator=generator)
    weights = torch.rand(count, keys, generator=generator, dtype=torch.float64) * visible
    mass = 0.5 + 0.5 * torch.rand(count, 1, generator=generator, dtype=torch.float64)
    return mass * weights / weights.sum(-1, keepdim=True), visible


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 5), keys=st.integers(2, 8))
def test_moves_keep_mass_and_mask(seed: int, count: int, keys: int) -> None:
    pattern, visible = rows(seed, count, keys)
    dealt = permuted_rows(pattern, visible, 5, seed)
    assert torch.equal(dealt.sort(-1).values, pattern.sort(-1).values.expand_as(dealt))
    for moved in (uniform_rows(pattern, visible), *dealt, tempered_rows(pattern, 0.3), tempered_rows(pattern, 7.0)):
        torch.testing.assert_close(moved.sum(-1), pattern.sum(-1))
        assert not bool(moved[~visible].any())
        assert float(moved.min()) >= 0
    torch.testing.assert_close(tempered_rows(pattern, 1.0), pattern)
    even = uniform_rows(pattern, visible)
    expected = visible.sum(-1).double().log()
    torch.testing.assert_close(entropy(even / even.sum(-1, keepdim=True)), expected)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), keys=st.integers(2, 8))
def test_the_divergence_is_scipys_squared_distance(seed: int, keys: int) -> None:
    one, two = rows(seed, 1, keys)[0][0], rows(seed + 1, 1, keys)[0][0]
    expected = jensenshannon(one.numpy(), two.numpy()) ** 2
    assert float(jensen_shannon(one, two)) == pytest.approx(np.nan_to_num(expected), abs=1e-12)
    assert float(jensen_shannon(one, one)) == pytest.approx(0.0, abs=1e-12)


def test_distributions_without_common_keys_are_ln_2_apart() -> None:
    one, two = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.25, 0.75])
    assert float(jensen_shannon(one, two)) == pytest.approx(math.log(2))
    # the worked example of two five-token lists
    a, b = torch.tensor([0.40, 0.25, 0.15, 0.10, 0.10]), torch.tensor([0.05, 0.30, 0.30, 0.20, 0.15])
    assert float(jensen_shannon(a, b)) == pytest.approx(0.102363, abs=1e-6)
    with pytest.raises(ShapeError, match="rows of 3 keys cannot be compared with rows of 2"):
        jensen_shannon(one, two[:2])
    with pytest.raises(ValueError, match="temperature is 0"):
        tempered_rows(one, 0)


def test_permutations_are_uniform() -> None:
    pattern = torch.tensor([[0.5, 0.3, 0.2, 0.0]])
    visible = torch.tensor([[True, True, True, False]])
    dealt = permuted_rows(pattern, visible, 6000, 0)[:, 0]
    kinds, counts = torch.unique(dealt, dim=0, return_counts=True)
    assert len(kinds) == 6
    assert float((counts / 6000 - 1 / 6).abs().max()) < 0.02

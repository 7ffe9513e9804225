"""Rollout against sums over paths, flow against a linear program, undefined rows and those who draw on them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from attndiag.core.attention import softmax_rows
from attndiag.core.contributions import alti
from attndiag.core.masks import causal_mask
from attndiag.core.mixing import alti_rollout, flow, residual_mixing, rollout
from attndiag.errors import ShapeError, UndefinedScoreWarning

F64 = torch.float64


def patterns(n_layers: int, n: int, *, batch: int = 2, heads: int = 3, causal: bool = True) -> list[Tensor]:
    scores = [2 * torch.randn(batch, heads, n, n, dtype=F64) for _ in range(n_layers)]
    allowed = causal_mask(n, n) if causal else torch.ones(1, 1, n, n, dtype=torch.bool)
    return [softmax_rows(s.masked_fill(~allowed, -math.inf))[0] for s in scores]


def shift(n: int) -> Tensor:
    """Every position reads the one before it, the first one itself: [1, n, n]."""
    matrix = torch.zeros(1, n, n, dtype=F64)
    matrix[0, 0, 0] = 1
    matrix[0, range(1, n), range(n - 1)] = 1
    return matrix


def linear_program_flow(matrices: list[np.ndarray], query: int, token: int) -> float:
    """Maximum flow as a linear program over edges (level, above, below), conservation at every inner node."""
    n = matrices[0].shape[0]
    edges = [(level, i, j) for level in range(len(matrices)) for i in range(n) for j in range(n)]
    capacity = [float(matrices[level][i, j]) for level, i, j in edges]
    source, sink = (len(matrices), query), (0, token)
    conserve, gain = [], np.zeros(len(edges))
    for node in itertools.product(range(len(matrices) + 1), range(n)):
        row = np.zeros(len(edges))
        for index, (level, i, j) in enumerate(edges):
            row[index] += ((level, j) == node) - ((level + 1, i) == node)
        if node == sink:
            gain = row
        elif node != source:
            conserve.append(row)
    bounds = [(0.0, c) for c in capacity]
    result = linprog(-gain, A_eq=np.array(conserve), b_eq=np.zeros(len(conserve)), bounds=bounds, method="highs")
    assert result.status == 0
    return float(-result.fun)


# --- the stand-in for the residual -----------------------------------------------------------------------------------


def test_residual_mixing() -> None:
    (pattern,) = patterns(1, 4)
    mixed = residual_mixing(pattern)
    torch.testing.assert_close(mixed, pattern.mean(dim=1) / 2 + torch.eye(4, dtype=F64) / 2)
    # with a sink rows sum to less than 1 before they are normalised, so the residual weighs more
    with_sink = residual_mixing(pattern * 0.5)
    expected = (pattern.mean(dim=1) / 2 + torch.eye(4, dtype=F64)) / 1.5
    torch.testing.assert_close(with_sink, expected)
    # a position that reads nothing keeps its own vector
    assert torch.equal(residual_mixing(torch.zeros(1, 2, 3, 3, dtype=F64))[0], torch.eye(3, dtype=F64))


# --- rollout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_rollout_is_the_sum_over_all_paths(causal: bool) -> None:
    layers = patterns(3, 4, causal=causal)
    actual = rollout(layers, holds_residual=False)
    expected = torch.zeros(2, 4, 4, dtype=F64)
    steps = [layer.mean(dim=1) / 2 + torch.eye(4, dtype=F64) / 2 for layer in layers]
    for top, upper, lower, token in itertools.product(range(4), repeat=4):
        expected[:, top, token] += steps[2][:, top, upper] * steps[1][:, upper, lower] * steps[0][:, lower, token]
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual.sum(-1), torch.ones(2, 4, dtype=F64))


def test_two_previous_token_layers_look_two_back() -> None:
    two_back = rollout([shift(5), shift(5)], holds_residual=True)[0]
    assert two_back.argmax(dim=-1).tolist() == [0, 0, 0, 1, 2]
    assert two_back.max(dim=-1).values.tolist() == [1.0] * 5
    # the same patterns with I added keep half of themselves at each layer: 1/4 two back, 1/2 one back, 1/4 here
    mixed = rollout([shift(5)[:, None], shift(5)[:, None]], holds_residual=False)[0]
    assert mixed[4].tolist() == [0.0, 0.0, 0.25, 0.5, 0.25]


def test_the_order_of_layers_matters() -> None:
    swap, copy_first = torch.zeros(1, 3, 3, dtype=F64), torch.zeros(1, 3, 3, dtype=F64)
    swap[0, [0, 1, 2], [1, 0, 2]] = 1
    copy_first[0, :, 0] = 1
    # first swap, then everybody reads position 0, which by then holds token 1
    assert rollout([swap, copy_first], holds_residual=True)[0, 2].tolist() == [0.0, 1.0, 0.0]
    # first everybody reads token 0, then a swap of equals
    assert rollout([copy_first, swap], holds_residual=True)[0, 2].tolist() == [1.0, 0.0, 0.0]


def test_rows_are_normalised_before_they_are_multiplied() -> None:
    layers = [torch.rand(2, 4, 4, dtype=F64) for _ in range(3)]
    shares = [layer / layer.sum(-1, keepdim=True) for layer in layers]
    torch.testing.assert_close(alti_rollout(layers), shares[2] @ shares[1] @ shares[0])
    torch.testing.assert_close(alti_rollout([5 * layer for layer in layers]), alti_rollout(layers))


def test_alti_rollout_follows_values_where_weights_mislead() -> None:
    """Both layers put .9 of the weight on token 0, whose value is null; what reaches the end is the other token."""
    pattern = torch.tensor([[[[1.0, 0.0], [0.9, 0.1]]]], dtype=F64)
    v = torch.tensor([[[[0.0, 0.0], [3.0, 1.0]]]], dtype=F64)
    w_o, x = torch.eye(2, dtype=F64)[None], torch.tensor([[[1.0, 1.0], [0.5, 2.0]]], dtype=F64)
    layer, _ = alti(pattern, v, w_o, residual=x)
    by_value = alti_rollout([layer, layer])
    by_weight = rollout([pattern, pattern], holds_residual=False)
    assert by_value[0, 1].tolist() == [0.0, 1.0]
    # (A + I) / 2 keeps .55 a layer, so .3025 is left after two
    assert by_weight[0, 1, 0] == pytest.approx(1 - 0.55**2)


def test_float32_and_half_layers_come_back_in_float32() -> None:
    layers = patterns(2, 4)
    exact = rollout(layers, holds_residual=False)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        actual = rollout([layer.to(dtype) for layer in layers], holds_residual=False)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), exact, atol=tolerance, rtol=0)


# --- flow ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_flow_is_the_optimum_of_the_linear_program(causal: bool) -> None:
    layers = patterns(3, 4, causal=causal)
    result = flow(layers, holds_residual=False, queries=[3, 1])
    assert result.queries == (3, 1)
    assert result.values.shape == (2, 2, 4)
    for b, (column, query), token in itertools.product(range(2), enumerate((3, 1)), range(4)):
        exact = linear_program_flow([residual_mixing(layer)[b].numpy() for layer in layers], query, token)
        low, gap = float(result.values[b, column, token]), float(result.error[b, column, token])
        # the linear program itself is right to 1e-9
        assert low - 1e-9 <= exact <= low + gap + 1e-9
        # at most n^2 edges of a layer are cut and each lost less than 2^-24
        assert gap <= 16 * 2**-24


def test_flow_is_a_bottleneck_where_rollout_is_a_product() -> None:
    halves = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]], dtype=F64)
    values = flow([halves, halves], holds_residual=True, queries=[1]).values[0, 0]
    # to token 1: stay twice, bottleneck .5. To token 0: leave at once (.5) and stay, then leave (.5), together 1
    assert values.tolist() == [1.0, 0.5]
    assert rollout([halves, halves], holds_residual=True)[0, 1].tolist() == [0.75, 0.25]


def test_flow_through_one_layer_is_the_layer() -> None:
    matrix = torch.rand(1, 5, 5, dtype=F64)
    share = matrix / matrix.sum(-1, keepdim=True)
    result = flow([matrix], holds_residual=True)
    assert result.queries == (0, 1, 2, 3, 4)
    torch.testing.assert_close(result.values, share, atol=2**-24, rtol=0)
    assert (result.values <= share).all()
    assert (share <= result.values + result.error + 1e-15).all()


def test_flow_bounds_rollout_from_above() -> None:
    # rollout divides the same capacities among all tokens at once, so no single maximum is smaller
    layers = patterns(4, 5)
    result = flow(layers, holds_residual=False)
    assert (rollout(layers, holds_residual=False) <= result.values + result.error + 1e-12).all()


# --- undefined rows and bad input ------------------------------------------------------------------------------------


def test_an_empty_row_spreads_to_those_who_draw_on_it_and_to_no_others() -> None:
    first, second = torch.eye(4, dtype=F64)[None].clone(), torch.eye(4, dtype=F64)[None].clone()
    first[0, 1] = 0
    second[0, 3] = torch.tensor([0.0, 0.5, 0.0, 0.5])
    with pytest.warns(UndefinedScoreWarning, match="rollout is undefined for 2 of 4"):
        rolled = rollout([first, second], holds_residual=True)[0]
    assert rolled.isnan().any(dim=-1).tolist() == [False, True, False, True]
    assert torch.equal(rolled[[0, 2]], torch.eye(4, dtype=F64)[[0, 2]])
    with pytest.warns(UndefinedScoreWarning, match="flow is undefined for 1 of 2"):
        result = flow([first, second], holds_residual=True, queries=[2, 3])
    assert result.values[0, 0].tolist() == [0.0, 0.0, 1.0, 0.0]
    assert result.values[0, 1].isnan().all()
    # the nan rows that alti makes mean the same
    with pytest.warns(UndefinedScoreWarning, match="rollout is undefined for 2 of 4"):
        again = rollout([first.masked_fill(first.sum(-1, keepdim=True) == 0, torch.nan), second], holds_residual=True)
    torch.testing.assert_close(again[0], rolled, equal_nan=True)


def test_padding_rows_do_not_poison_a_pattern() -> None:
    layers = patterns(2, 4)
    for layer in layers:
        layer[1, :, 0] = 0
    assert rollout(layers, holds_residual=False)[1, 0].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_what_cannot_be_put_together_is_refused() -> None:
    square, pattern = torch.rand(1, 3, 3), torch.rand(1, 2, 3, 3)
    for function in (rollout, flow):
        with pytest.raises(ShapeError, match=r"holds_residual=False expects \[batch, head, pos, pos\]"):
            function([square], holds_residual=False)
        with pytest.raises(ShapeError, match=r"holds_residual=True expects \[batch, pos, pos\]"):
            function([pattern], holds_residual=True)
        with pytest.raises(ShapeError, match=r"layer 1 \(1, 4, 4\) and layer 0 \(1, 3, 3\)"):
            function([square, torch.rand(1, 4, 4)], holds_residual=True)
        with pytest.raises(ShapeError, match="run the whole sequence at once"):
            function([torch.rand(1, 3, 5)], holds_residual=True)
        with pytest.raises(ValueError, match="layer 1 has negative entries"):
            function([square, square - 1], holds_residual=True)
        with pytest.raises(ValueError, match="no layers given"):
            function([], holds_residual=True)
    with pytest.raises(ShapeError, match=r"queries \(3,\) leave the 3 positions"):
        flow([square], holds_residual=True, queries=[3])
    with pytest.raises(ShapeError, match=r"expected \[batch, head, pos, pos\]"):
        residual_mixing(square)

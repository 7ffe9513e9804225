"""Masks entry by entry, scoring functions component by component, linear attention in both of its forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attndiag.core.attention import attention_scores, head_outputs, softmax_rows
from attndiag.core.masks import (
    block_mask,
    causal_mask,
    chunk_mask,
    from_additive,
    fully_masked_rows,
    graph_mask,
    intersect,
    padding_mask,
    to_additive,
    window_mask,
)
from attndiag.core.scoring import (
    additive_scores,
    dot_scores,
    elu_features,
    general_scores,
    linear_attention_outputs,
    linear_attention_weights,
    scaled_dot_scores,
)
from attndiag.errors import ShapeError

F64 = torch.float64


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64)


def where(mask: Tensor) -> set[tuple[int, int]]:
    """Allowed (query, key) pairs of a mask for one sequence."""
    return {(int(i), int(j)) for i, j in mask.reshape(mask.shape[-2:]).nonzero()}


def pairs(n_queries: int, n_keys: int, rule: object) -> set[tuple[int, int]]:
    return {(i, j) for i in range(n_queries) for j in range(n_keys) if rule(i, j)}  # type: ignore[operator]


@pytest.mark.parametrize("offset", [0, 3])
def test_masks_entry_by_entry(offset: int) -> None:
    size = (4, 4 + offset)
    assert where(causal_mask(*size, offset=offset)) == pairs(*size, lambda i, j: j <= i + offset)
    assert where(window_mask(*size, window=2, offset=offset)) == pairs(*size, lambda i, j: i + offset - j < 2)
    both = window_mask(*size, window=2, offset=offset, symmetric=True)
    assert where(both) == pairs(*size, lambda i, j: abs(i + offset - j) < 2)
    assert where(chunk_mask(*size, chunk=2, offset=offset)) == pairs(*size, lambda i, j: (i + offset) // 2 == j // 2)
    band = intersect(causal_mask(*size, offset=offset), window_mask(*size, window=2, offset=offset))
    assert where(band) == pairs(*size, lambda i, j: 0 <= i + offset - j < 2)


def test_a_cached_step_sees_what_the_whole_run_sees() -> None:
    whole = intersect(causal_mask(6, 6), window_mask(6, 6, window=3))
    step = intersect(causal_mask(1, 6, offset=5), window_mask(1, 6, window=3, offset=5))
    assert torch.equal(step[0, 0, 0], whole[0, 0, 5])


def test_block_graph_and_padding() -> None:
    documents = torch.tensor([[0, 0, 1], [7, 8, 7]])
    assert where(block_mask(documents)[0]) == {(0, 0), (0, 1), (1, 0), (1, 1), (2, 2)}
    assert where(block_mask(documents)[1]) == {(0, 0), (0, 2), (2, 0), (2, 2), (1, 1)}
    assert where(block_mask(documents[:1, :1], documents[:1])) == {(0, 0), (0, 1)}
    assert where(graph_mask([(0, 1), (2, 0)], 3, 3, self_loops=False)) == {(0, 1), (2, 0)}
    assert where(graph_mask([(0, 1)], 2, 3, self_loops=True)) == {(0, 1), (0, 0), (1, 1)}
    real = torch.tensor([[1, 1, 0], [0, 1, 1]])
    assert torch.equal(padding_mask(real), real.bool()[:, None, None, :])
    combined = intersect(padding_mask(real), causal_mask(3, 3))
    assert combined.shape == (2, 1, 3, 3)
    assert where(combined[1]) == {(1, 1), (2, 1), (2, 2)}
    # left padding leaves the first query without a key
    assert fully_masked_rows(combined)[1, 0].tolist() == [True, False, False]


def test_additive_form_and_back() -> None:
    mask = causal_mask(3, 3)
    additive = to_additive(mask, dtype=torch.float32)
    assert additive.dtype == torch.float32
    assert set(additive.flatten().tolist()) == {0.0, -math.inf}
    assert torch.equal(from_additive(additive), mask)
    assert torch.equal(from_additive(torch.zeros(3, 3).masked_fill(~mask, torch.finfo(torch.float32).min)), mask)
    q, k = rand(1, 2, 3, 4), rand(1, 2, 3, 4)
    both = [attention_scores(q, k, scale=1.0, mask=m) for m in (mask, to_additive(mask, dtype=F64))]
    assert torch.equal(*both)


def test_mask_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="finite biases"):
        from_additive(torch.tensor([[0.0, -3.0]]))
    with pytest.raises(TypeError, match="expected bool"):
        intersect(causal_mask(2, 2), to_additive(causal_mask(2, 2), dtype=F64))
    with pytest.raises(TypeError, match="expected bool"):
        to_additive(torch.ones(2, 2), dtype=F64)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="additive float"):
        from_additive(causal_mask(2, 2))
    with pytest.raises(ShapeError, match=r"\(1, 1, 2, 2\) and \(1, 1, 3, 3\)"):
        intersect(causal_mask(2, 2), causal_mask(3, 3))
    with pytest.raises(ShapeError, match=r"edge \(0, 5\)"):
        graph_mask([(0, 5)], 3, 3, self_loops=False)
    with pytest.raises(ShapeError, match="must agree in batch"):
        block_mask(torch.zeros(1, 2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="other than 0 and 1"):
        padding_mask(torch.tensor([[0.0, -1e9]]))
    with pytest.raises(ValueError, match="at least one mask"):
        intersect()
    with pytest.raises(ValueError, match="window is 0"):
        window_mask(2, 2, window=0)
    with pytest.raises(ValueError, match="chunk is 0"):
        chunk_mask(2, 2, chunk=0)


def test_scoring_functions_component_by_component() -> None:
    q, k, w = rand(1, 2, 3, 4), rand(1, 1, 5, 4), rand(4, 4)
    w_q, w_k, v = rand(6, 4), rand(6, 4), rand(6)
    results = [
        dot_scores(q, k),
        scaled_dot_scores(q, k),
        general_scores(q, k, w),
        additive_scores(q, k, w_q=w_q, w_k=w_k, v=v),
    ]
    assert {tuple(r.shape) for r in results} == {(1, 2, 3, 5)}
    for h in range(2):
        for i in range(3):
            for j in range(5):
                a, b = q[0, h, i], k[0, 0, j]
                expected = [a @ b, a @ b / 2, a @ w @ b, v @ torch.tanh(w_q @ a + w_k @ b)]
                for result, value in zip(results, expected, strict=True):
                    torch.testing.assert_close(result[0, h, i, j], value)


def test_relations_between_scoring_functions() -> None:
    q, k = rand(2, 3, 4, 8), rand(2, 3, 5, 8)
    torch.testing.assert_close(general_scores(q, k, torch.eye(8, dtype=F64)), dot_scores(q, k))
    per_head = rand(3, 8, 8)
    torch.testing.assert_close(
        general_scores(q, k, per_head)[:, 1], general_scores(q[:, 1:2], k[:, 1:2], per_head[1])[:, 0]
    )
    torch.testing.assert_close(scaled_dot_scores(q, k), attention_scores(q, k, scale=8**-0.5))
    # Bahdanau scores query and key of different widths; the tanh bounds them by |v|_1
    scores = additive_scores(q * 100, rand(2, 3, 5, 6), w_q=rand(7, 8), w_k=rand(7, 6), v=torch.ones(7, dtype=F64))
    assert scores.shape == (2, 3, 4, 5)
    assert scores.abs().max() <= 7


def test_scoring_shapes_are_checked() -> None:
    q, k = rand(1, 2, 3, 4), rand(1, 2, 5, 6)
    with pytest.raises(ShapeError, match=r"q \(1, 2, 3, 4\) axis 3 and k \(1, 2, 5, 6\) axis 3"):
        dot_scores(q, k)
    with pytest.raises(ShapeError, match=r"k \(1, 2, 5, 6\) axis 3 and weight \(4, 5\) axis -1"):
        general_scores(q, k, rand(4, 5))
    with pytest.raises(ShapeError, match=r"w_q \(7, 4\) axis 0 and v \(8,\) axis 0"):
        additive_scores(q, k, w_q=rand(7, 4), w_k=rand(7, 6), v=rand(8))
    with pytest.raises(ShapeError, match=r"q \(1, 2, 3, 4\) axis 2 and k \(1, 2, 5, 4\) axis 2"):
        linear_attention_outputs(q, rand(1, 2, 5, 4), rand(1, 2, 5, 4), causal=True)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_equals_its_implied_weights(causal: bool, kv_heads: int) -> None:
    q, k, v = rand(2, 4, 5, 8), rand(2, kv_heads, 5, 8), rand(2, kv_heads, 5, 3)
    mask = causal_mask(5, 5)
    weights = linear_attention_weights(q, k, mask=mask if causal else None)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 5, dtype=F64))
    if causal:
        assert torch.equal(weights != 0, mask.expand_as(weights))
    outputs = linear_attention_outputs(q, k, v, causal=causal)
    torch.testing.assert_close(outputs, head_outputs(weights, v), atol=1e-12, rtol=1e-12)
    # not softmax attention under another name
    assert (weights - softmax_rows(attention_scores(q, k, scale=1.0))[0]).abs().max() > 0.05


def test_linear_attention_features_and_empty_rows() -> None:
    x = torch.linspace(-5, 5, 41, dtype=F64)
    torch.testing.assert_close(elu_features(x), F.elu(x) + 1)
    assert float(elu_features(torch.tensor(-30.0))) == pytest.approx(math.exp(-30), rel=1e-6)
    mask = causal_mask(3, 3).clone()
    mask[..., 1, :] = False
    weights = linear_attention_weights(rand(1, 1, 3, 4), rand(1, 1, 3, 4), mask=mask)
    assert weights[0, 0, 1].tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(TypeError, match="expected bool"):
        linear_attention_weights(rand(1, 1, 3, 4), rand(1, 1, 3, 4), mask=to_additive(mask, dtype=F64))

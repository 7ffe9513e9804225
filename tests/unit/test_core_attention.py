"""Attention against worked examples, torch's own operators and the facts that make it what it is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from attndiag.core.attention import (
    AttentionWeights,
    attention_scores,
    concat_heads,
    head_outputs,
    multi_head_attention,
    softmax_rows,
    split_heads,
)
from attndiag.core.masks import causal_mask, fully_masked_rows, intersect, padding_mask, to_additive, window_mask
from attndiag.errors import ShapeError

F64 = torch.float64


def rand(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    pattern, _ = softmax_rows(attention_scores(q, k, scale=1 / math.sqrt(q.shape[-1]), **options))
    return pattern, head_outputs(pattern, v)


# --- worked examples -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "weights", "output"),
    [
        ([1.0, 0.0], [0.6698, 0.3302], [1.3395, 1.3210]),
        ([0.0, 0.0], [0.5, 0.5], [1.0, 2.0]),
        ([0.0, 1.0], [0.3302, 0.6698], [0.6605, 2.6790]),
    ],
)
def test_worked_example(query: list[float], weights: list[float], output: list[float]) -> None:
    q = torch.tensor([[[query]]], dtype=F64)
    k = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]], dtype=F64)
    v = torch.tensor([[[[2.0, 0.0], [0.0, 4.0]]]], dtype=F64)
    pattern, z = attend(q, k, v)
    torch.testing.assert_close(pattern.flatten(), torch.tensor(weights, dtype=F64), atol=5e-5, rtol=0)
    torch.testing.assert_close(z.flatten(), torch.tensor(output, dtype=F64), atol=6e-5, rtol=0)


def test_causal_mask_with_equal_scores_gives_running_means() -> None:
    pattern, _ = softmax_rows(torch.zeros(1, 1, 3, 3, dtype=F64).masked_fill(~causal_mask(3, 3), -math.inf))
    expected = torch.tensor([[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]], dtype=F64)
    torch.testing.assert_close(pattern[0, 0], expected)


def test_softmax_runs_over_keys_not_over_queries() -> None:
    scores = rand(2, 3, 4, 5)
    pattern, sink_mass = softmax_rows(scores)
    torch.testing.assert_close(pattern.sum(-1), torch.ones(2, 3, 4, dtype=F64))
    # over queries the columns would sum to 1; here they sum to 4/5 on average, so at least one is away from 1
    assert (pattern.sum(-2) - 1).abs().amax() > 0.05
    # one query's row does not feel another query's scores
    other = scores.clone()
    other[:, :, 1:] += rand(2, 3, 3, 5)
    assert torch.equal(softmax_rows(other)[0][:, :, 0], pattern[:, :, 0])
    assert torch.equal(sink_mass, torch.zeros(2, 3, 4, dtype=F64))


# --- agreement with torch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("masking", ["none", "bool", "additive", "causal"])
def test_agrees_with_scaled_dot_product_attention(kv_heads: int, masking: str) -> None:
    q, k, v = rand(2, 4, 5, 8), rand(2, kv_heads, 5, 8), rand(2, kv_heads, 5, 6)
    mask = intersect(causal_mask(5, 5), window_mask(5, 5, window=3))
    ours: dict[str, Tensor] = {}
    theirs: dict[str, object] = {}
    if masking == "bool":
        ours, theirs = {"mask": mask}, {"attn_mask": mask}
    elif masking == "additive":
        additive = rand(2, 4, 5, 5) + to_additive(mask, dtype=F64)
        ours, theirs = {"mask": additive}, {"attn_mask": additive}
    elif masking == "causal":
        ours, theirs = {"mask": causal_mask(5, 5)}, {"is_causal": True}
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **theirs)
    torch.testing.assert_close(attend(q, k, v, **ours)[1].transpose(1, 2), expected, atol=1e-12, rtol=1e-12)


def test_query_heads_read_neighbouring_kv_heads() -> None:
    # kv head of h is h // group: heads 0 and 1 read kv head 0. The other plausible order is h % n_kv.
    q, k, v = rand(1, 4, 3, 8), rand(1, 2, 3, 8), rand(1, 2, 3, 8)
    _, z = attend(q, k, v)
    for head in range(4):
        alone = attend(q[:, head : head + 1], k[:, head // 2 : head // 2 + 1], v[:, head // 2 : head // 2 + 1])[1]
        torch.testing.assert_close(z[:, :, head], alone[:, :, 0])


@pytest.mark.parametrize("cross", [False, True])
def test_agrees_with_torch_multi_head_attention(cross: bool) -> None:
    layer = nn.MultiheadAttention(
        12, 3, batch_first=True, dtype=F64, kdim=7 if cross else None, vdim=7 if cross else None
    )
    with torch.no_grad():
        for bias in (layer.in_proj_bias, layer.out_proj.bias):
            bias.normal_()
    x = rand(2, 5, 12)
    source = rand(2, 6, 7) if cross else x
    if cross:
        q, k, v = layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight
    else:
        q, k, v = layer.in_proj_weight.chunk(3)
    b_q, b_k, b_v = layer.in_proj_bias.chunk(3)
    weights = AttentionWeights.from_linear(
        q, k, v, layer.out_proj.weight, n_heads=3, b_q=b_q, b_k=b_k, b_v=b_v, b_o=layer.out_proj.bias
    )
    real = torch.ones(2, source.shape[1], dtype=torch.bool)
    real[1, -2:] = False
    mask = padding_mask(real)
    expected, pattern = layer(x, source, source, key_padding_mask=~real, average_attn_weights=False)
    steps = multi_head_attention(x, weights, source=source, mask=mask)
    torch.testing.assert_close(steps.pattern, pattern, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(steps.attn_out, expected, atol=1e-12, rtol=1e-12)
    assert steps.shapes()["z"] == (2, 5, 3, 4)
    assert list(steps.shapes()) == ["q", "k", "v", "scores", "pattern", "sink_mass", "z", "attn_out"]


def test_grouped_heads_equal_repeated_heads() -> None:
    grouped = AttentionWeights(rand(4, 8, 3), rand(2, 8, 3), rand(2, 8, 5), rand(4, 5, 8), b_v=rand(2, 5))
    repeated = AttentionWeights(
        grouped.w_q,
        grouped.w_k.repeat_interleave(2, 0),
        grouped.w_v.repeat_interleave(2, 0),
        grouped.w_o,
        b_v=grouped.b_v.repeat_interleave(2, 0),
    )
    x = rand(2, 6, 8)
    one, other = multi_head_attention(x, grouped), multi_head_attention(x, repeated)
    torch.testing.assert_close(one.attn_out, other.attn_out, atol=1e-12, rtol=1e-12)
    assert one.k.shape == (2, 2, 6, 3)


def test_order_of_scale_softcap_bias_and_mask() -> None:
    q, k, bias = rand(1, 2, 3, 4) * 5, rand(1, 2, 3, 4) * 5, rand(2, 3, 3) * 5
    scores = attention_scores(q, k, scale=0.5, softcap=3.0, position_bias=bias, mask=causal_mask(3, 3))
    for h in range(2):
        for i in range(3):
            for j in range(3):
                s = 3.0 * math.tanh(0.5 * float(q[0, h, i] @ k[0, h, j]) / 3.0) + float(bias[h, i, j])
                assert float(scores[0, h, i, j]) == pytest.approx(s if j <= i else -math.inf, abs=1e-12)


# --- masks' values, empty rows, sinks --------------------------------------------------------------------------------


@pytest.mark.parametrize("made_in", [torch.float16, torch.bfloat16, torch.float32, F64])
@pytest.mark.parametrize("used_in", [torch.float32, F64])
def test_most_negative_number_means_forbidden(made_in: torch.dtype, used_in: torch.dtype) -> None:
    allowed = causal_mask(4, 4)
    mask = torch.zeros(1, 1, 4, 4, dtype=made_in).masked_fill(~allowed, torch.finfo(made_in).min)
    mask[..., 2, :] = torch.finfo(made_in).min
    q, k = rand(1, 2, 4, 8, dtype=used_in), rand(1, 2, 4, 8, dtype=used_in)
    pattern, _ = softmax_rows(attention_scores(q, k, scale=1.0, mask=mask))
    assert pattern.dtype == used_in
    assert torch.equal(pattern != 0, (allowed & torch.tensor([True, True, False, True])[:, None]).expand(1, 2, 4, 4))


def test_mask_made_in_float32_and_cast_to_float64_still_forbids_a_whole_row() -> None:
    mask = torch.full((1, 1, 2, 3), torch.finfo(torch.float32).min).double()
    pattern, _ = softmax_rows(attention_scores(rand(1, 1, 2, 4), rand(1, 1, 3, 4), scale=1.0, mask=mask))
    assert torch.equal(pattern, torch.zeros_like(pattern))


def test_finite_mask_entries_are_added_as_they_are() -> None:
    q, k, mask = rand(1, 2, 3, 4), rand(1, 2, 3, 4), -1e4 * torch.rand(1, 1, 3, 3, dtype=F64)
    plain = attention_scores(q, k, scale=0.5)
    torch.testing.assert_close(attention_scores(q, k, scale=0.5, mask=mask), plain + mask)


def test_a_row_without_keys_is_zero_and_its_gradient_finite() -> None:
    allowed = causal_mask(3, 3).clone()
    allowed[..., 1, :] = False
    q, k, v = rand(1, 2, 3, 4).requires_grad_(), rand(1, 2, 3, 4), rand(1, 2, 3, 4)
    pattern, z = attend(q, k, v, mask=allowed)
    assert torch.equal(pattern[:, :, 1], torch.zeros(1, 2, 3, dtype=F64))
    assert torch.equal(z[:, 1], torch.zeros(1, 2, 4, dtype=F64))
    z.square().sum().backward()
    assert q.grad is not None
    assert torch.isfinite(q.grad).all()
    assert torch.equal(fully_masked_rows(allowed), torch.tensor([[[False, True, False]]]))


@pytest.mark.parametrize("form", ["head", "row"])
def test_sinks_are_one_more_key_that_writes_nothing(form: str) -> None:
    q, k, v = rand(2, 3, 4, 8), rand(2, 3, 4, 8), rand(2, 3, 4, 5)
    sinks = rand(3) if form == "head" else rand(2, 3, 4)
    scores = attention_scores(q, k, scale=0.3, mask=causal_mask(4, 4))
    pattern, sink_mass = softmax_rows(scores, sinks=sinks)
    logit = sinks[None, :, None].expand(2, 3, 4) if form == "head" else sinks
    wide = torch.softmax(torch.cat([scores, logit[..., None]], dim=-1), dim=-1)
    torch.testing.assert_close(pattern, wide[..., :-1])
    torch.testing.assert_close(sink_mass, wide[..., -1])
    assert (pattern.sum(-1) < 1).all()
    extra = torch.cat([v, torch.zeros(2, 3, 1, 5, dtype=F64)], dim=2)
    torch.testing.assert_close(head_outputs(pattern, v), head_outputs(wide, extra))


def test_a_sink_takes_everything_of_a_row_without_keys() -> None:
    scores = torch.full((1, 2, 1, 3), -math.inf, dtype=F64)
    pattern, sink_mass = softmax_rows(scores, sinks=torch.tensor([0.0, -math.inf], dtype=F64))
    assert torch.equal(pattern, torch.zeros(1, 2, 1, 3, dtype=F64))
    assert sink_mass.flatten().tolist() == [1.0, 0.0]


def test_large_scores_do_not_overflow() -> None:
    scores = torch.tensor([[[[1e4, 1e4 + 1, -1e4]]]], dtype=torch.float32)
    pattern, _ = softmax_rows(scores)
    torch.testing.assert_close(pattern[0, 0, 0], torch.tensor([1 / (1 + math.e), math.e / (1 + math.e), 0.0]))


# --- facts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d_head", "expected"), [(64, 8.0), (512, 22.6)])
def test_dot_products_of_unit_components_spread_like_the_root_of_the_width(d_head: int, expected: float) -> None:
    q, k = rand(1, 1, 300, d_head), rand(1, 1, 300, d_head)
    unscaled = attention_scores(q, k, scale=1.0)
    # 90,000 products made of 300 x 300 vectors: the standard error of the sd is below 1 %; 5 % leaves room
    assert float(unscaled.std()) == pytest.approx(expected, rel=0.05)
    assert float(attention_scores(q, k, scale=1 / math.sqrt(d_head)).std()) == pytest.approx(1.0, rel=0.05)
    # without the scale rows collapse onto single keys
    assert float(softmax_rows(unscaled)[0].amax(-1).mean()) > 0.7


def flops(n_heads: int, n_kv_heads: int, n: int = 16, d: int = 64) -> int:
    d_head = d // n_heads
    weights = AttentionWeights(
        rand(n_heads, d, d_head), rand(n_kv_heads, d, d_head), rand(n_kv_heads, d, d_head), rand(n_heads, d_head, d)
    )
    with FlopCounterMode(display=False) as counter:
        multi_head_attention(rand(1, n, d), weights)
    return counter.get_total_flops()


def test_eight_heads_cost_what_one_of_the_same_width_costs() -> None:
    n, d = 16, 64
    assert flops(1, 1) == flops(8, 8) == 4 * 2 * n * d * d + 2 * 2 * n * n * d
    # sharing kv heads saves projections only: 2 of 8 kv heads make keys and values a quarter as wide
    assert flops(8, 2) == (2 + 2 / 4) * 2 * n * d * d + 2 * 2 * n * n * d


def test_attention_without_positions_does_not_see_order() -> None:
    weights = AttentionWeights(rand(2, 8, 4), rand(2, 8, 4), rand(2, 8, 4), rand(2, 4, 8))
    x, order = rand(1, 6, 8), torch.tensor([3, 1, 5, 0, 2, 4])
    plain, shuffled = multi_head_attention(x, weights).attn_out, multi_head_attention(x[:, order], weights).attn_out
    torch.testing.assert_close(shuffled, plain[:, order], atol=1e-12, rtol=1e-12)


# --- shapes ----------------------------------------------------------------------------------------------------------


def test_split_and_concat_are_inverse() -> None:
    x = rand(2, 5, 12)
    split = split_heads(x, 3)
    assert split.shape == (2, 3, 5, 4)
    assert torch.equal(split[:, 1], x[..., 4:8])
    assert torch.equal(concat_heads(split.transpose(1, 2)), x)


def test_wrong_shapes_are_named_with_both_shapes() -> None:
    q, k, v = rand(2, 4, 5, 8), rand(2, 2, 6, 8), rand(2, 2, 6, 3)
    cases = [
        (lambda: attention_scores(q, rand(2, 2, 6, 7), scale=1.0), ["(2, 4, 5, 8)", "(2, 2, 6, 7)"]),
        (lambda: attention_scores(q, rand(3, 2, 6, 8), scale=1.0), ["(2, 4, 5, 8)", "(3, 2, 6, 8)"]),
        (lambda: attention_scores(q, rand(2, 3, 6, 8), scale=1.0), ["4 query heads", "3 key/value heads"]),
        (lambda: attention_scores(q[0], k, scale=1.0), ["(4, 5, 8)", "batch, head, query_pos, d_head"]),
        (lambda: attention_scores(q, k, scale=1.0, mask=causal_mask(5, 5)), ["(1, 1, 5, 5)", "(2, 4, 5, 6)"]),
        (lambda: attention_scores(q, k, scale=1.0, mask=causal_mask(5, 6)[None]), ["(1, 1, 1, 5, 6)", "(2, 4, 5, 6)"]),
        (lambda: attention_scores(q, k, scale=1.0, position_bias=rand(3, 5, 6)), ["(3, 5, 6)", "(2, 4, 5, 6)"]),
        (lambda: softmax_rows(rand(2, 4, 5, 6), sinks=rand(3)), ["(1, 3, 1)", "(2, 4, 5)"]),
        (lambda: head_outputs(rand(2, 4, 5, 7), v), ["(2, 4, 5, 7)", "(2, 2, 6, 3)"]),
        (lambda: split_heads(rand(2, 5, 10), 4), ["(2, 5, 10)", "4 heads"]),
        (
            lambda: AttentionWeights(rand(4, 8, 3), rand(2, 8, 3), rand(2, 8, 5), rand(4, 3, 8)),
            ["(2, 8, 5)", "(4, 3, 8)"],
        ),
        (
            lambda: AttentionWeights(rand(4, 8, 3), rand(2, 8, 3), rand(2, 8, 5), rand(4, 5, 8), b_v=rand(4, 5)),
            ["(4, 5)", "(2, 8, 5)"],
        ),
        (
            lambda: multi_head_attention(
                rand(1, 3, 9), AttentionWeights(rand(4, 8, 3), rand(2, 8, 3), rand(2, 8, 5), rand(4, 5, 8))
            ),
            ["(1, 3, 9)", "(4, 8, 3)"],
        ),
    ]
    for call, parts in cases:
        with pytest.raises(ShapeError) as caught:
            call()
        assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_ambiguous_masks_and_bad_options_are_refused() -> None:
    q, k = rand(1, 1, 2, 4), rand(1, 1, 2, 4)
    with pytest.raises(TypeError, match=r"0/1 integer mask is ambiguous.*\.bool\(\)"):
        attention_scores(q, k, scale=1.0, mask=torch.ones(1, 1, 2, 2, dtype=torch.long))
    with pytest.raises(TypeError, match="Masks go to mask="):
        attention_scores(q, k, scale=1.0, position_bias=causal_mask(2, 2))
    with pytest.raises(ValueError, match=r"softcap is 0\.0"):
        attention_scores(q, k, scale=1.0, softcap=0.0)
    with pytest.raises(TypeError, match="unknown bias"):
        AttentionWeights.from_linear(rand(4, 4), rand(4, 4), rand(4, 4), rand(4, 4), n_heads=2, bias=rand(4))

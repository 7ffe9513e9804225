"""Contributions against slow float64 replicas that build every [batch, head, query, key, d_model] vector.

The replicas are written from the definitions with explicit loops over batch, head, query and key; they share no code
with the package. Tolerances in float64 are 1e-12 relative to the largest entry: sums of fewer than 100 products.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from attndiag.core.attention import attention_scores, head_outputs, softmax_rows
from attndiag.core.contributions import (
    alti,
    alti_l2,
    attention_output,
    cancellation,
    completeness_error,
    contribution,
    head_contribution,
    mixing_ratio,
    projection,
    target_attribution,
    transformed_values,
    value_norm,
)
from attndiag.core.masks import causal_mask
from attndiag.core.norms import LinearisedNorm, fold_output
from attndiag.core.parts import part_blocks
from attndiag.errors import ShapeError, UndefinedScoreWarning

F64 = torch.float64
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12 * float(expected.nan_to_num().abs().max() + 1))


@dataclass
class Call:
    """One random attention call, d_value 3 and d_model 5 so that no two axes are of one size."""

    pattern: Tensor
    v: Tensor
    w_o: Tensor
    b_o: Tensor
    x: Tensor
    offset: int


def make_call(kind: str, *, sinks: bool = False, cache: int = 0, causal: bool = True) -> Call:
    n_heads, n_kv = HEADS[kind]
    n = 6
    mask = causal_mask(n, n + cache, offset=cache) if causal else None
    scores = attention_scores(rand(2, n_heads, n, 8), rand(2, n_kv, n + cache, 8), scale=0.5, mask=mask)
    pattern, _ = softmax_rows(scores, sinks=rand(n_heads) if sinks else None)
    # a value bias, so that nothing here holds only for centred values
    v = rand(2, n_kv, n + cache, 3) + rand(1, n_kv, 1, 3)
    return Call(pattern, v, rand(n_heads, 3, 5), rand(5), rand(2, n, 5), cache)


def full_parts(call: Call) -> Tensor:
    """A_ij^h v_j^h W_O^h for every batch, head, query and key: [batch, head, query, key, d_model]."""
    n_batch, n_heads, n_queries, n_keys = call.pattern.shape
    group = n_heads // call.v.shape[1]
    parts = torch.zeros(n_batch, n_heads, n_queries, n_keys, call.w_o.shape[-1], dtype=F64)
    for b in range(n_batch):
        for h in range(n_heads):
            for j in range(n_keys):
                written = torch.zeros(call.w_o.shape[-1], dtype=F64)
                for c in range(call.v.shape[-1]):
                    written += call.v[b, h // group, j, c] * call.w_o[h, c]
                for i in range(n_queries):
                    parts[b, h, i, j] = call.pattern[b, h, i, j] * written
    return parts


def with_residual(parts: Tensor, call: Call) -> Tensor:
    """Sum over heads, x_i added where the key is the query itself: [batch, query, key, d_model]."""
    summed = parts.sum(dim=1).clone()
    for i in range(call.x.shape[1]):
        summed[:, i, i + call.offset] += call.x[:, i]
    return summed


def layer_norm_part(u: Tensor, hidden: Tensor, gain: Tensor, eps: float, centre: bool) -> Tensor:
    """L_i(u) for vectors u [batch, query, ..., d_model] and the norm's real input hidden [batch, query, d_model]."""
    out = torch.zeros_like(u)
    for b in range(hidden.shape[0]):
        for i in range(hidden.shape[1]):
            h = hidden[b, i]
            mean = h.mean() if centre else torch.zeros((), dtype=F64)
            s = math.sqrt(float(((h - mean) ** 2).mean()) + eps)
            rows = u[b, i]
            out[b, i] = gain * (rows - rows.mean(dim=-1, keepdim=True) if centre else rows) / s
    return out


CALLS = [
    pytest.param({"kind": kind, "sinks": sinks, "cache": cache}, id=f"{kind}{'-sinks' * sinks}{'-cache' * (cache > 0)}")
    for kind, sinks, cache in (("MHA", False, 0), ("GQA", False, 0), ("MQA", True, 0), ("GQA", True, 3))
]


# --- one head at a time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", CALLS)
def test_per_head_sizes(options: dict[str, object]) -> None:
    call = make_call(**options)  # type: ignore[arg-type]
    parts = full_parts(call)
    close(head_contribution(call.pattern, call.v, call.w_o), parts.norm(dim=-1))
    group = call.pattern.shape[1] // call.v.shape[1]
    for h in range(call.pattern.shape[1]):
        close(
            value_norm(call.pattern, call.v)[:, h],
            call.pattern[:, h] * call.v[:, h // group].square().sum(-1).sqrt()[:, None],
        )
        close(transformed_values(call.v, call.w_o)[:, h], call.v[:, h // group] @ call.w_o[h])
    scale = rand(2, 6)
    scaled = head_contribution(call.pattern, call.v, call.w_o, row_scale=scale)
    close(scaled, (parts * scale[:, None, :, None, None]).norm(dim=-1))


# --- heads summed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", CALLS)
@pytest.mark.parametrize("block", [None, 1, 4, 100])
def test_contribution_in_any_block_size(options: dict[str, object], block: int | None) -> None:
    call = make_call(**options)  # type: ignore[arg-type]
    expected = full_parts(call).sum(dim=1).norm(dim=-1)
    close(contribution(call.pattern, call.v, call.w_o, block=block), expected)


@pytest.mark.parametrize("options", CALLS)
def test_residual_goes_to_the_key_that_is_the_query(options: dict[str, object]) -> None:
    call = make_call(**options)  # type: ignore[arg-type]
    # without a cache the diagonal is the default
    offset = call.offset if call.offset else None
    actual = contribution(call.pattern, call.v, call.w_o, residual=call.x, diagonal_offset=offset, block=4)
    close(actual, with_residual(full_parts(call), call).norm(dim=-1))


def test_a_cached_step_gives_the_rows_of_the_whole_run() -> None:
    call = make_call("GQA")
    whole = contribution(call.pattern, call.v, call.w_o, residual=call.x)
    step = contribution(call.pattern[:, :, 4:], call.v, call.w_o, residual=call.x[:, 4:], diagonal_offset=4)
    close(step, whole[:, 4:])


@pytest.mark.parametrize("options", CALLS)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_contribution_through_a_norm_after_the_residual(options: dict[str, object], kind: str) -> None:
    call = make_call(**options)  # type: ignore[arg-type]
    gain, bias = rand(5), rand(5)
    hidden = call.x + full_parts(call).sum(dim=(1, 3)) + call.b_o
    norm = LinearisedNorm.at(hidden, gain=gain, bias=bias, eps=0.1, kind=kind)  # type: ignore[arg-type]
    folded = fold_output(call.w_o, call.b_o, resid_pre=call.x, norm=norm)
    actual = contribution(
        call.pattern,
        call.v,
        folded.w_o,
        residual=folded.residual,
        row_scale=folded.row_scale,
        diagonal_offset=call.offset,
    )
    expected = layer_norm_part(with_residual(full_parts(call), call), hidden, gain, 0.1, kind == "layer")
    close(actual, expected.norm(dim=-1))


@pytest.mark.parametrize("options", CALLS)
def test_mixing_ratio(options: dict[str, object]) -> None:
    call = make_call(**options)  # type: ignore[arg-type]
    parts = with_residual(full_parts(call), call)
    expected = torch.zeros(2, 6, dtype=F64)
    for i in range(6):
        own = parts[:, i, i + call.offset]
        others = parts[:, i].sum(dim=1) - own
        expected[:, i] = others.norm(dim=-1) / (others.norm(dim=-1) + own.norm(dim=-1))
    close(mixing_ratio(call.pattern, call.v, call.w_o, residual=call.x, diagonal_offset=call.offset), expected)
    if not call.offset:
        # the first causal position has nothing but itself
        assert (mixing_ratio(call.pattern, call.v, call.w_o, residual=call.x)[:, 0] == 0).all()


@pytest.mark.parametrize("options", CALLS)
def test_projection_and_its_bias_part_add_up_to_the_size_of_the_output(options: dict[str, object]) -> None:
    call = make_call(**options)  # type: ignore[arg-type]
    parts = full_parts(call).sum(dim=1)
    out = parts.sum(dim=2) + call.b_o
    unit = out / out.norm(dim=-1, keepdim=True)
    scores, bias_part = projection(call.pattern, call.v, call.w_o, bias=call.b_o)
    close(scores, torch.einsum("bqkd,bqd->bqk", parts, unit))
    close(bias_part, unit @ call.b_o)
    close(scores.sum(-1) + bias_part, out.norm(dim=-1))
    given, _ = projection(call.pattern, call.v, call.w_o, bias=call.b_o, attn_out=out)
    close(given, scores)
    no_bias, zero = projection(call.pattern, call.v, call.w_o)
    close(no_bias.sum(-1), parts.sum(dim=2).norm(dim=-1))
    assert torch.equal(zero, torch.zeros(2, 6, dtype=F64))


@pytest.mark.parametrize("options", CALLS)
@pytest.mark.parametrize("norm_bias", [False, True])
def test_alti(options: dict[str, object], norm_bias: bool) -> None:
    call = make_call(**options)  # type: ignore[arg-type]
    parts = with_residual(full_parts(call), call)
    bias = call.b_o if norm_bias else None
    y = parts.sum(dim=2) + (call.b_o if norm_bias else 0)
    for function, order in ((alti, 1), (alti_l2, 2)):
        with warnings.catch_warnings():
            # rows may be all zero in so few dimensions; what they become is compared below
            warnings.simplefilter("ignore", UndefinedScoreWarning)
            shares, raw = function(
                call.pattern, call.v, call.w_o, residual=call.x, bias=bias, diagonal_offset=call.offset, block=4
            )
        expected = torch.zeros(parts.shape[:3], dtype=F64)
        for b in range(2):
            for i in range(6):
                for j in range(parts.shape[2]):
                    distance = torch.linalg.vector_norm(y[b, i] - parts[b, i, j], ord=order)
                    expected[b, i, j] = max(0.0, float(torch.linalg.vector_norm(y[b, i], ord=order) - distance))
        close(raw, expected)
        total = expected.sum(-1, keepdim=True)
        torch.testing.assert_close(shares, expected / total, rtol=1e-10, atol=1e-12, equal_nan=True)
        assert (total > 0).sum() > 8


def test_alti_keeps_the_digits_of_a_part_that_is_small_beside_the_output() -> None:
    # One key writes 1e-9 of what the residual holds. ||y|| - ||y - t|| in float32 would be 0 or noise; the exact value
    # is the part along the signs of y.
    call = make_call("MHA", causal=False)
    small = [t.float() for t in (call.pattern, call.v * 1e-9, call.w_o)]
    residual = call.x.float()
    _, raw = alti(*small, residual=residual)
    double = [t.double() for t in small]
    parts = part_of(*double)
    y = parts.sum(dim=2) + residual.double()
    along = (parts * y.sign()[:, :, None]).sum(-1).clamp(min=0)
    off_diagonal = ~torch.eye(6, dtype=torch.bool)
    # each of 5 components sums 4 heads in float32: 1e-6 of sum |t|
    bound = 1e-6 * parts.abs().sum(-1)
    assert ((raw.double() - along).abs() <= bound)[:, off_diagonal].all()
    assert (along[:, off_diagonal] > 0).any()


def part_of(pattern: Tensor, v: Tensor, w_o: Tensor) -> Tensor:
    """T_ij [batch, query, key, d_model] of a call without grouped heads."""
    return torch.einsum("bhqk,bhkc,hcd->bqkd", pattern, v, w_o)


@pytest.mark.parametrize("options", CALLS)
def test_cancellation(options: dict[str, object]) -> None:
    call = make_call(**options)  # type: ignore[arg-type]
    parts = full_parts(call)
    expected = parts.sum(dim=1).norm(dim=-1) / parts.norm(dim=-1).sum(dim=1)
    actual = cancellation(call.pattern, call.v, call.w_o)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert torch.equal(actual.isnan(), (call.pattern == 0).all(dim=1))


@pytest.mark.parametrize("options", CALLS)
def test_target_attribution(options: dict[str, object]) -> None:
    call = make_call(**options)  # type: ignore[arg-type]
    parts, direction = full_parts(call), rand(2, 5)
    close(
        target_attribution(call.pattern, call.v, call.w_o, direction, 3),
        torch.einsum("bhkd,bd->bhk", parts[:, :, 3], direction),
    )
    each = target_attribution(call.pattern, call.v, call.w_o, direction[0], torch.tensor([1, 5]))
    close(each[0], parts[0, :, 1] @ direction[0])
    close(each[1], parts[1, :, 5] @ direction[0])
    swapped = target_attribution(call.pattern, call.v, call.w_o, -direction[0], torch.tensor([1, 5]))
    assert torch.equal(swapped, -each)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_target_attribution_pulled_back_through_the_final_norm(kind: str) -> None:
    """Attributions + residual + biases add up to the logit difference that norm and unembedding really give."""
    call = make_call("GQA")
    gain, norm_bias, unembed = rand(5), rand(5), rand(11, 5)
    resid_post = attention_output(call.pattern, call.v, call.w_o, bias=call.b_o, residual=call.x)
    norm = LinearisedNorm.at(resid_post, gain=gain, bias=norm_bias, eps=1e-5, kind=kind)  # type: ignore[arg-type]
    if kind == "layer":
        logits = nn.functional.layer_norm(resid_post, (5,), gain, norm_bias, 1e-5) @ unembed.T
    else:
        logits = (nn.functional.rms_norm(resid_post, (5,), gain, 1e-5) + norm_bias) @ unembed.T
    contrast = unembed[3] - unembed[8]
    direction = norm.pull_back(contrast, 5)
    scores = target_attribution(call.pattern, call.v, call.w_o, direction, 5)
    rest = ((call.x[:, 5] + call.b_o) * direction).sum(-1) + norm_bias @ contrast
    close(scores.sum(dim=(1, 2)) + rest, logits[:, 5, 3] - logits[:, 5, 8])


def test_elementwise_gate_on_z() -> None:
    call = make_call("GQA", sinks=True)
    gate, scale = torch.rand(2, 6, 4, 3, dtype=F64), rand(2, 6)
    parts = torch.zeros(2, 6, 6, 5, dtype=F64)
    for h in range(4):
        for i in range(6):
            for j in range(6):
                gated = call.v[:, h // 2, j] * gate[:, i, h]
                parts[:, i, j] += scale[:, i, None] * call.pattern[:, h, i, j, None] * (gated @ call.w_o[h])
    out = parts.sum(dim=2)
    direction = rand(5)
    options = {"row_scale": scale, "gate": gate}
    close(contribution(call.pattern, call.v, call.w_o, block=4, **options), parts.norm(dim=-1))
    close(projection(call.pattern, call.v, call.w_o, **options)[0].sum(-1), out.norm(dim=-1))
    each = target_attribution(call.pattern, call.v, call.w_o, direction, 4, **options)
    close(each.sum(dim=1), parts[:, 4] @ direction)
    z = head_outputs(call.pattern, call.v) * gate
    close(
        attention_output(call.pattern, call.v, call.w_o, **options),
        (z.flatten(2) @ call.w_o.flatten(0, 1)) * scale[..., None],
    )
    assert completeness_error(call.pattern, call.v, call.w_o, out, **options).max() < 1e-14
    diagonal = parts.clone()
    diagonal[:, range(6), range(6)] += call.x
    own = diagonal[:, range(6), range(6)].norm(dim=-1)
    others = (diagonal.sum(dim=2) - diagonal[:, range(6), range(6)]).norm(dim=-1)
    close(mixing_ratio(call.pattern, call.v, call.w_o, residual=call.x, **options), others / (others + own))
    y = diagonal.sum(dim=2)
    raw = (y.abs().sum(-1)[..., None] - (y[:, :, None] - diagonal).abs().sum(-1)).clamp(min=0)
    close(alti(call.pattern, call.v, call.w_o, residual=call.x, **options)[1], raw)


# --- what follows W_O ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("post", [None, "layer", "rms"])
@pytest.mark.parametrize("sandwich", [None, "layer", "rms"])
def test_folded_parts_add_up_to_the_real_output(post: str | None, sandwich: str | None) -> None:
    """Multiplier, sandwich norm and post norm with all their biases, against torch's own norm layers."""
    call = make_call("GQA", sinks=True)
    gains, biases, eps = rand(2, 5), rand(2, 5), 0.03

    def real(kind: str, x: Tensor, which: int) -> Tensor:
        if kind == "layer":
            return nn.functional.layer_norm(x, (5,), gains[which], biases[which], eps)
        return nn.functional.rms_norm(x, (5,), gains[which], eps) + biases[which]

    def frozen(kind: str, x: Tensor, which: int) -> LinearisedNorm:
        return LinearisedNorm.at(x, gain=gains[which], bias=biases[which], eps=eps, kind=kind)  # type: ignore[arg-type]

    parts = full_parts(call)
    attn_out = parts.sum(dim=(1, 3)) + call.b_o
    branch = attn_out if sandwich is None else real(sandwich, attn_out, 0)
    middle = call.x + 0.22 * branch
    expected = middle if post is None else real(post, middle, 1)
    inner = None if sandwich is None else frozen(sandwich, attn_out, 0)
    outer = None if post is None else frozen(post, middle, 1)
    folded = fold_output(call.w_o, call.b_o, resid_pre=call.x, multiplier=0.22, sandwich=inner, norm=outer)

    pieces = {"residual": folded.residual, "row_scale": folded.row_scale}
    actual = attention_output(call.pattern, call.v, folded.w_o, bias=folded.bias, **pieces)
    close(actual, expected)
    assert completeness_error(call.pattern, call.v, folded.w_o, expected, bias=folded.bias, **pieces).max() < 1e-13

    vectors = 0.22 * parts.sum(dim=1)
    if sandwich is not None:
        vectors = layer_norm_part(vectors, attn_out, gains[0], eps, sandwich == "layer")
    for i in range(6):
        vectors[:, i, i] += call.x[:, i]
    if post is not None:
        vectors = layer_norm_part(vectors, middle, gains[1], eps, post == "layer")
    close(contribution(call.pattern, call.v, folded.w_o, **pieces), vectors.norm(dim=-1))
    raw = (expected.abs().sum(-1)[..., None] - (expected[:, :, None] - vectors).abs().sum(-1)).clamp(min=0)
    with warnings.catch_warnings():
        # the large biases of this test leave some rows without any part that brings the output closer
        warnings.simplefilter("ignore", UndefinedScoreWarning)
        close(alti(call.pattern, call.v, folded.w_o, bias=folded.bias, **pieces)[1], raw)


def test_a_sandwich_norm_scales_attention_parts_only() -> None:
    call = make_call("MHA")
    attn_out = attention_output(call.pattern, call.v, call.w_o, bias=call.b_o)
    sandwich = LinearisedNorm.at(attn_out, gain=None, eps=1e-6, kind="rms")
    folded = fold_output(call.w_o, call.b_o, resid_pre=call.x, sandwich=sandwich)
    assert folded.residual is call.x
    torch.testing.assert_close(folded.row_scale, 1 / attn_out.square().mean(-1).add(1e-6).sqrt())


def test_nothing_to_fold_changes_nothing() -> None:
    call = make_call("MHA")
    folded = fold_output(call.w_o, call.b_o)
    assert folded.w_o is call.w_o
    assert folded.bias is call.b_o
    assert folded.row_scale is None
    assert folded.residual is None


def test_frozen_norms_return_what_the_layers_return() -> None:
    hidden = rand(2, 4, 8) * 3 + 1
    layer, rms = nn.LayerNorm(8, dtype=F64), nn.RMSNorm(8, eps=1e-6, dtype=F64)
    with torch.no_grad():
        for parameter in (layer.weight, layer.bias, rms.weight):
            parameter.normal_()
        frozen = LinearisedNorm.at(hidden, gain=layer.weight, bias=layer.bias, eps=layer.eps)
        close(frozen.output(hidden), layer(hidden))
        close(LinearisedNorm.at(hidden, gain=rms.weight, eps=1e-6, kind="rms").output(hidden), rms(hidden))
        u, direction = rand(2, 4, 8), rand(2, 8)
        query = torch.tensor([3, 1])
        ends = (frozen.linear(u)[torch.arange(2), query] * direction).sum(-1)
        close((frozen.pull_back(direction, query) * u[torch.arange(2), query]).sum(-1), ends)
    half = LinearisedNorm.at(hidden.bfloat16(), gain=None, eps=1e-6)
    assert half.scale.dtype == torch.float32


def test_folding_the_value_bias_into_the_output_bias_is_wrong_with_sinks() -> None:
    call = make_call("GQA", sinks=True)
    b_v = rand(2, 3)
    v = call.v + b_v[None, :, None]
    truth = full_parts(Call(call.pattern, v, call.w_o, call.b_o, call.x, 0)).sum(dim=(1, 3)) + call.b_o
    assert completeness_error(call.pattern, v, call.w_o, truth, bias=call.b_o).max() < 1e-14
    moved = call.b_o + torch.einsum("hc,hcd->d", b_v.repeat_interleave(2, 0), call.w_o)
    assert completeness_error(call.pattern, call.v, call.w_o, truth, bias=moved).min() > 1e-3
    # without sinks rows sum to 1 and the two are the same
    full = call.pattern / call.pattern.sum(-1, keepdim=True)
    same = attention_output(full, v, call.w_o, bias=call.b_o)
    assert completeness_error(full, call.v, call.w_o, same, bias=moved).max() < 1e-14


# --- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [0, -1, -2, -4, -6, -8])
def test_float64_holds_where_heads_cancel(exponent: int) -> None:
    """Two heads write opposite vectors that differ by c; every other way to the norm would lose 1/c or 1/c^2 digits."""
    c = 10.0**exponent
    n, d = 5, 8
    base, rest = rand(1, 1, n, d), rand(1, 1, n, d)
    v = torch.cat([base, -base * (1 - c) + c * rest], dim=1) if exponent else torch.cat([base, base], dim=1)
    pattern = torch.full((1, 2, n, n), 1 / n, dtype=F64)
    w_o = torch.eye(d, dtype=F64).expand(2, d, d)
    exact_part = (c * (base + rest) if exponent else 2 * base)[0, 0] / n
    actual = contribution(pattern, v, w_o)[0, 0]
    # v itself is rounded to eps when it is made, which moves the difference by eps / c
    torch.testing.assert_close(actual, exact_part.norm(dim=-1), rtol=1e-15 * 20 / c, atol=0)
    ratio = cancellation(pattern, v, w_o)[0, 0]
    expected = exact_part.norm(dim=-1) * n / v[0].norm(dim=-1).sum(dim=0)
    torch.testing.assert_close(ratio, expected, rtol=1e-15 * 20 / c, atol=0)
    assert exponent == 0 or float(ratio.max()) < 5 * c


@pytest.mark.parametrize("c", [1e-1, 1e-2, 1e-3, 1e-4])
def test_float32_errs_by_eps_over_c_and_a_gram_form_by_more(c: float) -> None:
    n_heads, n, d = 8, 16, 64
    shared = torch.randn(1, 1, n, d)
    signs = torch.tensor([1.0, -1.0]).repeat(n_heads // 2)[None, :, None, None]
    v = signs * shared + c * torch.randn(1, n_heads, n, d)
    pattern = torch.full((1, n_heads, n, n), 1 / n)
    w_o = torch.randn(1, d, d).expand(n_heads, d, d) / 8
    exact = contribution(pattern.double(), v.double(), w_o.double())
    error = ((contribution(pattern, v, w_o).double() - exact).abs() / exact).max()
    smallest = float(cancellation(pattern.double(), v.double(), w_o.double()).min())
    eps = torch.finfo(torch.float32).eps
    # rounding of f (sums of 64 products, random signs) and of the sum over 8 heads: a few eps of what is written
    assert float(error) < 4 * eps / smallest
    f = transformed_values(v, w_o)
    gram = torch.einsum("bhkd,bgkd->bkhg", f, f)
    quadratic = torch.einsum("bhqk,bkhg,bgqk->bqk", pattern, gram, pattern).clamp(min=0).sqrt()
    if c <= 1e-3:
        assert float(((quadratic.double() - exact).abs() / exact).max()) > 10 * float(error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_lifted_not_used(dtype: torch.dtype) -> None:
    call = make_call("GQA")
    low = [t.to(dtype) for t in (call.pattern, call.v, call.w_o)]
    actual = contribution(*low)
    assert actual.dtype == torch.float32
    exact = contribution(*(t.double() for t in low))
    torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-6)
    assert head_contribution(*low).dtype == torch.float32
    assert completeness_error(*low, attention_output(*(t.float() for t in low))).max() < 1e-6


def test_float32_inputs_stay_float32_and_are_not_changed() -> None:
    call = make_call("MHA")
    tensors = [t.float() for t in (call.pattern, call.v, call.w_o, call.x)]
    before = [t.clone() for t in tensors]
    pattern, v, w_o, x = tensors
    scores = contribution(pattern, v, w_o, residual=x)
    alti(pattern, v, w_o, residual=x)
    mixing_ratio(pattern, v, w_o, residual=x)
    projection(pattern, v, w_o)
    assert scores.dtype == torch.float32
    assert all(torch.equal(one, other) for one, other in zip(before, tensors, strict=True))


def test_blocks_keep_the_peak_small() -> None:
    """No yielded tensor holds more than the stated number of elements, whatever the number of queries."""
    pattern, v, w_o = torch.rand(1, 2, 40, 50), torch.randn(1, 2, 50, 3), torch.randn(2, 3, 64)
    sizes = [parts.shape for _, parts in part_blocks(pattern, v, w_o, block=7)]
    assert [size[1] for size in sizes] == [7, 7, 7, 7, 7, 5]
    assert all(size == (1, rows[1], 50, 64) for size, rows in zip(sizes, sizes, strict=True))
    rows = [rows for rows, _ in part_blocks(pattern, v, w_o, block=7)]
    assert [(r.start, r.stop) for r in rows] == [(0, 7), (7, 14), (14, 21), (21, 28), (28, 35), (35, 40)]


# --- degenerate input ------------------------------------------------------------------------------------------------


def test_rows_without_anything_are_undefined_never_uniform() -> None:
    call = make_call("MHA")
    pattern = call.pattern.clone()
    pattern[0, :, 2] = 0
    with pytest.warns(UndefinedScoreWarning, match="alti is undefined .* 1 of 12 query rows"):
        shares, raw = alti(pattern, call.v, call.w_o)
    assert shares[0, 2].isnan().all()
    assert int(shares.isnan().sum()) == 6
    assert torch.equal(raw[0, 2], torch.zeros(6, dtype=F64))
    with pytest.warns(UndefinedScoreWarning, match="projection"):
        scores, bias_part = projection(pattern, call.v, call.w_o)
    assert scores[0, 2].isnan().all()
    assert bias_part[0, 2].isnan()
    assert int(scores.isnan().sum()) == 6
    x = call.x.clone()
    x[0, 2] = 0
    with pytest.warns(UndefinedScoreWarning, match="mixing_ratio"):
        ratio = mixing_ratio(pattern, call.v, call.w_o, residual=x)
    assert ratio.isnan().nonzero().tolist() == [[0, 2]]
    assert torch.equal(contribution(pattern, call.v, call.w_o)[0, 2], torch.zeros(6, dtype=F64))


def test_completeness_of_empty_rows() -> None:
    call = make_call("MHA")
    pattern = call.pattern.clone()
    pattern[0, :, 2] = 0
    truth = attention_output(pattern, call.v, call.w_o)
    assert completeness_error(pattern, call.v, call.w_o, truth).max() == 0
    other = attention_output(call.pattern, call.v, call.w_o)
    other[1, 3] = 0
    error = completeness_error(pattern, call.v, call.w_o, other)
    assert float(error[0, 2]) == 1.0
    assert math.isinf(float(error[1, 3]))


def test_alti_of_a_part_that_points_away_is_zero_not_negative() -> None:
    # t_0 = (3, 1), t_1 = (-1, 0), y = (2, 1): |y| - |y - t_0| = 3 - 1 = 2 and |y| - |y - t_1| = 3 - 4 < 0
    pattern = torch.full((1, 1, 2, 2), 0.5, dtype=F64)
    v = torch.tensor([[[[6.0, 2.0], [-2.0, 0.0]]]], dtype=F64)
    shares, raw = alti(pattern, v, torch.eye(2, dtype=F64)[None])
    assert raw.tolist() == [[[2.0, 0.0], [2.0, 0.0]]]
    assert shares.tolist() == [[[1.0, 0.0], [1.0, 0.0]]]
    scores, _ = projection(pattern, v, torch.eye(2, dtype=F64)[None])
    assert scores[0, 0, 1] == pytest.approx(-2 / math.sqrt(5))


def test_alti_row_that_the_bias_alone_makes_is_undefined() -> None:
    # y = t + b with b = -.2 t: |y| = .8 |t|, |y - t| = .2 |t|: the part counts; with b = -10 t, |y| = 9 |t| and
    # |y - t| = 10 |t|: without the part the output would be larger, so nothing counts
    t = torch.tensor([[[[1.0, 2.0]]]], dtype=F64)
    call = (torch.ones(1, 1, 1, 1, dtype=F64), t, torch.eye(2, dtype=F64)[None])
    for function, size in ((alti, 3.0), (alti_l2, math.sqrt(5))):
        shares, raw = function(*call, bias=-0.2 * t[0, 0, 0])
        assert raw.item() == pytest.approx(0.6 * size)
        assert shares.item() == 1.0
        with pytest.warns(UndefinedScoreWarning, match=f"{function.__name__} is undefined .* 1 of 1 query rows"):
            shares, raw = function(*call, bias=-10 * t[0, 0, 0])
        assert raw.item() == 0.0
        assert shares.isnan().all()


def test_what_does_not_fit_is_named_with_both_shapes() -> None:
    call = make_call("GQA", cache=3)
    p, v, w, x = call.pattern, call.v, call.w_o, call.x
    cases = [
        (lambda: contribution(p[..., :-1], v, w), ["(2, 4, 6, 8)", "(2, 2, 9, 3)"]),
        (lambda: contribution(p[:, :2], v, w), ["(2, 2, 6, 9)", "(4, 3, 5)"]),
        (lambda: contribution(p, v[..., :2], w), ["(2, 2, 9, 2)", "(4, 3, 5)"]),
        (lambda: contribution(p[0], v, w), ["(4, 6, 9)", "batch, head, query_pos, key_pos"]),
        (lambda: contribution(p, v, w, residual=x), ["6 queries and 9 keys", "diagonal_offset= (3 behind a cache)"]),
        (lambda: contribution(p, v, w, residual=x, diagonal_offset=4), ["diagonal_offset is 4", "0 to 3"]),
        (lambda: contribution(p, v, w, residual=x, diagonal_offset=-1), ["diagonal_offset is -1"]),
        (lambda: contribution(p, v, w, residual=x[:, :5], diagonal_offset=3), ["(2, 5, 5)", "(2, 6, 5)"]),
        (lambda: contribution(p, v, w, row_scale=x[0]), ["(6, 5)", "(2, 6)"]),
        (lambda: contribution(p, v, w, gate=x), ["(2, 6, 5)", "(2, 6, 4, 3)"]),
        (lambda: value_norm(p[..., :-1], v), ["(2, 4, 6, 8)", "(2, 2, 9, 3)"]),
        (lambda: projection(p, v, w, bias=rand(4)), ["(4,)", "(2, 6, 5)"]),
        (lambda: projection(p, v, w, attn_out=x[:, :5]), ["(2, 5, 5)", "(2, 6, 5)"]),
        (lambda: target_attribution(p, v, w, rand(3, 5), 0), ["(3, 5)", "[2, 5]"]),
        (lambda: target_attribution(p, v, w, rand(5), 6), ["query 6", "6 query positions"]),
        (lambda: target_attribution(p, v, w, rand(5), -1), ["query -1"]),
        (lambda: target_attribution(p, v, w, rand(5), torch.tensor([0, 1, 2])), ["(3,)", "[2]"]),
        (lambda: completeness_error(p, v, w, x[:, :5]), ["(2, 5, 5)", "(2, 6, 5)"]),
        (lambda: transformed_values(v, w[:, :2]), ["(2, 2, 9, 3)", "(4, 2, 5)"]),
        (lambda: fold_output(w, rand(4)), ["b_o (4,)", "(4, 3, 5)"]),
        (lambda: LinearisedNorm.at(x, gain=rand(4), eps=0.0), ["(4,)", "(2, 6, 5)"]),
        (lambda: LinearisedNorm(gain=rand(5), scale=x[..., 0].abs(), centre=True, bias=rand(4)), ["(4,)", "(5,)"]),
    ]
    for call_it, words in cases:
        with pytest.raises(ShapeError) as caught:
            call_it()
        assert all(word in str(caught.value) for word in words), str(caught.value)
    with pytest.raises(ValueError, match="expected 'layer' or 'rms'"):
        LinearisedNorm.at(x, gain=None, eps=0.0, kind="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scale is not positive"):
        LinearisedNorm.at(torch.ones(1, 2, 4), gain=None, eps=0.0)
    with pytest.raises(ValueError, match="block is 0"):
        contribution(p, v, w, block=0)

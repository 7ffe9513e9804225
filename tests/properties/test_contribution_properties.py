"""What must hold for every attention call: symmetries of the model, bounds, sums, independence of batch and padding.

`hypothesis` draws shapes, seeds and whether there are sinks; all in float64, so that 1e-9 relative is generous.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attndiag.core.attention import attention_scores, softmax_rows
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
    value_norm,
)
from attndiag.core.masks import causal_mask
from attndiag.core.mixing import alti_rollout
from attndiag.core.norms import LinearisedNorm, fold_output
from attndiag.errors import UndefinedScoreWarning

F64 = torch.float64
few = settings(max_examples=25, deadline=None, derandomize=True)


@dataclass
class Call:
    pattern: Tensor
    v: Tensor
    w_o: Tensor
    x: Tensor
    rand: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=F64, generator=self.rand)

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.pattern, self.v, self.w_o


@st.composite
def calls(draw: st.DrawFn) -> Call:
    rand = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    n, d_value, d = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(2, 7))
    batch, heads = draw(st.integers(1, 2)), kv_heads * group

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=F64, generator=rand)

    scores = attention_scores(
        normal(batch, heads, n, 4), normal(batch, kv_heads, n, 4), scale=1.0, mask=causal_mask(n, n)
    )
    pattern, _ = softmax_rows(scores, sinks=normal(heads) if draw(st.booleans()) else None)
    return Call(pattern, normal(batch, kv_heads, n, d_value), normal(heads, d_value, d), normal(batch, n, d), rand)


def everything(call: Call, pattern: Tensor, v: Tensor, w_o: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Every measure that is a property of the model, by name."""
    direction = torch.linspace(-1, 1, w_o.shape[-1], dtype=F64)
    with warnings.catch_warnings():
        # a row of alti may be all zero in so few dimensions
        warnings.simplefilter("ignore", UndefinedScoreWarning)
        return {
            "head_contribution": head_contribution(pattern, v, w_o),
            "contribution": contribution(pattern, v, w_o),
            "contribution_residual": contribution(pattern, v, w_o, residual=x),
            "mixing_ratio": mixing_ratio(pattern, v, w_o, residual=x),
            "projection": projection(pattern, v, w_o)[0],
            "target_attribution": target_attribution(pattern, v, w_o, direction, v.shape[2] - 1),
            "alti": alti(pattern, v, w_o, residual=x)[1],
            "alti_l2": alti_l2(pattern, v, w_o, residual=x)[1],
            "cancellation": cancellation(pattern, v, w_o),
        }


def same(one: dict[str, Tensor], other: dict[str, Tensor], *, rtol: float = 1e-9) -> None:
    for name, values in one.items():
        torch.testing.assert_close(
            other[name], values, rtol=rtol, atol=1e-10, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


@few
@given(calls())
def test_a_change_of_basis_inside_the_head_changes_no_measure(call: Call) -> None:
    """v -> v R, W_O -> R^-1 W_O leaves the model as it is."""
    d_value, kv_heads = call.w_o.shape[1], call.v.shape[1]
    # a rotation and a stretch for each kv head, so that the inverse loses no digits
    turned = torch.linalg.qr(call.normal(kv_heads, d_value, d_value))[0] * torch.linspace(0.5, 2, d_value, dtype=F64)
    group = call.w_o.shape[0] // kv_heads
    w_o = torch.linalg.solve(turned.repeat_interleave(group, 0), call.w_o)
    v = call.v @ turned
    same(everything(call, *call.args, call.x), everything(call, call.pattern, v, w_o, call.x))


def test_value_norm_is_not_a_property_of_the_model() -> None:
    pattern, v, w_o = torch.full((1, 1, 2, 2), 0.5, dtype=F64), torch.randn(1, 1, 2, 3, dtype=F64), torch.randn(1, 3, 4)
    stretched = torch.diag(torch.tensor([10.0, 1.0, 0.1], dtype=F64))
    w_o = w_o.double()
    other = torch.linalg.inv(stretched) @ w_o
    torch.testing.assert_close(contribution(pattern, v @ stretched, other), contribution(pattern, v, w_o))
    assert (value_norm(pattern, v @ stretched) / value_norm(pattern, v) - 1).abs().max() > 0.5


@few
@given(calls())
def test_bounds_and_sums(call: Call) -> None:
    found = everything(call, *call.args, call.x)
    total = attention_output(*call.args)
    upper = found["head_contribution"].sum(dim=1)
    assert (found["contribution"] <= upper * (1 + 1e-12)).all()
    assert (found["projection"].abs() <= found["contribution"] * (1 + 1e-9) + 1e-12).all()
    torch.testing.assert_close(found["projection"].sum(-1), total.norm(dim=-1), rtol=1e-9, atol=1e-10)
    ratio = found["cancellation"]
    assert ((ratio >= 0) & (ratio <= 1) | ratio.isnan()).all()
    assert ((found["mixing_ratio"] >= 0) & (found["mixing_ratio"] <= 1)).all()
    # leaving a part out changes the length of the output by no more than the part's own length
    assert (found["alti_l2"] <= found["contribution_residual"] * (1 + 1e-9)).all()
    future = ~causal_mask(*call.pattern.shape[2:])[0].expand_as(found["contribution"])
    for name in ("contribution", "contribution_residual", "projection", "alti", "alti_l2"):
        assert (found[name][future] == 0).all(), name
    direction = torch.linspace(-1, 1, call.w_o.shape[-1], dtype=F64)
    torch.testing.assert_close(
        found["target_attribution"].sum(dim=(1, 2)), total[:, -1] @ direction, rtol=1e-9, atol=1e-10
    )
    assert completeness_error(*call.args, total).max() == 0


@few
@given(calls())
def test_order_of_batch_rows_heads_and_keys_does_not_matter(call: Call) -> None:
    plain = everything(call, *call.args, call.x)
    flipped = everything(call, *(t.flip(0) for t in call.args[:2]), call.w_o, call.x.flip(0))
    same(plain, {name: values.flip(0) for name, values in flipped.items()})
    # reversing heads keeps every group together
    heads = everything(call, call.pattern.flip(1), call.v.flip(1), call.w_o.flip(0), call.x)
    per_head = {"head_contribution", "target_attribution"}
    same(plain, {name: values.flip(1) if name in per_head else values for name, values in heads.items()})
    keys = contribution(call.pattern.flip(3), call.v.flip(2), call.w_o).flip(2)
    torch.testing.assert_close(keys, plain["contribution"], rtol=1e-9, atol=1e-12)


@few
@given(calls(), st.integers(1, 3))
def test_padding_keys_change_nothing(call: Call, extra: int) -> None:
    """Left padding: keys without weight in front, whatever their values, and the diagonal moved along."""
    n_batch, n_heads, n, _ = call.pattern.shape
    pattern = torch.cat([torch.zeros(n_batch, n_heads, n, extra, dtype=F64), call.pattern], dim=3)
    v = torch.cat([1e3 * call.normal(n_batch, call.v.shape[1], extra, call.v.shape[3]), call.v], dim=2)
    padded = contribution(pattern, v, call.w_o, residual=call.x, diagonal_offset=extra)
    torch.testing.assert_close(padded[..., extra:], contribution(*call.args, residual=call.x), rtol=1e-9, atol=1e-10)
    assert (padded[..., :extra] == 0).all()


@few
@given(calls(), st.floats(0.01, 100))
def test_scaling_values_scales_sizes_and_leaves_ratios(call: Call, factor: float) -> None:
    one = everything(call, *call.args, call.x)
    other = everything(call, call.pattern, factor * call.v, call.w_o, factor * call.x)
    ratios = {"mixing_ratio", "cancellation"}
    same({k: t if k in ratios else factor * t for k, t in one.items()}, other)
    row_scale = torch.full(call.x.shape[:2], factor, dtype=F64)
    torch.testing.assert_close(contribution(*call.args, row_scale=row_scale), factor * one["contribution"])


@few
@given(calls())
def test_post_norm_parts_sum_to_the_layers_output(call: Call) -> None:
    d = call.x.shape[-1]
    layer = torch.nn.LayerNorm(d, eps=1e-3, dtype=F64)
    with torch.no_grad():
        layer.weight.copy_(call.normal(d))
        layer.bias.copy_(call.normal(d))
        b_o = call.normal(d)
        hidden = attention_output(*call.args, bias=b_o, residual=call.x)
        norm = LinearisedNorm.at(hidden, gain=layer.weight, bias=layer.bias, eps=layer.eps)
        folded = fold_output(call.w_o, b_o, resid_pre=call.x, norm=norm)
        pieces = {"bias": folded.bias, "residual": folded.residual, "row_scale": folded.row_scale}
        total = attention_output(call.pattern, call.v, folded.w_o, **pieces)
        torch.testing.assert_close(total, layer(hidden), rtol=1e-9, atol=1e-9)


@few
@given(calls())
def test_alti_rollout_rows_are_shares_of_the_past(call: Call) -> None:
    # position 0 has nothing but itself, so its row is always defined; later rows may lose all parts in few dimensions
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UndefinedScoreWarning)
        _, raw = alti(*call.args, residual=call.x)
        mixed = alti_rollout([raw, raw, raw])
    defined = ~mixed.isnan().any(dim=-1)
    torch.testing.assert_close(mixed.sum(-1)[defined], torch.ones(int(defined.sum()), dtype=F64))
    assert defined[:, 0].all()
    assert (mixed[:, 0, 1:] == 0).all()


@few
@given(calls())
def test_float32_agrees_with_float64_to_what_its_sums_allow(call: Call) -> None:
    """Each entry is a sum of at most H d_value products; its error is at most that many roundings of what is summed."""
    low = [t.float() for t in (*call.args, call.x)]
    high = [t.double() for t in low]
    n_terms = call.w_o.shape[0] * call.w_o.shape[1] + call.w_o.shape[2] + 4
    eps = torch.finfo(torch.float32).eps
    pattern, v, w_o, x = high
    group = w_o.shape[0] // v.shape[1]
    # every product in absolute value, as if nothing cancelled
    summed = torch.einsum("bhqk,bhkc,hcd->bqkd", pattern, v.abs().repeat_interleave(group, 1), w_o.abs()).norm(dim=-1)
    error = (contribution(*low[:3]).double() - contribution(*high[:3])).abs()
    assert (error <= n_terms * eps * summed + 1e-30).all()
    n = x.shape[1]
    summed[:, range(n), range(n)] += x.norm(dim=-1)
    error = (contribution(*low[:3], residual=low[3]).double() - contribution(*high[:3], residual=x)).abs()
    assert (error <= n_terms * eps * summed + 1e-30).all()


@pytest.mark.parametrize("n_heads", [1, 4])
def test_equal_heads_do_not_cancel_and_opposite_heads_do(n_heads: int) -> None:
    v = torch.randn(1, 1, 3, 2, dtype=F64)
    pattern = torch.full((1, n_heads, 3, 3), 1 / 3, dtype=F64)
    w_o = torch.randn(2, 5, dtype=F64).expand(n_heads, 2, 5)
    torch.testing.assert_close(cancellation(pattern, v, w_o), torch.ones(1, 3, 3, dtype=F64))
    if n_heads > 1:
        signs = torch.tensor([1.0, -1.0] * (n_heads // 2), dtype=F64)[:, None, None]
        assert float(cancellation(pattern, v, signs * w_o).max()) < 1e-15
        assert math.isclose(
            float(head_contribution(pattern, v, signs * w_o).sum()), float(head_contribution(pattern, v, w_o).sum())
        )

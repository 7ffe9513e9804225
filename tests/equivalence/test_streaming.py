"""Streaming contributions: the same numbers as the fused kernel, without any [query, key] tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attndiag.core.fused import OUTPUTS, attention_contributions
from attndiag.core.streaming import StreamResult, stream_contributions
from attndiag.errors import AttnDiagError, InsufficientMemoryError, ShapeError


def random_call(
    seed: int, n_queries: int = 150, n_keys: int = 150, heads: int = 4, kv_heads: int = 2
) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "q": torch.randn(2, heads, n_queries, 8, generator=g),
        "k": torch.randn(2, kv_heads, n_keys, 8, generator=g),
        "v": torch.randn(2, kv_heads, n_keys, 6, generator=g),
        "w_o": torch.randn(heads, 6, 20, generator=g),
        "scale": 8**-0.5,
        "row_scale": torch.rand(2, n_queries, generator=g) + 0.5,
        "residual": torch.randn(2, n_queries, 20, generator=g),
        "directions": torch.randn(2, n_queries, 20, generator=g),
    }


def exact(call: dict[str, Any], **more: Any) -> tuple[dict[str, Tensor], Tensor]:
    """The whole [query, key] results in float64, by the other formulation, and the weights."""
    lifted = {name: value.double() if isinstance(value, Tensor) else value for name, value in call.items()}
    result = attention_contributions(**lifted, **more, outputs=OUTPUTS, formulation="direct")
    # weights: contributions of one head at a time when every value writes the same unit vector
    heads, n_k = call["q"].shape[1], call["k"].shape[2]
    unit = lifted | {"v": torch.ones(2, 1, n_k, 1).double(), "w_o": torch.ones(heads, 1, 1).double()}
    unit |= {"k": lifted["k"].repeat_interleave(heads // lifted["k"].shape[1], dim=1)}
    unit["v"] = unit["v"].expand(2, heads, n_k, 1)
    for name in ("row_scale", "residual", "directions"):
        unit.pop(name)
    weights = attention_contributions(**unit, **more, outputs="head_contribution", formulation="direct")
    whole = {name: getattr(result, name) for name in OUTPUTS}
    whole["projection size"] = whole["head_contribution"].sum(dim=1) * lifted["directions"].norm(dim=-1)[..., None]
    return whole, weights.head_contribution


def close(got: Tensor | None, want: Tensor | None, tolerance: float = 1e-5) -> None:
    assert got is not None and want is not None
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance * 0.1, equal_nan=True)


def assert_top_keys(result: StreamResult, whole: dict[str, Tensor], weights: Tensor, top_k: int) -> None:
    """Index, contribution, weight, cancellation and projection of the top keys, -1 where nothing is written."""
    contribution = whole["contribution"]
    best, _ = contribution.topk(top_k, dim=-1)
    close(result.top_contribution, best)
    found = result.top_index >= 0
    assert torch.equal(found, best > 0)
    place = result.top_index.clamp_min(0)
    # ordered by value: equal values may change places, so what stands at the index is compared, not the index
    close(contribution.gather(2, place) * found, best)
    heads = weights.shape[1]
    per_head = weights.gather(3, place[:, None].expand(-1, heads, -1, -1)) * found[:, None]
    close(result.top_weight, per_head)
    close(result.top_cancellation, whole["cancellation"].gather(2, place).masked_fill(~found, torch.nan))
    # signed sums are as exact as the sizes that they are made of
    error = (result.top_projection - whole["projection"].gather(2, place) * found).abs()
    assert (error <= 2e-6 * whole["projection size"].gather(2, place)).all()
    ranked = result.top_index.sort(dim=-1).values
    assert not ((ranked[..., 1:] == ranked[..., :-1]) & (ranked[..., 1:] >= 0)).any(), "a key is named twice"


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 20},
    "window both ways": {"window": 9},
    "soft-cap and sinks": {"is_causal": True, "softcap": 3.0, "sinks": torch.tensor([0.0, 1.0, -2.0, 5.0])},
    "padding": {"mask": (torch.arange(150) < 100)[None, None, None, :], "is_causal": True},
    "global keys": {"mask": lambda own, key: (key < 3) | ((key > own - 8) & (key <= own))},
    "few keys": {"mask": (torch.arange(150) % 19 == 3)},
    "fully masked rows": {"mask": (torch.arange(150)[:, None] % 50 >= 34).expand(150, 150)},
    "bias": {"position_bias": lambda own, key: -0.1 * (own - key).abs(), "is_causal": True},
}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_stream_keeps_what_the_whole_shows(variant: str) -> None:
    call, more = random_call(1), VARIANTS[variant]
    whole, weights = exact(call, **more)
    rows = [0, 33, 149, -1]
    result = stream_contributions(**call, **more, top_k=10, rows=rows, columns=[0, 77, -1])
    assert_top_keys(result, whole, weights, 10)
    close(result.row_total, whole["contribution"].sum(dim=-1))
    close(result.own_weight, weights.diagonal(dim1=2, dim2=3))
    close(result.head_row_total, whole["head_contribution"].sum(dim=-1))
    assert result.columns == (0, 77, 149)
    close(result.column_contribution, whole["contribution"][:, :, [0, 77, 149]])
    close(result.column_weight, weights[:, :, :, [0, 77, 149]])
    for name in ("key_total", "head_total", "head_key_total", "entropy", "sink_mass"):
        close(getattr(result, name), whole[name])
    close(result.head_key_weight, weights.sum(dim=2))
    close(result.own_residual, whole["contribution_residual"].diagonal(dim1=1, dim2=2))
    assert result.rows == (0, 33, 149, 149)
    kept = torch.tensor(result.rows)
    close(result.row_contribution, whole["contribution"][:, kept])
    close(result.row_weight, weights[:, :, kept])
    close(result.row_cancellation, whole["cancellation"][:, kept])
    close(result.row_projection, whole["projection"][:, kept])


def test_queries_behind_a_cache_and_queries_without_an_own_key() -> None:
    for n_queries, n_keys in [(40, 130), (130, 40)]:
        call = random_call(2, n_queries, n_keys)
        whole, weights = exact(call, is_causal=True)
        result = stream_contributions(**call, is_causal=True, top_k=5)
        assert_top_keys(result, whole, weights, 5)
        own = torch.arange(n_queries) + n_keys - n_queries
        there = own >= 0
        assert result.own_residual is not None
        assert torch.equal(result.own_residual.isnan(), ~there.expand(2, -1))
        close(result.own_residual[:, there], whole["contribution_residual"][:, there, own[there]])


def test_optional_parts_are_absent_when_not_asked_for() -> None:
    call = random_call(3)
    for name in ("row_scale", "residual", "directions"):
        call.pop(name)
    result = stream_contributions(**call)
    assert result.top_projection is None and result.own_residual is None and result.row_projection is None
    assert result.top_index.shape == (2, 150, 16) and result.row_contribution.shape == (2, 0, 150)


def test_nearly_cancelling_pairs_are_repeated_here_too() -> None:
    call = random_call(4, kv_heads=4)
    for name in ("q", "k", "v"):
        call[name] = call[name][:, :1].expand(-1, 4, -1, -1).contiguous()
    call["w_o"] = call["w_o"][:1] * torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None, None] + 1e-3 * call["w_o"]
    whole, weights = exact(call, is_causal=True)
    result = stream_contributions(**call, is_causal=True, top_k=4)
    assert result.refined_pairs > 0
    assert_top_keys(result, whole, weights, 4)


class LargestTensor(TorchDispatchMode):
    """The size of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, Tensor):
                self.elements = max(self.elements, one.numel())
        return out


def largest(n: int, **more: Any) -> int:
    call = {
        name: value[:1, :, :n] if name in ("q", "k", "v") else value for name, value in random_call(5, n, n).items()
    }
    for name in ("row_scale", "residual", "directions"):
        call.pop(name)
    with LargestTensor() as seen:
        stream_contributions(**call, is_causal=True, **more)
    return seen.elements


def test_memory_is_linear_in_the_length() -> None:
    at_1024, at_2048, at_4096 = largest(1024), largest(2048), largest(4096)
    assert at_4096 < 4096 * 4096 / 8
    assert at_2048 <= 2.2 * at_1024 and at_4096 <= 2.2 * at_2048


def test_a_window_makes_the_blocks_narrow() -> None:
    # the largest tensor is then the kept top keys with their weights, not the scores
    narrow, wide = largest(2048, window=64, top_k=1), largest(2048, top_k=1)
    assert narrow < wide / 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 151}, "top_k is 151; expected 1 to 150, the number of keys"),
        ({"top_k": 0}, "top_k is 0; expected 1 to 150"),
        ({"rows": [150]}, "row 150 is outside the 150 queries"),
        ({"columns": [-151]}, "column -151 is outside the 150 keys"),
        ({"q": torch.randn(2, 4, 0, 8)}, "an axis is empty"),
        ({"directions": torch.randn(2, 150, 19)}, "directions has shape"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        stream_contributions(**(random_call(0) | change))


def test_nan_and_memory_are_refused() -> None:
    call = random_call(0)
    with pytest.raises(InsufficientMemoryError, match="Pass fewer queries at a time"):
        stream_contributions(**call, memory_limit=10_000)
    call["k"][1, 1, 5, 0] = torch.nan
    with pytest.raises(AttnDiagError, match=r"k of layer blocks\.3 holds NaN in kv head 1"):
        stream_contributions(**call, layer="blocks.3")

"""What the contribution kernels are measured against: shapes, contenders, the float64 reference. No command here.

Each contender computes ‖T_ij‖ for one causal attention call. `bytes_needed` predicts the peak of its working memory,
so that a benchmark can stop before the machine does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attndiag.core.fused import attention_contributions
from attndiag.core.streaming import stream_contributions


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention call."""

    name: str
    heads: int
    kv_heads: int
    d_head: int
    d_model: int


GPT2 = Shape("GPT-2 small", 12, 12, 64, 768)
SMOLLM2 = Shape("SmolLM2-135M", 9, 3, 64, 576)
LLAMA_8B = Shape("Llama-8B", 32, 8, 128, 4096)
LLAMA_70B = Shape("Llama-70B", 64, 8, 128, 8192)


@dataclass(frozen=True, eq=False)
class Call:
    """One causal call with random q, k, v and W_O, batch 1."""

    shape: Shape
    n: int
    q: Tensor
    k: Tensor
    v: Tensor
    w_o: Tensor

    @property
    def scale(self) -> float:
        return self.shape.d_head**-0.5

    def kernel_arguments(self) -> dict[str, Any]:
        return {"q": self.q, "k": self.k, "v": self.v, "w_o": self.w_o, "scale": self.scale, "is_causal": True}

    def expanded(self) -> tuple[Tensor, Tensor]:
        """k and v with one head for each query head."""
        group = self.shape.heads // self.shape.kv_heads
        return self.k.repeat_interleave(group, dim=1), self.v.repeat_interleave(group, dim=1)


def make_call(
    shape: Shape, n: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32, queries: int | None = None
) -> Call:
    """A reproducible random call."""
    g = torch.Generator().manual_seed(n)
    sizes = (
        (1, shape.heads, n if queries is None else queries, shape.d_head),
        (1, shape.kv_heads, n, shape.d_head),
        (1, shape.kv_heads, n, shape.d_head),
        (shape.heads, shape.d_head, shape.d_model),
    )
    q, k, v, w_o = (torch.randn(size, generator=g).to(device, dtype) for size in sizes)
    return Call(shape, n, q, k, v, w_o * shape.d_model**-0.5)


def pattern(call: Call, rows: slice = slice(None)) -> Tensor:
    """The causal softmax weights, [head, query, key], of some query rows."""
    k, _ = call.expanded()
    scores = call.scale * call.q[0, :, rows] @ k[0].mT
    own = torch.arange(call.n, device=k.device)[rows]
    return scores.masked_fill(torch.arange(call.n, device=k.device) > own[:, None], -torch.inf).softmax(dim=-1)


# ---------------------------------------------------------------- contenders: Call -> result


def sdpa(call: Call) -> Tensor:
    """Attention itself, fused, which gives no weight and no contribution."""
    group = call.shape.heads != call.shape.kv_heads
    return nn.functional.scaled_dot_product_attention(call.q, call.k, call.v, is_causal=True, enable_gqa=group)


def published_style(call: Call) -> Tensor:
    """Every weighted transformed vector of every head at once, [head, query, key, d_model], then the sum."""
    _, v = call.expanded()
    f = v[0] @ call.w_o
    weighted = pattern(call)[..., None] * f[:, None]
    return weighted.sum(dim=0).norm(dim=-1)


def einsum_style(call: Call) -> Tensor:
    """One contraction over heads to [query, key, d_model], then the norm."""
    _, v = call.expanded()
    return torch.einsum("hqk,hkd->qkd", pattern(call), v[0] @ call.w_o).norm(dim=-1)


def direct_in_blocks(call: Call, block_bytes: int = 2**26) -> Tensor:
    """The same contraction in blocks of queries, keys after the block left out: the best direct form in plain torch."""
    _, v = call.expanded()
    f = v[0] @ call.w_o
    size = max(1, block_bytes // (call.n * call.shape.d_model * call.q.element_size()))
    out = call.q.new_zeros(call.n, call.n)
    for start in range(0, call.n, size):
        stop = min(start + size, call.n)
        some = pattern(call, slice(start, stop))[..., :stop]
        out[start:stop, :stop] = torch.einsum("hqk,hkd->qkd", some, f[:, :stop]).norm(dim=-1)
    return out


def fused(call: Call, outputs: tuple[str, ...] = ("contribution",), **more: Any) -> Any:
    """The kernel of this project, everything included."""
    return attention_contributions(**call.kernel_arguments(), outputs=outputs, **more)


def streaming(call: Call, **more: Any) -> Any:
    """Top 16 of every query, totals and entropies, without a [query, key] tensor."""
    return stream_contributions(**call.kernel_arguments(), top_k=16, **more)


class Layer(nn.Module):
    """A whole pre-norm transformer layer of GPT-2 form around fused attention: what a model pays anyway."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, self.shape = shape.d_model, shape
        self.norm, self.norm_mlp = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        batch, n, d = x.shape
        parts = self.qkv(self.norm(x)).view(batch, n, 3, self.shape.heads, self.shape.d_head).permute(2, 0, 3, 1, 4)
        z = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(z.transpose(1, 2).reshape(batch, n, d))
        return x + self.down(nn.functional.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


def layer_forward(call: Call) -> Callable[[], Tensor]:
    """One forward of a layer of the call's width at the call's length."""
    layer = Layer(call.shape).to(call.q.device, call.q.dtype)
    x = torch.randn(1, call.n, call.shape.d_model, device=call.q.device, dtype=call.q.dtype)
    return lambda: layer(x)


def bytes_needed(contender: str, shape: Shape, n: int) -> float:
    """Predicted peak of the working memory in bytes (float32)."""
    heads, d = shape.heads, shape.d_model
    weights, vectors = heads * n * n, heads * n * d
    elements = {
        "published [H, n, n, d]": heads * n * n * d + n * n * d + weights + vectors,
        "einsum [n, n, d]": 1.1 * n * n * d + 3 * weights + vectors,
        "direct in query blocks": n * n + vectors + 2**24,
        "fused": n * n + n * heads * (heads + 1) + 3 * heads * n * 32 + 2**21,
        "streaming": n * (heads * (heads + 1) + 16 * (heads + 5) + 8 * heads) + 4 * heads * n * 32 + 2**21,
        "whole layer": 12 * n * d,
        "SDPA": 2 * n * d,
    }
    return 4.0 * elements[contender]


CONTENDERS: dict[str, Callable[[Call], Any]] = {
    "published [H, n, n, d]": published_style,
    "einsum [n, n, d]": einsum_style,
    "direct in query blocks": direct_in_blocks,
    "fused": fused,
    "streaming": streaming,
    "SDPA": sdpa,
}


def reference_rows(call: Call, rows: list[int]) -> tuple[Tensor, Tensor]:
    """Some rows of ‖T_ij‖ and of sum_h A‖f‖ in float64, straight from the definition, [row, key]."""
    exact = Call(call.shape, call.n, *(t.double() for t in (call.q, call.k, call.v, call.w_o)))
    _, v = exact.expanded()
    norms, bounds = torch.zeros(2, len(rows), call.n, dtype=torch.float64, device=call.q.device)
    weights = torch.cat([pattern(exact, slice(row, row + 1)) for row in rows], dim=1)
    step = max(1, 2**24 // (call.shape.heads * call.shape.d_model))
    for start in range(0, call.n, step):
        f = v[0][:, start : start + step] @ exact.w_o
        some = weights[:, :, start : start + step]
        norms[:, start : start + step] = torch.einsum("hqk,hkd->qkd", some, f).norm(dim=-1)
        bounds[:, start : start + step] = (some * f.norm(dim=-1)[:, None]).sum(dim=0)
    return norms, bounds

"""The fused kernel against a slow float64 replica written from the definitions, and against `core.contributions`.

Tolerances are those that the kernel promises: `contribution` to 1e-5 of the value where the cancellation ratio is at
least 1e-3, and to 1e-5 of sum_h A‖f‖ below; everything else to 1e-6 of the largest number of its row; for
signed sums that is the largest size of what is summed. One float32 rounding of a score of size s is 6e-8 s, so the
inputs keep |scores| below 10.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attndiag.core import contributions as readable
from attndiag.core import dispatch, gram
from attndiag.core.attention import attention_scores, softmax_rows
from attndiag.core.fused import OUTPUTS, FusedResult, attention_contributions
from attndiag.core.norms import LinearisedNorm, fold_output


def replica(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w_o: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    residual: Tensor | None = None,
    directions: Tensor | None = None,
    target_query: int = -1,
) -> dict[str, Tensor]:
    """Every output in float64, one sequence and one head at a time, vectors and all."""
    batch, heads, n_q, _ = q.shape
    n_k, d_model = k.shape[2], w_o.shape[2]
    group = heads // k.shape[1]
    own = torch.arange(n_q)[:, None] + (n_k - n_q)
    key = torch.arange(n_k)[None, :]
    legal = torch.ones(n_q, n_k, dtype=torch.bool)
    if is_causal:
        legal &= key <= own
    if window is not None:
        legal &= own - key < window
        if not is_causal:
            legal &= key - own < window
    if sinks is not None:
        sinks = (sinks[:, None] if sinks.ndim == 1 else sinks).double().expand(batch, heads, n_q)
    vectors = torch.zeros(batch, n_q, n_k, d_model, dtype=torch.float64)
    weights = torch.zeros(batch, heads, n_q, n_k, dtype=torch.float64)
    sink_mass = torch.zeros(batch, heads, n_q, dtype=torch.float64)
    sizes = torch.zeros(batch, heads, n_k, dtype=torch.float64)
    along = torch.zeros(batch, heads, n_k, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            s = scale * q[b, h].double() @ k[b, h // group].double().T
            if softcap is not None:
                s = softcap * torch.tanh(s / softcap)
            if position_bias is not None:
                s = s + position_bias.double().expand(batch, heads, n_q, n_k)[b, h]
            allowed = legal
            if mask is not None:
                one = mask.expand(batch, heads, n_q, n_k)[b, h]
                if mask.dtype == torch.bool:
                    allowed = allowed & one
                else:
                    forbidden = one < torch.finfo(one.dtype).min / 2
                    s, allowed = s + one.double().masked_fill(forbidden, 0.0), allowed & ~forbidden
            for i in range(n_q):
                row = s[i][allowed[i]]
                logits = [row] if sinks is None else [row, sinks[b, h, i : i + 1]]
                share = torch.softmax(torch.cat(logits), dim=0)
                weights[b, h, i, allowed[i]] = share[: len(row)]
                if sinks is not None:
                    sink_mass[b, h, i] = share[-1]
            f = v[b, h // group].double() @ w_o[h].double()
            sizes[b, h] = f.norm(dim=-1)
            vectors[b] += weights[b, h][:, :, None] * f[None]
            if directions is not None:
                along[b, h] = f @ directions.expand(batch, n_q, d_model)[b, target_query].double()
    size = torch.ones(batch, n_q, dtype=torch.float64) if row_scale is None else row_scale.double()
    vectors *= size[:, :, None, None]
    per_head = weights * sizes[:, :, None, :] * size[:, None, :, None].abs()
    norm = vectors.norm(dim=-1)
    mass = weights.sum(dim=-1)
    share = weights / mass[..., None]
    out = {
        "contribution": norm,
        "head_contribution": per_head,
        "cancellation": norm / per_head.sum(dim=1),
        "entropy": torch.special.entr(share).sum(dim=-1),
        "key_total": norm.sum(dim=1),
        "head_total": per_head.sum(dim=(2, 3)),
        "head_key_total": per_head.sum(dim=2),
        "sink_mass": sink_mass,
        "bound": per_head.sum(dim=1),
        "weights": weights,
    }
    if directions is not None:
        # what the signed sums are made of
        length = directions.double().expand(batch, n_q, d_model).norm(dim=-1)
        out["projection size"] = out["bound"] * length[..., None]
        out["target_attribution size"] = per_head[:, :, target_query] * length[:, None, target_query, None]
        out["projection"] = (vectors * directions.double()[..., None, :]).sum(dim=-1)
        out["target_attribution"] = weights[:, :, target_query] * along * size[:, target_query, None, None]
    if residual is not None:
        for i in range(n_q):
            if i + n_k - n_q >= 0:
                vectors[:, i, i + n_k - n_q] += residual[:, i].double()
        out["contribution_residual"] = out["contribution_norm"] = vectors.norm(dim=-1)
    return out


def assert_as_promised(result: FusedResult, expected: dict[str, Tensor], names: tuple[str, ...] = OUTPUTS) -> None:
    """Every output within the tolerance at the top of this file, nan where and only where expected."""
    for name in names:
        if name not in expected:
            continue
        got, want = getattr(result, name), expected[name]
        assert got is not None and got.shape == want.shape, name
        assert torch.equal(got.isnan(), want.isnan()), name
        error = (got.double() - want).abs()
        if name == "contribution":
            bound = expected["bound"]
            small = want < 1e-3 * bound
            allowed = 1e-5 * torch.where(small, bound, want)
        elif name == "cancellation":
            allowed = 1e-5 * torch.ones_like(want)
        elif name == "contribution_residual" or name == "contribution_norm":
            allowed = 1e-5 * torch.maximum(want, expected["contribution"])
        else:
            allowed = 1e-6 * expected.get(f"{name} size", want).nan_to_num(0.0).abs().amax(dim=-1, keepdim=True)
        # a float32 cannot hold less than this
        assert (error.nan_to_num(0.0) <= allowed.nan_to_num(0.0) + 1e-37).all(), (name, error.nan_to_num(0.0).max())


def random_call(
    seed: int,
    *,
    batch: int = 1,
    kv_heads: int = 2,
    group: int = 2,
    n_queries: int = 12,
    n_keys: int = 12,
    d_head: int = 8,
    d_value: int = 6,
    d_model: int = 20,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    heads = kv_heads * group

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    return {
        "q": draw(batch, heads, n_queries, d_head),
        "k": draw(batch, kv_heads, n_keys, d_head),
        "v": draw(batch, kv_heads, n_keys, d_value),
        "w_o": draw(heads, d_value, d_model),
        "scale": d_head**-0.5,
    }


def everything(seed: int, call: dict[str, Any]) -> dict[str, Any]:
    """Row scale, residual and directions that fit a call."""
    g = torch.Generator().manual_seed(seed + 1)
    batch, _, n_queries, _ = call["q"].shape
    d_model = call["w_o"].shape[2]
    return {
        "row_scale": torch.rand(batch, n_queries, generator=g) + 0.5,
        "residual": torch.randn(batch, n_queries, d_model, generator=g),
        "directions": torch.randn(batch, n_queries, d_model, generator=g),
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 5},
    "window both ways": {"window": 4},
    "soft-cap": {"softcap": 2.5},
    "sinks": {"is_causal": True, "sinks": torch.tensor([0.5, -1.0, 3.0, 9.0])},
    "sink per query": {"sinks": torch.linspace(-2, 2, 13)[None, None, :]},
    "padding": {"mask": (torch.arange(17) < 11)[None, None, None, :]},
    "finfo.min": {"mask": torch.where(torch.arange(17) % 3 == 0, torch.finfo(torch.float32).min, 0.7)},
    "-inf": {"mask": torch.where(torch.rand(13, 17) > 0.6, -torch.inf, 0.0)},
    "holes": {"mask": (torch.arange(17) % 5 == 1).expand(13, 17)},
    "fully masked rows": {"mask": (torch.arange(13)[:, None] % 4 != 2).expand(13, 17)},
    "nothing allowed": {"mask": torch.zeros(1, dtype=torch.bool), "sinks": torch.zeros(4)},
    "head masks": {"mask": torch.rand(1, 4, 13, 17) > 0.5},
    "bias": {"position_bias": torch.randn(1, 4, 13, 17), "is_causal": True},
}


@pytest.mark.parametrize("formulation", ["gram", "direct"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_output_on_every_kind_of_attention(variant: str, formulation: Any) -> None:
    call = random_call(3, batch=2, n_queries=13, n_keys=17)
    more = everything(3, call) | VARIANTS[variant]
    result = attention_contributions(**call, **more, outputs=OUTPUTS, formulation=formulation, target_query=9)
    assert_as_promised(result, replica(**call, **more, target_query=9))
    assert result.formulation == formulation


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    kv_heads=st.sampled_from([1, 2, 5]),
    group=st.sampled_from([1, 3, 8]),
    n_keys=st.integers(1, 130),
    queries=st.sampled_from(["same", "one", "fewer", "more"]),
    is_causal=st.booleans(),
    window=st.sampled_from([None, None, 1, 9]),
    softcap=st.sampled_from([None, None, 4.0]),
    with_sinks=st.booleans(),
    masked=st.sampled_from(["no", "padding", "pairs", "additive"]),
    layout=st.sampled_from(["plain", "transposed", "strided"]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]),
)
def test_random_calls(
    seed: int, kv_heads: int, group: int, n_keys: int, queries: str, is_causal: bool, window: int | None,
    softcap: float | None, with_sinks: bool, masked: str, layout: str, dtype: torch.dtype,
) -> None:  # fmt: skip
    n_queries = {"same": n_keys, "one": 1, "fewer": max(1, n_keys // 2), "more": n_keys + 3}[queries]
    batch = 1 + seed % 2
    call = random_call(
        seed, batch=batch, kv_heads=kv_heads, group=group, n_queries=n_queries, n_keys=n_keys, dtype=dtype
    )
    for name in ("q", "k", "v"):
        if layout == "transposed":
            call[name] = call[name].transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "strided":
            call[name] = torch.stack([call[name], call[name] + 1], dim=-1)[..., 0]
    g = torch.Generator().manual_seed(seed)
    more = everything(seed, call)
    if with_sinks:
        more["sinks"] = torch.randn(kv_heads * group, generator=g)
    if masked == "padding":
        more["mask"] = (torch.arange(n_keys) >= n_keys // 3)[None, None, None, :]
    elif masked == "pairs":
        more["mask"] = torch.rand(n_queries, n_keys, generator=g) > 0.5
    elif masked == "additive":
        forbidden = torch.rand(batch, 1, n_queries, n_keys, generator=g) > 0.8
        more["mask"] = torch.zeros(forbidden.shape).masked_fill(forbidden, torch.finfo(torch.float32).min)
    more |= {"is_causal": is_causal, "window": window, "softcap": softcap}
    assert_as_promised(attention_contributions(**call, **more, outputs=OUTPUTS), replica(**call, **more))


@pytest.mark.parametrize(
    ("kv_heads", "group", "n", "d_model"),
    [(1, 1, 700, 16), (1, 3, 700, 8), (40, 1, 60, 48), (5, 8, 300, 24), (12, 1, 257, 96)],
)
def test_many_heads_and_long_rows(kv_heads: int, group: int, n: int, d_model: int) -> None:
    call = random_call(5, kv_heads=kv_heads, group=group, n_queries=n, n_keys=n, d_model=d_model)
    result = attention_contributions(**call, is_causal=True, outputs=("contribution", "entropy", "key_total"))
    assert result.formulation == "gram"
    scores = attention_scores(call["q"].double(), call["k"].double(), scale=call["scale"])
    scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    pattern, _ = softmax_rows(scores)
    v, w_o = call["v"].double(), call["w_o"].double()
    expected = {
        "contribution": readable.contribution(pattern, v, w_o),
        "bound": readable.head_contribution(pattern, v, w_o).sum(dim=1),
        "entropy": torch.special.entr(pattern).sum(dim=-1),
    }
    expected["key_total"] = expected["contribution"].sum(dim=1)
    assert_as_promised(result, expected)


def test_the_readable_definitions_agree_with_a_norm_folded_in() -> None:
    call = {name: value.double() if name != "scale" else value for name, value in random_call(8).items()}
    batch, _, n, _ = call["q"].shape
    d_model = call["w_o"].shape[2]
    x, gain = torch.randn(batch, n, d_model, dtype=torch.float64), torch.rand(d_model, dtype=torch.float64) + 0.5
    norm = LinearisedNorm.at(x, gain=gain, eps=1e-5)
    folded = fold_output(call["w_o"], resid_pre=x, norm=norm)
    fold = {"row_scale": folded.row_scale, "residual": folded.residual}
    scores = attention_scores(call["q"], call["k"], scale=call["scale"])
    pattern, _ = softmax_rows(scores)
    out = readable.attention_output(pattern, call["v"], folded.w_o, row_scale=folded.row_scale)
    unit = out / out.norm(dim=-1, keepdim=True)
    target = torch.randn(d_model, dtype=torch.float64)
    given = call | {"w_o": folded.w_o}
    result = attention_contributions(
        **given, **fold, directions=unit, outputs=("contribution", "contribution_norm", "projection", "cancellation")
    )
    row = attention_contributions(
        **given, **fold, directions=target, outputs="target_attribution", target_query=4
    ).target_attribution
    args = (pattern, call["v"], folded.w_o)
    for got, want in [
        (result.contribution, readable.contribution(*args, row_scale=folded.row_scale)),
        (result.contribution_norm, readable.contribution(*args, **fold)),
        (result.projection, readable.projection(*args, row_scale=folded.row_scale)[0]),
        (result.cancellation, readable.cancellation(*args)),
        (row, readable.target_attribution(*args, target, 4, row_scale=folded.row_scale)),
    ]:
        assert got is not None
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def cancelling_call(spread: float, n: int = 48, heads: int = 8) -> dict[str, Any]:
    """Heads in pairs that write opposite vectors with equal weights, up to `spread`."""
    g = torch.Generator().manual_seed(0)

    def same(*shape: int) -> Tensor:
        return torch.randn(1, 1, *shape, generator=g).expand(1, heads, *shape).contiguous()

    q, k, v = 3 * same(n, 16), same(n, 16), same(n, 16)
    signs = torch.tensor([1.0, -1.0] * (heads // 2))[:, None, None]
    w_o = torch.randn(1, 16, 64, generator=g) * signs + spread * torch.randn(heads, 16, 64, generator=g)
    return {"q": q + spread * torch.randn(q.shape, generator=g), "k": k, "v": v, "w_o": w_o, "scale": 0.25}


@pytest.mark.parametrize("formulation", ["gram", "direct"])
@pytest.mark.parametrize("spread", [1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8])
def test_heads_that_nearly_cancel(spread: float, formulation: Any) -> None:
    call = cancelling_call(spread)
    names = ("contribution", "cancellation")
    result = attention_contributions(**call, is_causal=True, outputs=names, formulation=formulation)
    expected = replica(**call, is_causal=True)
    seen = expected["cancellation"].nan_to_num(1.0).min()
    assert spread / 10 < seen < 3 * spread, "the stress test does not stress"
    # 1e-5 of the value in the ratio would be 1e-5 c; the promise for it is absolute
    assert_as_promised(result, expected, names)
    assert (result.refined_pairs > 0) == (spread <= 0.1)


def test_without_the_repetition_in_float64_the_promise_would_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attndiag.core.refine.CancellationGuard.repair", lambda *_: None)
    call = cancelling_call(1e-2)
    result = attention_contributions(**call, is_causal=True, formulation="gram")
    with pytest.raises(AssertionError, match="contribution"):
        assert_as_promised(result, replica(**call, is_causal=True), ("contribution",))


@pytest.mark.parametrize("coarse", [False, True])
def test_parallel_and_silent_heads_factor_too(coarse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram, "COARSE_HEADS", 1 if coarse else 99)
    call = random_call(2, kv_heads=1, group=6, n_queries=40, n_keys=40, d_model=300)
    call["w_o"][1] = call["w_o"][0]
    call["w_o"][2] = -2 * call["w_o"][0]
    call["w_o"][3] = 0
    call["v"][:, :, 5] = 0
    result = attention_contributions(**call, outputs=("contribution", "cancellation"), formulation="gram")
    expected = replica(**call)
    assert_as_promised(result, expected, ("contribution", "cancellation"))
    assert result.contribution is not None and (result.contribution[:, :, 5] == 0).all()


def test_more_heads_than_dimensions_need_the_eigenvalue_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram, "LIFTS", (0.0,))
    call = random_call(4, kv_heads=1, group=9, n_queries=30, n_keys=30, d_model=3)
    result = attention_contributions(**call, formulation="gram")
    assert_as_promised(result, replica(**call), ("contribution",))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    call = random_call(6, n_queries=64, n_keys=64, dtype=dtype)
    result = attention_contributions(**call, is_causal=True, outputs=("contribution", "head_contribution"))
    assert result.contribution is not None and result.contribution.dtype == torch.float32
    assert_as_promised(result, replica(**call, is_causal=True), ("contribution", "head_contribution"))


def test_autocast_and_reduced_precision_products_do_not_reach_the_kernel() -> None:
    call = random_call(7, n_queries=64, n_keys=64)
    plain = attention_contributions(**call).contribution
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = attention_contributions(**call).contribution
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert plain is not None and inside is not None and torch.equal(plain, inside)


def test_inputs_that_require_grad_are_detached_and_nothing_is_changed() -> None:
    call = random_call(9)
    before = {name: value.clone() for name, value in call.items() if isinstance(value, Tensor)}
    for name in before:
        call[name].requires_grad_(True)
    more = {"mask": torch.randn(12, 12), "position_bias": torch.randn(1, 4, 12, 12), "sinks": torch.randn(4)}
    more["mask"][:, 3] = torch.finfo(torch.float32).min
    more |= everything(9, call)
    call |= more
    before |= {name: value.clone() for name, value in more.items()}
    result = attention_contributions(**call, is_causal=True, softcap=3.0, outputs=OUTPUTS)
    assert result.contribution is not None and not result.contribution.requires_grad
    for name, value in before.items():
        assert torch.equal(call[name], value) and call[name].grad is None


def test_callables_stand_for_masks_and_biases() -> None:
    call = random_call(10, n_queries=9, n_keys=14)
    own, key = torch.arange(9)[:, None] + 5, torch.arange(14)[None, :]
    slopes = torch.tensor([1.0, 0.5, 0.25, 0.125])
    as_tensors = attention_contributions(
        **call, mask=(own - key) % 3 != 1, position_bias=-slopes[:, None, None] * (own - key).abs()
    )
    as_functions = attention_contributions(
        **call,
        mask=lambda own, key: (own - key) % 3 != 1,
        position_bias=lambda own, key: -slopes[:, None, None] * (own - key).abs(),
    )
    assert as_tensors.contribution is not None and as_functions.contribution is not None
    assert torch.equal(as_tensors.contribution, as_functions.contribution)


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


def test_no_tensor_exceeds_the_result() -> None:
    n, heads, d_model = 400, 4, 64
    call = random_call(11, kv_heads=heads, group=1, n_queries=n, n_keys=n, d_model=d_model)
    with LargestTensor() as seen:
        attention_contributions(**call, is_causal=True)
    assert n * n <= seen.elements <= heads * n * dispatch.MAX_QUERIES < heads * n * n


def test_the_compiled_body_is_the_eager_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    from attndiag.core import engine

    # the body that torch.compile gets, run as it stands
    monkeypatch.setattr(engine, "_compiled_body", engine.block_body)
    for variant in VARIANTS.values():
        call = random_call(3, batch=2, n_queries=13, n_keys=17)
        more = everything(3, call) | variant
        result = attention_contributions(**call, **more, outputs=OUTPUTS, compile=True, formulation="gram")
        assert result.compiled
        assert_as_promised(result, replica(**call, **more))

"""What the kernels refuse, how they choose, and what torch.compile makes of them."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from attndiag.core import dispatch
from attndiag.core.fused import attention_contributions
from attndiag.core.problem import attention_problem
from attndiag.errors import AttnDiagError, InsufficientMemoryError, ShapeError


def random_call(
    seed: int, *, n: int = 12, queries: int | None = None, heads: int = 4, d_model: int = 20
) -> dict[str, Any]:
    """Two query heads on each key/value head, unless there is one head only."""
    g = torch.Generator().manual_seed(seed)
    return {
        "q": torch.randn(1, heads, n if queries is None else queries, 8, generator=g),
        "k": torch.randn(1, max(1, heads // 2), n, 8, generator=g),
        "v": torch.randn(1, max(1, heads // 2), n, 6, generator=g),
        "w_o": torch.randn(heads, 6, d_model, generator=g),
        "scale": 8**-0.5,
    }


def test_few_queries_are_direct_and_many_are_gram() -> None:
    for queries, heads, expected in [(1, 12, "direct"), (10, 8, "direct"), (30, 12, "gram"), (30, 32, "gram")]:
        problem = attention_problem(**random_call(0, n=300, queries=queries, heads=heads))
        assert dispatch.choose_formulation(problem) == expected


def test_a_function_that_returns_the_wrong_shape_is_named() -> None:
    with pytest.raises(
        ShapeError, match=r"function returned shape \(5,\) for 12 queries and 12 keys; expected \(4, 12"
    ):
        attention_contributions(**random_call(0), position_bias=lambda *_: torch.zeros(5))


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.randn(1, 2, 12, 7)}, "d_head of q is 8 but d_head of k is 7"),
        ({"v": torch.randn(1, 2, 11, 6)}, "key_pos of k is 12 but key_pos of v is 11"),
        ({"w_o": torch.randn(3, 6, 20)}, "heads of q is 4 but the number of heads of w_o is 3"),
        ({"w_o": torch.randn(4, 5, 20)}, "d_value of v is 6 but d_value of w_o is 5"),
        ({"q": torch.randn(1, 3, 12, 8), "w_o": torch.randn(3, 6, 20)}, "3 query heads cannot share 2"),
        ({"q": torch.randn(1, 4, 0, 8)}, r"q has shape \(1, 4, 0, 8\): an axis is empty"),
        ({"q": torch.randn(4, 12, 8)}, r"q has shape \(4, 12, 8\); expected 4 axes"),
        ({"q": torch.ones(1, 4, 12, 8, dtype=torch.int64)}, "expected a floating-point tensor"),
        ({"mask": torch.ones(5, 12, dtype=torch.bool)}, r"mask has shape \(5, 12\), which does not broadcast"),
        ({"mask": torch.ones(12, 12, dtype=torch.int64)}, "0/1 integer mask is ambiguous"),
        ({"sinks": torch.zeros(3)}, r"sinks has shape \(1, 3, 1\), which does not broadcast"),
        ({"row_scale": torch.ones(12)}, r"row_scale has shape \(12,\); expected 2 axes"),
        ({"residual": torch.ones(1, 12, 19), "outputs": "contribution_residual"}, r"residual has shape \(1, 12, 19\)"),
        ({"directions": torch.ones(19), "outputs": "projection"}, r"directions has shape \(19,\)"),
        ({"directions": torch.ones(20), "outputs": "target_attribution", "target_query": 12}, "outside the 12 queries"),
    ],
)
def test_shapes_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        attention_contributions(**(random_call(0) | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outputs": ("contributions",)}, "unknown output 'contributions'; expected some of head_contribution"),
        ({"outputs": ()}, "outputs is empty"),
        ({"outputs": "contribution_norm"}, "contribution_norm needs residual="),
        ({"outputs": "projection"}, "projection needs directions="),
        ({"softcap": 0.0}, "softcap is 0.0; expected a positive number"),
        ({"window": 0}, "window is 0; expected at least 1"),
    ],
)
def test_arguments_out_of_range(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_contributions(**(random_call(0) | change))


def test_nan_is_reported_with_layer_and_head_and_not_spread() -> None:
    call = random_call(0)
    call["q"][0, 1, 3, 0] = torch.nan
    call["q"][0, 3, 2, 0] = torch.inf
    with pytest.raises(AttnDiagError, match="q of layer 7 holds NaN in heads 1, 3"):
        attention_contributions(**call, layer=7)
    call = random_call(0)
    call["k"][0, 1, 3, 0] = torch.inf
    with pytest.raises(AttnDiagError, match="k holds infinite values in kv head 1"):
        attention_contributions(**call)


def test_a_sum_that_overflows_is_not_mistaken_for_bad_input() -> None:
    call = random_call(0, d_model=4)
    call["v"] = torch.full_like(call["v"], 3e38 / 32)
    call["w_o"] = call["w_o"] * 1e-30
    assert not torch.isfinite(call["v"].sum())
    assert attention_contributions(**call).contribution is not None


def test_mixed_devices() -> None:
    call = random_call(0)
    call["k"] = call["k"].to("meta")
    with pytest.raises(AttnDiagError, match="q is on cpu but k on meta; move all of them"):
        attention_contributions(**call)


def test_memory_is_estimated_first() -> None:
    call = random_call(0, n=200)
    attention_contributions(**call, memory_limit=10**7)
    with pytest.raises(InsufficientMemoryError, match=r"available\. Stream it: stream_contributions\(\)"):
        attention_contributions(**call, memory_limit=10**5)
    with pytest.raises(InsufficientMemoryError, match="Leave out head_contribution"):
        attention_contributions(**call, outputs="head_contribution", memory_limit=10**5)
    free = dispatch.available_bytes(torch.device("cpu"))
    assert free is not None and free > 10**6
    with pytest.raises(InsufficientMemoryError, match="are available"):
        dispatch.require_memory(2 * free, None, torch.device("cpu"), "")


# ---------------------------------------------------------------- torch.compile


def run_python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False, env=os.environ | env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_auto_stays_eager_on_a_cpu() -> None:
    assert not attention_contributions(**random_call(0, n=64)).compiled


COMPILED = """
import torch, warnings
from torch._dynamo.utils import counters
from attndiag.core.fused import attention_contributions
torch.set_num_threads(1)
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    for n in LENGTHS:
        torch.manual_seed(n)
        q, k, v = torch.randn(1, 4, n, 16), torch.randn(1, 2, n, 16), torch.randn(1, 2, n, 16)
        w_o = torch.randn(4, 16, 32)
        call = dict(scale=.25, is_causal=True, outputs=("contribution", "entropy"), formulation="gram")
        a = attention_contributions(q, k, v, w_o, compile=True, **call)
        b = attention_contributions(q, k, v, w_o, compile=False, **call)
        assert a.compiled and not b.compiled
        torch.testing.assert_close(a.contribution, b.contribution, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(a.entropy, b.entropy, rtol=1e-5, atol=1e-6)
print(counters["stats"]["unique_graphs"], sum("torch.compile does not work" in str(w.message) for w in caught))
"""


@pytest.mark.slow
def test_seven_lengths_share_at_most_two_graphs() -> None:
    graphs, warned = run_python(COMPILED.replace("LENGTHS", "(64, 128, 200, 512, 777, 1024, 2048)")).split()
    assert 1 <= int(graphs) <= 2
    assert warned == "0"


@pytest.mark.slow
def test_without_a_compiler_one_warning_and_the_same_numbers(tmp_path: Any) -> None:
    code = COMPILED.replace("LENGTHS", "(64, 100)")
    _, warned = run_python(code, CXX="/no/such/compiler", TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).split()
    assert warned == "1"


def test_the_warning_about_a_missing_compiler_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def failing(_function: Any) -> Any:
        def call(*_arguments: Any) -> Any:
            raise InvalidCxxCompiler

        return call

    monkeypatch.setattr(dispatch, "_compiled", failing)
    monkeypatch.setattr(dispatch, "_broken_compiler", [])
    double = dispatch.compiled_or_eager(lambda x: 2 * x)
    with pytest.warns(dispatch.CompilerMissingWarning, match="continuing in eager mode with the same numbers"):
        assert double(3) == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert double(4) == 8

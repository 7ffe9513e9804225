"""Builds, checks and times the contribution kernels on a CUDA device, in one call of under six minutes.

    python scripts/gpu_check.py                 # on a CUDA machine; prints one table of each kind
    python scripts/gpu_check.py --device cpu    # the same code on small sizes, to see that it runs

1. Correctness: rows of `contribution` against float64 for GPT-2, Llama-8B and Llama-70B attention shapes, float32 and
   bfloat16 inputs, eager and compiled; streaming against the whole. In units of the promise (1e-5 of the value).
2. Graphs that torch.compile makes over seven lengths.
3. Times at n = 1k, 4k, 8k, and streaming at 32k, against SDPA forward and two floors: bytes that must be written over
   the measured bandwidth, and multiplications that must be done over the measured float32 rate.
4. Where the time goes: preparation, scores, softmax, norms; and what other block sizes would give.

Nothing new starts after `--seconds`; what was not reached is listed. Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from kernel_contenders import GPT2, LLAMA_8B, LLAMA_70B, Call, Shape, fused, make_call, reference_rows, streaming
from torch import Tensor

from attndiag.core import blocks, dispatch, gram
from attndiag.core.problem import attention_problem
from attndiag.errors import InsufficientMemoryError

SHAPES = (GPT2, LLAMA_8B, LLAMA_70B)
LENGTHS, STREAM_LENGTH = (1024, 4096, 8192), 32768
SMALL = (Shape("small", 4, 2, 16, 64), Shape("many heads", 24, 8, 16, 128))
SMALL_LENGTHS, SMALL_STREAM = (128, 200), 512
GRAPH_LENGTHS = (64, 128, 200, 512, 777, 1024, 2048)


class Clock:
    """Seconds since the start, and the point after which nothing new begins."""

    def __init__(self, limit: float) -> None:
        self.start, self.limit, self.missed = time.perf_counter(), limit, []

    def reached(self, what: str) -> bool:
        """Whether there is time for `what`; remembers it where there is not."""
        if time.perf_counter() - self.start < self.limit:
            return True
        self.missed.append(what)
        return False


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(function: Callable[[], Any], device: str, rounds: int = 5) -> float:
    """Median wall seconds of a call, device work included, after one call to warm up."""
    function()
    times = []
    for _ in range(rounds):
        synchronise(device)
        start = time.perf_counter()
        function()
        synchronise(device)
        times.append(time.perf_counter() - start)
        if times[-1] > 3:
            break
    return statistics.median(times)


def worst_error(got: Tensor, exact: Tensor, bound: Tensor) -> float:
    """Largest error in units of the promise."""
    allowed = torch.where(exact < 1e-3 * bound, bound, exact) * 1e-5
    return float(((got.double() - exact).abs() / allowed.clamp_min(1e-37)).max())


def check_numbers(shapes: tuple[Shape, ...], n: int, device: str, clock: Clock) -> int:
    """Part 1; returns the number of failures."""
    failed = 0
    print(
        "\n| shape | inputs | n | eager | compiled | streaming rows | repeated pairs |\n|---|---|---|---|---|---|---|"
    )
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            if not clock.reached(f"check {shape.name} {dtype}"):
                continue
            call = make_call(shape, n, device=device, dtype=dtype)
            rows = [0, 1, n // 3, n - 2, n - 1]
            exact, bound = reference_rows(call, rows)
            eager, compiled = fused(call, compile=False), fused(call, compile=True)
            stream = streaming(call, rows=rows)
            errors = [
                worst_error(got, exact, bound)
                for got in (eager.contribution[0, rows], compiled.contribution[0, rows], stream.row_contribution[0])
            ]
            failed += sum(error > 1 for error in errors)
            cells = " | ".join(f"{error:.2f}{'' if error <= 1 else ' FAIL'}" for error in errors)
            print(f"| {shape.name} | {str(dtype)[6:]} | {n} | {cells} | {eager.refined_pairs} |", flush=True)
    return failed


def check_graphs(shape: Shape, device: str, clock: Clock) -> int:
    """Part 2; returns the number of failures."""
    from torch._dynamo.utils import counters

    if not clock.reached("graphs"):
        return 0
    torch._dynamo.reset()
    counters.clear()
    start = time.perf_counter()
    for n in GRAPH_LENGTHS:
        fused(make_call(shape, n, device=device), compile=True, formulation="gram")
    graphs = counters["stats"]["unique_graphs"]
    verdict = "PASS" if 1 <= graphs <= 2 else "FAIL: expected 1 or 2"
    print(f"\ngraphs over {len(GRAPH_LENGTHS)} lengths: {graphs} ({time.perf_counter() - start:.0f} s) {verdict}")
    return int(verdict != "PASS")


def rates(device: str) -> tuple[float, float]:
    """Measured bytes a second of a copy, and float32 multiplications a second of a matrix product."""
    size = 2**28 if device == "cuda" else 2**22
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * size / seconds(lambda: target.copy_(source), device)
    side = 8192 if device == "cuda" else 512
    square = torch.randn(side, side, device=device)
    return bandwidth, side**3 / seconds(lambda: square @ square, device)


def floors(shape: Shape, n: int, bandwidth: float, rate: float) -> tuple[float, float]:
    """(seconds to write the result, seconds to multiply) of `contribution`, causal."""
    heads, pairs = shape.heads, n * n / 2
    work = pairs * (heads * shape.d_head + heads * (heads + 1) / 2)
    work += n * heads * shape.d_model * (shape.d_head + heads)
    return 4 * n * n / bandwidth, work / rate


def time_all(
    shapes: tuple[Shape, ...], lengths: tuple[int, ...], stream_length: int, device: str, clock: Clock
) -> None:
    """Part 3."""
    bandwidth, rate = rates(device)
    print(f"\nmeasured {bandwidth / 1e9:.0f} GB/s, {rate / 1e12:.2f} T float32 multiply-adds a second")
    print("\n| shape | inputs | n | what | ms | SDPA ms | ratio | bytes floor ms | arithmetic floor ms | peak MB |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            for n in (*lengths, stream_length):
                names = ("streaming",) if n == stream_length else ("fused", "compiled", "projection", "streaming")
                for name in names:
                    if clock.reached(f"time {shape.name} {dtype} {n} {name}"):
                        print(time_one(shape, n, dtype, name, device, floors(shape, n, bandwidth, rate)), flush=True)


def time_one(shape: Shape, n: int, dtype: torch.dtype, name: str, device: str, floor: tuple[float, float]) -> str:
    """One line of the table of times."""
    call = make_call(shape, n, device=device, dtype=dtype)
    k, v = call.expanded()  # not every fused backend of SDPA takes grouped heads
    wide = Call(shape, n, call.q, k, v, call.w_o)
    directions = torch.nn.functional.normalize(torch.randn(1, n, shape.d_model, device=device), dim=-1)
    runs: dict[str, Callable[[], Any]] = {
        "fused": lambda: fused(call, compile=False),
        "compiled": lambda: fused(call, compile=True),
        "projection": lambda: fused(call, ("projection",), directions=directions),
        "streaming": lambda: streaming(call),
    }
    plain = seconds(lambda: torch.nn.functional.scaled_dot_product_attention(wide.q, k, v, is_causal=True), device)
    head = f"| {shape.name} | {str(dtype)[6:]} | {n} | {name} |"
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated() if device == "cuda" else 0
    try:
        spent = seconds(runs[name], device)
    except (InsufficientMemoryError, torch.OutOfMemoryError) as error:
        return f"{head} {type(error).__name__} | {1e3 * plain:.2f} | | | | |"
    peak = f"{(torch.cuda.max_memory_allocated() - base) / 1e6:.0f}" if device == "cuda" else "-"
    timed = f"{1e3 * spent:.2f} | {1e3 * plain:.2f} | {spent / plain:.1f}"
    return f"{head} {timed} | {1e3 * floor[0]:.2f} | {1e3 * floor[1]:.2f} | {peak} |"


def where_time_goes(shapes: tuple[Shape, ...], n: int, device: str, clock: Clock) -> None:
    """Part 4: the parts of one pass apart, then other block sizes."""
    print("\n| shape | n | preparation ms | scores ms | softmax ms | norms ms |\n|---|---|---|---|---|---|")
    for shape in shapes:
        if not clock.reached(f"parts {shape.name}"):
            continue
        call = make_call(shape, n, device=device)
        problem = attention_problem(**call.kernel_arguments())
        size = dispatch.block_queries(problem)
        queries, keys, count = slice(n - min(size, n), n), slice(0, n), math.ceil(n / size)
        factors = gram.key_factors(problem, 0)
        scores = blocks.raw_scores(problem, 0, queries, keys)
        block = blocks.pattern_block(problem, 0, queries, keys)
        copy = torch.empty_like(scores)
        fill = seconds(lambda one=copy, other=scores: one.copy_(other), device)
        parts = [
            seconds(lambda p=problem: gram.key_factors(p, 0), device),
            count / 2 * seconds(lambda p=problem, a=queries, b=keys: blocks.raw_scores(p, 0, a, b), device),
            count / 2 * (seconds(lambda a=copy, b=scores: blocks.softmax_over_keys(a.copy_(b), None), device) - fill),
            count / 2 * seconds(lambda a=block, b=factors: gram.contribution_from_factors(a, b), device),
        ]
        print(f"| {shape.name} | {n} | " + " | ".join(f"{1e3 * part:.2f}" for part in parts) + " |", flush=True)
    if device != "cuda":
        return
    print("\n| shape | n | MB of scores a block: ms |\n|---|---|---|")
    usual = dispatch.GPU_BLOCK_BYTES
    try:
        for shape in shapes:
            if not clock.reached(f"block sizes {shape.name}"):
                continue
            call, cells = make_call(shape, n, device=device), []
            for size in (2**25, 2**27, 2**28, 2**29, 2**30):
                dispatch.GPU_BLOCK_BYTES = size
                spent = seconds(lambda one=call: fused(one, compile=False), device, 3)
                cells.append(f"{size // 2**20}: {1e3 * spent:.2f}")
            print(f"| {shape.name} | {n} | {', '.join(cells)} |", flush=True)
    finally:
        dispatch.GPU_BLOCK_BYTES = usual


def main() -> None:
    """Parse, run the four parts, say what was not reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=270.0, help="nothing new starts after this")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device here. `--device cpu` runs the same code on small sizes.")
        sys.exit(0)
    clock, cuda = Clock(options.seconds), options.device == "cuda"
    name = torch.cuda.get_device_name() if cuda else "CPU, small sizes: the numbers say nothing about a GPU"
    print(f"torch {torch.__version__}, {name}")
    shapes, lengths, stream = (SHAPES, LENGTHS, STREAM_LENGTH) if cuda else (SMALL, SMALL_LENGTHS, SMALL_STREAM)
    with torch.no_grad():
        failed = check_numbers(shapes, lengths[0], options.device, clock)
        failed += check_graphs(shapes[0], options.device, clock)
        time_all(shapes, lengths, stream, options.device, clock)
        where_time_goes(shapes, lengths[-1], options.device, clock)
    print(f"\n{time.perf_counter() - clock.start:.0f} s, {failed} failed")
    if clock.missed:
        print("not reached: " + "; ".join(clock.missed))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

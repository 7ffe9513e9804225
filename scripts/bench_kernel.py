"""The contribution kernels against everything that they replace: one row a target, with PASS or the shortfall.

    python scripts/bench_kernel.py                     # every row, a few minutes on an idle machine
    python scripts/bench_kernel.py --rows layer streaming
    python scripts/bench_kernel.py --figure docs/figures/kernel.png

Times are process CPU seconds on one thread. The contenders of a row take turns, round by round, so that a busy machine
hits all of them alike, and a row compares medians of the ratios of one round. Memory is the growth of the peak resident
set in a fresh process, its inputs and the loaded libraries not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_replacement import measured, small_gpt2
from kernel_contenders import (
    CONTENDERS,
    GPT2,
    LLAMA_8B,
    SMOLLM2,
    Call,
    Shape,
    bytes_needed,
    direct_in_blocks,
    einsum_style,
    fused,
    layer_forward,
    make_call,
    published_style,
    reference_rows,
    sdpa,
    streaming,
)

import attndiag
from attndiag.core.dispatch import available_bytes

SHAPES = {shape.name: shape for shape in (GPT2, SMOLLM2, LLAMA_8B)}
STOP_AT = 0.6  # of the machine's memory


@dataclass(frozen=True)
class Row:
    """One measured line: what, the number, the bound that it must keep."""

    what: str
    measured: float
    bound: float
    at_least: bool
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def line(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "PASS" if self.passed else f"short: {self.measured / self.bound:.2f} of the bound"
        return f"| {self.what} | {sign} {self.bound:g} | {self.measured:.3g} | {verdict} | {self.note} |"


# ---------------------------------------------------------------- measuring


def cpu_seconds(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def take_turns(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each function, round by round, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(cpu_seconds(function))
    return times


def ratio(times: dict[str, list[float]], above: str, below: str) -> float:
    """Median over the rounds of one contender's time over another's in the same round."""
    return statistics.median(a / b for a, b in zip(times[above], times[below], strict=True))


def milliseconds(times: dict[str, list[float]]) -> str:
    return ", ".join(f"{name} {1e3 * statistics.median(one):.1f} ms" for name, one in times.items())


def probe(contender: str, shape: Shape, n: int, *, rounds: int = 1) -> dict[str, float]:
    """Seconds and peak bytes of one contender in a fresh process."""
    command = [sys.executable, __file__, "--probe", contender, "--shape", shape.name, "--n", str(n)]
    command += ["--rounds", str(rounds)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode != 0:
        raise RuntimeError(f"{contender} at n = {n} failed: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def probed(contender: str, shape: Shape, n: int, rounds: int) -> dict[str, float]:
    """What the fresh process does: load everything at a small size, then run once for memory, then for time."""
    run = contender_function(contender)
    run(make_call(shape, 64))()
    call = make_call(shape, n)
    function = run(call)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: start a new peak
    before = resident("VmRSS")
    times = [cpu_seconds(function)]
    peak = resident("VmHWM")
    times += [cpu_seconds(function) for _ in range(rounds - 1)]
    return {"seconds": statistics.median(times), "bytes": max(peak - before, 4096)}


def resident(field: str) -> int:
    """Bytes of this process, now (`VmRSS`) or at the most (`VmHWM`)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field + ":"))


def contender_function(contender: str) -> Callable[[Call], Callable[[], Any]]:
    if contender == "whole layer":
        return layer_forward
    return lambda call: lambda: CONTENDERS[contender](call)


# ---------------------------------------------------------------- the rows


def against_einsum(rounds: int) -> Iterator[Row]:
    """`contribution` against einsum to [n, n, d]."""
    for n, bound in ((512, 20.0), (1024, 35.0)):
        call = make_call(GPT2, n)
        pair = {"fused": lambda c=call: fused(c), "einsum": lambda c=call: einsum_style(c)}
        times = take_turns(pair, min(rounds, 3))
        what = f"contribution, einsum / fused, n = {n}"
        yield Row(what, ratio(times, "einsum", "fused"), bound, True, milliseconds(times))
    ours, theirs = (probe(name, GPT2, 1024)["bytes"] for name in ("fused", "einsum [n, n, d]"))
    note = f"{ours / 1e6:.0f} MB against {theirs / 1e6:.0f} MB"
    yield Row("peak memory, einsum / fused, n = 1024", theirs / ours, 40.0, True, note)


def against_published(rounds: int) -> Iterator[Row]:
    """`contribution` against the published style."""
    n, shrink = 512, 1
    free = available_bytes(torch.device("cpu"))
    if free is not None and bytes_needed("published [H, n, n, d]", GPT2, n) > STOP_AT * free:
        shrink = 2  # its time grows with n², so it is timed at half the length and multiplied by 4
    big, small = make_call(GPT2, n), make_call(GPT2, n // shrink)
    pair = {"fused": lambda: fused(big), "published": lambda: published_style(small)}
    times = take_turns(pair, min(rounds, 2))
    note = milliseconds(times) + (f", the latter at n = {n // shrink}, times {shrink**2}" if shrink > 1 else "")
    what = f"contribution, published / fused, n = {n}"
    yield Row(what, shrink**2 * ratio(times, "published", "fused"), 250.0, True, note)


def against_layer(rounds: int) -> Iterator[Row]:
    """All in against one whole layer."""
    for n, bound in ((512, 0.5), (1024, 0.5), (2048, 0.7)):
        call = make_call(GPT2, n)
        times = take_turns(
            {"fused": lambda c=call: fused(c), "layer": layer_forward(call), "SDPA": lambda c=call: sdpa(c)}, rounds
        )
        what = f"contribution all in / layer, n = {n}"
        yield Row(what, ratio(times, "fused", "layer"), bound, False, milliseconds(times))


def two_outputs(rounds: int) -> Iterator[Row]:
    """`head_contribution` and `projection` against one whole layer."""
    call = make_call(GPT2, 1024)
    directions = torch.nn.functional.normalize(torch.randn(1, call.n, GPT2.d_model), dim=-1)
    both = ("head_contribution", "projection")
    times = take_turns(
        {"fused": lambda: fused(call, both, directions=directions), "layer": layer_forward(call)}, rounds
    )
    what = "head_contribution + projection / layer, n = 1024"
    yield Row(what, ratio(times, "fused", "layer"), 0.6, False, milliseconds(times))


def llama_shapes(rounds: int) -> Iterator[Row]:
    """Llama-8B shapes against the direct form in query blocks."""
    for n, bound in ((256, 1.0), (512, 1.0), (1024, 10.0)):
        call = make_call(LLAMA_8B, n)
        pair = {"fused": lambda c=call: fused(c), "direct": lambda c=call: direct_in_blocks(c)}
        times = take_turns(pair, min(rounds, 3))
        what = f"Llama-8B, direct / fused, n = {n}"
        yield Row(what, ratio(times, "direct", "fused"), bound, True, milliseconds(times))


def long_sequences(rounds: int) -> Iterator[Row]:
    """Streaming: time against SDPA, memory linear in the length."""
    call = make_call(GPT2, 4096)
    times = take_turns({"stream": lambda: streaming(call), "SDPA": lambda: sdpa(call)}, min(rounds, 3))
    yield Row("streaming / SDPA, n = 4096", ratio(times, "stream", "SDPA"), 4.5, False, milliseconds(times))
    peaks = {n: probe("streaming", GPT2, n)["bytes"] for n in (4096, 8192, 16384)}
    note = ", ".join(f"{n}: {peak / 1e6:.0f} MB" for n, peak in peaks.items())
    growth = max(peaks[8192] / peaks[4096], peaks[16384] / peaks[8192])
    yield Row("streaming, extra memory when n doubles", growth, 2.2, False, note)


def last_row(rounds: int) -> Iterator[Row]:
    """One query row against SDPA over the whole sequence."""
    for n in (1024, 4096):
        whole, last = make_call(GPT2, n), make_call(GPT2, n, queries=1)
        times = take_turns({"row": lambda c=last: fused(c), "SDPA": lambda c=whole: sdpa(c)}, rounds)
        yield Row(f"last query row / SDPA, n = {n}", ratio(times, "row", "SDPA"), 1.0, False, milliseconds(times))


def compiled_graphs(_rounds: int) -> Iterator[Row]:
    """Graphs that torch.compile makes over seven lengths."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    start = time.perf_counter()
    for n in (64, 128, 200, 512, 777, 1024, 2048):
        fused(make_call(GPT2, n), compile=True)
    note = f"{time.perf_counter() - start:.0f} s, compiling included"
    yield Row("compiled graphs over seven lengths", counters["stats"]["unique_graphs"], 2.0, False, note)
    call = make_call(GPT2, 1024)
    pair = {"compiled": lambda: fused(call, compile=True), "eager": lambda: fused(call, compile=False)}
    times = take_turns(pair, 5)
    # no target: shows why "auto" stays eager on a CPU
    yield Row("compiled / eager, n = 1024", ratio(times, "compiled", "eager"), 9.9, False, milliseconds(times))


def precision(_rounds: int) -> Iterator[Row]:
    """Error against float64, in units of the promise."""
    for shape, n in ((GPT2, 1024), (LLAMA_8B, 256), (SMOLLM2, 512)):
        call = make_call(shape, n)
        rows = [1, n // 2, n - 1]
        exact, bound = reference_rows(call, rows)
        got = fused(call).contribution[0, rows].double()
        allowed = torch.where(exact < 1e-3 * bound, bound, exact) * 1e-5
        worst = float(((got - exact).abs() / allowed.clamp_min(1e-37)).max())
        yield Row(f"error / promise, {shape.name}, n = {n}", worst, 1.0, False, "1e-5 of the value")


def whole_model(rounds: int) -> Iterator[Row]:
    """Contributions of every layer of a trained model beside its plain forward; both keep one row of logits."""
    torch.set_grad_enabled(False)
    lm = attndiag.load("default", device="cpu")
    ids = torch.randint(100, 10_000, (1, 512), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def plain() -> None:
        lm.run(inputs, logits_to_keep=1)

    def every_layer() -> None:
        def measure(call: attndiag.hooks.record.AttentionCall) -> None:
            attndiag.contributions(call, certificate="sampled").require_verified()

        with attndiag.capture(lm, on_call=measure):
            lm.run(inputs, logits_to_keep=1)

    peaks = {}
    for name, function in (("plain", plain), ("contributions", every_layer)):
        function()
        Path("/proc/self/clear_refs").write_text("5")
        function()
        peaks[name] = resident("VmHWM")
    times = take_turns({"contributions": every_layer, "plain": plain}, rounds)
    what = "contributions of all layers / plain forward, SmolLM2, n = 512"
    yield Row(what, ratio(times, "contributions", "plain"), 1.6, False, milliseconds(times))
    extra = (peaks["contributions"] - peaks["plain"]) / 1e6
    yield Row("its peak memory above the plain forward's, MB", extra, 100.0, False, "one layer kept at a time")


def replacement(_rounds: int) -> Iterator[Row]:
    """Every position of a prompt replaced: shared prefixes against naive batches (`bench_replacement.py`)."""
    lm = small_gpt2()
    for n, bound in ((128, 1.6), (512, 1.8)):
        turn = measured(lm, n, answer="w5", foil="w7", block=8, rounds=2)
        note = f"{turn.naive:.1f} s, {turn.shared:.1f} s; largest difference of an effect {turn.difference:.0e}"
        yield Row(f"replacement at every position, naive / shared prefix, n = {n}", turn.ratio, bound, True, note)


ROWS: dict[str, Callable[[int], Iterator[Row]]] = {
    "einsum": against_einsum,
    "published": against_published,
    "layer": against_layer,
    "outputs": two_outputs,
    "llama": llama_shapes,
    "streaming": long_sequences,
    "last-row": last_row,
    "graphs": compiled_graphs,
    "precision": precision,
    "model": whole_model,
    "replacement": replacement,
}


def crossover(rounds: int) -> Iterator[str]:
    """Gram against direct over the number of queries: what the dispatch rests on."""
    yield "| shape | n | queries: direct / gram |\n|---|---|---|"
    for shape, n in ((GPT2, 128), (GPT2, 512), (SMOLLM2, 256), (LLAMA_8B, 256)):
        cells = []
        for queries in (1, 4, 16, 32, 64):
            call = make_call(shape, n, queries=queries)
            times = take_turns(
                {
                    "direct": lambda c=call: fused(c, formulation="direct"),
                    "gram": lambda c=call: fused(c, formulation="gram"),
                },
                rounds,
            )
            cells.append(f"{queries}: {ratio(times, 'direct', 'gram'):.2f}")
        yield f"| {shape.name} | {n} | {', '.join(cells)} |"


# ---------------------------------------------------------------- the picture


def curves(shape: Shape, longest: int, patience: float, file: Path) -> dict[str, Any]:
    """Time and peak memory of every contender over n, each until its prediction passes a limit.

    Kept in `file`, one contender after the other: what is there already is not measured again.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    data: dict[str, Any] = {"memory": memory, "shape": shape.name, "curves": {}}
    if file.exists():
        data = json.loads(file.read_text())
    for contender in (*CONTENDERS, "whole layer"):
        if contender in data["curves"]:
            continue
        points: list[tuple[int, float, float]] = []
        stopped = ""
        n = 64
        while n <= longest:
            if bytes_needed(contender, shape, n) > STOP_AT * memory:
                stopped = "memory"
                break
            seconds = points[-1][1] * (points[-1][1] / points[-2][1] if len(points) > 1 else 4) if points else 0.0
            if seconds > patience:
                stopped = "time"
                break
            found = probe(contender, shape, n, rounds=3 if seconds < 0.5 else 1)
            points.append((n, found["seconds"], found["bytes"]))
            told = f"{found['seconds']:.4f} s  {found['bytes'] / 1e6:.1f} MB"
            print(f"{contender:24s} n = {n:6d}  {told}", file=sys.stderr)
            n *= 2
        data["curves"][contender] = {"points": points, "stopped": stopped, "wall": wall(contender, shape, memory)}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(data, indent=1))
    return data


def wall(contender: str, shape: Shape, memory: float) -> float:
    """The n at which the predicted memory passes the limit."""
    low, high = 1.0, 1e9
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        below = bytes_needed(contender, shape, round(middle)) <= STOP_AT * memory
        low, high = (middle, high) if below else (low, middle)
    return low


def draw(data: dict[str, Any], path: Path) -> None:
    """Two log-log panels; a dotted line where a contender's predicted memory passes the limit."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for place, (contender, curve) in enumerate(data["curves"].items()):
        n, seconds, size = zip(*curve["points"], strict=True)
        colour = f"C{place}"
        panels[0].plot(n, seconds, "o-", color=colour, label=contender, markersize=3)
        # below a megabyte the peak resident set tells nothing
        panels[1].plot(n, [max(one, 1e6) / 1e6 for one in size], "o-", color=colour, label=contender, markersize=3)
        if n[-1] < curve["wall"] < 3e4:
            for panel in panels:
                panel.axvline(curve["wall"], color=colour, linestyle=":", linewidth=1)
    panels[1].axhline(STOP_AT * data["memory"] / 1e6, color="0.5", linestyle="--", linewidth=1)
    panels[0].set(xlabel="positions", ylabel="CPU seconds, one thread", title=f"{data['shape']} shapes, one layer")
    panels[1].set(xlabel="positions", ylabel="extra peak memory, MB", title="dotted: the predicted wall")
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=130)


# ---------------------------------------------------------------- command line


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=[*ROWS, "crossover"], help="all when left out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figure", type=Path, help="measure the curves over n and draw them here instead")
    parser.add_argument("--longest", type=int, default=16384, help="largest n of the figure")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds after which a curve stops")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    parser.add_argument("--shape", default=GPT2.name, choices=list(SHAPES), help=argparse.SUPPRESS)
    parser.add_argument("--n", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        if options.probe:
            print(json.dumps(probed(options.probe, SHAPES[options.shape], options.n, options.rounds)))
            return
        if options.figure:
            file = options.figure.with_suffix(".json")
            draw(curves(SHAPES[options.shape], options.longest, options.patience, file), options.figure)
            return
        load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
        cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        print(f"torch {torch.__version__}, {cpu}, load {load}\n")
        print("| what | bound | measured | | |\n|---|---|---|---|---|")
        failed = 0
        for name in options.rows or ROWS:
            for row in ROWS[name](options.rounds) if name in ROWS else ():
                print(row.line(), flush=True)
                failed += not row.passed
        if "crossover" in (options.rows or ()):
            print()
            for line in crossover(options.rounds):
                print(line, flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

"""What a capture costs beside the plain forward, in one run.

    python scripts/bench_capture.py [--model default] [--lengths 128 512] [--rounds 7] [--skip-lens]

Each contender takes turns with the plain forward, so that a busy machine hits both alike:
the plain forward, attndiag's capture, the same with the sampled and with the full certificate,
transformers' eager attention with `output_attentions=True`, TransformerLens `run_with_cache`.
Times are process CPU seconds, medians over the rounds, as ratios to the plain forward of the same length.
Then memory: peak of a capture of every layer by `on_call` at n = 2048 over the peak of the plain forward,
each in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import attndiag


def contenders(
    lm: attndiag.models.load.LoadedModel, eager: torch.nn.Module, bridge: object | None
) -> dict[str, Callable]:
    """Name -> function of the input ids."""

    def full_certificate(ids: torch.Tensor) -> None:
        with attndiag.capture(lm, on_call=lambda call: call.certificate.check()):
            lm.model(ids)

    def captured(ids: torch.Tensor, *, certify: bool) -> None:
        with attndiag.capture(lm, certify=certify):
            lm.model(ids)

    table: dict[str, Callable] = {
        "plain forward": lambda ids: lm.model(ids),
        "capture": lambda ids: captured(ids, certify=False),
        "capture + sampled certificate": lambda ids: captured(ids, certify=True),
        "capture + full certificate": full_certificate,
        "eager, output_attentions": lambda ids: eager(ids, output_attentions=True),
    }
    if bridge is not None:
        table["TransformerLens run_with_cache"] = lambda ids: bridge.run_with_cache(ids)
    return table


def cpu_seconds(run: Callable, ids: torch.Tensor) -> float:
    """CPU seconds of one run in this process."""
    start = time.process_time()
    run(ids)
    return time.process_time() - start


def peak_memory(model: str, n: int, capture: bool, queue: multiprocessing.Queue) -> None:
    """Peak resident megabytes of one forward in this process, with or without a streaming capture."""
    torch.set_num_threads(1)
    lm = attndiag.load(model, device="cpu")
    ids = torch.randint(100, 10_000, (1, n), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        lm.model(ids[:, :8])
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
        if capture:
            with attndiag.capture(lm, on_call=lambda call: call.sampled_certificate.check()):
                lm.model(ids, logits_to_keep=1)
        else:
            lm.model(ids, logits_to_keep=1)
    status = Path("/proc/self/status").read_text()
    queue.put(int(status.split("VmHWM:")[1].split()[0]) / 1024)


def boot_bridge(lm: attndiag.models.load.LoadedModel) -> object | None:
    """TransformerLens over a saved copy of the model: it replaces submodules of the model that it is given."""
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError as error:
        sys.stderr.write(f"TransformerLens is left out: {error}\n")
        return None
    with tempfile.TemporaryDirectory() as folder:
        lm.model.save_pretrained(folder)
        lm.tokenizer.save_pretrained(folder)
        return TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)


def main() -> None:
    """Print one table of time ratios and one of peak memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--skip-lens", action="store_true", help="leave TransformerLens out")
    parser.add_argument("--skip-memory", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    lm = attndiag.load(options.model, device="cpu")
    eager = attndiag.load(options.model, device="cpu").model
    eager.set_attn_implementation("eager")
    table = contenders(lm, eager, None if options.skip_lens else boot_bridge(lm))
    write = sys.stdout.write
    write(f"{options.model}, float32, one thread, median of {options.rounds} rounds, ratio to the plain forward\n")
    write(f"{'':34}" + "".join(f"n = {n:<10}" for n in options.lengths) + "\n")
    ratios: dict[str, list[float]] = {name: [] for name in table}
    for n in options.lengths:
        ids = torch.randint(100, 10_000, (1, n), generator=torch.Generator().manual_seed(0))
        plain = table["plain forward"]
        for name, run in table.items():
            pairs = [(cpu_seconds(run, ids), cpu_seconds(plain, ids)) for _ in range(options.rounds + 1)]
            ratios[name].append(statistics.median(own / other for own, other in pairs[1:]))  # the first pair warms up
    for name, values in ratios.items():
        write(f"{name:34}" + "".join(f"{value:<14.3f}" for value in values) + "\n")
    if options.skip_memory:
        return
    context = multiprocessing.get_context("spawn")
    peaks = []
    for capture in (False, True):
        queue = context.Queue()
        process = context.Process(target=peak_memory, args=(options.model, 2048, capture, queue))
        process.start()
        peaks.append(queue.get())
        process.join()
    write(f"peak memory at n = 2048, logits_to_keep=1: plain {peaks[0]:.0f} MB, capture by on_call {peaks[1]:.0f} MB ")
    write(f"(+{peaks[1] - peaks[0]:.0f} MB)\n")


if __name__ == "__main__":
    main()

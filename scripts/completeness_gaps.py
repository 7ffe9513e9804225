"""How often integrated gradients close: the share of the shipped prompts with a completeness gap below 5 %.

    python scripts/completeness_gaps.py                            all prompts, three baselines (hours on a CPU)
    python scripts/completeness_gaps.py --per-cluster 1            one prompt of each cluster
    python scripts/completeness_gaps.py --per-cluster 1 --every 3  one prompt of every third cluster
    python scripts/completeness_gaps.py --baselines pair --prompts my.jsonl

Steps double from `--steps` to 512 as long as the gap is open; special tokens and the first token are kept. One line a
prompt, then a table: prompts, closed, median steps of the closed ones, median gap of the others.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict

import torch

import attndiag
from attndiag.catalog import explain
from attndiag.errors import AttnDiagError
from attndiag.prompts import Prompt
from attndiag.runs.prompt_files import SHIPPED, read_prompts


def chosen_prompts(path: str, per_cluster: int | None, every: int = 1) -> list[Prompt]:
    """Prompts with target and foil, the first few of each (or of every so many) cluster where that is asked for."""
    taken: dict[str | None, int] = defaultdict(int)
    found = []
    prompts = read_prompts(path)
    clusters = list(dict.fromkeys(prompt.cluster for prompt in prompts))[::every]
    for prompt in prompts:
        if prompt.cluster not in clusters:
            continue
        if per_cluster is None or taken[prompt.cluster] < per_cluster:
            taken[prompt.cluster] += 1
            found.append(prompt)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--prompts", default=str(SHIPPED))
    parser.add_argument("--baselines", nargs="+", default=["pair", "mean_embedding", "zero"])
    parser.add_argument("--per-cluster", type=int)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    lm = attndiag.load(arguments.model, device=arguments.device)
    prompts = chosen_prompts(arguments.prompts, arguments.per_cluster, arguments.every)
    table = []
    for baseline in arguments.baselines:
        closed, opened, skipped = [], [], 0
        for prompt in prompts:
            began = time.perf_counter()
            try:
                scores = explain(
                    lm, prompt, method="integrated_gradients", baseline=baseline, steps=arguments.steps, batch_size=16
                )
            except AttnDiagError as error:
                skipped += 1
                print(f"{baseline:<15} {prompt.id:<14} left out: {error}", flush=True)
                continue
            gap, steps = scores.checks["completeness_gap"], scores.checks["steps"]
            seconds = time.perf_counter() - began
            print(f"{baseline:<15} {prompt.id:<14} gap {gap:8.2%} at {steps:>3} steps, {seconds:6.1f} s", flush=True)
            (closed if scores.verified else opened).append((gap, steps))
        count = len(closed) + len(opened)
        table.append(
            f"{baseline:<15} {count:>7} {skipped:>8} {len(closed) / count if count else float('nan'):>7.0%} "
            f"{statistics.median(steps for _, steps in closed) if closed else float('nan'):>12.0f} "
            + (f"{statistics.median(gap for gap, _ in opened):>11.0%}" if opened else f"{'':>11}")
        )
    print(f"\n{'baseline':<15} {'prompts':>7} {'left out':>8} {'closed':>7} {'median steps':>12} {'gap if open':>11}")
    print("\n".join(table))


if __name__ == "__main__":
    main()

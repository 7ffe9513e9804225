"""Cost and exactness of edge effects, and how far estimators get: prints the tables of the benchmark page.

    python scripts/bench_causal.py speed                 # restarts against one forward an edge and whole forwards
    python scripts/bench_causal.py speed --full          # every edge of the prompt
    python scripts/bench_causal.py estimators --truth DIR  # needs exact effects; makes them where DIR lacks them

Times are CPU seconds of this process; the machine may be shared.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import attndiag as ad
from attndiag.errors import UnsupportedModelError
from attndiag.explanations.edge_estimators import edge_estimates
from attndiag.explanations.resolve import resolve_target
from attndiag.stats.agreement import spearman

PROMPT = ad.Prompt(
    "When Mary and John went to the store, John gave a drink to",
    id="ioi-docs",
    cluster="ioi",
    target=" Mary",
    foil=" John",
)
PROMPTS = Path(ad.__file__).parent / "data" / "prompts.jsonl"
MORE = (  # clusters that the shipped set lacks
    ad.Prompt("A, B, C, D, E,", id="alphabet-1", cluster="alphabet", target=" F", foil=" A"),
    ad.Prompt(
        "big, bigger, biggest. small, smaller,", id="comparison-1", cluster="comparison",
        target=" smallest", foil=" biggest",
    ),
    ad.Prompt(
        "Once upon a time, there was a little girl who", id="stories-1", cluster="stories",
        target=" lived", foil=" died",
    ),
    ad.Prompt(
        "French: chat. English: cat. French: chien. English:", id="translation-1", cluster="translation",
        target=" dog", foil=" cat",
    ),
)  # fmt: skip
METHODS: dict[str, dict] = {
    "first_order": {},
    "own_position, 100": {"method": "own_position", "top": 100},
    "own_position, 160": {"method": "own_position", "top": 160},
    "own_position, 250": {"method": "own_position", "top": 250},
    "with_target, 100": {"method": "with_target", "top": 100},
    "with_target, 400": {"method": "with_target", "top": 400},
}
RECOMPUTED = (60, 200)


def cpu(work: Callable[[], object]) -> tuple[float, object]:
    """CPU seconds of a piece of work, and what it returned."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def one_forward(lm, prompt) -> float:
    """CPU seconds of one plain forward of the prompt: the smallest of five."""
    inputs = resolve_target(lm, prompt).inputs
    return min(cpu(lambda: lm.run(inputs))[0] for _ in range(5))


def speed(lm, full: bool, n_edges: int) -> None:
    """Restarts against brute force on drawn edges; CPU time an edge on whole layers."""
    generator = torch.Generator().manual_seed(0)
    forward = one_forward(lm, PROMPT)
    length = resolve_target(lm, PROMPT).encoded.input_ids.shape[1]
    edges: dict[tuple[int, int, int, int], None] = {}
    while len(edges) < n_edges:
        layer, head, query = (int(torch.randint(size, (), generator=generator)) for size in (30, 9, length))
        edges[layer, head, query, int(torch.randint(query + 1, (), generator=generator))] = None
    drawn = list(edges)
    exact = ad.edge_effects(lm, PROMPT, edges=drawn)
    place = {layer: index for index, layer in enumerate(exact.labels["layer"])}
    fast = torch.tensor([float(exact.values[(place[e[0]], *e[1:])]) for e in drawn])
    clean = float(ad.score(lm, PROMPT).values)

    def brute() -> list[float]:
        effects = []
        for layer, head, query, key in drawn:
            with ad.edit(lm, ad.Knockout(layer, head, query, key)):
                effects.append(clean - float(ad.score(lm, PROMPT).values))
        return effects

    seconds, slow_list = cpu(brute)
    slow = torch.tensor(slow_list)
    strong = slow.abs() >= slow.abs().median()
    relative = (fast - slow).abs()[strong] / slow.abs()[strong]
    print(f"| {n_edges} drawn edges against one forward each | |\n|---|---|")
    print(f"| largest relative difference on the stronger half | {float(relative.max()):.1e} |")
    print(f"| its 99th percentile | {float(relative.quantile(0.99)):.1e} |")
    print(f"| largest absolute difference on the stronger half | {float((fast - slow).abs()[strong].max()):.1e} |")
    print(f"| largest absolute difference on the rest | {float((fast - slow).abs()[~strong].max()):.1e} |")
    print(f"| restart of an unedited run, relative | {exact.checks['restart_error']:.1e} |\n")
    layers = None if full else [0, 7, 14, 22, 29]
    restarts, found = cpu(lambda: ad.edge_effects(lm, PROMPT, layers=layers))
    whole, _ = cpu(lambda: ad.edge_effects(lm, PROMPT, layers=[drawn[0][0]], queries=[5, 12], route="forwards"))
    n_whole = 9 * (6 + 13)
    an_edge = restarts / found.checks["edges"]
    print("| CPU ms | an edge | restarts are faster by |\n|---|---|---|")
    print(f"| plain forward of the prompt | {forward * 1e3:.1f} | {forward / an_edge:.1f} |")
    print(f"| one edited forward an edge | {seconds / n_edges * 1e3:.1f} | {seconds / n_edges / an_edge:.1f} |")
    print(f"| whole forwards in batches | {whole / n_whole * 1e3:.1f} | {whole / n_whole / an_edge:.1f} |")
    print(f"| restarts ({found.checks['edges']} edges, layers {layers or 'all'}) | {an_edge * 1e3:.2f} | |")
    print(f"\nAll 28,350 edges: {an_edge * 28350 / 60:.1f} CPU minutes; peak memory {peak():.2f} GB.")


def peak() -> float:
    """Largest resident size of this process so far, GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


# ----------------------------------------------------------------------------------------------------- estimators
def prompts_of(lm, count: int) -> list[ad.Prompt]:
    """The shortest prompt of each cluster of the shipped set and of `MORE`, shortest first."""
    best: dict[str, tuple[int, ad.Prompt]] = {
        str(prompt.cluster): (lm.encode(prompt).input_ids.shape[1], prompt) for prompt in MORE
    }
    for line in PROMPTS.read_text().splitlines():
        row = json.loads(line)
        prompt = ad.Prompt(row["prompt"], id=row["id"], target=row["target"], foil=row["foil"], cluster=row["cluster"])
        length = lm.encode(prompt).input_ids.shape[1]
        if row["cluster"] not in best or length < best[row["cluster"]][0]:
            best[row["cluster"]] = (length, prompt)
    return [prompt for _, prompt in sorted(best.values(), key=lambda pair: pair[0])][:count]


def truth(lm, prompt: ad.Prompt, folder: Path, candidates: int) -> tuple[torch.Tensor, bool]:
    """Exact effects, and whether of all edges; else of the strongest first-order estimates."""
    whole = folder / f"{prompt.id}.pt"
    if whole.exists() or candidates == 0:
        return _stored(whole, lambda: ad.edge_effects(lm, prompt).values), True
    first = edge_estimates(lm, prompt)
    strongest = first.values.abs().nan_to_num(-1).flatten().argsort(descending=True)[:candidates]
    edges = [tuple(edge) for edge in torch.stack(torch.unravel_index(strongest, first.values.shape), 1).tolist()]
    path = folder / f"{prompt.id}.{candidates}.pt"
    return _stored(path, lambda: _full(ad.edge_effects(lm, prompt, edges=edges), first.values)), False


def _stored(path: Path, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    if not path.exists():
        torch.save(make(), path)
    return torch.load(path, weights_only=True)


def _full(some: ad.Scores, like: torch.Tensor) -> torch.Tensor:
    values = torch.full_like(like, float("nan"))
    values[list(some.labels["layer"])] = some.values
    return values


def plain_scores(lm, prompt: ad.Prompt) -> dict[str, torch.Tensor]:
    """What needs no gradient: weight, head contribution, and the head's part along what attention writes."""
    with ad.capture(lm) as captured:
        lm.forward(prompt)
    kinds: dict[str, list[torch.Tensor]] = {"weight": [], "head_contribution": [], "projection (head)": []}
    for call in captured.calls:
        if call.attn_out is None:
            raise UnsupportedModelError(f"{call.module_name} has no output of its own to project on")
        pattern = call.pattern[0]
        values = torch.einsum("hkd,hdm->hkm", call.v[0].repeat_interleave(call.n_heads // call.n_kv_heads, 0), call.w_o)
        written = torch.nn.functional.normalize(call.attn_out[0], dim=-1)
        kinds["weight"].append(pattern)
        kinds["head_contribution"].append(pattern * values.norm(dim=-1)[:, None])
        kinds["projection (head)"].append(pattern * torch.einsum("hkm,qm->hqk", values, written))
    return {name: torch.stack(parts) for name, parts in kinds.items()}


def judge(estimate: torch.Tensor, exact: torch.Tensor, k: int) -> tuple[float, float, float]:
    """Recall, Spearman of magnitudes and median relative error inside the k strongest edges."""
    known = ~exact.isnan()
    e, t = estimate[known], exact[known]
    top = t.abs().argsort(descending=True)[:k]
    chosen = set(e.abs().argsort(descending=True)[:k].tolist())
    recall = len(chosen & set(top.tolist())) / k
    rank = float(spearman(e[top].abs().numpy(), t[top].abs().numpy()))
    error = float(((e[top] - t[top]).abs() / t[top].abs()).median())
    return recall, rank, error


def estimators(lm, folder: Path, count: int, candidates: int, stored: bool) -> None:
    """The table: means over prompts of different clusters, 95 % bootstrap intervals over clusters."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[int, list[tuple[float, float, float]]]] = {}
    costs: dict[str, list[float]] = {}
    tokens: dict[str, list[float]] = {}
    complete = 0
    chosen = prompts_of(lm, count)
    if stored:
        chosen = [prompt for prompt in chosen if (folder / f"{prompt.id}.pt").exists()]
    for prompt in chosen:
        exact, whole = truth(lm, prompt, folder, candidates)
        complete += whole
        forward = one_forward(lm, prompt)
        estimates = plain_scores(lm, prompt)
        for name, given in METHODS.items():
            seconds, result = cpu(lambda given=given, prompt=prompt: edge_estimates(lm, prompt, **given))
            estimates[name] = result.values
            costs.setdefault(name, []).append(seconds / forward)
            tokens.setdefault(name, []).append(float(result.checks["token_layers"]))
        for top in RECOMPUTED:
            name = f"recomputed, {top}"
            estimates[name], spent = with_exact(estimates["first_order"], exact, top)
            tokens.setdefault(name, []).append(spent)
        for name, values in estimates.items():
            for k in (20, 100, 500):
                found.setdefault(name, {}).setdefault(k, []).append(judge(values, exact, k))
        print(
            f"<!-- {prompt.id}: {exact.shape[-1]} tokens, {'all edges' if whole else f'{candidates} candidates'} -->",
            flush=True,
        )
    print(f"\n{len(chosen)} prompts of {len(chosen)} clusters, {complete} with every edge measured.\n")
    print("Cost in forwards of the prompt: CPU time in all, and tokens times blocks beyond one forward and backward.\n")
    print("| estimator | cost | tokens | inside the strongest | recall | Spearman of sizes | median relative error |")
    print("|---|---|---|---|---|---|---|")
    for name, by_size in found.items():
        cost = f"{np.mean(costs[name]):.1f}" if name in costs else ""
        spent = f"{np.mean(tokens[name]):.1f}" if name in tokens else ""
        for k, rows in by_size.items():
            columns = np.array(rows)
            cells = [_interval(columns[:, column]) for column in range(3)]
            unsigned = name in ("weight", "head_contribution", "projection (head)")
            print(f"| {name} | {cost} | {spent} | {k} | {cells[0]} | {cells[1]} | {'' if unsigned else cells[2]} |")


def with_exact(first: torch.Tensor, exact: torch.Tensor, top: int) -> tuple[torch.Tensor, float]:
    """First order with its strongest edges exact, and what restarts for them cost by tokens and blocks."""
    strongest = first.abs().nan_to_num(-1).flatten().argsort(descending=True)[:top]
    values = first.flatten().clone()
    values[strongest] = exact.flatten()[strongest]
    layer, _, query, _ = torch.unravel_index(strongest, first.shape)
    n_layers, n = first.shape[0], first.shape[2]
    spent = ((n_layers - 1 - layer) * (n - query) + 1).sum() / (n_layers * n)
    return values.reshape(first.shape), float(spent)


def _interval(values: np.ndarray) -> str:
    generator = np.random.default_rng(0)
    draws = values[generator.integers(0, len(values), (2000, len(values)))].mean(1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return f"{values.mean():.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    """Parse arguments and run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["speed", "estimators"])
    parser.add_argument("--full", action="store_true", help="time every edge of the prompt")
    parser.add_argument("--edges", type=int, default=500, help="edges compared with one forward each")
    parser.add_argument("--truth", type=Path, default=Path("edge_truth"), help="folder of exact effects")
    parser.add_argument("--prompts", type=int, default=12, help="prompts, one of each cluster")
    parser.add_argument(
        "--candidates", type=int, default=0, help="measure only so many of the strongest first-order edges (0: all)"
    )
    parser.add_argument("--stored", action="store_true", help="only prompts whose every edge was measured before")
    given = parser.parse_args()
    torch.set_num_threads(1)
    lm = ad.load("default", device="cpu")
    if given.part == "speed":
        speed(lm, given.full, given.edges)
    else:
        estimators(lm, given.truth, given.prompts, given.candidates, given.stored)


if __name__ == "__main__":
    main()

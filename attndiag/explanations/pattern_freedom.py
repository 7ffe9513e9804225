"""Different weights, same output: how far a head's pattern can move without moving the answer.

For chosen heads of one prompt the real pattern is exchanged for others, and m is measured under each:

- `pattern_freedom`: uniform rows; permuted rows, many draws (Jain & Wallace 2019, arXiv 1902.10186); and an adversary,
  a gradient search for the pattern with the largest Jensen-Shannon divergence from the real one that keeps m within
  epsilon.
- The calibrations of Wiegreffe & Pinter (2019, arXiv 1908.04626), without which these numbers say little:
  the uniform pattern itself, `frozen_pattern` (the weights of another prompt's run) and `pattern_spread` (how far
  apart the same head is in several checkpoints).
- `temperature_sweep`: the scores divided by t; entropy and effect against t. A peaked row is neither good nor bad.

A head whose pattern can move far at no cost is one whose weights here explain nothing about m; it is no statement about
the head elsewhere. Rows keep their mass, and hidden keys stay hidden.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attndiag.core.pattern_moves import entropy, jensen_shannon, permuted_rows, tempered_rows, uniform_rows
from attndiag.errors import NotApplicableError, PromptError, ShapeError, UnsupportedModelError
from attndiag.explanations.forwarding import measure_rows, take_rows
from attndiag.explanations.pattern_gradients import forbidden_edges, part_of
from attndiag.explanations.resolve import prompt_label, resolve_target
from attndiag.explanations.resolved import ResolvedTarget
from attndiag.explanations.token_records import Progress
from attndiag.hooks.capture_context import capture
from attndiag.hooks.edit_kinds import PatternReplacement
from attndiag.hooks.edits import edit
from attndiag.models.load import LoadedModel, as_prompts
from attndiag.prompts import Prompt, Target
from attndiag.scores import Scores

Head = tuple[int, int]
EPSILON_SHARE = 0.02
"""Default epsilon: this share of |m|, the same below which an effect counts as absent in verdicts."""


class _Run:
    """One prompt with the real patterns of the chosen heads, and m under other patterns."""

    def __init__(self, lm: LoadedModel, prompt: Prompt | str, target: Target | None, heads: Sequence[Head]) -> None:
        self.lm = lm
        self.prompt = as_prompts(prompt)[0]
        self.resolved = resolve_target(lm, self.prompt, target)
        self.patterns, self.visible = real_patterns(lm, self.resolved, heads)
        self.clean = float(self.measure(heads[0], self.patterns[0][None])[0])

    def measure(self, head: Head, patterns: Tensor, *, grad: bool = False, batch_size: int = 16) -> Tensor:
        """m under each pattern [variant, query_pos, key_pos] of one head, [variant]."""
        found = []
        for begin in range(0, len(patterns), batch_size):
            some = patterns[begin : begin + batch_size]
            rows = torch.zeros(len(some), dtype=torch.int64, device=self.lm.device)
            with edit(self.lm, PatternReplacement(head[0], some[:, None], head=head[1])):
                found.append(measure_rows(self.lm, take_rows(self.resolved, rows), grad=grad))
        return torch.cat(found)

    def scores(self, method: str, heads: Sequence[Head], values: Tensor, unit: str, **more: Any) -> Scores:
        """A record over `head` (and further axes) with what all of them share."""
        axes = more.pop("axes", ("head",))
        labels = {"head": [f"L{layer}H{head}" for layer, head in heads], **more.pop("labels", {})}
        return Scores(
            values=values,
            axes=axes,
            method=method,
            unit=unit,
            sign=more.pop("sign", "non-negative"),
            labels=labels,
            target=self.resolved.targets[0],
            params=more.pop("params", {}),
            provenance={
                "model": self.lm.info.name,
                "prompt": prompt_label(self.prompt),
                "dtype": self.lm.info.dtype,
                "kernel": self.lm.info.attn_implementation,
            },
            checks={"m": self.clean, **more.pop("checks", {})},
        )


def real_patterns(
    lm: LoadedModel, resolved: ResolvedTarget, heads: Sequence[Head]
) -> tuple[list[Tensor], list[Tensor]]:
    """Pattern and visible keys, [query_pos, key_pos] each, of every chosen head of a batch of one.

    Raises
    ------
    ValueError : no heads, or one named twice. ShapeError : a head that the layer does not have.
    UnsupportedModelError : a layer that makes several attention calls.
    """
    if not heads or len(set(heads)) < len(heads):
        raise ValueError(f"heads is {list(heads)}; expected one or more different (layer, head)")
    with capture(lm, layers=sorted({layer for layer, _ in heads})) as captured:
        lm.run(resolved.inputs)
    calls: dict[int | None, Any] = {}
    for call in captured.calls:
        if part_of(lm, call) in (None, "decoder"):
            if call.layer in calls:
                raise UnsupportedModelError(
                    f"layer {call.layer} makes several attention calls; its heads have no one pattern"
                )
            calls[call.layer] = call
    patterns, visible = [], []
    for layer, head in heads:
        call = calls[layer]
        if not 0 <= head < call.n_heads:
            raise ShapeError(f"head {head} does not exist at layer {layer}: it has {call.n_heads} heads")
        pattern = call.pattern[0, head].detach()
        hidden = forbidden_edges(call)
        seen = torch.ones_like(pattern, dtype=torch.bool)
        if hidden is not None:
            while hidden.ndim < 4:
                hidden = hidden[None]
            seen = ~hidden[0, head if hidden.shape[1] > 1 else 0].expand_as(pattern)
        patterns.append(pattern)
        visible.append(seen)
    return patterns, visible


def pattern_freedom(
    lm: LoadedModel,
    prompt: Prompt | str,
    target: Target | None = None,
    *,
    heads: Sequence[Head],
    epsilon: float | None = None,
    draws: int = 100,
    steps: int = 60,
    rate: float = 0.3,
    seed: int = 0,
    progress: Progress | None = None,
) -> Scores:
    """How far each head's pattern can move while m stays within epsilon.

    Parameters
    ----------
    heads : (layer, head), each exchanged alone.
    epsilon : how far m may move; by default 2 % of |m|.
    draws : permutations. steps, rate : of the adversary (Adam on the logits of the pattern).

    Returns
    -------
    Scores over `head`: the adversary's Jensen-Shannon divergence from the real pattern, nats, mean over the rows that
    have a choice (two visible keys or more), in [0, ln 2]. Checks, each over `head`: `adversarial_effect` (within
    epsilon by construction), `uniform_effect`, `uniform_distance`, `permuted_effect` (mean), `permuted_se`,
    `permuted_distance`, `permuted_within` (share of the draws within epsilon), `entropy`; and `m`, `epsilon`.
    Effects are m(real) - m(other pattern), signed.

    Raises
    ------
    NotApplicableError : no row has a choice. ShapeError, ValueError : see `real_patterns`.
    """
    run = _Run(lm, prompt, target, heads)
    bound = EPSILON_SHARE * abs(run.clean) if epsilon is None else epsilon
    if not bound > 0:
        raise ValueError(f"epsilon is {bound}; expected a positive number (2 % of |m| by default)")
    columns: dict[str, list[float]] = {}
    for done, (head, real, visible) in enumerate(zip(heads, run.patterns, run.visible, strict=True), start=1):
        choice = visible.sum(-1) > 1
        if not bool(choice.any()):
            raise NotApplicableError(f"no query of L{head[0]}H{head[1]} sees two keys, so its pattern cannot move")
        even, dealt = uniform_rows(real, visible), permuted_rows(real, visible, draws, seed)
        moved = run.clean - run.measure(head, torch.cat([even[None], dealt])).cpu().double()
        found, effect = _adversary(run, head, real, visible, bound, steps, rate, seed)
        row: dict[str, float] = {
            "value": _distance(found, real, choice),
            "adversarial_effect": effect,
            "uniform_effect": float(moved[0]),
            "uniform_distance": _distance(even, real, choice),
            "permuted_effect": float(moved[1:].mean()),
            "permuted_se": float(moved[1:].std() / draws**0.5) if draws > 1 else math.nan,
            "permuted_distance": float(torch.tensor([_distance(each, real, choice) for each in dealt]).mean()),
            "permuted_within": float((moved[1:].abs() <= bound).double().mean()),
            "entropy": float(entropy(real / real.sum(-1, keepdim=True))[choice].mean()),
        }
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
        if progress is not None:
            progress(done, len(heads))
    values = torch.tensor(columns.pop("value"), dtype=torch.float64)
    checks: dict[str, Any] = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    return run.scores(
        "pattern_freedom",
        heads,
        values,
        "nats",
        params={"epsilon": bound, "draws": draws, "steps": steps, "seed": seed},
        checks={**checks, "epsilon": bound},
    )


def _distance(other: Tensor, real: Tensor, choice: Tensor) -> float:
    return float(jensen_shannon(other, real)[choice].mean())


def _adversary(
    run: _Run, head: Head, real: Tensor, visible: Tensor, bound: float, steps: int, rate: float, seed: int
) -> tuple[Tensor, float]:
    """The furthest pattern found that keeps m within the bound, and m(real) - m under it."""
    choice, mass = visible.sum(-1) > 1, real.sum(-1, keepdim=True)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(real.shape, generator=generator).to(real)
    logits = (real.clamp_min(1e-6).log() + 0.1 * noise).requires_grad_()
    optimiser = torch.optim.Adam([logits], lr=rate)
    best, weight = (real, 0.0, 0.0), 1.0
    candidate = real
    for _ in range(steps):
        pattern = mass * torch.softmax(logits.masked_fill(~visible, -torch.inf), dim=-1).nan_to_num()
        moved_m = run.measure(head, pattern[None], grad=True)[0]
        if not moved_m.requires_grad:
            raise UnsupportedModelError(
                f"no gradient reaches the pattern of L{head[0]}H{head[1]} in {run.lm.info.name} (quantised or detached "
                "weights), so nothing leads the adversary; use frozen_pattern or temperature_sweep"
            )
        effect = run.clean - moved_m
        distance = jensen_shannon(pattern, real)[choice].mean()
        excess = (effect.abs() / bound - 0.8).clamp_min(0.0)
        optimiser.zero_grad()
        (logits.grad,) = torch.autograd.grad(weight * excess.square() - distance, [logits])
        optimiser.step()
        moved, far = float(effect.detach()), float(distance.detach())
        candidate = pattern.detach()
        # a bound that is broken costs more and more, one that is kept less and less
        weight = min(weight * 1.3, 1e4) if abs(moved) > bound else max(weight * 0.8, 1e-2)
        if abs(moved) <= bound and far > best[1]:
            best = (candidate, far, moved)
    return _nearest_allowed(run, head, real, candidate, choice, bound, best)


def _nearest_allowed(
    run: _Run,
    head: Head,
    real: Tensor,
    candidate: Tensor,
    choice: Tensor,
    bound: float,
    best: tuple[Tensor, float, float],
) -> tuple[Tensor, float]:
    """The furthest allowed of `best` and the mixtures of the real pattern with the last candidate, with its effect."""
    shares = torch.linspace(0.125, 1.0, 8, device=real.device)[:, None, None]
    mixed = real + shares * (candidate - real)
    effects = run.clean - run.measure(head, mixed).cpu().double()
    for pattern, moved in zip(mixed, effects.tolist(), strict=True):
        far = _distance(pattern, real, choice)
        if abs(moved) <= bound and far > best[1]:
            best = (pattern, far, moved)
    return best[0], best[2]


def frozen_pattern(
    lm: LoadedModel,
    prompt: Prompt | str,
    target: Target | None = None,
    *,
    other: Prompt | str,
    heads: Sequence[Head],
) -> Scores:
    """Effect of running the prompt with the weights that each head has on another prompt of the same length.

    Returns
    -------
    Scores over `head`, m(real) - m(frozen), signed, unit of m. Checks: `distance` (Jensen-Shannon, nats), `m`.

    Raises
    ------
    PromptError : the prompts differ in their number of tokens.
    """
    run = _Run(lm, prompt, target, heads)
    second = resolve_target(lm, other, Target.logprob() if run.resolved.kind != "cosine" else target)
    mine, theirs = run.resolved.encoded.input_ids.shape[1], second.encoded.input_ids.shape[1]
    if mine != theirs:
        raise PromptError(
            f"{prompt_label(run.prompt)!r} has {mine} tokens, the other prompt {theirs}; give one of {mine}"
        )
    patterns, _ = real_patterns(lm, second, heads)
    effects, distances = [], []
    for head, real, frozen, visible in zip(heads, run.patterns, patterns, run.visible, strict=True):
        effects.append(run.clean - float(run.measure(head, frozen[None])[0]))
        distances.append(_distance(frozen, real, visible.sum(-1) > 1))
    return run.scores(
        "frozen_pattern",
        heads,
        torch.tensor(effects, dtype=torch.float64),
        run.resolved.unit,
        sign="signed",
        params={"other": prompt_label(as_prompts(other)[0])},
        checks={"distance": torch.tensor(distances, dtype=torch.float64)},
    )


def pattern_spread(models: Sequence[LoadedModel], prompt: Prompt | str, *, heads: Sequence[Head]) -> Scores:
    """How far apart the same head is in several checkpoints (seeds): mean Jensen-Shannon divergence over their pairs.

    Heads of other seeds have other jobs, so a large spread is normal; a pattern that an adversary moves no further
    than this has not moved far.

    Returns
    -------
    Scores over `head`, nats, in [0, ln 2]. Checks: `largest` (over pairs).

    Raises
    ------
    ValueError : fewer than two models. PromptError : they read the prompt as different numbers of tokens.
    """
    if len(models) < 2:
        raise ValueError(f"{len(models)} model was given; a spread needs two or more")
    runs = []
    for lm in models:
        run = _Run(lm, prompt, Target.logprob(), heads)
        if runs and run.patterns[0].shape != runs[0].patterns[0].shape:
            raise PromptError(f"{models[0].info.name} and {lm.info.name} read {prompt_label(run.prompt)!r} differently")
        runs.append(run)
    table = []
    for index in range(len(heads)):
        choice = runs[0].visible[index].sum(-1) > 1
        pairs = itertools.combinations([run.patterns[index] for run in runs], 2)
        table.append([_distance(one, two, choice) for one, two in pairs])
    apart = torch.tensor(table, dtype=torch.float64)
    return runs[0].scores(
        "pattern_spread",
        heads,
        apart.mean(1),
        "nats",
        params={"models": tuple(lm.info.name for lm in models)},
        checks={"largest": apart.amax(1)},
    )


def temperature_sweep(
    lm: LoadedModel,
    prompt: Prompt | str,
    target: Target | None = None,
    *,
    heads: Sequence[Head],
    temperatures: Sequence[float] = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0),
) -> Scores:
    """Effect of dividing the scores of each head by t, with the entropy that its rows then have.

    Returns
    -------
    Scores [head, temperature], m(real) - m(t), signed, unit of m; 0 at t = 1 up to rounding. Checks: `entropy`
    [head, temperature] (nats, mean over rows with a choice), `distance` (Jensen-Shannon from the real pattern), `m`.
    """
    run = _Run(lm, prompt, target, heads)
    effects, entropies, distances = [], [], []
    for head, real, visible in zip(heads, run.patterns, run.visible, strict=True):
        choice = visible.sum(-1) > 1
        rows = torch.stack([tempered_rows(real, t) for t in temperatures])
        values = run.measure(head, torch.cat([real[None], rows]))
        effects.append((values[0] - values[1:]).cpu().double())
        entropies.append([float(entropy(each / each.sum(-1, keepdim=True))[choice].mean()) for each in rows])
        distances.append([_distance(each, real, choice) for each in rows])
    return run.scores(
        "temperature_sweep",
        heads,
        torch.stack(effects),
        run.resolved.unit,
        sign="signed",
        axes=("head", "temperature"),
        labels={"temperature": list(temperatures)},
        checks={
            "entropy": torch.tensor(entropies, dtype=torch.float64),
            "distance": torch.tensor(distances, dtype=torch.float64),
        },
    )

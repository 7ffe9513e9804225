"""One-layer models that separate a weight from what is written, and what is written from its effect.

All heads read the same query (a constant) and keys by token name, so every head's pattern is chosen freely: the score
of a named token is log(its mass) + 30, every other token scores 0 and gets less than 1e-12. The value is chosen per
head and token, and every head writes along directions that sum to 0 over the residual columns, so LayerNorm neither
shifts nor mixes them: the logit difference `ANS` - `FOIL` is exactly the sum over heads and keys of
A_ij * value_j * (how much the unembedding reads of that head), plus a constant.

Prompts: `<bos> MARK a b ... Q`, the target is read at the last position, which the answer words never enter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from attndiag.models.known.build import KnownModel, Layout, blank_gpt2, stack_columns, wire_gpt2

PEAK = 30.0
WORDS = ("<bos>", "MARK", "ANS", "FOIL", "Q", "a", "b", "c")


@dataclass(frozen=True)
class HeadPlan:
    """What one head of a one-layer model does at the last query.

    Parameters
    ----------
    mass : token -> its share of the attention weight; the shares sum to 1.
    value : token -> signed length of what it can write through this head, ||f_j||; tokens not named write nothing.
    read : how much of the head's direction the logit difference reads (0: written but unread).
    stored : whether W_O passes the value on; False leaves the value vectors and zeroes W_O.
    direction : heads of the same number write along the same direction.
    """

    mass: Mapping[str, float]
    value: Mapping[str, float] = field(default_factory=dict)
    read: float = 1.0
    stored: bool = True
    direction: int | None = None


def one_layer_gpt2(
    plans: Sequence[HeadPlan],
    *,
    words: Sequence[str] = WORDS,
    positions: int = 32,
    width: int = 32,
    base: float = 0.0,
    saturate: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> GPT2LMHeadModel:
    """A one-layer GPT-2 whose heads follow `plans`; `base` is the logit difference without attention.

    With `saturate`, the logits read min(x, .5) * 2 * saturate of the summed directions x through the feed-forward
    part instead of x itself: once half a unit is written, more of it changes nothing.
    """
    directions = [plan.direction if plan.direction is not None else head for head, plan in enumerate(plans)]
    layout = Layout(
        heads=len(plans),
        least=max(width, 2 * len(plans)),
        token=len(words),
        written=2 * (1 + max(directions)),
        result=2,
        empty=1,
        constant=1,
        pin=2,
    )
    shape = (layout.width, layout.d_head)
    written = [0.0] * (1 + max(directions))
    for plan, direction in zip(plans, directions, strict=True):
        if plan.stored:
            written[direction] += sum(plan.mass.get(word, 0.0) * value for word, value in plan.value.items())
    model = blank_gpt2(
        layout,
        vocab_size=len(words),
        positions=positions,
        layers=1,
        norms=[(2, 2), (2, 2 + sum(amount**2 for amount in written))],
        inner=2,
        dtype=dtype,
    )
    constant = layout.column("constant")
    readout = torch.zeros(layout.width, dtype=torch.float64)
    for head, (plan, direction) in enumerate(zip(plans, directions, strict=True)):
        scores = {word: PEAK + math.log(mass) for word, mass in plan.mass.items() if mass > 0}
        pair = layout.column("written", 2 * direction), layout.column("written", 2 * direction + 1)
        half = 0.5**0.5
        wire_gpt2(
            model,
            0,
            head,
            q=stack_columns(shape, {(constant, 0): layout.d_head**0.5}),
            k=_read_tokens(layout, words, scores, 0),
            v=_read_tokens(layout, words, plan.value, 1),
            o=stack_columns(shape[::-1], {(1, pair[0]): half, (1, pair[1]): -half}) if plan.stored else None,
        )
        readout[pair[0]], readout[pair[1]] = plan.read * half, -plan.read * half
    answer = model.lm_head.weight.data[words.index("ANS")]
    answer[constant] = base
    if saturate is None:
        answer += readout.to(dtype)
    else:
        pair = layout.column("result", 0), layout.column("result", 1)
        mlp = model.transformer.h[0].mlp
        mlp.c_fc.weight.data[:] = readout[:, None].to(dtype)
        mlp.c_fc.bias.data[1] = -0.5
        for unit, sign in enumerate((1.0, -1.0)):
            mlp.c_proj.weight.data[unit, pair[0]] = sign
            mlp.c_proj.weight.data[unit, pair[1]] = -sign
        answer[pair[0]], answer[pair[1]] = saturate, -saturate
    return model


def _read_tokens(layout: Layout, words: Sequence[str], amounts: Mapping[str, float], to: int) -> Tensor:
    """A matrix [d_model, d_head] that puts each word's amount into head dimension `to`.

    The column `empty`, always 0, takes the opposite of the sum: the rounding of the norm's mean, the same on every
    column and up to 1e-5 beside pins of 1000, then drops out of scores and values.
    """
    entries = {(layout.column("token", words.index(word)), to): amount for word, amount in amounts.items()}
    entries[layout.column("empty"), to] = -sum(amounts.values())
    return stack_columns((layout.width, layout.d_head), entries)


def sink_against_value(*, dtype: torch.dtype = torch.float32) -> KnownModel:
    """Two heads, both .9 on BOS and .1 on MARK: in head 0 BOS carries almost no value, in head 1 both carry the same.

    A ||f|| and the effect of removing the edge are .009 (BOS) and 1.0 (MARK) in head 0, .9 and .1 in head 1. So the
    raw weight misleads on head 0 and is right on head 1. (The contrast of Kobayashi 2020, arXiv 2004.10102.)
    """
    mass = {"<bos>": 0.9, "MARK": 0.1}
    plans = [
        HeadPlan(mass, {"<bos>": 0.01, "MARK": 10.0}),
        HeadPlan(mass, {"<bos>": 1.0, "MARK": 1.0}),
    ]
    return _record(
        "sink_against_value", plans, "a b c Q", one_layer_gpt2(plans, dtype=dtype), sink_against_value.__doc__
    )


def dead_heads(*, dtype: torch.dtype = torch.float32) -> KnownModel:
    """Four heads with the same pattern, all of it on MARK, of which only head 0 has an effect.

    Head 1 has no values. Head 2 has values and no output weights: A ||v|| is 1, A ||f|| is 0. Head 3 writes 1 along a
    direction that nothing reads: a contribution without an effect.
    """
    mass, value = {"MARK": 1.0}, {"MARK": 1.0}
    plans = [
        HeadPlan(mass, value),
        HeadPlan(mass),
        HeadPlan(mass, value, stored=False),
        HeadPlan(mass, value, read=0.0),
    ]
    built = _record("dead_heads", plans, "a b c Q", one_layer_gpt2(plans, dtype=dtype), dead_heads.__doc__)
    extra = {"value_norm": {(0, head, -1, 1): 1.0 if head != 1 else 0.0 for head in range(4)}, "dead_heads": (1, 2, 3)}
    return _with(built, extra)


def duplicated_heads(*, dtype: torch.dtype = torch.float32) -> KnownModel:
    """Heads 0 and 1 are equal, and what they write is read through min(x, .5): one suffices, both are needed.

    Ablating either alone changes nothing, ablating both costs the whole logit difference of 8. Head 2 is idle.
    """
    plans = [
        HeadPlan({"MARK": 1.0}, {"MARK": 1.0}, direction=0),
        HeadPlan({"MARK": 1.0}, {"MARK": 1.0}, direction=0),
        HeadPlan({"<bos>": 1.0}, read=0.0),
    ]
    model = one_layer_gpt2(plans, saturate=8.0, dtype=dtype)
    built = _record("duplicated_heads", plans, "a b c Q", model, duplicated_heads.__doc__)
    return _with(
        built,
        {
            "logit_diff": 8.0,
            "edge_effect": dict.fromkeys(built.expected["edge_effect"], 0.0),
            "head_effect": {(0, 0): 0.0, (0, 1): 0.0, (0, 2): 0.0},
            "joint_ablation_effect": {((0, 0), (0, 1)): 8.0, ((0, 0), (0, 2)): 0.0},
            "redundancy": {((0, 0), (0, 1)): 1.0},
        },
    )


def randomised_sink(seed: int, *, dtype: torch.dtype = torch.float32) -> KnownModel:
    """A sink model with drawn sizes: heads, width, prompt length, masses, values; some heads mislead, some do not.

    In an agreeing head the sink (BOS) has most of the weight and of the effect. In a planted disagreement the sink has
    the weight and MARK, with less than 1 / (2n) of it, the effect. `expected["verdict"]` gives, for every edge of the
    last query, `agree`, `disagree` or `inconclusive` between its weight's share of the row and the effect of its
    removal (`high` from 2/n, `low` up to 1/(2n), `present` outside +-.02 |m|). No share is nearer to a threshold than a
    fifth of it, and no effect is near a margin of `stats.verdicts`: planted effects are far above their row's mean, the
    others far below half of it. `expected["planted"]` names the misleading heads.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))

    def choose(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    heads, fillers = choose(2, 6), choose(5, 14)
    words = ["<bos>", "MARK", "ANS", "FOIL", "Q", *(f"w{index}" for index in range(fillers))]
    n_keys = fillers + 3
    planted = [uniform(0, 1) < 0.5 for _ in range(heads)]
    effects = [uniform(0.6, 1.6) for _ in range(heads)]
    # a minority of the heads pushes against the answer; the base keeps m positive
    signs = [-1.0 if uniform(0, 1) < 0.25 else 1.0 for _ in range(heads)]
    base = uniform(0.5, 2.0) + 2.0 * sum(e for e, s in zip(effects, signs, strict=True) if s < 0)
    present = base + sum(e * s for e, s in zip(effects, signs, strict=True))
    plans = []
    for misleads, effect, sign in zip(planted, effects, signs, strict=True):
        low_mass = uniform(0.2, 0.8) / (2 * n_keys)
        spread = uniform(0.0, 0.25) / (2 * n_keys)
        mass = {"<bos>": 1 - low_mass - spread * (n_keys - 2), "MARK": low_mass}
        mass |= dict.fromkeys([*words[5:], "Q"], spread)
        trifle = uniform(-0.4, 0.4) * 0.02 * present
        carrier, other = ("MARK", "<bos>") if misleads else ("<bos>", "MARK")
        plans.append(HeadPlan(mass, {carrier: sign * effect / mass[carrier], other: trifle / mass[other]}))
    width = 8 * choose(4, 12)
    order = torch.randperm(fillers, generator=generator)
    body = " ".join(words[5 + int(index)] for index in order)
    model = one_layer_gpt2(plans, words=words, positions=64, width=width, base=base, dtype=dtype)
    built = _record(f"randomised_sink_{seed}", plans, f"{body} Q", model, randomised_sink.__doc__, words, base)
    verdicts = {
        edge: _verdict(weight, built.expected["edge_effect"][edge], n_keys, 0.02 * abs(built.expected["logit_diff"]))
        for edge, weight in built.expected["weight"].items()
    }
    extra = {"planted": tuple(head for head, misleads in enumerate(planted) if misleads), "verdict": verdicts}
    return _with(built, extra)


def _verdict(share: float, effect: float, n_keys: int, delta: float) -> str:
    """Verdict on one edge by the margin `delta` alone: planted effects are clear of the row's margins as well."""
    high, low, present = share >= 2 / n_keys, share <= 1 / (2 * n_keys), abs(effect) > delta
    if (high and present) or (low and not present):
        return "agree"
    return "disagree" if high or low else "inconclusive"


def _record(
    name: str,
    plans: Sequence[HeadPlan],
    body: str,
    model: GPT2LMHeadModel,
    notes: str | None,
    words: Sequence[str] = WORDS,
    base: float = 0.0,
) -> KnownModel:
    """Put plans, prompt and model into a record; edges are those of the last query, `query_pos` -1."""
    prompt = ["<bos>", "MARK", *body.split()]
    weight: dict[tuple[int, int, int, int], float] = {}
    contribution: dict[tuple[int, int, int, int], float] = {}
    effect: dict[tuple[int, int, int, int], float] = {}
    for head, plan in enumerate(plans):
        for key, word in enumerate(prompt):
            written = plan.mass.get(word, 0.0) * plan.value.get(word, 0.0) * plan.stored
            weight[0, head, -1, key] = plan.mass.get(word, 0.0)
            contribution[0, head, -1, key] = abs(written)
            effect[0, head, -1, key] = written * plan.read
    head_effect = {
        (0, head): sum(value for edge, value in effect.items() if edge[1] == head) for head in range(len(plans))
    }
    expected: dict[str, Any] = {
        "target": ("ANS", "FOIL"),
        "logit_diff": base + sum(effect.values()),
        "weight": weight,
        "head_contribution": contribution,
        "edge_effect": effect,
        "head_effect": head_effect,
    }
    vocab = {word: index for index, word in enumerate(words)}
    ids: Tensor = torch.tensor([[vocab[word] for word in prompt]])
    return KnownModel(name, model, vocab, ids, expected, " ".join((notes or "").split()))


def _with(built: KnownModel, extra: Mapping[str, Any]) -> KnownModel:
    """The same record with more, or corrected, answers."""
    return KnownModel(
        built.name, built.model, built.vocab, built.prompt_ids, {**built.expected, **extra}, built.notes, built.inputs
    )

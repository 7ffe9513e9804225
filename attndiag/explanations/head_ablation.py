"""What heads are good for on the induction probe: their effect when they are taken away, alone and together.

effect = loss on the second copy without the heads - loss with them, in nats: positive where they helped. Beside each
effect stands the same difference on the first copy, where no induction is possible: an effect there says that the head
does something else as well.

Three ways: `zero` (z = 0) and `mean` (z = its mean over the tokens of the same row), with everything after the head
recomputed; and `zero` with the attention patterns of all later layers kept as they were, which shows how much of the
effect goes through what later heads attend to. Redundant heads hide each other, so the set above a threshold is
ablated as one, beside random sets of the same size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attndiag.errors import NotApplicableError
from attndiag.explanations.head_inputs import BATCH_BYTES, HeadInput
from attndiag.hooks.capture_context import capture
from attndiag.hooks.edit_kinds import Edit, HeadAblation, PatternReplacement
from attndiag.hooks.edits import edit
from attndiag.hooks.record import AttentionCall
from attndiag.hooks.sites import stream_of
from attndiag.models.access import evaluating
from attndiag.models.load import LoadedModel

Head = tuple[int, int]  # layer number, head
Way = Literal["zero", "mean", "zero, patterns kept"]
WAYS: tuple[Way, ...] = ("zero", "mean", "zero, patterns kept")


@dataclass(frozen=True)
class NamedSet:
    """Heads to take away together, and how."""

    name: str
    heads: tuple[Head, ...]
    way: Way


@dataclass(frozen=True, eq=False)
class Ablation:
    """Effect of taking a set of heads away together.

    Parameters
    ----------
    name, heads, way : as in `NamedSet`; heads are (layer, head) pairs.
    effect : [row], nats; rise of the second-copy loss, positive where the heads helped.
    first_copy_effect : [row], nats; the same on the first copy.
    """

    name: str
    heads: tuple[Head, ...]
    way: Way
    effect: Tensor
    first_copy_effect: Tensor


def copy_losses(logits: Tensor, given: HeadInput) -> tuple[Tensor, Tensor]:
    """Loss on the first and on the second copy of each row, [row], nats.

    Raises
    ------
    NotApplicableError : the rows are no induction probe, or the output is no prediction of the next token.
    """
    probe = given.probe
    if probe is None or logits.shape[:2] != given.tokens.shape:
        raise NotApplicableError("losses of the two copies need logits for every position of an induction probe")
    targets = given.tokens.to(logits.device)[:, 1:]
    losses = nn.functional.cross_entropy(logits[:, :-1].float().transpose(1, 2), targets, reduction="none").double()
    losses = losses.cpu()
    first, second = probe.first_copy[:, 1:].cpu(), probe.scored_losses[:, 1:].cpu()
    return (losses * first).sum(dim=1) / first.sum(dim=1), (losses * second).sum(dim=1) / second.sum(dim=1)


def ablate_sets(
    lm: LoadedModel,
    given: HeadInput,
    sets: Sequence[NamedSet],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[Ablation]:
    """Effects of several sets of heads, each taken away by itself from the same rows.

    Parameters
    ----------
    lm : a causal language model.
    given : rows of the induction probe.
    sets : what is taken away, each by itself.
    progress : called with (forwards done, forwards in all).

    Raises
    ------
    NotApplicableError : as `copy_losses`.
    UnsupportedModelError : heads of this model cannot be edited; the text says why.
    """
    keep = any(each.way == WAYS[2] for each in sets)
    batches = _batches(lm, given, keep_patterns=keep)
    total = len(batches) * (len(sets) + 1)
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in sets]
    done = 0
    with torch.no_grad(), evaluating(lm.model):
        for batch in batches:
            inputs = batch.model_inputs(lm)
            clean, patterns = _clean(lm, batch, inputs, keep=keep)
            for index, each in enumerate(sets):
                done += 1
                if progress is not None:
                    progress(done, total)
                with edit(lm, *_edits(each.heads, each.way, patterns)):
                    first, second = copy_losses(lm.run(inputs).logits, batch)
                parts[index].append((second - clean[1], first - clean[0]))
            done += 1
            if progress is not None:
                progress(done, total)
    return [
        Ablation(each.name, each.heads, each.way, torch.cat([p[0] for p in found]), torch.cat([p[1] for p in found]))
        for each, found in zip(sets, parts, strict=True)
    ]


def random_sets(candidates: Sequence[Head], size: int, count: int, seed: int) -> list[tuple[Head, ...]]:
    """Up to `count` different sets of `size` heads, drawn from the candidates; all there are, where they are fewer.

    Raises
    ------
    NotApplicableError : there are fewer candidates than a set needs.
    """
    if len(candidates) < size:
        raise NotApplicableError(f"random sets of {size} heads need that many other heads; there are {len(candidates)}")
    if math.comb(len(candidates), size) <= count:
        return list(itertools.combinations(sorted(candidates), size))
    generator = torch.Generator().manual_seed(seed)
    found: dict[tuple[Head, ...], None] = {}
    while len(found) < count:
        picks = torch.randperm(len(candidates), generator=generator)[:size].tolist()
        found[tuple(sorted(candidates[i] for i in picks))] = None
    return list(found)


def _clean(
    lm: LoadedModel, batch: HeadInput, inputs: dict[str, Tensor], *, keep: bool
) -> tuple[tuple[Tensor, Tensor], dict[int, Tensor]]:
    """Losses of the unedited rows, and the patterns of its numbered self-attention layers where they are kept."""
    patterns: dict[int, Tensor] = {}

    def note(call: AttentionCall) -> None:
        if call.layer is not None and stream_of(lm.model, call.module_name, call.kind == "cross") == "self":
            patterns[call.layer] = call.pattern

    with capture(lm, on_call=note) if keep else nullcontext():
        output: Any = lm.run(inputs)
    return copy_losses(output.logits, batch), patterns


def _edits(heads: Sequence[Head], way: Way, patterns: dict[int, Tensor]) -> list[Edit]:
    by_layer: dict[int, list[int]] = {}
    for layer, head in heads:
        by_layer.setdefault(layer, []).append(head)
    mode: Literal["zero", "mean"] = "mean" if way == "mean" else "zero"
    edits: list[Edit] = [HeadAblation(layer, sorted(some), mode=mode) for layer, some in sorted(by_layer.items())]
    if way == WAYS[2]:
        later = [layer for layer in patterns if layer > min(by_layer)]
        edits += [PatternReplacement(layer, patterns[layer]) for layer in later]
    return edits


def _batches(lm: LoadedModel, given: HeadInput, *, keep_patterns: bool) -> list[HeadInput]:
    """Batches whose patterns of all layers fit the same budget where they have to be kept."""
    if not keep_patterns:
        return list(given.batches(lm))
    seen: list[int] = []
    one = given.take(slice(0, 1))
    with torch.no_grad(), evaluating(lm.model), capture(lm, on_call=lambda c: seen.append(c.n_heads * c.n_queries**2)):
        lm.run(one.model_inputs(lm))
    rows = max(1, BATCH_BYTES // max(1, 4 * sum(seen)))
    return [
        batch.take(slice(start, start + rows)) for batch in given.batches(lm) for start in range(0, len(batch), rows)
    ]

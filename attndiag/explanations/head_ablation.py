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

from attndiag.errors import NotApplicableError, UnsupportedModelError
from attndiag.explanations.head_inputs import BATCH_BYTES, HeadInput
from attndiag.hooks.capture_context import capture
from attndiag.hooks.edit_kinds import Edit, HeadAblation, PatternReplacement
from attndiag.hooks.edits import edit
from attndiag.hooks.record import AttentionCall
from attndiag.hooks.sites import stream_of
from attndiag.hooks.stored_blocks import StoredBlocks
from attndiag.models.access import evaluating
from attndiag.models.load import LoadedModel

Head = tuple[int, int]  # layer number, head
Way = Literal["zero", "mean", "zero, patterns kept"]
WAYS: tuple[Way, ...] = ("zero", "mean", "zero, patterns kept")
# unedited logits of a batch twice as large when blocks are skipped, relative to their spread; rounding is far below
SKIP_TOLERANCE = 1e-4
WHOLE = "whole forwards: "
SKIPPED = "blocks below the heads skipped, unedited logits equal"


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
    route : whether blocks were skipped (`SKIPPED`), or `"whole forwards: "` and why.
    """

    name: str
    heads: tuple[Head, ...]
    way: Way
    effect: Tensor
    first_copy_effect: Tensor
    route: str


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
    skip: bool = True,
    together: bool = True,
) -> list[Ablation]:
    """Effects of several sets of heads, each taken away by itself from the same rows.

    Blocks below the lowest head of a set are not run again where the model allows it (`hooks.stored_blocks`): an
    unedited forward that skips them has to give exactly the same logits, and with the rows twice the same to
    `SKIP_TOLERANCE` (100 times that in half precision), or whole forwards are made; `Ablation.route` says which.

    Parameters
    ----------
    lm : a causal language model.
    given : rows of the induction probe.
    sets : what is taken away, each by itself.
    progress : called with (sets done, sets in all).
    skip : False runs every block every time.
    together : False gives each set a forward of its own; else sets share a batch, each row losing its own heads.

    Raises
    ------
    NotApplicableError : as `copy_losses`.
    UnsupportedModelError : heads of this model cannot be edited; the text says why.
    """
    keep = any(each.way == WAYS[2] for each in sets)
    # sets that skip the same blocks go together
    order = sorted(range(len(sets)), key=lambda index: (sets[index].way == WAYS[2], _lowest(sets[index])))
    batches, room = _batches(lm, given, keep_patterns=keep)
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in sets]
    done, total = 0, len(batches) * len(sets)
    with torch.no_grad(), evaluating(lm.model):
        if skip:
            stored, route = _stored(lm, given, sorted({_lowest(each) for each in sets}))
        else:
            stored, route = None, f"{WHOLE}asked for"
        for batch in batches:
            inputs = batch.model_inputs(lm)
            with nullcontext() if stored is None else stored.recording(len(batch)):
                clean, patterns = _clean(lm, batch, inputs, keep=keep)
            for chunk in _chunks(order, sets, max(1, room // len(batch)) if together else 1):
                found = _edited_losses(lm, batch, [sets[index] for index in chunk], stored, patterns)
                for index, (first, second) in zip(chunk, found, strict=True):
                    parts[index].append((second - clean[1], first - clean[0]))
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
    return [
        Ablation(
            each.name, each.heads, each.way, torch.cat([p[0] for p in found]), torch.cat([p[1] for p in found]), route
        )
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


def _stored(lm: LoadedModel, given: HeadInput, layers: Sequence[int]) -> tuple[StoredBlocks | None, str]:
    """A way to skip the blocks below these layers, tried on two rows, or None: that costs time and nothing else.

    With what `Ablation.route` says.
    """
    limit = SKIP_TOLERANCE * (1 if lm.info.dtype in ("float32", "float64") else 100)
    try:
        stored = StoredBlocks(lm)
        error = stored.error(given.take(slice(0, 2)).model_inputs(lm), layers)
    except UnsupportedModelError as refusal:
        return None, f"{WHOLE}{refusal}"
    if error.same_batch != 0:
        return None, f"{WHOLE}skipping blocks moves unedited logits by {error.same_batch:.1e} of their spread"
    if not error.two_copies <= limit:
        return None, f"{WHOLE}skipping blocks moves logits of a doubled batch by {error.two_copies:.1e} of their spread"
    return stored, SKIPPED


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


def _chunks(order: Sequence[int], sets: Sequence[NamedSet], size: int) -> list[list[int]]:
    """Indices of sets that are run together: at most `size`; patterns are kept from one layer on, or in none."""
    found: list[list[int]] = []
    for _, same in itertools.groupby(
        order, key=lambda index: _lowest(sets[index]) if sets[index].way == WAYS[2] else None
    ):
        members = list(same)
        found += [members[start : start + size] for start in range(0, len(members), size)]
    return found


def _lowest(each: NamedSet) -> int:
    return min(layer for layer, _ in each.heads)


def _edited_losses(
    lm: LoadedModel,
    batch: HeadInput,
    sets: Sequence[NamedSet],
    stored: StoredBlocks | None,
    patterns: dict[int, Tensor],
) -> list[tuple[Tensor, Tensor]]:
    """Losses of the two copies without each set: the rows stand in the batch once for each set."""
    rows, lowest = len(batch), min(_lowest(each) for each in sets)
    copies = batch.take(torch.arange(rows).repeat(len(sets)))
    edits = _edits(sets, rows)
    if sets[0].way == WAYS[2]:
        later = [layer for layer in patterns if layer > lowest]
        edits += [PatternReplacement(layer, patterns[layer].repeat(len(sets), 1, 1, 1)) for layer in later]
    with nullcontext() if stored is None else stored.below(lowest, len(sets)), edit(lm, *edits):
        output: Any = lm.run(copies.model_inputs(lm))
    first, second = copy_losses(output.logits, copies)
    return list(zip(first.split(rows), second.split(rows), strict=True))


def _edits(sets: Sequence[NamedSet], rows: int) -> list[Edit]:
    """One edit for each layer and mode; each set's rows lose that set's heads."""
    chosen: dict[tuple[int, str], dict[int, list[int]]] = {}
    for place, each in enumerate(sets):
        mode = "mean" if each.way == "mean" else "zero"
        for layer, head in each.heads:
            chosen.setdefault((layer, mode), {}).setdefault(head, []).append(place)
    edits: list[Edit] = []
    for (layer, mode), heads in sorted(chosen.items()):
        names = sorted(heads)
        where = torch.zeros(len(sets), len(names), dtype=torch.bool)
        for column, head in enumerate(names):
            where[heads[head], column] = True
        kind: Literal["zero", "mean"] = "mean" if mode == "mean" else "zero"
        where = where.repeat_interleave(rows, dim=0)[:, None]
        edits.append(HeadAblation(layer, names, mode=kind, where=None if len(sets) == 1 else where))
    return edits


def _batches(lm: LoadedModel, given: HeadInput, *, keep_patterns: bool) -> tuple[list[HeadInput], int]:
    """Batches, and how many rows fit the same budget; with the patterns of all layers where they have to be kept."""
    room = given.room(lm)
    if keep_patterns:
        seen: list[int] = []
        with (
            torch.no_grad(),
            evaluating(lm.model),
            capture(lm, on_call=lambda c: seen.append(c.n_heads * c.n_queries**2)),
        ):
            lm.run(given.take(slice(0, 1)).model_inputs(lm))
        room = min(room, max(1, BATCH_BYTES // max(1, 4 * sum(seen))))
    return [given.take(slice(start, start + room)) for start in range(0, len(given), room)], room

"""Effects of interventions on the target: any edits together, sets of heads ablated, layers without attention.

effect = m(clean) - m(edited), positive where what was taken away had helped the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from attndiag.errors import ShapeError
from attndiag.explanations.resolve import prompt_label, resolve_target
from attndiag.explanations.resolved import ResolvedTarget
from attndiag.hooks.activations import layers_with, recording
from attndiag.hooks.edit_kinds import AttentionOff, Edit, HeadAblation, PatternReplacement, Stream
from attndiag.hooks.edits import edit
from attndiag.models.access import evaluating
from attndiag.models.encoding import PaddingSide
from attndiag.models.load import LoadedModel, as_prompts
from attndiag.prompts import Prompt, Target
from attndiag.scores import Scores

Head = tuple[int, int]
Progress = Callable[[int, int], None]


def effect_of(
    lm: LoadedModel,
    prompts: Prompt | str | Sequence[Prompt | str],
    target: Target | None = None,
    edits: Sequence[Edit] = (),
    *,
    batch_size: int = 8,
    padding_side: PaddingSide | None = None,
) -> Scores:
    """m(clean) - m(edited) of each prompt, [batch], under all edits together; positions count in each prompt's own.

    Raises
    ------
    What `attndiag.edit` and `attndiag.score` raise.
    """
    batch = as_prompts(prompts)
    effects, clean = [], []
    unit, used = "", None
    for start in range(0, len(batch), batch_size):
        part = batch[start : start + batch_size]
        resolved = resolve_target(lm, part, target, padding_side=padding_side)
        before = resolved.value(lm.run(resolved.inputs))
        with edit(lm, *edits):
            after = resolved.value(lm.run(resolved.inputs))
        effects.append((before - after).cpu())
        clean.append(before.cpu())
        unit, used = resolved.unit, resolved.targets[0]
    return Scores(
        values=torch.cat(effects),
        axes=("batch",),
        method="effect",
        unit=unit,
        sign="signed",
        labels={"batch": [prompt_label(prompt) for prompt in batch]},
        target=used,
        params={"edits": tuple(type(each).__name__ for each in edits)},
        provenance=provenance(lm),
        checks={"clean": torch.cat(clean)},
    )


def ablate_heads(
    lm: LoadedModel,
    prompts: Prompt | str | Sequence[Prompt | str],
    target: Target | None = None,
    *,
    heads: Sequence[Head],
    mode: Literal["zero", "mean", "resample"] = "zero",
    donors: Sequence[Prompt | str] | None = None,
    preserve_patterns: bool = False,
    stream: Stream = "self",
    seed: int = 0,
) -> Scores:
    """m(clean) - m(without a set of heads), [batch]: all of them at once, because redundant heads hide each other.

    Parameters
    ----------
    heads : (layer, head) pairs, ablated together.
    mode : `"zero"`; `"mean"`: over the tokens of the donors, or of each prompt itself where none are given;
        `"resample"`: at every position the output at a token drawn from the donors.
    donors : prompts that means and draws come from.
    preserve_patterns : later layers keep the patterns of the unedited run, so that only values change there.

    Raises
    ------
    ShapeError : no heads, or `resample` without donors.
    """
    if not heads:
        raise ShapeError("no heads were given; give (layer, head) pairs")
    if mode == "resample" and donors is None:
        raise ShapeError("mode='resample' draws from other prompts; give donors=")
    if mode == "zero" and donors is not None:
        raise ShapeError("mode='zero' takes no donors; use mode='mean' or 'resample'")
    grouped: dict[int, list[int]] = {}
    for layer, head in dict.fromkeys((int(layer), int(head)) for layer, head in heads):
        grouped.setdefault(layer, []).append(head)
    pool = None if donors is None else _pool(lm, donors, list(grouped), stream)
    effects, clean, used, unit = [], [], None, ""
    generator = torch.Generator().manual_seed(seed)
    batch = as_prompts(prompts)
    for prompt in batch:
        resolved = resolve_target(lm, prompt, target)
        length = resolved.encoded.input_ids.shape[1]
        edits: list[Edit] = []
        for layer, chosen in grouped.items():
            values = None
            if pool is not None:
                there = pool[layer][:, sorted(chosen)]
                drawn = torch.randint(len(there), (length,), generator=generator)
                values = there.mean(0) if mode == "mean" else there[drawn.to(there.device)][None]
            edits.append(HeadAblation(layer, sorted(chosen), mode, values, stream=stream))
        before = resolved.value(lm.run(resolved.inputs))
        if preserve_patterns:
            edits.extend(_frozen_patterns(lm, resolved, min(grouped), stream))
        with edit(lm, *edits):
            after = resolved.value(lm.run(resolved.inputs))
        effects.append((before - after).cpu())
        clean.append(before.cpu())
        used, unit = resolved.targets[0], resolved.unit
    return Scores(
        values=torch.cat(effects),
        axes=("batch",),
        method="head_ablation",
        unit=unit,
        sign="signed",
        labels={"batch": [prompt_label(prompt) for prompt in batch]},
        target=used,
        params={"heads": tuple(sorted(heads)), "mode": mode, "preserve_patterns": preserve_patterns, "seed": seed},
        provenance=provenance(lm),
        checks={"clean": torch.cat(clean)},
    )


def attention_off(
    lm: LoadedModel,
    prompt: Prompt | str,
    target: Target | None = None,
    *,
    layers: Sequence[int] | None = None,
    stream: Stream = "self",
    progress: Progress | None = None,
) -> Scores:
    """m(clean) - m(a layer's attention adds nothing to the stream, its bias included), [layer], one layer at a time.

    Parameters
    ----------
    layers : all that have an output projection when None.
    progress : called with (layers done, layers in all).

    Raises
    ------
    What `attndiag.edit` and `attndiag.score` raise.
    """
    one = as_prompts(prompt)[0]
    resolved = resolve_target(lm, one, target)
    there = layers_with(lm.model, "attn_out", stream)
    chosen = sorted(there) if layers is None else sorted({int(layer) for layer in layers})
    clean = float(resolved.value(lm.run(resolved.inputs)))
    effects = []
    for done, layer in enumerate(chosen, start=1):
        with edit(lm, AttentionOff(layer, stream=stream)):
            effects.append(clean - float(resolved.value(lm.run(resolved.inputs))))
        if progress is not None:
            progress(done, len(chosen))
    return Scores(
        values=torch.tensor(effects),
        axes=("layer",),
        method="attention_off",
        unit=resolved.unit,
        sign="signed",
        labels={"layer": chosen},
        target=resolved.targets[0],
        params={"stream": stream},
        provenance=provenance(lm) | {"prompt": prompt_label(one)},
        checks={"clean": clean},
    )


def _pool(lm: LoadedModel, donors: Sequence[Prompt | str], layers: list[int], stream: Stream) -> dict[int, Tensor]:
    """Head outputs at the donors' tokens, [token, head, d_value] for each layer."""
    found: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    for donor in as_prompts(donors):
        encoded = lm.encode(donor)
        with evaluating(lm.model), recording(lm.model, "head_out", layers, stream) as kept:
            lm.run(encoded.inputs)
        for layer in layers:
            found[layer].append(kept.values[layer][0].detach())
    return {layer: torch.cat(parts) for layer, parts in found.items()}


def _frozen_patterns(lm: LoadedModel, resolved: ResolvedTarget, above: int, stream: Stream) -> list[Edit]:
    """Edits that hold every later layer to the patterns of the unedited run."""
    later = [layer for layer in layers_with(lm.model, "head_out", stream) if layer > above]
    if not later:
        return []
    with evaluating(lm.model), recording(lm.model, "head_out", later, stream) as kept:
        lm.run(resolved.inputs)
    return [PatternReplacement(layer, kept.calls[layer].pattern, stream=stream) for layer in later]


def provenance(lm: LoadedModel) -> dict[str, Any]:
    """Where a measurement on this model comes from."""
    return {"model": lm.info.name, "dtype": lm.info.dtype, "kernel": lm.info.attn_implementation}

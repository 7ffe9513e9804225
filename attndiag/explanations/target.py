"""The scorer: a prompt and a target become one number m, by one teacher-forced forward.

Every explanation, intervention and metric measures the same m, so it is defined once:

1. `resolve_target` turns texts into token ids and positions, checks them, and fixes what depends on the model itself
   (its top-1, a reference embedding) from the unperturbed run: edits that are active rest meanwhile.
2. `ResolvedTarget.value` reads m off a model output: differentiable, one number for each row of the batch.
3. `score` does both for any number of prompts and returns `Scores`; `noise_floor` measures how far m moves when
   nothing but the batch changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from attndiag.errors import TargetError
from attndiag.explanations.resolve import one_target_each, prompt_label, resolve_target
from attndiag.explanations.resolved import UNITS, ResolvedTarget
from attndiag.models.encoding import PaddingSide
from attndiag.models.load import LoadedModel, as_prompts
from attndiag.prompts import Prompt, Target
from attndiag.scores import Scores

__all__ = ["ResolvedTarget", "noise_floor", "prompt_label", "resolve_target", "score"]

Progress = Callable[[int, int], None]


def score(
    lm: LoadedModel,
    prompts: Prompt | str | Sequence[Prompt | str],
    target: Target | Sequence[Target] | ResolvedTarget | None = None,
    *,
    batch_size: int = 8,
    padding_side: PaddingSide | None = None,
    progress: Progress | None = None,
) -> Scores:
    """m of each prompt: one teacher-forced forward for each batch, in eval mode, modes restored.

    Inside an `attndiag.edit` context it measures the edited model, with what the target left open (the model's own
    top-1) decided by the unedited one.

    Parameters
    ----------
    target : see `resolve_target`; a `ResolvedTarget` for these very prompts is measured as it is.
    batch_size : prompts in one forward; batches equal single prompts to 1e-5 of scale in float32.
    progress : called with (prompts done, prompts in all).

    Returns
    -------
    Scores
        axis `batch`; unit by kind (logits, nats, probability, cosine). Checks: `answer_ids`, `foil_ids`,
        `top1_ids` and `top1_is_answer` as lists (None where the target reads no logits).

    Raises
    ------
    TargetError, PromptError : see `resolve_target` and `lm.encode`.
    """
    batch = as_prompts(prompts)
    if isinstance(target, ResolvedTarget):
        if len(target) != len(batch):
            raise TargetError(f"the resolved target has {len(target)} rows for {len(batch)} prompts")
        parts = [target]
        targets = list(target.targets)
    else:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; expected at least 1")
        targets = one_target_each(batch, target)
        parts = [
            resolve_target(
                lm, batch[start : start + batch_size], targets[start : start + batch_size], padding_side=padding_side
            )
            for start in range(0, len(batch), batch_size)
        ]
    values, checks, done = [], {"answer_ids": [], "foil_ids": [], "top1_ids": [], "top1_is_answer": []}, 0
    for part in parts:
        output = lm.run(part.inputs)
        values.append(part.value(output).detach().cpu())
        for name, found in _facts(part, output).items():
            checks[name].extend(found)
        done += len(part)
        if progress is not None:
            progress(done, len(batch))
    same = all(each == targets[0] for each in targets)
    return Scores(
        values=torch.cat(values),
        axes=("batch",),
        method="score",
        unit=parts[0].unit,
        sign="signed",
        labels={"batch": [prompt_label(prompt) for prompt in batch]},
        target=targets[0] if same else None,
        params={"kind": parts[0].kind},
        provenance={"model": lm.info.name, "dtype": lm.info.dtype, "kernel": lm.info.attn_implementation},
        checks=checks,
    )


def noise_floor(
    lm: LoadedModel,
    prompts: Prompt | str | Sequence[Prompt | str],
    target: Target | Sequence[Target] | None = None,
    *,
    rounds: int = 4,
    seed: int = 0,
) -> Scores:
    """Spread of m when nothing but the batch changes: largest minus smallest m of each prompt over reshuffled batches.

    Each round puts the prompts, in a drawn order, into batches of another size, with copies of single prompts where
    there are too few; ragged batches are padded on the right. Effects below this number are rounding.

    Returns
    -------
    Scores
        axis `batch`, non-negative, unit of the target. `checks["floor"]` is the largest over the prompts.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; expected at least 1")
    batch = as_prompts(prompts)
    targets = one_target_each(batch, target)
    sizes = [1, 2, 3, 5, 8]
    generator = torch.Generator().manual_seed(seed)
    seen: list[list[float]] = [[] for _ in batch]
    for turn in range(rounds + 1):
        size = sizes[turn % len(sizes)]
        order = torch.randperm(len(batch), generator=generator).tolist()
        # fewer prompts than the batch is wide: copies fill it up
        order = order + [order[index % len(order)] for index in range(-len(order) % size)]
        found = score(lm, [batch[i] for i in order], [targets[i] for i in order], batch_size=size)
        for index, value in zip(order, found.values.tolist(), strict=True):
            seen[index].append(value)
    spread = torch.tensor([max(values) - min(values) for values in seen])
    return Scores(
        values=spread,
        axes=("batch",),
        method="noise_floor",
        unit=UNITS[targets[0].kind],
        sign="non-negative",
        labels={"batch": [prompt_label(prompt) for prompt in batch]},
        params={"rounds": rounds, "seed": seed},
        provenance={"model": lm.info.name, "dtype": lm.info.dtype, "kernel": lm.info.attn_implementation},
        checks={"floor": float(spread.max())},
    )


def _facts(resolved: ResolvedTarget, output: Any) -> dict[str, list[Any]]:
    """Ids, and whether the model's first choice is the answer, row by row."""
    if resolved.answer_ids is None:
        return {}
    answers = resolved.answer_ids[:, 0].tolist()
    top = resolved.top1(output)
    foils = [None] * len(answers) if resolved.foil_ids is None else resolved.foil_ids[:, 0].tolist()
    return {
        "answer_ids": answers,
        "foil_ids": foils,
        "top1_ids": top,
        "top1_is_answer": [a == b for a, b in zip(answers, top, strict=True)],
    }

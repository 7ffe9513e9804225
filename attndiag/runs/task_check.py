"""Does the model do what the prompt asks: is the target its first choice, and by how much does it beat the foil.

A diagnosis of attention on prompts that the model gets wrong describes something else than the template promises, so
every run says so beside its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attndiag.errors import TargetError
from attndiag.explanations.target import ResolvedTarget, resolve_target
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt, Target


@dataclass(frozen=True)
class Answers:
    """Token ids that stand for target and foil on one prompt; None where the prompt has none."""

    target_id: int | None = None
    foil_id: int | None = None


def resolve_answers(lm: LoadedModel, prompt: Prompt) -> Answers:
    """The ids of target and foil where they follow this prompt.

    Raises
    ------
    TargetError : they start with the same token, or lie outside the vocabulary.
    """
    if prompt.target is None:
        return Answers()
    target = Target.logprob(prompt.target)
    if prompt.foil is not None:
        target = Target.logit_diff(prompt.target, prompt.foil)
    resolved = resolve_target(lm, prompt, target)
    return Answers(_only(resolved, resolved.answer_ids), _only(resolved, resolved.foil_ids))


def _only(resolved: ResolvedTarget, ids: Tensor | None) -> int | None:
    if ids is not None and ids.numel() != 1:
        raise TargetError(f"a {resolved.kind} target of one prompt has {ids.numel()} ids; expected one")
    return None if ids is None else int(ids)


def predicts_next_token(lm: LoadedModel) -> bool:
    """True for models whose output at the last position is about the next token."""
    can_generate = getattr(lm.model, "can_generate", None)
    return bool(can_generate()) if callable(can_generate) else False


def check_task(lm: LoadedModel, logits: Tensor, answers: Answers) -> dict[str, Any]:
    """Columns of the table `prompts` that say what the model makes of the prompt.

    Parameters
    ----------
    logits : [vocabulary], at the last position.
    answers : of `resolve_answers`.
    """
    with torch.no_grad():
        logits = logits.detach().float()
        logprobs = torch.log_softmax(logits, dim=-1)
        top1 = int(logits.argmax())
        found: dict[str, Any] = {
            "top1": lm.tokenizer.decode([top1]),
            "top1_id": top1,
            "top1_prob": float(logprobs[top1].exp()),
        }
        right, wrong = answers.target_id, answers.foil_id
        if right is None:
            return found
        difference = None if wrong is None else float(logits[right] - logits[wrong])
        return found | {
            "target_id": right,
            "foil_id": wrong,
            "target_prob": float(logprobs[right].exp()),
            "target_logprob": float(logprobs[right]),
            "logit_diff": difference,
            "target_is_top1": top1 == right,
            "task_ok": top1 == right and (difference is None or difference > 0),
        }

"""The sentences of a report that carry numbers."""

from __future__ import annotations

import math

from attndiag.reports.html import number, percent
from attndiag.reports.tables import Summary

# below this a difference between two shares is not worth a "but"
_NOTABLE = 0.03


def headline(summary: Summary) -> str:
    """What the run shows, in one sentence with its numbers."""
    weight = summary.overall("sink_weight")
    by_head = summary.overall("sink_head_contribution_share")
    by_layer = summary.overall("sink_contribution_share")
    n_prompts = len(summary.by_prompt)
    over = f"Over {n_prompts} prompts" if n_prompts != 1 else "On one prompt"
    takes = f"{over}, position 0 takes {percent(weight)} of the attention weight"
    if not math.isfinite(by_head):
        return f"{takes}; what it contributes could not be measured on this model."
    link = "but only" if by_head < weight - _NOTABLE else "and" if by_head < weight + _NOTABLE else "and even"
    layers = f" and {percent(by_layer)} of what whole layers write" if math.isfinite(by_layer) else ""
    return f"{takes} {link} {percent(by_head)} of what single heads write{layers}."


def second_sentence(summary: Summary) -> str:
    """How far ranking by weight and by contribution part ways."""
    differs, tau = summary.overall("top_key_differs"), summary.overall("rank_agreement")
    if not math.isfinite(differs):
        return ""
    agree = (
        f" With sinks and special tokens set aside, Kendall's tau-b is {number(tau, 2)}." if math.isfinite(tau) else ""
    )
    return (
        f"For the last query, the largest weight and the largest head contribution fall on different tokens in "
        f"{percent(differs)} of the heads.{agree}"
    )


def task_sentence(summary: Summary) -> str:
    """Whether the model does what the prompts ask."""
    checked = summary.by_prompt[summary.by_prompt.task_ok.notna()]
    if checked.empty:
        return "No prompt has a target that this model could be checked on, so nothing is known about the task."
    right = int(checked.task_ok.astype(bool).sum())
    if len(checked) == 1:
        if right:
            return "The model gets the one checked prompt right: the target is its first choice and beats the foil."
        return "The model gets the one checked prompt wrong: the target is not its first choice, or the foil beats it."
    everyone = f"all {len(checked)}" if right == len(checked) else f"{right} of {len(checked)}"
    return f"The model gets {everyone} checked prompts right: the target is its first choice and beats the foil."


def norm_sentence(summary: Summary) -> str:
    """The sink's vectors beside the others'."""
    v, f = (summary.overall(f"sink_{k}_norm") / summary.overall(f"other_{k}_norm") for k in ("v", "f"))
    if not math.isfinite(v):
        return ""
    writes = f", and what it can write {number(f, 2)} times" if math.isfinite(f) else ""
    return (
        f"On average the value at position 0 is {number(v, 2)} times as long as that of the median other token of its "
        f"prompt{writes}."
    )

"""Gradient attributions of a target to the input embeddings: captum's algorithms on this project's scorer.

The function that captum differentiates is m itself: one teacher-forced forward of the loaded model, its own kernel, in
eval mode, read by the target. Several prompts and several steps of a path share a forward. Captum's own language-model
wrappers are not used: their cached path mis-scores every target token after the first.

- `saliency`: dm/de (Simonyan 2013, arXiv 1312.6034).
- `input_x_gradient`: e * dm/de (Shrikumar 2016, arXiv 1605.01713).
- `integrated_gradients`: (e - b) * mean of dm/de on the path from b to e (Sundararajan 2017, arXiv 1703.01365),
  Gauss-Legendre, the steps doubled until the scores add up.
- `gradient_shap`: the same in expectation over baselines, points of the path and noise (Lundberg 2017,
  arXiv 1705.07874).
- `deeplift`: multipliers by the rescale rule (Shrikumar 2017, arXiv 1704.02685), only on models where the rule applies.

A token's embedding has many dimensions; see `token_records` for the two ways to one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from captum.attr import InputXGradient, IntegratedGradients, Saliency
from torch import Tensor

from attndiag.core.gradients import completeness_gap
from attndiag.errors import AttnDiagError
from attndiag.explanations.baselines import Keep, PathStart, path_start
from attndiag.explanations.resolve import prompt_label
from attndiag.explanations.token_records import (
    Aggregate,
    EmbeddedBatch,
    Facts,
    Progress,
    aggregated,
    embedded_batches,
    token_record,
)
from attndiag.models.encoding import PaddingSide
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt, Target
from attndiag.scores import Scores, Sign

GAP_TOLERANCE = 0.05
"""A relative completeness gap above this marks the row: the scores miss more than 5 % of what they explain."""

Prompts = Prompt | str | Sequence[Prompt | str]
Targets = Target | Sequence[Target] | None


def saliency(
    lm: LoadedModel,
    prompts: Prompts,
    target: Targets = None,
    *,
    aggregate: Aggregate = "norm",
    batch_size: int = 8,
    padding_side: PaddingSide | None = None,
    progress: Progress | None = None,
) -> list[Scores]:
    """Gradient of m in each token's embedding, dm/de_t: by default its length.

    Returns
    -------
    One `Scores` a prompt over `position`, unit of m for one unit of embedding. `checks`: `sum` (signed), `norm`.

    Raises
    ------
    UnsupportedModelError : no gradient reaches the embeddings.
    """
    results = []
    for batch in embedded_batches(
        lm, prompts, target, batch_size=batch_size, padding_side=padding_side, progress=progress
    ):
        found = Saliency(batch).attribute(
            batch.embeddings.clone().requires_grad_(), abs=False, additional_forward_args=(batch.rows,)
        )
        results += _plain_records(batch, found, "saliency", aggregate, f"{batch.resolved.unit} per embedding unit")
    return results


def input_x_gradient(
    lm: LoadedModel,
    prompts: Prompts,
    target: Targets = None,
    *,
    aggregate: Aggregate = "sum",
    batch_size: int = 8,
    padding_side: PaddingSide | None = None,
    progress: Progress | None = None,
) -> list[Scores]:
    """Embedding times gradient, e_t * dm/de_t: the first-order effect of replacing e_t by the zero vector.

    Returns
    -------
    One `Scores` a prompt over `position`, unit of m. `checks`: `sum` (signed), `norm`.

    Raises
    ------
    UnsupportedModelError : no gradient reaches the embeddings.
    """
    results = []
    for batch in embedded_batches(
        lm, prompts, target, batch_size=batch_size, padding_side=padding_side, progress=progress
    ):
        found = InputXGradient(batch).attribute(
            batch.embeddings.clone().requires_grad_(), additional_forward_args=(batch.rows,)
        )
        results += _plain_records(batch, found, "input_x_gradient", aggregate, batch.resolved.unit)
    return results


def integrated_gradients(
    lm: LoadedModel,
    prompts: Prompts,
    target: Targets = None,
    *,
    baseline: str = "mean_embedding",
    keep: Keep = "sinks",
    steps: int = 32,
    max_steps: int = 512,
    aggregate: Aggregate = "sum",
    batch_size: int = 8,
    padding_side: PaddingSide | None = None,
    progress: Progress | None = None,
) -> list[Scores]:
    """Integrated gradients: (e - b) * integral over [0, 1] of dm/de at b + a (e - b).

    The integral is taken by Gauss-Legendre with `steps` points, doubled up to `max_steps` as long as the scores miss
    m(x) - m(baseline) by more than 5 % of it. The gap need not shrink with the steps where the path is steep, so the
    result with the smallest gap is kept.

    Parameters
    ----------
    baseline : see `attndiag.explanations.baselines`.
    keep : tokens that stay on the whole path: `"sinks"` (special tokens and the first), `"none"`, or positions.
    batch_size : rows (prompts times steps) in one forward.

    Returns
    -------
    One `Scores` a prompt over `position`, unit of m; nan at kept tokens. `checks`: `completeness_gap` (relative),
    `steps`, `gaps` (steps -> gap), `m`, `m_baseline`, `sum`, `norm`. A gap above 5 % is a failure of the record.

    Raises
    ------
    AttnDiagError : the baseline equals the input, or m does not tell them apart.
    """
    if not 1 <= steps <= max_steps:
        raise ValueError(f"steps is {steps} and max_steps {max_steps}; expected 1 <= steps <= max_steps")
    results = []
    for batch in embedded_batches(
        lm, prompts, target, batch_size=batch_size, padding_side=padding_side, progress=progress
    ):
        start = path_start(lm, batch.prompts, batch.resolved, batch.embeddings, baseline, keep)
        clean, empty = endpoints(batch, start)
        best: list[tuple[float, int, Tensor] | None] = [None] * len(batch.prompts)
        gaps: list[dict[int, float]] = [{} for _ in batch.prompts]
        open_rows, count = list(range(len(batch.prompts))), steps
        while open_rows:
            rows = torch.tensor(open_rows, device=batch.embeddings.device)
            found = IntegratedGradients(batch).attribute(
                batch.embeddings[rows],
                baselines=start.embeddings[rows],
                additional_forward_args=(rows,),
                n_steps=count,
                method="gausslegendre",
                internal_batch_size=max(batch_size, len(open_rows)),
            )
            for row, attribution in zip(open_rows, found, strict=True):
                gap = completeness_gap(float(attribution.cpu().double().sum()), clean[row] - empty[row])
                gaps[row][count] = gap
                so_far = best[row]
                if so_far is None or not gap >= so_far[0]:
                    best[row] = (gap, count, attribution)
            count *= 2
            open_rows = [row for row in open_rows if best[row][0] > GAP_TOLERANCE] if count <= max_steps else []  # type: ignore[index]
        for row, chosen in enumerate(best):
            gap, used, attribution = chosen  # type: ignore[misc]
            params = {"baseline": baseline, "keep": keep, "rule": "gausslegendre", "aggregate": aggregate}
            results.append(
                path_record(
                    batch,
                    row,
                    attribution,
                    start,
                    ("integrated_gradients", params, aggregate),
                    {"steps": used, "gaps": gaps[row], "m": clean[row], "m_baseline": empty[row]},
                    gap,
                )
            )
    return results


def endpoints(batch: EmbeddedBatch, start: PathStart) -> tuple[list[float], list[float]]:
    """m at the input and at the baseline, row by row.

    Raises
    ------
    AttnDiagError : they are the same number (to rounding), so there is nothing to distribute.
    """
    clean, empty = batch.measure(batch.embeddings).tolist(), batch.measure(start.embeddings).tolist()
    for row, (full, none) in enumerate(zip(clean, empty, strict=True)):
        if abs(full - none) <= 1e-6 * max(abs(full), abs(none), 1e-6):
            raise AttnDiagError(
                f"m is {full:.6g} at the input {prompt_label(batch.prompts[row])!r} and {none:.6g} at the baseline "
                f"{start.name!r}: there is no difference to attribute; choose another baseline or target"
            )
    return clean, empty


def path_record(
    batch: EmbeddedBatch,
    row: int,
    attribution: Tensor,
    start: PathStart,
    method: tuple[str, dict[str, Any], Aggregate],
    checks: dict[str, Any],
    gap: float,
) -> Scores:
    """Record of a method whose scores should add up to m(x) - m(baseline); `gap` says how far they do."""
    name, params, aggregate = method
    values, both = aggregated(attribution, aggregate)
    failures = []
    if not gap <= GAP_TOLERANCE:
        failures.append(
            f"the scores miss m(x) - m({start.name}) by {gap:.0%} of it, above {GAP_TOLERANCE:.0%}; "
            "more steps or samples, or a baseline nearer to the prompt (pair), may close it"
        )
    facts = Facts(name, "captum", batch.resolved.unit, params, sign_of(aggregate))
    return token_record(
        batch,
        row,
        values,
        facts,
        kept=start.kept[row],
        checks={**checks, **both, "completeness_gap": gap},
        failures=failures,
    )


def sign_of(aggregate: Aggregate) -> Sign:
    """Norms have no sign."""
    return "signed" if aggregate == "sum" else "non-negative"


def _plain_records(batch: EmbeddedBatch, found: Tensor, method: str, aggregate: Aggregate, unit: str) -> list[Scores]:
    records = []
    for row in range(len(batch.prompts)):
        values, both = aggregated(found[row].detach(), aggregate)
        facts = Facts(method, "captum", unit, {"aggregate": aggregate}, sign_of(aggregate))
        records.append(token_record(batch, row, values, facts, checks=both))
    return records

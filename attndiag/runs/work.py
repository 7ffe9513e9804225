"""The unit of work of a compared run: stateless functions of a model, a prompt and a plan.

Nothing is shared between prompts, nothing is kept outside, nothing is written: an engine on one machine or on many may
call `measure_prompt` in any order and write what it returns. Batches lie within a prompt, so neither the other prompts
nor the number of workers changes a number.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from attndiag.comparison.edge_measuring import EdgeResult, measure_edges
from attndiag.comparison.methods import reason_of
from attndiag.comparison.one_prompt import Own, PromptResult, compare_prompt
from attndiag.errors import AttnDiagError, InsufficientMemoryError
from attndiag.explanations.attention_card import card
from attndiag.explanations.edge_truth import RESTART_TOLERANCE
from attndiag.explanations.head_scores import heads
from attndiag.explanations.resolve import prompt_label
from attndiag.explanations.target import noise_floor
from attndiag.hooks.capture_context import capture
from attndiag.models.encoding import Encoded
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt, Target
from attndiag.runs.memory import estimate_memory
from attndiag.runs.plan import RunPlan
from attndiag.runs.result_files import RESTARTED, SAME_M, UNTOUCHED, Check, ModelWork, PromptWork

# scores of heads that stand in the table, each with what it is read against
_HEAD_SCORES = ("prefix_matching_score", "previous_token_score", "sink_mass")
_BESIDE = ("", "_low", "_high", "_baseline")
# rows of the induction probe: enough to tell heads apart, a quarter of the probe's own default
PROBE_ROWS = 16


def measure_prompt(
    lm: LoadedModel,
    prompt: Prompt,
    plan: RunPlan,
    *,
    target: Target | None = None,
    own: Mapping[str, Own] | None = None,
    signed: Mapping[str, bool] | None = None,
) -> PromptWork:
    """Everything that the plan asks of one prompt. What cannot be measured is in the result with its reason.

    Parameters
    ----------
    target : the prompt's own when None.
    own : name -> scores made elsewhere, for this prompt's tokens or characters.
    signed : name -> whether those have signs, over all prompts; told from this prompt's alone where not given.
    """
    seconds: dict[str, float] = {}
    told = {
        "label": prompt_label(prompt),
        "cluster": prompt.cluster or prompt_label(prompt),
        "text": prompt.text or "",
        "target": prompt.target or "",
        "foil": prompt.foil or "",
    }
    try:
        encoded = lm.encode(prompt)
        told["text"] = encoded.texts[0]
        estimate_memory(lm, int(encoded.lengths[0])).require_fit(f"prompt {told['label']!r}")
        began = time.perf_counter()
        floor = float(noise_floor(lm, prompt, target, seed=plan.seed).values[0])
        seconds["noise floor"] = time.perf_counter() - began
        compared = compare_prompt(lm, prompt, target, plan.compared, floor=floor, own=own, own_signed=signed)
        began = time.perf_counter()
        untouched, kernels = _untouched(lm, encoded)
        seconds["self-checks"] = time.perf_counter() - began
    except AttnDiagError as error:
        transient = isinstance(error, InsufficientMemoryError)
        return PromptWork(
            **told, compared=None, edges=None, checks=(), failure=reason_of(error), transient=transient, seconds=seconds
        )
    seconds |= compared.seconds
    edges, edge_failure, transient = None, "", compared.transient
    if plan.edges is not None:
        try:
            edges = measure_edges(
                lm, prompt, target, plan.edges, floor=floor, seed=plan.seed, thresholds=plan.compared.thresholds
            )
            seconds |= edges.seconds
        except AttnDiagError as error:
            edge_failure = reason_of(error)
            transient = transient or isinstance(error, InsufficientMemoryError)
    checks = (untouched, *_checks(lm, compared, edges))
    return PromptWork(
        **told,
        compared=compared,
        edges=edges,
        checks=checks,
        transient=transient,
        edge_failure=edge_failure,
        kernels=kernels,
        seconds=seconds,
    )


def measure_model(lm: LoadedModel, plan: RunPlan) -> ModelWork:
    """The attention card, and scores of heads on probes: once for a run."""
    problems: dict[str, str] = {}
    seconds: dict[str, float] = {}
    made: dict[str, Any] | None = None
    began = time.perf_counter()
    try:
        made = plain_values(card(lm).to_dict())
    except AttnDiagError as error:
        problems["card"] = reason_of(error)
    seconds["card"] = time.perf_counter() - began
    columns: dict[str, Any] = {}
    if plan.heads:
        began = time.perf_counter()
        try:
            table = heads(lm, probes=("induction", "previous", "sink"), rows=PROBE_ROWS, seed=plan.seed)
            problems |= {f"probe {one.probe}": one.reason for one in table.not_measurable}
            frame = table.to_frame()
            wanted = [name + beside for name in _HEAD_SCORES for beside in _BESIDE]
            columns = {name: frame[name].to_numpy() for name in ("layer", "head", *wanted) if name in frame}
        except AttnDiagError as error:
            problems["heads"] = reason_of(error)
        seconds["probes of heads"] = time.perf_counter() - began
    return ModelWork(made, columns, problems, seconds)


def plain_values(value: Any) -> Any:
    """Lists, dictionaries with text keys, numbers and texts, as JSON has them."""
    if isinstance(value, Mapping):
        return {str(name): plain_values(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(part) for part in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _untouched(lm: LoadedModel, encoded: Encoded) -> tuple[Check, tuple[str, ...]]:
    """Whether the output under capture is bit-equal to the plain one, and which kernels ran."""
    kernels: set[str] = set()
    plain = lm.run(encoded.inputs)
    with capture(lm, on_call=lambda call: kernels.add(call.kernel)):
        seen = lm.run(encoded.inputs)
    name = next((name for name in ("logits", "last_hidden_state") if getattr(plain, name, None) is not None), None)
    if name is None:
        return Check(UNTOUCHED, True, "the output has no logits or hidden states"), ()
    left, right = getattr(plain, name), getattr(seen, name)
    equal = torch.equal(left, right)
    detail = f"{name} bit-equal" if equal else f"{name} differ by up to {float((left - right).abs().max()):.3g}"
    return Check(UNTOUCHED, equal, detail), tuple(sorted(kernels))


def _checks(lm: LoadedModel, compared: PromptResult, edges: EdgeResult | None) -> list[Check]:
    found = [
        Check(f"scores of {name}", not scores.failures, "; ".join(scores.failures))
        for name, scores in compared.scores.items()
    ]
    above = abs(compared.m) > compared.floor
    found.append(Check("m above its noise floor", above, f"|m| {abs(compared.m):.4g}, floor {compared.floor:.2g}"))
    if edges is None:
        return found
    found += [Check(f"edges of {name}", not failures, "; ".join(failures)) for name, failures in edges.failures.items()]
    if edges.restart_error is not None:
        limit = RESTART_TOLERANCE * (1 if lm.info.dtype in ("float32", "float64") else 100)
        # where a restart is not exact, whole forwards were run instead
        exact = edges.restart_error <= limit or edges.route != "restart"
        detail = (
            f"error {edges.restart_error:.2g} of the logits' spread, at most {limit:.2g}; measured by {edges.route}"
        )
        found.append(Check(RESTARTED, exact, detail))
    equal = abs(edges.m - compared.m) <= max(compared.floor, 1e-6 * abs(compared.m))
    found.append(Check(SAME_M, equal, f"{edges.m:.6g} and {compared.m:.6g}"))
    return found

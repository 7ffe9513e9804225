"""The unit of work of a comparison: one model, one prompt, one plan -> plain rows. No state, nothing shared.

What a method cannot do on a prompt becomes a row with the reason; the other methods go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attndiag.comparison.axis import PromptTokens, Spans, TokenAxis, sinks, token_axis
from attndiag.comparison.methods import PromptMethods, TokenScores, reason_of
from attndiag.errors import AttnDiagError, InsufficientMemoryError, NotApplicableError
from attndiag.explanations.replacement import Replacement
from attndiag.explanations.replacement_effects import set_effects
from attndiag.explanations.target import score
from attndiag.models.load import LoadedModel
from attndiag.models.vocabulary import learned_places
from attndiag.prompts import Prompt, Target
from attndiag.scores import Scores
from attndiag.stats.controls import TOKEN_FREQUENCY, Ranking, control_rankings, faithfulness_table
from attndiag.stats.masked import MaskedValues
from attndiag.stats.two_methods import Agreement, agree
from attndiag.stats.verdicts import Thresholds, replacement_agreement, task_check

Rows = list[dict[str, Any]]
Array = NDArray[np.float64]
Own = NDArray[np.floating] | Sequence[float] | Spans

# those that share forwards; normalised AOPC, curves and LDS multiply the masks
DEFAULT_METRICS = ("aopc_comprehensiveness", "aopc_sufficiency", "effect_tau")
# shuffles behind each null band of the agreement
NULL_DRAWS = 300


@dataclass(frozen=True)
class Plan:
    """What to do with every prompt.

    Parameters
    ----------
    methods : names, see `comparison.methods`.
    replacements : the first one gives the evidence and the metrics; with several, prompts on which they order the
        tokens differently get no verdict.
    metrics : of faithfulness; empty to leave them out.
    params : method -> its parameters.
    thresholds : of the verdicts.
    random_orders : controls.
    metric_draws : draws of a random replacement for each set that a metric replaces. Sets are many, and the mean over
        prompts evens the draws out.
    seed : of everything drawn.
    """

    methods: tuple[str, ...]
    replacements: tuple[Replacement, ...]
    metrics: tuple[str, ...] = DEFAULT_METRICS
    params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    thresholds: Thresholds = field(default_factory=Thresholds)
    random_orders: int = 20
    metric_draws: int = 1
    seed: int = 0


@dataclass(frozen=True, eq=False)
class PromptResult:
    """Everything measured on one prompt.

    Parameters
    ----------
    label, cluster : of the prompt; the label is the cluster where it has none.
    m, floor : target and noise floor.
    task : why the task check failed; empty where it passed.
    axis : tokens and admissible positions.
    sink : [position].
    scores : by method, the replacements among them.
    replacement_tau : smallest tau between replacements; None with a single one.
    agreement : (first, second) -> measures.
    faithfulness : rows of the table.
    problems : method -> why it has no scores.
    seconds : what was done -> wall time; of no influence on any other number.
    transient : something lacked memory, and may not another time.
    """

    label: str
    cluster: str
    m: float
    floor: float
    task: str
    axis: PromptTokens
    sink: NDArray[np.bool_]
    scores: Mapping[str, TokenScores]
    replacement_tau: float | None
    agreement: Mapping[tuple[str, str], tuple[Agreement, ...]]
    faithfulness: Rows
    problems: Mapping[str, str]
    seconds: Mapping[str, float] = field(default_factory=dict)
    transient: bool = False

    @property
    def judged(self) -> NDArray[np.bool_]:
        """[position] what shares a method's mass in the verdicts: admissible tokens and sinks."""
        return self.axis.admissible | self.sink


def compare_prompt(
    lm: LoadedModel,
    prompt: Prompt,
    target: Target | None,
    plan: Plan,
    *,
    floor: float = 0.0,
    own: Mapping[str, Own] | None = None,
    own_signed: Mapping[str, bool] | None = None,
) -> PromptResult:
    """Every method of the plan on one prompt, their agreement, faithfulness and the evidence for verdicts.

    Parameters
    ----------
    floor : noise floor of m, from `attndiag.explanations.target.noise_floor` over the prompt set.
    own : name -> scores made elsewhere, one for each token, or character spans (start, end, score).
    own_signed : name -> whether those have signs, see `have_signs`; told from this prompt's alone where not given.

    Raises
    ------
    TargetError, PromptError : the prompt has no target or cannot be read.
    """
    axis = token_axis(lm, prompt, target)
    measured = score(lm, prompt, axis.resolved)
    m = float(measured.values[0])
    run = PromptMethods(lm, axis)
    scores, problems, seconds, transient = _all_scores(run, plan, own or {}, own_signed or {})
    try:
        sink = sinks(run.pattern)
    except AttnDiagError as error:
        problems["sinks"] = reason_of(error)
        transient |= isinstance(error, InsufficientMemoryError)
        sink = np.arange(len(axis)) == 0
    replaced = [name for name in scores if name.startswith("replacement[")]
    tau = None
    if len(plan.replacements) > 1:
        effects = {name: scores[name].values[axis.admissible] for name in replaced}
        tau = replacement_agreement(effects) if len(effects) == len(plan.replacements) else float("nan")
    ranked = axis.admissible & ~sink
    began = time.perf_counter()
    agreement = {
        (one, two): agree(
            scores[one].values,
            scores[two].values,
            admissible=ranked & np.isfinite(scores[one].values) & np.isfinite(scores[two].values),
            signed=(scores[one].signed, scores[two].signed),
            draws=NULL_DRAWS,
            seed=plan.seed,
        )
        for one, two in combinations(scores, 2)
    }
    seconds["agreement"] = time.perf_counter() - began
    faithfulness: Rows = []
    began = time.perf_counter()
    if plan.metrics and plan.replacements:
        try:
            faithfulness = _faithfulness(lm, axis, scores, plan, floor)
        except AttnDiagError as error:
            problems["faithfulness"] = reason_of(error)
            transient |= isinstance(error, InsufficientMemoryError)
    seconds["faithfulness"] = time.perf_counter() - began
    return PromptResult(
        label=axis.label,
        cluster=prompt.cluster or axis.label,
        m=m,
        floor=floor,
        task=check_task(measured, axis),
        axis=axis.plain,
        sink=sink,
        scores=scores,
        replacement_tau=tau,
        agreement=agreement,
        faithfulness=faithfulness,
        problems=problems,
        seconds=seconds,
        transient=transient,
    )


def _all_scores(
    run: PromptMethods, plan: Plan, own: Mapping[str, Own], own_signed: Mapping[str, bool]
) -> tuple[dict[str, TokenScores], dict[str, str], dict[str, float], bool]:
    scores: dict[str, TokenScores] = {}
    problems: dict[str, str] = {}
    seconds: dict[str, float] = {}
    jobs: dict[str, Callable[[], TokenScores]] = {
        name: lambda name=name: run.scores(name, **plan.params.get(name, {})) for name in plan.methods
    }
    jobs |= {f"replacement[{one.label}]": lambda one=one: run.replacement(one) for one in plan.replacements}
    jobs |= {name: lambda name=name: _own_scores(run.axis, name, own[name], own_signed.get(name)) for name in own}
    transient = False
    for name, job in jobs.items():
        began = time.perf_counter()
        try:
            scores[name] = job()
        except AttnDiagError as error:
            problems[name] = reason_of(error)
            transient = transient or isinstance(error, InsufficientMemoryError)
        if name not in own:
            seconds[name] = time.perf_counter() - began
    return scores, problems, seconds, transient


def _own_scores(axis: TokenAxis, name: str, given: Own, signed: bool | None) -> TokenScores:
    """Scores made elsewhere, on the tokens of a prompt."""
    values = axis.from_spans(given, name) if _are_spans(given) else axis.place(given, name)  # type: ignore[arg-type]
    return TokenScores(name, values, have_signs([given]) if signed is None else signed, "own")


def _are_spans(given: Own) -> bool:
    return len(given) > 0 and np.ndim(given[0]) == 1


def have_signs(entries: Sequence[Own]) -> bool:
    """Whether scores made elsewhere are signed: any of them, on any prompt, is below 0.

    One answer for a method: with one a prompt, it would be ranked by size on some and by value on others.
    """
    for given in entries:
        scores = [span[2] for span in given] if _are_spans(given) else given  # type: ignore[index]
        if bool((np.asarray(scores, dtype=np.float64) < 0).any()):
            return True
    return False


def check_task(measured: Scores, axis: TokenAxis) -> str:
    """Task check from the scorer's own facts on one prompt; targets without a first choice have none to fail."""
    first = measured.checks.get("top1_is_answer")
    if first is None:
        return ""
    margin = float(measured.values[0]) if axis.resolved.foil_ids is not None else None
    return task_check(target_is_top1=bool(first[0]), margin=margin)


def _made_by(scores: TokenScores, replacement: Replacement) -> str | None:
    """Label of the metric's replacement where the scores were made by the same kind, however many draws of it."""
    kind = None if scores.replacement is None else scores.replacement.partition("(")[0]
    return replacement.label if kind == replacement.name else scores.replacement


def _faithfulness(
    lm: LoadedModel, axis: TokenAxis, scores: Mapping[str, TokenScores], plan: Plan, floor: float
) -> Rows:
    """The table over the admissible tokens, replaced by the first replacement."""
    evidence = plan.replacements[0]
    replacement = replace(evidence, draws=plan.metric_draws) if evidence.random else evidence
    places = np.flatnonzero(axis.admissible)
    if not len(places):
        raise NotApplicableError(f"{axis.label!r} has no token that may be replaced")
    clean = float(score(lm, axis.prompt, axis.resolved).values[0])

    def value(keep: NDArray[np.bool_]) -> Array:
        found = set_effects(
            lm,
            axis.prompt,
            axis.resolved.targets[0],
            sets=[places[~row].tolist() for row in keep],
            replacement=replacement,
        )
        effects = found.numpy().astype(np.float64)
        if replacement.name == "pair":
            # a set whose tokens the counterfactual shares is replaced by itself
            effects = np.where(np.isnan(effects), 0.0, effects)
        return clean - effects

    values = MaskedValues(value, len(places), replacement.label)
    rankings = [
        Ranking(name, one.values[places], one.signed, _made_by(one, replacement))
        for name, one in scores.items()
        if np.isfinite(one.values[places]).all()
    ]
    often, no_order = None, ""
    try:
        often = -learned_places(lm.tokenizer, axis.token_ids[places])
    except NotApplicableError as error:
        no_order = str(error)
    rankings += control_rankings(places.astype(np.float64), often, random_orders=plan.random_orders, seed=plan.seed)
    table = faithfulness_table(rankings, values, wanted=plan.metrics, floor=floor, seed=plan.seed)
    rows: Rows = [
        {
            "method": row.method,
            "metric": row.metric,
            "value": row.value,
            "low": row.low,
            "high": row.high,
            "direction": row.direction,
            "unit": axis.resolved.unit if row.unit == "m" else "1",
            "control": row.control,
            "circular": row.circular,
            "undefined": row.undefined,
        }
        for row in table
    ]
    # a method without a score for some token cannot order all that are replaced; it is told, not left out
    kinds = {(row["metric"], row["direction"], row["unit"]): None for row in rows}
    if no_order:
        rows += [_without_value(TOKEN_FREQUENCY, kind, no_order, control=True) for kind in kinds]
    for name, one in scores.items():
        gaps = places[~np.isfinite(one.values[places])]
        if len(gaps):
            told = ", ".join(f"{axis.tokens[place]!r} ({place})" for place in gaps[:3]) + (
                ", ..." if gaps[3:].size else ""
            )
            rows += [_without_value(name, kind, f"no score for {told}, so it orders not all tokens") for kind in kinds]
    return rows


def _without_value(method: str, kind: tuple[str, str, str], why: str, *, control: bool = False) -> dict[str, Any]:
    metric, direction, unit = kind
    return {
        "method": method,
        "metric": metric,
        "value": np.nan,
        "low": np.nan,
        "high": np.nan,
        "direction": direction,
        "unit": unit,
        "control": control,
        "circular": False,
        "undefined": why,
    }

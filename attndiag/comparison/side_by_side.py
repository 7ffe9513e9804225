"""Methods side by side over a prompt set: the tables that come of prompts measured one by one.

1. Each prompt by itself (`one_prompt`): noise floor of m, scores of every method, agreement of pairs, faithfulness.
2. Over all prompts: verdicts of tokens with one correction over all of them, a verdict on each method, paired
   differences of the faithfulness metrics with intervals by cluster, summaries of the agreement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attndiag.comparison.one_prompt import Plan, PromptResult
from attndiag.stats.controls import CONTROLS, RANDOM
from attndiag.stats.evidence import Evidence, from_draws, from_knockout
from attndiag.stats.inference import compare_pairs
from attndiag.stats.two_methods import summarise
from attndiag.stats.verdict_sets import Catalogues, MethodVerdict, catalogues, method_verdict
from attndiag.stats.verdicts import Verdicts, judge

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Methods side by side: tables (pandas), and the records behind them.

    Parameters
    ----------
    prompts : one row a prompt: m, noise floor, task check, tau between replacements, why it failed.
    scores : one row a prompt, method and token.
    agreement : one row a prompt, pair of methods and measure, with its null.
    agreement_summary : one row a pair and measure, undefined ones counted.
    faithfulness : one row a prompt, method and metric; controls among them.
    differences : paired differences of methods by metric and unit, corrected by Holm within these.
    verdicts : one row a prompt, method and token.
    methods : one row a method: its verdict over the prompt set, counts, circularity. The row of the replacement that
        gave the evidence is the `ceiling`, what a method can at best reach: it is wrong only where twice a
        prompt's mean effect is still within 2 % of m or the noise floor.
    problems : method and prompt where something could not be measured, with the reason.
    cases : method -> catalogues of disagreements, (row, item) being (prompt, position).
    judged : method -> the verdicts as arrays.
    """

    prompts: pd.DataFrame
    scores: pd.DataFrame
    agreement: pd.DataFrame
    agreement_summary: pd.DataFrame
    faithfulness: pd.DataFrame
    differences: pd.DataFrame
    verdicts: pd.DataFrame
    methods: pd.DataFrame
    problems: pd.DataFrame
    cases: Mapping[str, Catalogues]
    judged: Mapping[str, Verdicts]

    @property
    def blocked(self) -> bool:
        """True when a failed self-check blocked any verdict."""
        return any(bool(found.blocked.any()) for found in self.judged.values())


def tables(
    results: Sequence[PromptResult],
    plan: Plan,
    *,
    failed: Sequence[Mapping[str, Any]] = (),
    primary: tuple[str, str] | None = None,
    broken: Mapping[str, Sequence[str]] | None = None,
) -> Comparison:
    """The tables over prompts that were measured one by one, in whatever process.

    Parameters
    ----------
    failed : rows of `Comparison.problems` about prompts and what else could not be measured.
    broken : prompt -> self-checks that failed on it, beside those of single methods; they block its verdicts.
    """
    import pandas as pd

    names = list(dict.fromkeys(name for one in results for name in one.scores))
    judged = {name: found for name in names if (found := judge_method(results, name, plan, broken)) is not None}
    whole = {name: method_verdict(found, _clusters(results), seed=plan.seed) for name, found in judged.items()}
    problems = [
        *failed,
        *({"prompt": r.label, "method": k, "reason": v} for r in results for k, v in r.problems.items()),
    ]
    return Comparison(
        prompts=pd.DataFrame([_prompt_row(one) for one in results]),
        scores=pd.DataFrame([row for one in results for row in _score_rows(one)]),
        agreement=pd.DataFrame([row for one in results for row in _agreement_rows(one)]),
        agreement_summary=pd.DataFrame(_agreement_summary(results)),
        faithfulness=pd.DataFrame(
            [{"prompt": r.label, "cluster": r.cluster, **row} for r in results for row in r.faithfulness]
        ),
        differences=pd.DataFrame(_differences(results, plan, primary)),
        verdicts=_verdict_frame(results, judged),
        methods=pd.DataFrame([_method_row(name, judged[name], whole[name], results, plan) for name in judged]),
        problems=pd.DataFrame(problems, columns=["prompt", "method", "reason"]),
        cases={name: catalogues(found, seed=plan.seed) for name, found in judged.items()},
        judged=judged,
    )


def _clusters(results: Sequence[PromptResult]) -> list[str]:
    return [one.cluster for one in results]


def judge_method(
    results: Sequence[PromptResult], method: str, plan: Plan, broken: Mapping[str, Sequence[str]] | None = None
) -> Verdicts | None:
    """Verdicts of one method on the tokens of all prompts; None where there is no evidence at all.

    A sink that is a special token takes its share of the mass, else the mass that it draws would be handed to the
    others; nobody replaces it, so its own verdict is inconclusive.
    """
    if not plan.replacements or not results:
        return None
    source = f"replacement[{plan.replacements[0].label}]"
    width = max(len(one.axis) for one in results)
    shape = (len(results), width)
    scores, keep = np.zeros(shape), np.zeros(shape, dtype=bool)
    failed: list[list[str]] = []
    task: list[str] = []
    for row, one in enumerate(results):
        mine = one.scores.get(method)
        n = len(one.axis)
        failed.append([*(() if mine is None else mine.failures), *(broken or {}).get(one.label, ())])
        task.append(one.task)
        if mine is None:
            task[-1] = "the method has no scores here: " + one.problems.get(method, "not asked for")
            keep[row, :n] = one.judged
            continue
        scores[row, :n] = np.where(np.isfinite(mine.values), mine.values, 0.0)
        keep[row, :n] = one.judged & np.isfinite(mine.values)
    taus = [one.replacement_tau for one in results]
    return judge(
        scores,
        _evidence(results, source, shape),
        np.array([one.m for one in results]),
        admissible=keep,
        task=task,
        failed_checks=failed,
        replacement_tau=None if None in taus else np.array(taus, dtype=np.float64),
        thresholds=plan.thresholds,
    )


def _evidence(results: Sequence[PromptResult], source: str, shape: tuple[int, int]) -> Evidence:
    draws = max((one.scores[source].draws.shape[0] for one in results if source in one.scores), default=1)  # type: ignore[union-attr]
    table = np.full((draws, *shape), np.nan)
    for row, one in enumerate(results):
        found = one.scores.get(source)
        if found is not None and found.draws is not None:
            table[: len(found.draws), row, : len(one.axis)] = found.draws
    floor = np.array([one.floor for one in results])
    return from_draws(table, floor) if draws > 1 else from_knockout(table[0], floor)


def _prompt_row(one: PromptResult) -> dict[str, Any]:
    return {
        "prompt": one.label,
        "cluster": one.cluster,
        "m": one.m,
        "unit": one.axis.unit,
        "noise_floor": one.floor,
        "task": one.task,
        "replacement_tau": np.nan if one.replacement_tau is None else one.replacement_tau,
        "tokens": len(one.axis),
        "admissible": int(one.axis.admissible.sum()),
        "sinks": int((one.sink & one.axis.admissible).sum()),
        "text": one.axis.text,
        "target_kind": one.axis.kind,
        "target": one.axis.answer,
        "foil": one.axis.foil,
    }


def _score_rows(one: PromptResult) -> list[dict[str, Any]]:
    return [
        {
            "prompt": one.label,
            "method": name,
            "position": place,
            "token": one.axis.tokens[place],
            "score": float(found.values[place]),
            "unit": found.unit,
            "signed": found.signed,
            "admissible": bool(one.axis.admissible[place]),
            "sink": bool(one.sink[place]),
        }
        for name, found in one.scores.items()
        for place in range(len(one.axis))
    ]


def _agreement_rows(one: PromptResult) -> list[dict[str, Any]]:
    return [
        {
            "prompt": one.label,
            "cluster": one.cluster,
            "first": first,
            "second": second,
            "measure": found.measure,
            "parameter": next(iter(found.params.values()), np.nan),
            "value": found.value,
            "adjusted": found.adjusted,
            "null_low": np.nan if found.null is None else found.null.low,
            "null_high": np.nan if found.null is None else found.null.high,
            "p": np.nan if found.null is None else found.null.p,
            "items": found.n_items,
            "ranked_by": found.ranked_by,
            "undefined": found.undefined,
        }
        for (first, second), measures in one.agreement.items()
        for found in measures
    ]


def _agreement_summary(results: Sequence[PromptResult]) -> list[dict[str, Any]]:
    pairs = list(dict.fromkeys(pair for one in results for pair in one.agreement))
    rows: list[dict[str, Any]] = []
    for pair in pairs:
        for found in summarise([one.agreement[pair] for one in results if pair in one.agreement]):
            rows.append(
                {
                    "first": pair[0],
                    "second": pair[1],
                    "measure": found.measure,
                    "parameter": next(iter(found.params.values()), np.nan),
                    "mean": found.mean,
                    "null_low": found.null_low,
                    "null_high": found.null_high,
                    "beyond_chance": found.beyond_chance,
                    "prompts": found.n_prompts,
                    "undefined_share": found.undefined_share,
                }
            )
    return rows


def _differences(results: Sequence[PromptResult], plan: Plan, primary: tuple[str, str] | None) -> list[dict[str, Any]]:
    """Each method against the random orders, and the primary pair, by metric and unit: logits and nats have no mean."""
    cells: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    directions: dict[str, str] = {}
    circular: set[tuple[str, str]] = set()
    for index, one in enumerate(results):
        for row in one.faithfulness:
            cells.setdefault((row["metric"], row["unit"]), {}).setdefault(row["method"], {})[index] = row["value"]
            directions[row["metric"]] = row["direction"]
            if row["circular"]:
                circular.add((row["metric"], row["method"]))
    rows: list[dict[str, Any]] = []
    clusters = _clusters(results)
    for (metric, unit), by_method in cells.items():
        # prompts of another unit are not undefined here: they are asked elsewhere
        here = sorted(set().union(*by_method.values()))
        values = {name: np.array([found.get(index, np.nan) for index in here]) for name, found in by_method.items()}
        declared = [(name, RANDOM) for name in values if name not in CONTROLS]
        main = primary if primary is not None and set(primary) <= set(values) else None
        declared = ([main] if main else []) + declared
        if not declared:
            continue
        behind = [clusters[index] for index in here]
        for found in compare_pairs(values, behind, declared=declared, primary=main, seed=plan.seed):
            rows.append(
                {
                    "metric": metric,
                    "first": found.first,
                    "second": found.second,
                    "difference": found.difference.value,
                    "low": found.difference.low,
                    "high": found.difference.high,
                    "p": found.test.p,
                    "p_holm": found.p_holm,
                    "direction": directions[metric],
                    "unit": unit,
                    "clusters": found.difference.n_clusters,
                    "enough_clusters": found.enough_clusters,
                    "undefined_share": found.difference.undefined_share,
                    "primary": found.primary and main is not None,
                    "circular": (metric, found.first) in circular or (metric, found.second) in circular,
                }
            )
    return rows


def _verdict_frame(results: Sequence[PromptResult], judged: Mapping[str, Verdicts]) -> pd.DataFrame:
    import pandas as pd

    frames: list[pd.DataFrame] = []
    for name, found in judged.items():
        frame = found.to_frame()
        frame.insert(0, "method", name)
        frame.insert(0, "prompt", [results[row].label for row in frame["row"]])
        texts = [results[row].axis.tokens[item] for row, item in zip(frame["row"], frame["item"], strict=True)]
        frame.insert(3, "token", texts)
        frames.append(frame.rename(columns={"item": "position"}).drop(columns="row"))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _method_row(
    name: str, found: Verdicts, whole: MethodVerdict, results: Sequence[PromptResult], plan: Plan
) -> dict[str, Any]:
    made_by = {one.scores[name].replacement for one in results if name in one.scores}
    return {
        "method": name,
        "verdict": whole.verdict,
        "hit_rate": whole.hit_rate.value,
        "hit_rate_low": whole.hit_rate.low,
        "hit_rate_high": whole.hit_rate.high,
        "p_chance": whole.p_chance,
        "hits": whole.hits,
        "weights_without_effect": whole.weights_without_effect,
        "effects_without_weight": whole.effects_without_weight,
        **found.counts,
        # the evidence comes from the first replacement; a method made by it agrees with itself
        "circular": plan.replacements[0].label in made_by,
        "role": "ceiling" if name == f"replacement[{plan.replacements[0].label}]" else "method",
        "blocked_prompts": int(found.blocked.sum()),
    }

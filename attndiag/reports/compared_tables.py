"""The tables of a comparison page: what the frames of a comparison hold, in the order in which a reader needs it.

Nothing is measured here. What is undefined stays nan or None and is counted; the template writes it as "undefined".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attndiag.comparison.misled import rates_by_head, rates_by_layer, rates_by_prompt
from attndiag.stats.controls import RANDOM
from attndiag.stats.verdicts import VERDICTS, Verdicts

if TYPE_CHECKING:
    import pandas as pd

    from attndiag.comparison.edges import EdgeVerdicts
    from attndiag.comparison.side_by_side import Comparison
    from attndiag.stats.rates import Rate
    from attndiag.stats.verdict_sets import Catalogues

Row = dict[str, Any]
# measures in the matrix: the order of all tokens, and the three strongest corrected for chance
ORDER, TOP = "tau_b", ("top_k_overlap", 3.0)
KINDS = (
    ("weights_without_effect", "High score, effect absent", "the method marks it, its effect is within the margin"),
    ("effects_without_weight", "Low score, effect present", "the method passes it over, the model needs it"),
    ("agreeing_high", "High score, effect present", "agreeing cases, as many as in the first list if there are"),
    ("agreeing_low", "Low score, effect absent", "agreeing cases, as many as in the second list if there are"),
)
# cases of one catalogue on the page, and tokens shown on either side of a marked one
_CASES, _AROUND = 5, 24
# heads in the table of the page
HEADS_SHOWN = 400


def methods_of(comparison: Comparison) -> list[str]:
    """Methods with scores on at least one prompt, in the order in which they were asked for."""
    if comparison.scores.empty:
        return []
    return list(dict.fromkeys(comparison.scores["method"]))


def ceilings(comparison: Comparison) -> set[str]:
    """The replacement that gives the evidence, as a method: what the others can at best reach, not a rival."""
    frame = comparison.methods
    return set() if frame.empty else set(frame.loc[frame["role"] == "ceiling", "method"])


def method_rows(comparison: Comparison) -> list[Row]:
    """One row a method: its verdict on tokens, with what stands behind it; the ceiling last."""
    rows = [{**row, "ceiling": row["role"] == "ceiling"} for row in _records(comparison.methods)]
    return sorted(rows, key=lambda row: bool(row["ceiling"]))


def edge_rows(edges: EdgeVerdicts | None) -> list[Row]:
    """The same on edges: one row a method."""
    if edges is None:
        return []
    return [
        {
            "method": name,
            "verdict": whole.verdict,
            "hit_rate": whole.hit_rate.value,
            "hit_rate_low": whole.hit_rate.low,
            "hit_rate_high": whole.hit_rate.high,
            "p_chance": whole.p_chance,
            "weights_without_effect": whole.weights_without_effect,
            "effects_without_weight": whole.effects_without_weight,
            "hits": whole.hits,
            **edges.judged[name].counts,
            "blocked": int(edges.judged[name].blocked.sum()),
            "ceiling": False,
        }
        for name, whole in edges.whole.items()
    ]


@dataclass(frozen=True)
class Cell:
    """One pair of methods in the matrix: mean over prompts, mean null band, and how many prompts have no value."""

    value: float
    low: float
    high: float
    beyond: float
    prompts: int
    undefined_share: float

    @property
    def undefined(self) -> bool:
        """No prompt has a value."""
        return not math.isfinite(self.value)


def agreement_matrix(
    comparison: Comparison, measure: str = ORDER, parameter: float | None = None, *, adjusted: bool = False
) -> dict[tuple[str, str], Cell]:
    """(first, second) -> cell, both ways round, for one measure; pairs without it are left out.

    Parameters
    ----------
    adjusted : the mean of the chance-adjusted values instead, which have no band of their own (it is around 0).
    """
    cells: dict[tuple[str, str], Cell] = {}
    for row in agreement_rows(comparison):
        if row["measure"] != measure or (parameter is not None and row["parameter"] != parameter):
            continue
        band = (math.nan, math.nan) if adjusted else (row["null_low"], row["null_high"])
        value = row["adjusted"] if adjusted else row["mean"]
        cell = Cell(value, *band, row["beyond_chance"], int(row["prompts"]), float(row["undefined_share"]))
        cells[row["first"], row["second"]] = cells[row["second"], row["first"]] = cell
    return cells


def agreement_rows(comparison: Comparison) -> list[Row]:
    """The summary of every pair and measure, with the mean of the adjusted values beside the raw mean."""
    summary = comparison.agreement_summary
    if summary.empty:
        return []
    keys = ["first", "second", "measure", "parameter"]
    adjusted = comparison.agreement.groupby(keys, dropna=False)["adjusted"].mean().rename("adjusted").reset_index()
    return summary.merge(adjusted, on=keys, how="left").to_dict("records")


def faithfulness_rows(comparison: Comparison) -> list[tuple[str, list[Row]]]:
    """By metric and unit: one row a method with its mean over prompts and its paired difference to random orders.

    Prompts with targets of different kinds have values in different units; there is no mean over both.
    """
    frame = comparison.faithfulness
    if frame.empty:
        return []
    differences = comparison.differences
    paired = {} if differences.empty else {
        (r["metric"], r["unit"], r["first"], r["second"]): r for r in _records(differences)
    }  # fmt: skip
    groups: list[tuple[str, list[Row]]] = []
    for _, of_metric in frame.groupby(["metric", "unit"], sort=False):
        metric, unit = of_metric["metric"].iloc[0], of_metric["unit"].iloc[0]
        rows: list[Row] = []
        for method, found in of_metric.groupby("method", sort=False):
            first = found.iloc[0]
            rows.append(
                {
                    "method": method,
                    "mean": float(found["value"].mean()),
                    "prompts": len(found),
                    "undefined": int(found["value"].isna().sum()),
                    "why": next((str(told) for told in found["undefined"] if told), ""),
                    "direction": first["direction"],
                    "unit": str(unit),
                    "control": bool(first["control"]),
                    "circular": bool(found["circular"].any()),
                    "range": (float(found["low"].mean()), float(found["high"].mean())),
                    "paired": paired.get((metric, unit, method, RANDOM)),
                }
            )
        # methods, then the ceiling, then the controls
        rows.sort(key=lambda row: (row["control"], row["circular"]))
        groups.append((str(metric), rows))
    # the units of one metric beside each other
    order = list(dict.fromkeys(metric for metric, _ in groups))
    return sorted(groups, key=lambda group: order.index(group[0]))


def primary_rows(comparison: Comparison) -> list[Row]:
    """The declared main comparison, one row a metric and unit; empty where none was declared."""
    frame = comparison.differences
    return [] if frame.empty else _records(frame[frame["primary"].astype(bool)])


def replacement_rows(comparison: Comparison) -> list[Row]:
    """Pairs of replacements: how alike they order the tokens, over prompts."""
    return [
        row
        for row in agreement_rows(comparison)
        if row["measure"] == ORDER and all(str(row[side]).startswith("replacement[") for side in ("first", "second"))
    ]


def level_counts(comparison: Comparison, edges: EdgeVerdicts | None) -> list[Row]:
    """How many items got which verdict, by level (token, edge, head) and method."""
    rows = [
        {"level": "token", "method": row["method"], "ceiling": row["ceiling"], **{v: int(row[v]) for v in VERDICTS}}
        for row in method_rows(comparison)
    ]
    if edges is None:
        return rows
    for name, found in edges.judged.items():
        rows.append({"level": "edge", "method": name, "ceiling": False, **found.counts})
    for name in edges.judged:
        counts = edges.head_rows(name)["verdict"].value_counts()
        rows.append({"level": "head", "method": name, "ceiling": False, **{v: int(counts.get(v, 0)) for v in VERDICTS}})
    return rows


def units_of(edges: EdgeVerdicts | None) -> dict[str, int]:
    """Units of the effects on edges and how many prompts have each, the most frequent first."""
    if edges is None:
        return {}
    prompts = {prompt: unit for (prompt, *_), unit in zip(edges.rows, edges.units, strict=True)}
    return dict(Counter(prompts.values()).most_common())


def head_rows(edges: EdgeVerdicts | None, heads: pd.DataFrame | None) -> list[Row]:
    """One row a head: how often each method misleads there (`by_method`, a `Rate` each), and what probes say of it.

    Heads on which `weight` misleads most surely come first: by the lower end of its interval.
    """
    import pandas as pd

    rows: dict[tuple[int, int], Row] = {}
    for name in () if edges is None else edges.judged:
        assert edges is not None
        for place, rate in rates_by_head(edges, name).items():
            rows.setdefault(place, {"by_method": {}})["by_method"][name] = rate
    probes = {} if heads is None or heads.empty else {
        (int(r["layer"]), int(r["head"])): r for r in _records(heads) if not pd.isna(r["layer"])
    }  # fmt: skip
    for place, found in probes.items():
        rows.setdefault(place, {"by_method": {}})["probes"] = found
    table = [{"layer": layer, "head": head, "probes": {}, **row} for (layer, head), row in sorted(rows.items())]
    return sorted(table, key=_most_surely_misled)


def _most_surely_misled(row: Row) -> tuple[bool, float, float]:
    """Without an interval last but for those without a decided prompt."""
    first: Rate | None = next(iter(row["by_method"].values()), None)
    if first is None or not first.decided:
        return (True, 1.0, 0.0)
    return (False, 0.0 if math.isnan(first.low) else -first.low, -first.wrong)


def layer_rows(edges: EdgeVerdicts | None) -> list[Row]:
    """One row a layer: in how many of its decided rows (a head on a prompt) each method misleads."""
    if edges is None:
        return []
    rates = {name: rates_by_layer(edges, name) for name in edges.judged}
    layers = sorted({layer for found in rates.values() for layer in found})
    return [
        {"layer": layer, "by_method": {name: found[layer] for name, found in rates.items() if layer in found}}
        for layer in layers
    ]


def prompt_rows(comparison: Comparison, edges: EdgeVerdicts | None, method: str | None) -> list[Row]:
    """One row a prompt: task check, noise floor, and in which part of the decided heads `method` misleads there."""
    measured = edges is not None and method in edges.judged
    by_prompt = rates_by_prompt(edges, str(method)) if measured and edges is not None else {}
    rows = _records(comparison.prompts)
    for row in rows:
        row["wrong_heads"], row["decided_heads"] = by_prompt.get(row["prompt"], (0, 0))
    return rows


def blocked_by(comparison: Comparison, edges: EdgeVerdicts | None) -> list[tuple[str, int]]:
    """Why prompts have no verdict at all, and how many prompts each reason holds for, the most frequent first.

    A reason that holds for one method only (constant scores) is not among them; it stands in the verdicts.
    """
    reasons: dict[str, set[str]] = {}
    frame = comparison.verdicts
    if not frame.empty:
        for prompt, found in frame.groupby("prompt", sort=False):
            told = set(found["reason"])
            if len(told) == 1 and "" not in told:
                reasons.setdefault(kind_of_reason(str(told.pop())), set()).add(str(prompt))
    problems = comparison.problems
    for prompt in problems.loc[problems["method"] == "", "prompt"] if not problems.empty else ():
        reasons.setdefault("could not be measured", set()).add(str(prompt))
    if edges is not None:
        for prompt in edges.problems:
            if not any(prompt in found for found in reasons.values()):
                reasons.setdefault("edges could not be measured", set()).add(prompt)
    return sorted(((text, len(found)) for text, found in reasons.items()), key=lambda one: -one[1])


def kind_of_reason(reason: str) -> str:
    """A reason without the numbers of its prompt."""
    for start in ("task check failed", "blocked by failed self-checks", "the replacements cannot be compared"):
        if reason.startswith(start):
            return start
    if reason.startswith("two replacements"):
        return "two replacements order the tokens differently"
    if reason.startswith("|m| is"):
        return "the target is not above the noise floor"
    if "admissible items" in reason:
        return "too few tokens"
    return reason


def tokens_of(comparison: Comparison, prompt: str) -> list[str]:
    """Token texts of a prompt, from the scores."""
    frame = comparison.scores[comparison.scores["prompt"] == prompt]
    return frame.drop_duplicates("position").sort_values("position")["token"].tolist()


def token_cases(comparison: Comparison, method: str) -> list[Row]:
    """The catalogues of one method on tokens."""
    labels = comparison.prompts["prompt"].tolist()
    texts = {label: tokens_of(comparison, label) for label in labels}
    units = comparison.prompts["unit"].tolist()
    where = [(label, f"prompt {label}", unit) for label, unit in zip(labels, units, strict=True)]
    return _catalogue_rows(comparison.cases[method], comparison.judged[method], where, texts)


def edge_cases(edges: EdgeVerdicts, method: str) -> list[Row]:
    """The catalogues of one method on edges: which head of which layer, which key of the last query."""
    named = zip(edges.rows, edges.units, strict=True)
    where = [(prompt, f"L{layer}H{head}, prompt {prompt}", unit) for (prompt, _, layer, head), unit in named]
    return _catalogue_rows(edges.cases[method], edges.judged[method], where, edges.tokens)


def _catalogue_rows(
    cases: Catalogues, judged: Verdicts, where: Sequence[tuple[str, str, str]], texts: Mapping[str, Sequence[str]]
) -> list[Row]:
    kinds: list[Row] = []
    for kind, title, meaning in KINDS:
        found = [_case(judged, row, item, where[row], texts) for row, item in getattr(cases, kind)[:_CASES].tolist()]
        kinds.append({"kind": kind, "title": title, "meaning": meaning, "cases": found, "total": cases.totals[kind]})
    return kinds


def _case(
    judged: Verdicts, row: int, item: int, where: tuple[str, str, str], texts: Mapping[str, Sequence[str]]
) -> Row:
    prompt, place, unit = where
    tokens = list(texts[prompt])
    start, end = max(0, item - _AROUND), min(len(tokens), item + _AROUND + 1)
    return {
        "place": place,
        "prompt": prompt,
        "position": item,
        "before": "".join(tokens[start:item]),
        "token": tokens[item],
        "after": "".join(tokens[item + 1 : end]),
        "cut_before": start > 0,
        "cut_after": end < len(tokens),
        "share": float(judged.share[row, item]),
        "even": 1.0 / max(1, int(np.isfinite(judged.share[row]).sum())),
        "effect": float(judged.effect[row, item]),
        "low": float(judged.shown.low[row, item]),
        "high": float(judged.shown.high[row, item]),
        "unit": unit,
        "absent_below": float(judged.shown.absent_below[row]),
        "present_from": float(judged.shown.present_from[row]),
    }


def _records(frame: pd.DataFrame) -> list[Row]:
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]

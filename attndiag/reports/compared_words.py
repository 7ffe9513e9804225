"""The sentences of a comparison page that carry numbers: for which prompts, layers and heads weights mislead, how sure
that is, and what blocks a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attndiag.comparison.misled import rate_of_prompts, rates_by_layer
from attndiag.reports.compared_tables import (
    Row,
    blocked_by,
    ceilings,
    edge_rows,
    head_rows,
    method_rows,
    methods_of,
    prompt_rows,
)
from attndiag.reports.html import percent
from attndiag.reports.token_text import shortened, visible
from attndiag.stats.inference import LEAST_CLUSTERS
from attndiag.stats.rates import Rate
from attndiag.stats.verdicts import ABSENT, HIGH, LOW, PRESENT

if TYPE_CHECKING:
    from attndiag.comparison.edges import EdgeVerdicts
    from attndiag.comparison.side_by_side import Comparison

# heads, layers and prompts that a sentence names
_NAMED = 3
_NAMES = {
    "weight": "attention weights",
    "contribution": "contributions of layers",
    "head_contribution": "head contributions",
    "value_norm": "weights times value norms",
    "rollout": "rollout",
    "flow": "flow",
}


def subject(comparison: Comparison, edges: EdgeVerdicts | None) -> str | None:
    """The method that the headline is about: weights where they were compared, else the first; None without any."""
    names = [*(edges.judged if edges is not None else ()), *comparison.judged]
    ceiling = ceilings(comparison)
    rivals = [name for name in names if name not in ceiling]
    if "weight" in rivals:
        return "weight"
    return next(iter(rivals), next(iter(methods_of(comparison)), None))


def in_words(method: str) -> str:
    """A method as it stands in a sentence."""
    return _NAMES.get(method, visible(method, mark_spaces=False))


def headline(comparison: Comparison, edges: EdgeVerdicts | None) -> str:
    """Whether the subject tells where the effects are, with the interval that decides it."""
    method = subject(comparison, edges)
    failed = _failed(comparison)
    if method is None or comparison.prompts.empty:
        why = f": {failed} prompt{_s(failed)} could not be measured" if failed else ""
        return f"Nothing could be compared{why}."
    row, level = _verdict_row(comparison, edges, method)
    name = in_words(method)
    if row is None:
        return f"There is no evidence about {name}: no replacement was asked for, so only agreement is described."
    matters = _counted(row)
    if row["verdict"] == "undefined" or not math.isfinite(row["hit_rate"]):
        reasons = "; ".join(f"{text} ({count})" for text, count in blocked_by(comparison, edges)[:_NAMED])
        return f"No verdict on {name}: {reasons or f'no {level} is both decided and marked or needed'}."
    screened = edges is not None and level == "edge" and edges.measured_share < 1
    items = f"{matters:,} decided {level}{_s(matters)}{' of a screen' if screened else ''}"
    rate = (
        f"{percent(row['hit_rate'], 0)} of the {items} that they mark or should mark {'is' if matters == 1 else 'are'} "
        f"right ({_interval(row, _clusters_behind(comparison, edges, method, level))})"
    )
    if row["verdict"] == "disagree":
        return f"{_capital(name)} mislead: only {rate}."
    if row["verdict"] == "agree":
        return f"{_capital(name)} tell which {level}s the model needs: {rate}."
    return f"Whether {name} mislead is not decided: {rate}."


def _counted(row: Row) -> int:
    """Decided items that count for or against a method."""
    return int(row["hits"]) + int(row["weights_without_effect"]) + int(row["effects_without_weight"])


def _verdict_row(comparison: Comparison, edges: EdgeVerdicts | None, method: str) -> tuple[Row | None, str]:
    for rows, level in ((edge_rows(edges), "edge"), (method_rows(comparison), "token")):
        found = next((row for row in rows if row["method"] == method), None)
        if found is not None:
            return found, level
    return None, "token"


def _clusters_behind(comparison: Comparison, edges: EdgeVerdicts | None, method: str, level: str) -> int:
    """In how many clusters of prompts an item counts for or against the method."""
    if level == "edge" and edges is not None:
        return edges.whole[method].hit_rate.n_clusters
    found = comparison.judged[method]
    counts = found.where(HIGH, PRESENT) | found.where(HIGH, ABSENT) | found.where(LOW, PRESENT)
    behind = zip(comparison.prompts["cluster"], counts.any(axis=1), strict=True)
    return len({cluster for cluster, counted in behind if counted})


def _interval(row: Row, clusters: int) -> str:
    low, high = row["hit_rate_low"], row["hit_rate_high"]
    if not (math.isfinite(low) and math.isfinite(high)):
        return "no interval: too few clusters of prompts"
    over = f"over {'only ' if clusters < LEAST_CLUSTERS else ''}{clusters} clusters of prompts"
    return f"95\u00a0% interval {percent(low, 0)} to {percent(high, 0)}, {over}"


def where_sentences(comparison: Comparison, edges: EdgeVerdicts | None) -> list[str]:
    """For which heads, layers and prompts, one sentence each; nothing where it is not known."""
    method = subject(comparison, edges)
    if method is None:
        return []
    if edges is None or method not in edges.judged:
        return [] if comparison.prompts.empty else [_token_sentence(comparison, method)]
    heads = [row for row in head_rows(edges, None) if row["by_method"][method].decided]
    sentences = [_heads_sentence(heads, method), _layers_sentence(edges, method), _prompts_sentence(comparison, edges)]
    tokens = _token_sentence(comparison, method) if method in comparison.judged else ""
    return [text for text in (*sentences, tokens) if text]


def _heads_sentence(heads: Sequence[Row], method: str) -> str:
    if not heads:
        return f"No head has a decided verdict on {in_words(method)}."
    found: list[Rate] = [row["by_method"][method] for row in heads]
    always = sum(one.wrong == one.decided for one in found)
    often = [row for row in heads if row["by_method"][method].share > 0.5]
    named = ", ".join(_head(row, method) for row in often[:_NAMED])
    more = f" and {len(often) - _NAMED} more" if len(often) > _NAMED else ""
    if not often:
        return f"Heads: in none of the {len(heads)} decided heads do they mislead on more than half of the prompts."
    return (
        f"Heads: they mislead on more than half of the decided prompts in {len(often)} of {len(heads)} heads (on all "
        f"of them in {always}), most surely in {named}{more}."
    )


def _head(row: Row, method: str) -> str:
    found: Rate = row["by_method"][method]
    return f"L{row['layer']}H{row['head']} ({found.wrong} of {found.decided} prompts{_ends(found.low, found.high)})"


def _layers_sentence(edges: EdgeVerdicts, method: str) -> str:
    rates = [(layer, rate) for layer, rate in rates_by_layer(edges, method).items() if rate.decided]
    if len(rates) < 2:
        return ""
    rates.sort(key=lambda one: (-one[1].share, one[0]))
    worst = ", ".join(_layer(*one) for one in rates[:_NAMED])
    return f"Layers, rows of heads that mislead of those decided: most in {worst}; least in {_layer(*rates[-1])}."


def _layer(layer: int, rate: Rate) -> str:
    return f"{layer} ({rate.wrong} of {rate.decided}{_ends(rate.low, rate.high)})"


def _ends(low: float, high: float) -> str:
    return f", {percent(low, 0)} to {percent(high, 0)}" if math.isfinite(low) and math.isfinite(high) else ""


def _prompts_sentence(comparison: Comparison, edges: EdgeVerdicts) -> str:
    rows = [row for row in prompt_rows(comparison, edges, subject(comparison, edges)) if row["decided_heads"]]
    if not rows:
        return ""
    rows.sort(key=lambda row: -row["wrong_heads"] / row["decided_heads"])
    named = ", ".join(
        f"{shortened(visible(row['prompt'], mark_spaces=False), 24)} ({row['wrong_heads']} of {row['decided_heads']} "
        "heads)"
        for row in rows[:_NAMED]
    )
    rate = rate_of_prompts(edges, str(subject(comparison, edges)))
    return (
        f"Prompts: on {rate.wrong} of {rate.decided} they mislead in more than half of the decided heads"
        f"{_ends(rate.low, rate.high)}; {'most on ' if len(rows) > 1 else ''}{named}."
    )


def _token_sentence(comparison: Comparison, method: str) -> str:
    row = next((row for row in method_rows(comparison) if row["method"] == method), None)
    if row is None or not math.isfinite(row["hit_rate"]):
        return ""
    matters = _counted(row)
    return (
        f"Tokens: averaged over layers and heads, {percent(row['hit_rate'], 0)} of the {matters:,} decided "
        f"token{_s(matters)} that they mark or should mark {'is' if matters == 1 else 'are'} right "
        f"({_interval(row, _clusters_behind(comparison, None, method, 'token'))})."
    )


def blocking_sentence(comparison: Comparison, edges: EdgeVerdicts | None) -> str:
    """What has no verdict, and why; empty where every prompt has one."""
    reasons = blocked_by(comparison, edges)
    if not reasons:
        return ""
    asked = len(comparison.prompts) + _failed(comparison)
    listed = "; ".join(f"{text} ({count})" for text, count in reasons)
    return f"Prompts without a verdict, of {asked}: {listed}."


def cluster_sentence(comparison: Comparison) -> str:
    """How many independent clusters stand behind the intervals, and whether they are enough."""
    if comparison.prompts.empty:
        return ""
    prompts, clusters = len(comparison.prompts), len(set(comparison.prompts["cluster"]))
    text = f"{prompts} prompt{_s(prompts)} in {clusters} cluster{_s(clusters)}."
    if clusters < LEAST_CLUSTERS:
        text += f" Fewer than {LEAST_CLUSTERS} clusters: intervals are wide and no p-value can be small."
    return text


def sinks_sentence(comparison: Comparison) -> str:
    """What agreement sets aside and faithfulness does not; how many tokens that are."""
    sinks = comparison.prompts["sinks"] if len(comparison.prompts) else []
    if not len(sinks):
        return ""
    low, high = int(min(sinks)), int(max(sinks))
    if high == 0:
        return "Special tokens are set aside; no prompt has a sink among its other tokens."
    count = f"{low}" if low == high else f"{low} to {high}"
    return (
        f"Special tokens and attention sinks are set aside here: {count} sink{_s(high)} a prompt. Faithfulness, "
        "replacements and verdicts keep sinks in."
    )


def agreement_sentence(method: str | None, cells: dict, methods: Sequence[str]) -> str:
    """The subject against every other method, in one sentence."""
    if method is None:
        return ""
    found = [(other, cells[method, other]) for other in methods if (method, other) in cells]
    defined = [(other, cell) for other, cell in found if not cell.undefined]
    if not defined:
        return "No two methods have a defined rank agreement on any prompt." if found else ""
    defined.sort(key=lambda one: -one[1].value)
    ends = [defined[0]] if len(defined) == 1 else [defined[0], defined[-1]]
    words = [
        f"{visible(other, mark_spaces=False)} (tau-b {cell.value:.2f}, chance {cell.low:.2f} to {cell.high:.2f})"
        for other, cell in ends
    ]
    joined = f"closest to {words[0]}" + (f" and farthest from {words[1]}" if len(words) > 1 else "")
    return f"{_capital(in_words(method))} are {joined}.".replace("-0.", "\u22120.")


def _failed(comparison: Comparison) -> int:
    """Prompts that could not be measured at all."""
    return list(comparison.problems["method"]).count("")


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]

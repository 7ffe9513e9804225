"""What a page about heads says: its headline, its tables, and the sentences that carry numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attndiag.explanations.head_composition import KINDS, strongest_pairs
from attndiag.reports.head_figures import EFFECTS, TITLES, head_name, measures_of_heads
from attndiag.reports.html import MINUS, number

if TYPE_CHECKING:
    from attndiag.explanations.head_table import HeadTable
    from attndiag.reports.phase_change import PhaseChange

WAYS_OF_READING = {"q": "queries", "k": "keys", "v": "values"}
SCORE, EFFECT = "prefix_matching_score", EFFECTS[0]
# the page's table of heads; all of them are in the file
_HEADS_SHOWN = 600
_LEVEL = 0.05

READING = {
    "prefix matching": "Mass of second-copy queries (first and last left out) on every earlier follower of the same "
    "token; random tokens, twice, without replacement. A perfect induction head has 1, a uniform one the baseline.",
    "previous, current token": "Mean mass on position i\u22121, on position i, over plain text; positions 0 and 1 are "
    "no queries.",
    "duplicate token": "Mean mass of second-copy queries on the same token in the first copy.",
    "mass on sinks": "Mean mass on position 0 and special tokens. Beside it the sinks' share of what the head writes: "
    "weight that writes nothing does nothing.",
    "entropy, effective support": "Nats of a row, and its exponential in keys. Peaked is not good and flat is not bad: "
    "read it next to the effect.",
    "output / layer mean": "How much the head writes beside the other heads of its layer; near 0 it is dormant on "
    "these inputs, which says nothing about others.",
    "most similar head": "Cosine of what two heads of a layer write. Heads that do the same hide each other's effect.",
    "copying eigenvalues": "\u03a3Re(\u03bb)/\u03a3|\u03bb| of the OV circuit, direct path. High long before induction "
    "exists, and in one-layer models: never a detector of induction heads by itself.",
    "composition": "\u2016W_b W_a\u2016 / (\u2016W_b\u2016 \u2016W_a\u2016) of a later and an earlier head, minus that "
    "of random matrices. By queries and keys W_b is the later head's QK circuit, by values its OV. Direct path; "
    "it says what a head can read, not that it does.",
    "effect": "Rise of the second-copy loss without the head. Zero: its output is 0. Mean: its mean over the tokens of "
    "the row. Later patterns kept: only what it writes changes, not what later heads attend to.",
    "relation": "Mass from one span's last token to another span, against the best fixed offset (chosen on the same "
    "pairs, so generous) and shuffled pairs (each query with the distances of other pairs). p, any head: the chance "
    "that some head looks this good when pairs are shuffled.",
}


def table_view(table: HeadTable | None) -> dict[str, Any]:
    """Headline and what stands at the top of the page."""
    view: dict[str, Any] = {
        "headline": "",
        "lead": "",
        "probe_text": "",
        "columns": [],
        "sets": [],
        "beside": [],
        "ablation_rows": 0,
        "reading": list(READING.items()),
    }
    if table is None:
        return view
    names = measures_of_heads(table)
    view["columns"] = [
        {"title": TITLES.get(name, name), "unit": table[name].unit}
        for name in (*names, *(name for name in EFFECTS if name in table.scores))
    ]
    view["headline"], view["lead"] = _headline(table), _lead(table)
    view["probe_text"] = _probe_text(table)
    view["sets"] = _sets(table)
    view["beside"] = [_beside(table, name) for name in names if "baseline" in table[name].checks]
    if EFFECT in table.scores:
        view["ablation_rows"] = table[EFFECT].checks["rows"]
    return view


def every_head(table: HeadTable | None) -> dict[str, Any]:
    """Rows of the table of heads."""
    if table is None or not measures_of_heads(table):
        return {"rows": [], "heads_left_out": 0}
    frame = table.to_frame()
    names = [*measures_of_heads(table), *(name for name in EFFECTS if name in table.scores)]
    by = SCORE if SCORE in frame else names[0]
    order = frame[by].sort_values(ascending=False, kind="stable", na_position="last").index
    left_out = max(0, len(frame) - _HEADS_SHOWN)
    rows = []
    for index in order[:_HEADS_SHOWN]:
        row = frame.loc[index]
        cells = [{"value": float(row[name]), "half": _half(row, name)} for name in names]
        rows.append({"name": head_name(row["layer"], row["head"]), "order": int(index), "cells": cells})
    return {"rows": rows, "heads_left_out": left_out}


def ranked_by(table: HeadTable) -> str:
    """The score by which heads were chosen to be ablated."""
    name = table.facts.get("ablated_by", SCORE)
    return "their effect" if name == EFFECT else str(TITLES.get(name, name)).lower()


def score_of_effects(table: HeadTable) -> str:
    """The score to show against the effects: the one that chose the heads, unless that is the effect itself."""
    name = table.facts.get("ablated_by", SCORE)
    return SCORE if name == EFFECT else name


def composition_view(table: HeadTable | None, *, count: int = 20) -> dict[str, Any] | None:
    """The strongest pairs of heads for the page; None where composition was not measured."""
    if table is None or not any(kind in table.scores for kind in KINDS):
        return None
    rows = []
    for _, row in strongest_pairs(table, count).iterrows():
        rows.append(
            {
                "kind": WAYS_OF_READING[row["kind"]],
                "later": head_name(row["layer"], row["head"]),
                "earlier": head_name(row["earlier_layer"], row["earlier_head"]),
                "score": row["score"],
                "next": row["next"],
                "spreads": row["spreads"],
            }
        )
    scores = next(table.scores[kind] for kind in KINDS if kind in table.scores)
    return {
        "rows": rows,
        "baseline": scores.checks["baseline"],
        "spread": scores.checks["spread"],
        "remarks": "; ".join(scores.provenance.get("remarks", ())),
    }


def _pair_headline(table: HeadTable) -> str:
    view = composition_view(table, count=1)
    if view is None or not view["rows"]:
        return ""
    row = view["rows"][0]
    score, after = number(row["score"], 2), number(row["next"], 2)
    beside = "" if math.isnan(row["next"]) else f" (the head that it reads next most: {after})"
    return (
        f"Of all pairs, {row['later']} reads {row['earlier']} the most, with its {row['kind']}: {score} above random "
        f"matrices{beside}."
    )


def relation_view(table: HeadTable, *, count: int = 12) -> dict[str, Any]:
    """One relation for the page."""
    facts = table.facts
    top = table.top("relation_mass", count)
    rows = []
    for _, row in top.iterrows():
        rows.append(
            {
                "head": head_name(row["layer"], row["head"]),
                "mass": row["relation_mass"],
                "share": row.get("relation_share", math.nan),
                "offset_mass": row["relation_mass_best_offset"],
                "offset": f"{row['relation_offset']:.0f}".replace("-", MINUS),
                "shuffled": row["relation_mass_shuffled"],
                "p": row["relation_p"],
                "p_any": row["relation_p_any"],
                "effect": row.get("relation_effect", math.nan),
                "elsewhere": row.get("relation_effect_shuffled", math.nan),
                "claim": claim(row),
            }
        )
    unit = table["relation_effect"].unit if "relation_effect" in table.scores else ""
    return {
        "name": relation_name(table),
        "pairs": facts["pairs"],
        "clusters": facts["clusters"],
        "left_out": facts["left_out"],
        "unit": unit,
        "rows": rows,
        "sentence": _relation_sentence(table, rows, unit),
    }


def phase_headline(change: PhaseChange | None) -> str:
    """What the phase change shows, with its steps."""
    if change is None:
        return ""
    window = change.window
    if not window.found:
        return f"No induction window: {window.reason}"
    best = max(change.control.curve()) if change.control is not None else math.nan
    control = f"; in the control no head passes {best:.2f}" if best == best else ""
    return f"Induction heads form between steps {window.start:.0f} and {window.end:.0f}{control}."


def _headline(table: HeadTable) -> str:
    if SCORE not in table.scores:
        names = measures_of_heads(table)
        if not names:
            return _pair_headline(table) or "No head could be measured; the reasons are below."
        return f"{TITLES.get(names[0], names[0])} is highest in {_leaders(table, names[0], 3)}."
    said = f"Prefix matching is highest in {_leaders(table, SCORE, 3)}"
    together = next((item for item in table.sets if item.name != "random" and item.way == "zero"), None)
    if together is None:
        return f"{said}."
    return (
        f"{said}; without the {len(together.heads)} heads {together.name} the second copy costs "
        f"{together.effect:.2f} nats more."
    )


def _leaders(table: HeadTable, name: str, count: int) -> str:
    top = table.top(name, count)
    return ", ".join(
        f"{head_name(layer, head)} ({value:.2f})"
        for layer, head, value in zip(top["layer"], top["head"], top[name], strict=True)
    )


def _lead(table: HeadTable) -> str:
    facts = table.facts
    parts = []
    if "first_copy_loss" in facts:
        parts.append(
            f"The loss is {facts['first_copy_loss']:.2f} nats on the first copy of random tokens and "
            f"{facts['second_copy_loss']:.2f} on the second. That the second copy is easier proves no induction head: "
            "it is so in a one-layer model too."
        )
    drawn = [item.effect for item in table.sets if item.name == "random"]
    together = next((item for item in table.sets if item.name != "random" and item.way == "zero"), None)
    if drawn and together is not None:
        parts.append(
            f"Beside the {number(together.effect)} nats of the set above the threshold, {len(drawn)} random sets of "
            f"its size cost {number(min(drawn))} to {number(max(drawn))}; on the first copy the set costs "
            f"{number(together.first_copy_effect)}."
        )
    return " ".join(parts)


def _probe_text(table: HeadTable) -> str:
    inputs = dict.fromkeys(str(table[name].provenance.get("input", "")) for name in measures_of_heads(table))
    return "Measured on: " + "; ".join(text for text in inputs if text) + "."


def _sets(table: HeadTable) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for item in table.sets:
        if item.name != "random":
            name = f"{item.name} ({item.way})"
            rows.append(_set_row(name, len(item.heads), item.effect, item.low, item.high, item.first_copy_effect))
    drawn = [item for item in table.sets if item.name == "random"]
    if drawn:
        mean = sum(item.effect for item in drawn) / len(drawn)
        first = sum(item.first_copy_effect for item in drawn) / len(drawn)
        largest = max(drawn, key=lambda item: item.effect)
        rows.append(_set_row(f"{len(drawn)} random sets, mean", len(drawn[0].heads), mean, None, None, first))
        rows.append(
            _set_row("the most harmful of them", len(largest.heads), largest.effect, largest.low, largest.high,
                     largest.first_copy_effect)
        )  # fmt: skip
    return rows


def _set_row(name: str, count: int, effect: float, low: float | None, high: float | None, first: float) -> dict:
    return {"name": name, "count": count, "effect": effect, "low": low, "high": high, "first": first}


def _beside(table: HeadTable, name: str) -> dict[str, Any]:
    frame = table.to_frame()
    best = table.top(name, 1).iloc[0]
    sink = f"{name}_sink_mass"
    return {
        "title": TITLES.get(name, name),
        "mean": frame[name].mean(),
        "largest": best[name],
        "head": head_name(best["layer"], best["head"]),
        "baseline": frame[f"{name}_baseline"].mean(),
        "sink": frame[sink].mean() if sink in frame else math.nan,
        "sink_of_largest": best[sink] if sink in frame else math.nan,
    }


def _half(row: Any, name: str) -> float:
    low, high = row.get(f"{name}_low", math.nan), row.get(f"{name}_high", math.nan)
    return float(high - low) / 2


def relation_name(table: HeadTable) -> str:
    """The relation with a proper arrow."""
    return str(table.facts["relation"]).replace("->", "\u2192")


def claim(row: Any) -> str:
    """What is left of "this is the head for that relation" after the tests."""
    position = row["relation_mass"] > row["relation_mass_best_offset"]
    p = row["relation_p_any"]
    if p != p:
        said = "cannot be told from a fixed offset here"
    elif not position:
        said = "a fixed offset does as well"
    elif p > _LEVEL:
        said = "not told from shuffled pairs"
    else:
        said = "more than position"
    low, high = row.get("relation_effect_low", math.nan), row.get("relation_effect_high", math.nan)
    if low != low:
        return f"{said}; effect not measured"
    return f"{said}; {'helps' if low > 0 else 'hurts' if high < 0 else 'effect not different from 0'}"


def _relation_sentence(table: HeadTable, rows: list[dict[str, Any]], unit: str) -> str:
    facts = table.facts
    holds = [row["head"] for row in rows if row["claim"].startswith("more than position")]
    said = (
        f"{facts['pairs']} pairs. Of the {len(rows)} heads with the most mass on the related token, {len(holds)} beat "
        "both rules that know nothing of the relation" + (f" ({', '.join(holds)})." if holds else ".")
    )
    if "effect_together" in facts:
        said += (
            f" Taking the edge away from the {len(facts['knocked_out'])} heads with the most mass together costs "
            f"{facts['effect_together']:.2f} {unit} ({facts['effect_together_low']:.2f} to "
            f"{facts['effect_together_high']:.2f})."
        ).replace("-", MINUS)
    if facts["clusters"] == 1 and facts["pairs"] > 1:
        said += " All pairs come from one template, so this describes that template."
    return said

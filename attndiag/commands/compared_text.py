"""A comparison as text for a terminal: headline, verdicts, agreement, faithfulness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attndiag.reports import compared_tables as tables
from attndiag.reports import compared_words as words
from attndiag.reports.html import fixed, number, percent
from attndiag.reports.token_text import visible

if TYPE_CHECKING:
    from attndiag.runs.compared_run import ComparedRun


def text_of(run: ComparedRun) -> list[str]:
    """The whole result as lines of text."""
    comparison, edges = run.comparison, run.edges
    lines = [words.headline(comparison, edges), *words.where_sentences(comparison, edges)]
    lines += [text for text in (words.blocking_sentence(comparison, edges), words.cluster_sentence(comparison)) if text]
    for level, rows in (("tokens", tables.method_rows(comparison)), ("edges", tables.edge_rows(edges))):
        if not rows:
            continue
        body = [
            [
                row["method"] + (" (ceiling)" if row["ceiling"] else ""),
                row["verdict"],
                _or_undefined(row["hit_rate"], percent),
                _interval(row["hit_rate_low"], row["hit_rate_high"], percent),
                _or_undefined(row["p_chance"], lambda p: number(p, 2)),
                str(row["weights_without_effect"]),
                str(row["effects_without_weight"]),
            ]
            for row in rows
        ]
        head = ["verdicts on " + level, "verdict", "right", "95 % interval", "p", "high, absent", "low, present"]
        lines += ["", *_columns(head, body)]
    methods, cells = tables.methods_of(comparison), tables.agreement_matrix(comparison)
    if cells:
        head = ["agreement, mean tau-b", *(f"[{i + 1}]" for i in range(len(methods)))]
        body = []
        for i, one in enumerate(methods):
            found = [cells.get((one, two)) for two in methods[:i]]
            shown = ["" if c is None else "undefined" if c.undefined else fixed(c.value) for c in found]
            body.append([f"[{i + 1}] {one}", *shown, "", *[""] * (len(methods) - i - 1)])
        lines += ["", *_columns(head, body)]
        bands = [cell for cell in cells.values() if not cell.undefined]
        if bands:
            low, high = min(cell.low for cell in bands), max(cell.high for cell in bands)
            lines.append(f"unrelated scores lie between {fixed(low)} and {fixed(high)} in 95 % of cases")
    for metric, rows in tables.faithfulness_rows(comparison):
        better = f"{rows[0]['direction']} is better"
        unit = "" if rows[0]["unit"] == "1" else f", in {rows[0]['unit']}"
        head = [f"{metric} ({better}{unit})", "mean", "minus random", "95 % interval", "p (Holm)", "undefined"]
        body = []
        for row in rows:
            tag = " (circular)" if row["circular"] else " (control)" if row["control"] else ""
            paired = row["paired"]
            told = ["", "", ""] if paired is None else [
                _or_undefined(paired["difference"], number),
                _interval(paired["low"], paired["high"], fixed),
                _or_undefined(paired["p_holm"], lambda p: number(p, 2)),
            ]  # fmt: skip
            mean = _or_undefined(row["mean"], number)
            body.append([row["method"] + tag, mean, *told, f"{row['undefined']} of {row['prompts']}"])
        lines += ["", *_columns(head, body)]
    return [line.replace("\u00a0", " ") for line in lines]


def _or_undefined(value: float, write: Any) -> str:
    return write(value) if value == value else "undefined"


def _interval(low: float, high: float, write: Any) -> str:
    return f"{write(low)} to {write(high)}" if low == low and high == high else "undefined"


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines: the first column to the left, the others to the right; nothing invisible in it."""
    # terminals get ordinary spaces
    shown = [[visible(cell.replace("\u00a0", " "), mark_spaces=False) if cell else "" for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(head), *shown]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        others = zip(cells[1:], widths[1:], strict=True)
        return "  ".join([first, *(cell.rjust(width) for cell, width in others)]).rstrip()

    return [line(head), "  ".join("-" * width for width in widths), *(line(row) for row in shown)]

"""A comparison as text for a terminal: headline, verdicts, agreement, faithfulness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attndiag.commands.console import counted
from attndiag.reports import compared_tables as tables
from attndiag.reports import compared_words as words
from attndiag.reports.html import fixed, number, percent
from attndiag.reports.token_text import visible

if TYPE_CHECKING:
    from attndiag.runs.compared_run import ComparedRun


SHUFFLED = "p (shuffled)"
_SHUFFLED_MEANS = (
    SHUFFLED + ": chance that the same claims, shuffled {}, do as well or better. A small one "
    "says better than chance; it does not say that the verdict is sure, which the interval does"
)
_SHUFFLED_OVER = {"tokens": "over the tokens of each prompt", "edges": "over the keys of each head on a prompt"}
_NAMED = 3


def text_of(run: ComparedRun) -> list[str]:
    """The whole result as lines of text."""
    comparison, edges = run.comparison, run.edges
    lines = [*unfinished(run), words.headline(comparison, edges), *words.where_sentences(comparison, edges)]
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
        head = ["verdicts on " + level, "verdict", "right", "95 % interval", SHUFFLED, "high, absent", "low, present"]
        lines += ["", *_columns(head, body), _SHUFFLED_MEANS.format(_SHUFFLED_OVER[level])]
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
        better = f"{rows[0]['direction']} is better{_in_unit(rows[0]['unit'])}"
        head = [f"{metric} ({better})", "mean", "minus random", "95 % interval", "p (Holm)", "undefined"]
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
    main = declared_lines(run)
    lines += ["", *main] if main else []
    return [line.replace("\u00a0", " ") for line in lines]


def rate(value: float, low: float, high: float) -> str:
    """A share with its interval; one cluster of prompts has none."""
    interval = "no interval" if low != low or high != high else f"{low:.0%} to {high:.0%}"
    return f"{value:.0%} right ({interval})"


def short_lines(run: ComparedRun) -> list[str]:
    """Which methods tell what the model uses, one line each; the ceiling last."""
    rows = sorted(run.comparison.methods.to_dict("records"), key=lambda row: row["role"] == "ceiling")
    width = max((len(row["method"]) for row in rows), default=0)
    lines = []
    for row in rows:
        told = rate(row["hit_rate"], row["hit_rate_low"], row["hit_rate_high"])
        about = " of tokens: the ceiling" if row["role"] == "ceiling" else " of tokens"
        known = row["hit_rate"] == row["hit_rate"]
        lines.append(f"{row['method']:<{width}}  {row['verdict']:<12}  {told + about if known else 'nothing decided'}")
    for name, one in run.edges.whole.items() if run.edges is not None else ():
        told = rate(one.hit_rate.value, one.hit_rate.low, one.hit_rate.high) + " of edges"
        known = one.hit_rate.value == one.hit_rate.value
        lines.append(f"{name:<{width}}  {one.verdict:<12}  {told if known else 'nothing decided'}")
    return lines


def unfinished(run: ComparedRun) -> list[str]:
    """A line about prompts that are still to be measured; none for a whole run."""
    done, asked = run.facts["n_done"], run.facts["n_prompts"]
    if run.facts["status"] != "unfinished":
        return []
    return [f"unfinished: {done} of {counted(asked, 'prompt')} {_are(done)} done; the same run call goes on"]


def declared(run: ComparedRun) -> dict[str, Any] | None:
    """The pair that was declared as the main question: `first`, `second`, and one row a metric; None without one."""
    pair = run.facts["plan"]["primary"]
    if pair is None:
        return None
    named = ("metric", "unit", "difference", "low", "high", "p", "p_holm", "direction", "clusters", "circular")
    rows = tables.primary_rows(run.comparison)
    return {"first": pair[0], "second": pair[1], "metrics": [{name: row[name] for name in named} for row in rows]}


def declared_lines(run: ComparedRun) -> list[str]:
    """The declared comparison, one line a metric; a line that says so where none was measured."""
    found = declared(run)
    if found is None:
        return []
    pair = f"declared comparison, {found['first']} minus {found['second']}"
    if not found["metrics"]:
        return [f"{pair}: not measured, for no faithfulness metric of this run has both"]
    return [
        f"{pair}: {row['metric']} ({row['direction']} is better{_in_unit(row['unit'])}"
        f"{', circular' if row['circular'] else ''}) {_or_undefined(row['difference'], number)}, "
        f"95 % interval {_interval(row['low'], row['high'], fixed)}, "
        f"p {_or_undefined(row['p_holm'], lambda p: number(p, 2))} (Holm)"
        for row in found["metrics"]
    ]


def task_failed(run: ComparedRun) -> list[str]:
    """Prompts on which the model does not do what is asked, so that nothing there has a verdict."""
    frame = run.comparison.prompts
    return [] if frame.empty else [str(label) for label in frame[frame["task"] != ""]["prompt"]]


def task_line(run: ComparedRun) -> list[str]:
    """How many prompts have no verdict for that reason, and which; none where all passed."""
    labels = task_failed(run)
    if not labels:
        return []
    more = f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else ""
    shown = ", ".join(visible(label, mark_spaces=False) for label in labels[:_NAMED])
    of = counted(run.facts["n_prompts"], "prompt")
    return [f"no verdict on {len(labels)} of {of}, where the task check failed: {shown}{more}"]


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _in_unit(unit: str) -> str:
    return "" if unit == "1" else f", in {unit}"


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

"""What a comparison stands on, as rows of its page: facts of the run, attention card, self-checks, what could
not be measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from attndiag.reports.compared_tables import Row
from attndiag.reports.html import percent, seconds
from attndiag.reports.places import without_home

if TYPE_CHECKING:
    from attndiag.runs.compared_run import ComparedRun

_CARD = ("kind", "query_heads", "kv_heads", "d_head", "mask", "window", "positions", "dtype", "kernel", "certified")
# failing prompts that a self-check names
_SAID = 3
_FACT_NAMES = {
    "n_prompts": "prompts",
    "n_done": "prompts done",
    "n_failed": "prompts failed",
    "n_skipped": "entries skipped",
    "seconds": "time of all work, workers added up",
    "seconds_by_method": "the same by work",
    "adds_bos": "adds a start token",
    "tokenizer_hash": "tokenizer",
    "prompt_hash": "prompts, hash",
    "prompt_file": "prompt file",
    "kernel": "attention function",
    "notes": "loader's notes",
    "params": "settings",
}
_ELSEWHERE = {"versions", "created", "command", "plan"}


def fact_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The run row, in its own order; what is missing is left out, JSON is spelt out."""
    shown: list[tuple[str, str]] = []
    for name, value in facts.items():
        if name in _ELSEWHERE or value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
            continue
        shown.append((_FACT_NAMES.get(name, name.replace("_", " ")), _fact(name, value)))
    return shown


def _fact(name: str, value: Any) -> str:
    if name == "location":
        return without_home(str(value))
    if name == "edges_measured":
        # facts show what they hold character by character, and this one is a space
        return percent(value).replace("\u00a0", " ")
    if name == "seconds":
        return seconds(value)
    if name == "seconds_by_method" and isinstance(value, Mapping):
        return ", ".join(f"{work} {seconds(spent)}" for work, spent in value.items())
    return _in_words(value)


def _in_words(value: Any) -> str:
    if isinstance(value, str) and value[:1] in "{[":
        try:
            value = json.loads(value)
        except ValueError:
            return value
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_in_words(part)}" for name, part in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(_in_words(part) for part in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def version_text(facts: Mapping[str, Any]) -> str:
    found = facts.get("versions")
    if isinstance(found, str):
        found = json.loads(found) if found else {}
    listed = ", ".join(f"{name} {number}" for name, number in (found or {}).items())
    return f"Versions: {listed}." if listed else ""


def package_version() -> str:
    """Of attndiag; "unknown" in a source tree."""
    try:
        return version("attndiag")
    except PackageNotFoundError:
        return "unknown"


def card_rows(card: Mapping[str, Any]) -> list[Row]:
    """Layers that are alike share a row."""
    rows: list[Row] = []
    for layer in card.get("layers", ()):
        seen = {**layer, "window": layer.get("window_seen") or layer.get("window_told")}
        facts = {name: seen.get(name) for name in _CARD}
        label = seen.get("layer")
        place = str(seen.get("module_name") if label is None else label)
        if rows and rows[-1]["facts"] == facts:
            rows[-1]["places"].append(place)
        else:
            rows.append({"facts": facts, "places": [place]})
    # the first and the last of those that are alike
    ends = [list(dict.fromkeys((row["places"][0], row["places"][-1]))) for row in rows]
    return [{**row["facts"], "layers": "\u2013".join(both)} for row, both in zip(rows, ends, strict=True)]


def card_caption(card: Mapping[str, Any]) -> str:
    if not card:
        return ""
    parts = [str(card[name]) for name in ("architecture", "dtype", "device") if card.get(name)]
    if card.get("length"):
        parts.append(f"seen on a probe of {card['length']} tokens")
    differences = len(card.get("differences", ()))
    if differences:
        parts.append(f"{differences} differences from its configuration (attndiag card lists them)")
    return ", ".join(parts) + "."


def check_rows(run: ComparedRun) -> list[Row]:
    """One row a self-check: on how many prompts it passed, and what the failing ones say."""
    rows: list[Row] = []
    for check, found in run.checks.groupby("check", sort=False):
        wrong = found[~found["passed"].astype(bool)]
        said = [
            f"{prompt or 'the model'}: {detail}"
            for prompt, detail in zip(wrong["prompt"], wrong["detail"], strict=True)
        ]
        more = f"; and {len(said) - _SAID} more" if len(said) > _SAID else ""
        rows.append(
            {
                "check": str(check),
                "passed": len(found) - len(wrong),
                "of": len(found),
                "detail": "; ".join(said[:_SAID]) + more if said else str(found["detail"].iloc[0] or ""),
            }
        )
    # the failed ones first
    return sorted(rows, key=lambda row: row["passed"] == row["of"])


def failed_checks(run: ComparedRun) -> int:
    """Self-checks that failed, on any prompt."""
    return int((~run.checks["passed"].astype(bool)).sum())


def problem_rows(run: ComparedRun) -> list[Row]:
    """What could not be measured, on tokens and on edges."""
    return [{str(k): v for k, v in row.items()} for row in run.comparison.problems.to_dict("records")]

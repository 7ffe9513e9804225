"""What a compared run ends with beside its results: what has no number, what is blocked, and what to do about it.

A failed self-check blocks verdicts and sets the exit status. Whoever sees status 1 must read here which check failed,
on which prompts, what it takes away, what it leaves, and what can be done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attndiag.commands.console import counted, remark

if TYPE_CHECKING:
    from attndiag.runs.compared_run import ComparedRun

_NAMED = 3
# methods whose scores must add up along a path -> the parameter that makes the path finer, and a value to try
_FINER: Mapping[str, str] = {"integrated_gradients": "max_steps=512", "gradient_shap": "samples=256"}


@dataclass(frozen=True)
class Blocked:
    """A self-check that failed, and what stands on it.

    Parameters
    ----------
    check : its name, as in the table of checks.
    prompts : where it failed.
    detail : what was found on the first of them.
    method : whose scores or edges it is about; empty for a check of the prompt itself.
    about : `"tokens"`, `"edges"` or both: the verdicts that are blocked.
    """

    check: str
    prompts: tuple[str, ...]
    detail: str
    method: str
    about: tuple[str, ...]


def measured_nowhere(run: ComparedRun) -> dict[str, str]:
    """What was asked for and has a number on no prompt -> the reason, with the prompt that gave it."""
    problems = run.comparison.problems
    found: dict[str, str] = {}
    for name in run.facts["failed_everywhere"]:
        rows = problems[problems["method"] == name].to_dict("records")
        found[name] = f"{rows[0]['reason']} (prompt {rows[0]['prompt']})" if rows else "no reason was written down"
    return found


def blocked_checks(run: ComparedRun) -> list[Blocked]:
    """The failed self-checks on which verdicts stand, most prompts first."""
    from attndiag.runs.result_files import BLOCKS

    judged = {"scores of ": run.comparison.judged, "edges of ": () if run.edges is None else run.edges.judged}
    level = {"scores of ": "tokens", "edges of ": "edges"}
    failed = run.checks[~run.checks["passed"].astype(bool)]
    found: list[Blocked] = []
    for name, rows in failed.groupby("check", sort=False):
        check, about, method = str(name), tuple(BLOCKS.get(str(name), ())), ""
        for start, methods in judged.items():
            if check.startswith(start) and check.removeprefix(start) in methods:
                method, about = check.removeprefix(start), (level[start],)
        if about:
            prompts = tuple(str(prompt) for prompt in rows["prompt"])
            found.append(Blocked(check, prompts, str(rows["detail"].iloc[0]), method, about))
    return sorted(found, key=lambda one: -len(one.prompts))


def say_measured_nowhere(run: ComparedRun, *, quiet: bool) -> None:
    """One line for each method, and for the edges, without a number on any prompt."""
    for name, why in measured_nowhere(run).items():
        remark(f"{name} could be measured on no prompt: {why}", quiet=quiet)


def say_blocked(run: ComparedRun, *, quiet: bool) -> None:
    """Which checks failed where, what they block, what to do, and what stands."""
    found = blocked_checks(run)
    for one in found:
        for line in blocked_in_words(one, int(run.facts["n_prompts"]), run.facts["methods"]):
            remark(line, quiet=quiet)
    if found:
        remark(
            "everything else stands: no other verdict rests on a check that failed. tables/checks.csv of a kept run "
            "has every check. Exit status 1 is for what is blocked",
            quiet=quiet,
        )


def blocked_in_words(one: Blocked, n_prompts: int, methods: Sequence[str]) -> list[str]:
    """The lines about one failed check; `methods` are those of the run."""
    where = f"on {len(one.prompts)} of {counted(n_prompts, 'prompt')} ({_listed(one.prompts)})"
    verdicts = " and ".join(f"verdicts on {about}" for about in one.about)
    whose = f"the {verdicts} of {one.method}" if one.method else f"all {verdicts}"
    there = "on this prompt" if len(one.prompts) == 1 else "on these prompts"
    lines = [
        f"self-check failed: {one.check}, {where}; on {one.prompts[0]}: {one.detail or 'no detail'}",
        f"  blocked: {whose} {there}",
    ]
    advice = _advice(one, methods)
    return [*lines, f"  to do: {advice}"] if advice else lines


def _advice(one: Blocked, methods: Sequence[str]) -> str:
    if not one.method or one.about != ("tokens",):
        return "this is about the model, not the prompts: try --dtype float32, or --attn-implementation eager"
    if one.method not in methods:
        return "choose other replacements with --replacement" if one.method.startswith("replacement[") else ""
    rest = [name for name in methods if name != one.method]
    leave = f"leave {one.method} out (--methods {','.join(rest)})" if rest else "choose other methods with --methods"
    finer = _FINER.get(one.method)
    if finer is None:
        return f"try --dtype float32 where rounding is the cause, or {leave}"
    return (
        f"start the path nearer, at the pair (--set {one.method}.baseline=pair; the scores then speak only of tokens "
        f"that differ from a pair of as many tokens), or refine it (--set {one.method}.{finer}); or {leave}. Another "
        "plan wants another folder (-o), or --overwrite"
    )


def _listed(names: Sequence[str]) -> str:
    shown = names[:_NAMED]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")

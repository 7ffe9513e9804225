"""`ComparedRun`: what a compared run comes to, from results in memory or read back from a folder, the same either way.

Every table follows from the results of the single prompts, in the order of the prompt list, and from the plan. Wall
times stand apart, in `timings` and in facts: they are the only thing in which two runs of one plan may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attndiag.comparison.edges import EdgeVerdicts, judge_edges
from attndiag.comparison.misled import rates_by_head
from attndiag.comparison.one_prompt import PromptResult
from attndiag.comparison.side_by_side import Comparison, tables
from attndiag.runs.compared_folder import ComparedFolder
from attndiag.runs.plan import RunPlan, plan_from_plain
from attndiag.runs.result_files import BLOCKS, ModelWork, PromptWork

if TYPE_CHECKING:
    import pandas as pd

    from attndiag.stats.verdicts import Thresholds

# problems of a prompt that are about no method's scores
_NO_METHODS = ("sinks", "faithfulness")


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """A prompt set under a plan: tables, verdicts, and everything needed to know what they stand on.

    Parameters
    ----------
    facts : the row of the table `runs`: `run` (id), `status`, `model`, `revision`, `weights`, `dtype`, `device`,
        `kernel`, `tokenizer_hash`, `seed`, `versions`, `methods`, `replacements`, `edges`, `thresholds`, `plan` (all
        of it, as plain values), `n_prompts`, `n_failed`, `failed_everywhere` (methods, and `edges`, that were
        asked for and could be measured on no prompt), `seconds`, `seconds_by_method`.
    comparison : methods on tokens; `comparison.problems` holds what could not be measured: failed prompts with an empty
        `method`, what is asked of the model alone (`card`, `heads`, `probe induction`, ...) with an empty `prompt`.
    edges : verdicts on edges and heads; None where they were not asked for or could be measured on no prompt, with the
        reasons in `comparison.problems` (method `edges`).
    checks : one row a self-check: `check`, `prompt` (None for the model's own), `passed`, `detail`.
    card : `attndiag.card` as plain values; None where it could not be made (`problems` says why).
    heads : one row a head: `layer`, `head`, `prompts`; by edge method `<method>_agree`, `<method>_disagree`,
        `<method>_inconclusive`, `<method>_undefined` (prompts), `<method>_misleads` (disagree / (agree + disagree))
        and the ends of its 95 % interval over clusters of prompts, `<method>_misleads_low` and
        `<method>_misleads_high` (see `stats.rates`; nan with fewer than 2 clusters); `mean_edge_effect` (mean size over
        prompts and keys, in `unit`), `largest_edge_effect`, `head_effect` and `mean_head_effect_size` (deep runs), in a
        run with targets of several units `<name>[<unit>]` for each of them; `prefix_matching_score`,
        `previous_token_score`, `sink_mass` with `_low`, `_high`, `_baseline` beside them. nan where not
        measured. None without any of it.
    tokens : one row a token: `prompt`, `pos`, `token_id`, `text`, `char_start`, `char_end`, `is_special`.
    timings : one row a prompt and work: `prompt` (None for the model's own), `work`, `seconds`.
    folder : where it is kept; None for a run in memory.
    failed : one entry a failed prompt: `prompt`, `cluster`, `text`, `target`, `foil`, `error`.
    """

    facts: Mapping[str, Any]
    comparison: Comparison
    edges: EdgeVerdicts | None
    checks: pd.DataFrame
    card: Mapping[str, Any] | None
    heads: pd.DataFrame | None
    tokens: pd.DataFrame
    timings: pd.DataFrame
    folder: Path | None = None
    failed: tuple[Mapping[str, str], ...] = ()

    def __repr__(self) -> str:
        facts = self.facts
        where = "in memory" if self.folder is None else str(self.folder)
        return (
            f"ComparedRun({facts['run']}: {facts['model']}, {facts['n_done']} of {facts['n_prompts']} prompts, "
            f"{len(facts['methods'])} methods, edges: {'no' if self.edges is None else 'yes'}, {where})"
        )

    @property
    def blocked(self) -> bool:
        """True when a failed self-check blocked any verdict, or would have where none was asked for."""
        broken = self.checks["check"].isin(list(BLOCKS)) & ~self.checks["passed"].astype(bool)
        return self.comparison.blocked or (self.edges is not None and self.edges.blocked) or bool(broken.any())

    @property
    def passed(self) -> bool:
        """Every prompt was measured, every method and the edges on some prompt, and no self-check blocked a verdict."""
        whole = self.facts["status"] == "complete" and not self.facts["n_failed"]
        return whole and not self.facts["failed_everywhere"] and not self.blocked


def read_compared_run(folder: str | Path, *, thresholds: Thresholds | None = None) -> ComparedRun:
    """A compared run from its folder; of an unfinished one, the prompts that are done.

    Parameters
    ----------
    thresholds : judge what was measured by these instead of the run's own.

    Raises
    ------
    RunFolderError : there is no compared run in `folder`, or one that never began, or a result of it is damaged, or
        missing in a finished run.
    """
    from attndiag.errors import RunFolderError

    found = ComparedFolder.open(folder)
    about = found.about
    if not about["prompts"]:
        raise RunFolderError(f"the run in {folder} was stopped before it began; make the same call again")
    plan = plan_from_plain(about["plan"], thresholds)
    works: list[PromptWork] = []
    missing: list[str] = []
    for one in about["prompts"]:
        work, why = found.find(one["key"], one["key"])
        if work is not None:
            works.append(work)
        elif why or about["finished"]:
            missing.append(why or f"the result of prompt {one['id']!r} is gone")
    if missing:
        raise RunFolderError(
            f"{folder}: {'; '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}. Run the same plan into this "
            "folder again: whole results are kept, these are measured anew"
        )
    model, why = found.find(f"model-{about['model_key']}", about["model_key"])
    if model is None:
        model = ModelWork(None, {}, {"model": why or "not measured yet"})
    return assemble(works, model, plan, about["facts"], folder=Path(folder), n_prompts=len(about["prompts"]))


def assemble(
    works: Sequence[PromptWork],
    model: ModelWork,
    plan: RunPlan,
    facts: Mapping[str, Any],
    *,
    folder: Path | None = None,
    n_prompts: int | None = None,
) -> ComparedRun:
    """The run that these results make. Pure: no model, no file.

    Parameters
    ----------
    works : in the order of the prompt list.
    facts : what was known before the work, see `comparing.run_facts`.
    n_prompts : prompts asked for; those that have a result when None.
    """
    compared = [one.compared for one in works if one.compared is not None]
    measured = [one.edges for one in works if one.edges is not None]
    failed = [{"prompt": one.label, "method": "", "reason": one.failure} for one in works if one.failure]
    no_edges = {one.label: one.edge_failure for one in works if one.edge_failure}
    failed += [{"prompt": label, "method": "edges", "reason": reason} for label, reason in no_edges.items()]
    failed += [{"prompt": "", "method": name, "reason": reason} for name, reason in model.problems.items()]
    comparison = tables(compared, plan.compared, failed=failed, primary=plan.primary, broken=_broken(works, "tokens"))
    edges = None
    if measured:
        edges = judge_edges(
            measured,
            thresholds=plan.compared.thresholds,
            seed=plan.seed,
            problems=no_edges,
            broken=_broken(works, "edges"),
        )
    asked = len(works) if n_prompts is None else n_prompts
    timings = _timings(works, model)
    by_method = timings.groupby("work", sort=False)["seconds"].sum().to_dict() if len(timings) else {}
    told = {
        **facts,
        "status": "complete" if len(works) == asked else "unfinished",
        "kernel": ", ".join(sorted({name for one in works for name in one.kernels})) or facts.get("kernel"),
        "n_prompts": asked,
        "n_done": len(works),
        "n_failed": sum(bool(one.failure) for one in works),
        "failed_everywhere": _failed_everywhere(compared, bool(measured), plan),
        "thresholds": asdict(plan.compared.thresholds),
        "edges_measured": None if edges is None else edges.measured_share,
        "seconds": float(timings["seconds"].sum()) if len(timings) else 0.0,
        "seconds_by_method": by_method,
    }
    return ComparedRun(
        facts=told,
        comparison=comparison,
        edges=edges,
        checks=_checks(works, model),
        card=model.card,
        heads=_heads(edges, model),
        tokens=_tokens(works),
        timings=timings,
        folder=folder,
        failed=tuple(
            {
                "prompt": one.label,
                "cluster": one.cluster,
                "text": one.text,
                "target": one.target,
                "foil": one.foil,
                "error": one.failure,
            }
            for one in works
            if one.failure
        ),
    )


def _broken(works: Sequence[PromptWork], about: str) -> dict[str, tuple[str, ...]]:
    return {one.label: found for one in works if (found := one.broken(about))}


def _failed_everywhere(compared: Sequence[PromptResult], edges: bool, plan: RunPlan) -> list[str]:
    """What was asked for and has no number on any of the prompts that were measured."""
    if not compared:
        # then the prompts failed, and are counted as such
        return []
    labels = (f"replacement[{one.label}]" for one in plan.compared.replacements)
    # scores made elsewhere are no part of the plan; where they fit no prompt, they are among the problems of all
    own = (name for name in compared[0].problems if name not in _NO_METHODS)
    names = dict.fromkeys([*plan.compared.methods, *labels, *own])
    found = [name for name in names if not any(name in one.scores for one in compared)]
    return found + (["edges"] if plan.edges is not None and not edges else [])


def _checks(works: Sequence[PromptWork], model: ModelWork) -> pd.DataFrame:
    import pandas as pd

    rows: list[tuple[str, str | None, bool, str]] = [
        (name, None, False, why) for name, why in model.problems.items() if name == "card"
    ]
    rows += [(check.name, one.label, check.passed, check.detail) for one in works for check in one.checks]
    return pd.DataFrame(rows, columns=["check", "prompt", "passed", "detail"])


def _timings(works: Sequence[PromptWork], model: ModelWork) -> pd.DataFrame:
    import pandas as pd

    rows: list[tuple[str | None, str, float]] = [(None, work, spent) for work, spent in model.seconds.items()]
    rows += [(one.label, work, spent) for one in works for work, spent in one.seconds.items()]
    return pd.DataFrame(rows, columns=["prompt", "work", "seconds"])


def _tokens(works: Sequence[PromptWork]) -> pd.DataFrame:
    import pandas as pd

    rows = [
        {
            "prompt": one.label,
            "pos": pos,
            "token_id": int(axis.token_ids[pos]),
            "text": text,
            "char_start": int(axis.offsets[pos, 0]),
            "char_end": int(axis.offsets[pos, 1]),
            "is_special": bool(axis.special[pos]),
        }
        for one in works
        if one.compared is not None
        for axis in [one.compared.axis]
        for pos, text in enumerate(axis.tokens)
    ]
    columns = ["prompt", "pos", "token_id", "text", "char_start", "char_end", "is_special"]
    return pd.DataFrame(rows, columns=columns)


def _heads(edges: EdgeVerdicts | None, model: ModelWork) -> pd.DataFrame | None:
    import pandas as pd

    frames: list[pd.DataFrame] = []
    if edges is not None:
        frames.append(_measured_heads(edges))
        for method in edges.judged:
            found = edges.heads(method).drop(columns="replacement_dependent")
            rates = rates_by_head(edges, method)
            ordered = [rates[place] for place in zip(found["layer"], found["head"], strict=True)]
            found["misleads_low"] = [rate.low for rate in ordered]
            found["misleads_high"] = [rate.high for rate in ordered]
            frames.append(
                found.rename(columns={name: f"{method}_{name}" for name in found if name not in ("layer", "head")})
            )
    if model.heads:
        frames.append(pd.DataFrame(dict(model.heads)))
    if not frames:
        return None
    table = frames[0]
    for frame in frames[1:]:
        table = table.merge(frame, on=["layer", "head"], how="outer")
    return table.sort_values(["layer", "head"], ignore_index=True)


def _measured_heads(edges: EdgeVerdicts) -> pd.DataFrame:
    """One row a head; with targets of several units, each unit's effects in columns of their own, `name[unit]`."""
    import pandas as pd

    size = np.abs(edges.effects)
    frame = pd.DataFrame(
        {
            "layer": [layer for _, _, layer, _ in edges.rows],
            "head": [head for _, _, _, head in edges.rows],
            "unit": list(edges.units),
            "edges": np.isfinite(size).sum(axis=1),
            "total": np.nansum(size, axis=1),
            "largest": np.where(np.isfinite(size).any(axis=1), np.nanmax(np.nan_to_num(size, nan=0.0), axis=1), np.nan),
            "head_effect": edges.head_effects,
        }
    )
    frame["head_size"] = frame["head_effect"].abs()
    place = ["layer", "head"]
    table = frame.groupby(place, as_index=False).agg(prompts=("edges", "size"), edges_measured=("edges", "sum"))
    units = sorted(set(edges.units))
    for unit in units:
        of_unit = frame[frame["unit"] == unit].groupby(place, as_index=False)
        effects = of_unit.agg(
            edges=("edges", "sum"),
            total=("total", "sum"),
            largest_edge_effect=("largest", "max"),
            head_effect=("head_effect", "mean"),
            mean_head_effect_size=("head_size", "mean"),
        )
        effects["mean_edge_effect"] = effects["total"] / effects["edges"].where(effects["edges"] > 0)
        effects = effects.drop(columns=["edges", "total"])
        if len(units) > 1:
            effects = effects.rename(columns={name: f"{name}[{unit}]" for name in effects if name not in place})
        table = table.merge(effects, on=place, how="left")
    table["unit"] = units[0] if len(units) == 1 else "mixed: " + ", ".join(units)
    return table

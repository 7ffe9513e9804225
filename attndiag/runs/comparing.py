"""`run`: a prompt set under a plan, prompt by prompt, kept as it goes.

    plan -> keys of the prompts -> results that are there -> the missing ones, each written when it is done -> tables

A run that was stopped, by whatever, goes on where it was when the same call is made again: what is there and whole is
not measured again. Without an output folder everything stays in memory; the tables are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from attndiag.comparison.edge_measuring import EdgePlan
from attndiag.comparison.one_prompt import Own, have_signs
from attndiag.explanations.replacement import Replacement
from attndiag.explanations.resolve import one_target_each
from attndiag.models.load import LoadedModel, as_prompts
from attndiag.prompts import Prompt, Target
from attndiag.runs.compared_folder import ComparedFolder, Identity
from attndiag.runs.compared_run import ComparedRun, assemble
from attndiag.runs.compared_tables import write_tables
from attndiag.runs.keys import digest, model_identity, package_versions, prompt_key, with_ids
from attndiag.runs.plan import RunPlan, make_plan
from attndiag.runs.result_files import ModelWork, PromptWork
from attndiag.runs.work import measure_model, measure_prompt
from attndiag.runs.workers import Job, measured, require_workers
from attndiag.stats.verdicts import Thresholds

Progress = Callable[[str, int, int], None]


class Callback(Protocol):
    """What a logger (of experiments, of a scheduler) is told. Every method is called in the process of the run.

    A result is written before `on_prompt` is told of it, so an exception in here stops the run and loses nothing.
    """

    def on_start(self, facts: Mapping[str, Any], done: int, total: int) -> None:
        """Before the first prompt: facts of the run, prompts that are done already, prompts in all."""
        ...

    def on_prompt(self, work: PromptWork, done: int, total: int) -> None:
        """After each prompt that was measured now."""
        ...

    def on_end(self, run: ComparedRun) -> None:
        """After the tables."""
        ...


def run(
    lm: LoadedModel,
    prompts: Prompt | str | Sequence[Prompt | str],
    methods: Sequence[str] | None = None,
    *,
    target: Target | Sequence[Target] | None = None,
    replacements: Sequence[Replacement | str] | None = None,
    own: Mapping[str, Sequence[Own]] | None = None,
    metrics: Sequence[str] | None = None,
    params: Mapping[str, Mapping[str, Any]] | None = None,
    thresholds: Thresholds | None = None,
    primary: tuple[str, str] | None = None,
    edges: EdgePlan | str | None = "auto",
    heads: bool = True,
    deep: bool = False,
    plan: RunPlan | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    limit: int | None = None,
    workers: int = 1,
    seed: int = 0,
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    remark: Callable[[str], None] | None = None,
    callback: Callback | None = None,
) -> ComparedRun:
    """Compare methods on a prompt set, with exact effects of edges, into a folder that can be gone on with.

    Parameters
    ----------
    methods : see `attndiag.compare`; those of the default plan when None.
    target : for all prompts or one each; each prompt's own when None.
    replacements : the first gives the evidence about tokens; `seed` is theirs where they name none.
    own : name -> one entry a prompt, scores of its tokens or character spans (start, end, score).
    metrics, params, thresholds, primary : see `attndiag.compare`.
    edges : `"auto"` (all edges of the last query, or a screen where they are many), `"all"`, `"screen"`, an `EdgePlan`,
        or None for none.
    heads : run the induction, previous-token and sink probes once.
    deep : the deep plan: more methods and draws, all edges, effects of whole heads.
    plan : a plan made before, instead of everything above but `target` and `own`.
    output : folder of the run; None keeps it in memory. The same plan goes on with what is there, also with more or
        fewer prompts or in another order (of prompts with ids: those without are named by their place).
    overwrite : replace a run with another plan.
    limit : take the first prompts only.
    workers : processes of one thread each that measure prompts of a model on the CPU; 1 measures here, with the threads
        that torch has. A script that asks for more must guard its own start by `if __name__ == "__main__":`.
    about : more facts for the row of the run (`prompt_file`, `n_skipped`, ...).
    progress : called with (what is being done, prompts done, prompts in all).
    remark : called with what a person should know: results that were found, or found broken.
    callback : see `Callback`.

    Raises
    ------
    UnknownMethodError, NotApplicableError, ValueError : a plan that cannot be run, before any model runs.
    PromptError : no prompts, or two of one id.
    RunFolderError : the folder holds another plan or something else, is in use, full or not writable. What was
        measured before stays.
    WorkerError : a worker ended by itself. What was measured before stays.
    """
    require_workers(lm, workers)
    if plan is None:
        plan = make_plan(
            methods,
            replacements=replacements,
            metrics=metrics,
            params=params,
            thresholds=thresholds,
            edges=edges,
            heads=heads,
            primary=primary,
            own=tuple(own or ()),
            deep=deep,
            seed=seed,
        )
    given = as_prompts(prompts)
    batch = with_ids(given)[:limit]
    targets = one_target_each(given, target)[:limit]
    scores = _own_of(own or {}, len(given), plan)
    signed = {name: have_signs(rows) for name, rows in (own or {}).items()}
    identity = Identity(model_identity(lm), plan.plain(), package_versions()["attndiag"])
    keys = [
        prompt_key(prompt, each if target is not None else None, mine, identity.model, identity.plan, signed=signed)
        for prompt, each, mine in zip(batch, targets, scores, strict=False)
    ]
    model_key = digest({"model": identity.model, "seed": plan.seed, "heads": plan.heads, "version": identity.version})
    facts = run_facts(lm, identity, plan, keys, workers=workers) | dict(about or {})
    say = remark or (lambda _text: None)
    place = nullcontext(None) if output is None else ComparedFolder.begin(output, identity, overwrite=overwrite)
    with place as folder:
        marker = {
            "run": facts["run"],
            "n_prompts": len(batch),
            "model": identity.model,
            "plan": identity.plan,
            "version": identity.version,
            "model_key": model_key,
            "prompts": [{"id": prompt.id, "key": key} for prompt, key in zip(batch, keys, strict=True)],
            "facts": facts,
        }
        works = _found(folder, keys, say)
        if folder is not None:
            before = folder.about
            if not (before["finished"] and before["run"] == facts["run"] and len(works) == len(batch)):
                folder.drop_rendered()
            if before["run"] == facts["run"]:
                # the same run goes on: it began when it began
                facts["created"] = before["facts"]["created"]
            folder.mark(marker, finished=False)
            others = folder.strangers([*keys, f"model-{model_key}"])
            if others:
                say(f"{len(others)} results of other prompts or runs in {folder.path} are left alone")
        if callback is not None:
            callback.on_start(facts, len(works), len(batch))
        model = _model(lm, plan, folder, model_key, progress)
        jobs = {
            key: Job(prompt, each if target is not None else None, mine, signed)
            for prompt, each, mine, key in zip(batch, targets, scores, keys, strict=False)
            if key not in works
        }
        if progress is not None:
            progress("measuring", len(works), len(batch))
        with closing(_results(lm, plan, jobs, workers, None if folder is None else folder.path)) as results:
            for key, work in results:
                if folder is not None:
                    folder.keep(key, key, work)
                works[key] = work
                if progress is not None:
                    progress("measuring", len(works), len(batch))
                if callback is not None:
                    callback.on_prompt(work, len(works), len(batch))
        if progress is not None:
            progress("tables", 0, 0)
        done = assemble(
            [works[key] for key in keys], model, plan, facts, folder=None if folder is None else folder.path
        )
        if folder is not None:
            write_tables(folder, done)
            folder.mark(marker, finished=True)
    if callback is not None:
        callback.on_end(done)
    return done


def _results(
    lm: LoadedModel, plan: RunPlan, jobs: Mapping[str, Job], workers: int, folder: Path | None
) -> Iterator[tuple[str, PromptWork]]:
    """What every job comes to, here or in workers."""
    if workers > 1 and jobs:
        yield from measured(lm, plan, jobs, workers=workers, folder=folder)
        return
    for key, job in jobs.items():
        yield key, measure_prompt(lm, job.prompt, plan, target=job.target, own=job.own, signed=job.signed)


def _own_of(own: Mapping[str, Sequence[Own]], count: int, plan: RunPlan) -> list[dict[str, Own]]:
    """The own scores of each prompt."""
    taken = {*plan.compared.methods, *(f"replacement[{one.label}]" for one in plan.compared.replacements)}
    for name, rows in own.items():
        if name in taken:
            raise ValueError(f"own scores are called {name!r}, as a method of the plan is; give them another name")
        if len(rows) != count:
            raise ValueError(f"own scores {name!r} have {len(rows)} entries for {count} prompts; give one for each")
    return [{name: rows[index] for name, rows in own.items()} for index in range(count)]


def _found(folder: ComparedFolder | None, keys: Sequence[str], say: Callable[[str], None]) -> dict[str, PromptWork]:
    """Results that are there and whole; the others are said to be measured again."""
    works: dict[str, PromptWork] = {}
    if folder is None:
        return works
    for key in keys:
        work, why = folder.find(key, key)
        if why:
            say(f"measuring again: {why}")
        elif isinstance(work, PromptWork) and not work.transient:
            works[key] = work
    if works:
        say(f"{len(works)} of {len(keys)} prompts are in {folder.path} already")
    return works


def _model(
    lm: LoadedModel, plan: RunPlan, folder: ComparedFolder | None, key: str, progress: Progress | None
) -> ModelWork:
    """What is measured once, found or made."""
    name = f"model-{key}"
    if folder is not None:
        found, _ = folder.find(name, key)
        if isinstance(found, ModelWork):
            return found
    if progress is not None:
        progress("card and heads" if plan.heads else "card", 0, 0)
    made = measure_model(lm, plan)
    if folder is not None:
        folder.keep(name, key, made)
    return made


def run_facts(
    lm: LoadedModel, identity: Identity, plan: RunPlan, keys: Sequence[str], *, workers: int = 1
) -> dict[str, Any]:
    """What is known of a run before the work. The id follows from model, plan, version and the prompts in order."""
    info = lm.info
    told = {"model": {k: v for k, v in identity.model.items() if k != "name"}, "plan": identity.plan}
    return {
        "run": digest({**told, "version": identity.version, "prompts": list(keys)})[:16],
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": info.name,
        "source": info.source,
        "location": info.location,
        "revision": info.revision,
        "weights": identity.model["weights"],
        "architecture": info.architecture,
        "parameters": info.n_parameters,
        "dtype": info.dtype,
        "device": info.device,
        "kernel": info.attn_implementation,
        "tokenizer_hash": info.tokenizer_hash,
        "adds_bos": info.adds_bos,
        "methods": list(plan.compared.methods),
        "replacements": [one.label for one in plan.compared.replacements],
        "metrics": list(plan.compared.metrics),
        "edges": plan.edge_text,
        "deep": plan.deep,
        "seed": plan.seed,
        "plan": dict(identity.plan),
        "versions": package_versions(),
        "workers": workers,
        "threads": 1 if workers > 1 else torch.get_num_threads(),
        "notes": list(info.notes),
    }

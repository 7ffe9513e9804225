"""`attndiag run`: methods side by side and exact effects on a prompt set, into a folder that can be gone on with."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attndiag.commands import options
from attndiag.commands.choosing import EdgeChoice, comma_names, read_set
from attndiag.commands.console import FINE, INTERRUPTED, SOME_FAILED, counted, data, data_json, guarded, remark
from attndiag.commands.endings import blocked_checks, measured_nowhere, say_blocked, say_measured_nowhere
from attndiag.commands.given_scores import OwnFiles, given_scores, own_files
from attndiag.commands.progress import progress_bar
from attndiag.commands.settings import method_parameters

if TYPE_CHECKING:
    from attndiag.prompts import Prompt
    from attndiag.runs.compared_run import ComparedRun
    from attndiag.runs.config import RunConfig
    from attndiag.runs.plan import RunPlan

COMPARISON = "Comparison"


def _option(*names: str, panel: str = options.RUN, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, show_default=False, **more)


@guarded
def run(
    config: Annotated[
        Path | None,
        _option(
            "--config",
            metavar="FILE",
            help="A YAML file with the keys of `attndiag.runs.config`; flags win over it. None by default.",
        ),
    ] = None,
    prompts: options.Prompts = None,
    methods: Annotated[
        list[str] | None,
        _option("--methods", panel=COMPARISON, metavar="NAMES", help=options.METHODS_HELP),
    ] = None,
    replacements: Annotated[
        list[str] | None,
        _option(
            "--replacement",
            "--replacements",
            panel=COMPARISON,
            metavar="NAME[:draws=N,...]",
            help=options.REPLACEMENT_HELP,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        _option(
            "--set",
            panel=COMPARISON,
            metavar="METHOD.NAME=VALUE",
            help=options.SET_HELP,
        ),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        _option("--metrics", panel=COMPARISON, metavar="NAMES", help=options.METRICS_HELP),
    ] = None,
    own: Annotated[
        list[str] | None,
        _option(
            "--own",
            panel=COMPARISON,
            metavar="FILE[:METHOD]",
            help=options.OWN_HELP,
        ),
    ] = None,
    primary: Annotated[
        str | None, _option("--primary", panel=COMPARISON, metavar="A,B", help=options.PRIMARY_HELP)
    ] = None,
    edges: Annotated[
        EdgeChoice | None,
        _option(
            "--edges",
            panel=COMPARISON,
            help=options.EDGES_HELP + " auto by default.",
            case_sensitive=False,
        ),
    ] = None,
    heads: Annotated[
        bool | None,
        _option(
            "--heads/--no-heads",
            panel=COMPARISON,
            help="Score every head on induction, previous-token and sink probes, once. On by default.",
        ),
    ] = None,
    deep: Annotated[
        bool | None,
        _option(
            "--deep",
            panel=COMPARISON,
            help="14 methods, 32 draws a token, all edges, effects of whole heads: several times the work.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        _option(
            "--model", "-m", panel=options.MODEL, metavar="MODEL", help=options.MODEL_HELP + " default by default."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        _option(
            "--output", "-o", panel=options.OUTPUT, metavar="DIR", help="Folder of the run; attndiag-run by default."
        ),
    ] = None,
    revision: options.Revision = None,
    device: Annotated[
        str | None,
        _option("--device", panel=options.MODEL, metavar="NAME", help=options.DEVICE_HELP + " auto by default."),
    ] = None,
    dtype: Annotated[
        str | None,
        _option("--dtype", panel=options.MODEL, metavar="NAME", help=options.DTYPE_HELP + " auto by default."),
    ] = None,
    attn_implementation: options.AttnImplementation = None,
    offline: Annotated[
        bool | None, _option("--offline", panel=options.MODEL, help="Ask no model hub and no package index.")
    ] = None,
    chat_template: Annotated[
        bool | None,
        _option(
            "--chat-template/--no-chat-template", help="Give plain texts to the model as a user's turn. Off by default."
        ),
    ] = None,
    limit: options.Limit = None,
    workers: Annotated[
        int | None,
        _option(
            "--workers",
            min=1,
            metavar="N",
            help="Processes of one thread that measure prompts on the CPU. By default one a core, where prompts and "
            "memory suffice.",
        ),
    ] = None,
    skip_bad: Annotated[bool | None, _option("--skip-bad", help=options.SKIP_BAD_HELP)] = None,
    seed: Annotated[int | None, _option("--seed", metavar="N", help="Seed of every draw; 0 by default.")] = None,
    overwrite: Annotated[
        bool | None,
        _option(
            "--overwrite/--resume",
            panel=options.OUTPUT,
            help="Replace the run of another plan, or go on with the same plan's. --resume by default.",
        ),
    ] = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Methods side by side on a prompt set, with exact effects.

    Runs attention weights, value-aware contributions and attributions on every prompt, replaces every token and takes
    every edge of the last query away, and judges which method tells what the model uses. Every prompt is kept as soon
    as it is done: the same call goes on where a stopped one was.

    Costs about 35 CPU seconds a prompt with the default model (SmolLM2-135M) on the shipped prompts, of 13 tokens on
    average; --edges none, fewer methods or draws cost less, longer prompts more.

    Exit status: 0 fine; 1 some prompts failed or a self-check blocked verdicts; 2 misuse.

    \b
    Examples:
      attndiag run -o out                                     default model, shipped prompts, eight methods
      attndiag run --prompts my.jsonl --limit 10 --edges none -o quick
      attndiag run --methods weight,rollout --replacement pair -o pairs
      attndiag run --config run.yaml --seed 1 -o seed1
    """
    from attndiag.runs.config import read_config
    from attndiag.runs.folder import RunFolder

    chosen = read_config(
        config,
        {
            "prompts": prompts,
            "methods": comma_names(methods),
            "replacements": tuple(replacements) if replacements else None,
            "metrics": comma_names(metrics),
            "own": tuple(own) if own else None,
            "primary": comma_names([primary]) if primary else None,
            "edges": None if edges is None else edges.value,
            "heads": heads,
            "deep": deep,
            "model": model,
            "output": output,
            "revision": revision,
            "device": device,
            "dtype": dtype,
            "attn_implementation": attn_implementation,
            "offline": offline,
            "chat_template": chat_template,
            "limit": limit,
            "skip_bad": skip_bad,
            "seed": seed,
            "workers": workers,
            "overwrite": overwrite,
        },
    )
    if settings:
        # on top of the file's, parameter by parameter
        chosen = chosen.model_copy(update={"params": method_parameters(settings, chosen.params)})
    # cheap things first: a wrong plan or prompt file should not wait for the model
    batch, n_skipped = _read(chosen, quiet)
    files = own_files(chosen.own)
    plan = _plan(chosen, tuple(files))
    RunFolder.require_place(chosen.output)
    _finish(_measure(chosen, plan, batch, files, n_skipped, quiet), json=json, quiet=quiet, n_skipped=n_skipped)


def _plan(config: RunConfig, own: tuple[str, ...]) -> RunPlan:
    from dataclasses import replace

    from attndiag.errors import AttnDiagError
    from attndiag.runs.config import ConfigError
    from attndiag.runs.plan import make_plan
    from attndiag.stats.verdicts import Thresholds

    try:
        plan = make_plan(
            config.methods,
            replacements=config.replacements,
            metrics=config.metrics,
            params=config.params,
            thresholds=Thresholds(**config.thresholds.model_dump()),
            edges=None if config.edges == "none" else config.edges,
            heads=config.heads,
            primary=config.primary,
            own=own,
            deep=config.deep,
            seed=config.seed,
        )
        if plan.edges is not None:
            edges = replace(plan.edges, most=config.edge_most, methods=config.edge_methods or plan.edges.methods)
            plan = replace(plan, edges=edges)
    except AttnDiagError:
        # says itself what it is about
        raise
    except (ValueError, TypeError) as error:
        # of our own checks: what was asked for cannot be run
        raise ConfigError(str(error)) from error
    return plan


def _read(config: RunConfig, quiet: bool) -> tuple[list[Prompt], int]:
    """The prompts, and how many entries were skipped; plain texts as chat turns where that is asked for."""
    batch, n_skipped = read_set(config.prompts, skip_bad=config.skip_bad, quiet=quiet)
    batch = batch[: config.limit]
    return ([_as_chat(one) for one in batch] if config.chat_template else batch), n_skipped


def _as_chat(prompt: Prompt) -> Prompt:
    """The text as one user turn; everything else stays.

    Raises
    ------
    PromptError : it has a pair or spans, which are about the plain text and would mean nothing in the template.
    """
    from dataclasses import replace

    from attndiag.errors import PromptError

    if prompt.text is None:
        return prompt
    told = [name for name in ("pair", "spans") if getattr(prompt, name)]
    if told:
        raise PromptError(
            f"prompt {prompt.id!r} has {' and '.join(told)}, which are about its plain text and not about a chat turn; "
            "leave --chat-template out, or give messages instead of text in the prompt file"
        )
    return replace(prompt, text=None, messages=({"role": "user", "content": prompt.text},), spans={})


def _measure(
    config: RunConfig,
    plan: RunPlan,
    batch: list[Prompt],
    own: OwnFiles,
    n_skipped: int,
    quiet: bool,
) -> ComparedRun:
    from attndiag.models.load import load
    from attndiag.runs.comparing import run as compare_prompts
    from attndiag.runs.keys import with_ids
    from attndiag.runs.prompt_files import SHIPPED
    from attndiag.runs.weights_run import estimate_run
    from attndiag.runs.workers import fitting_workers

    batch = with_ids(batch)
    with progress_bar(quiet=quiet) as bar:
        lm = load(
            config.model,
            revision=config.revision,
            device=config.device,
            dtype=config.dtype,
            attn_implementation=config.attn_implementation,
            # None follows the environment; the flag only ever forbids
            offline=True if config.offline else None,
            progress=bar,
        )
    remark(f"{counted(len(batch), 'prompt')} on {lm.info.name} ({lm.info.architecture}, {lm.info.device})", quiet=quiet)
    remark(f"{counted(len(plan.compared.methods), 'method')}; edges: {plan.edge_text}", quiet=quiet)
    memory = estimate_run(lm, batch)
    remark(f"memory: {memory}", quiet=quiet)
    workers = config.workers or fitting_workers(lm, len(batch), memory)
    if workers > 1:
        remark(f"{workers} workers, each with these needs beside one copy of the weights", quiet=quiet)
    try:
        with progress_bar(quiet=quiet) as bar:
            return compare_prompts(
                lm,
                batch,
                plan=plan,
                own=given_scores(lm, batch, own),
                output=config.output,
                overwrite=config.overwrite,
                workers=workers,
                about={
                    "prompt_file": SHIPPED.name if config.prompts is None else str(config.prompts),
                    "n_skipped": n_skipped,
                },
                progress=bar,
                remark=lambda text: remark(text, quiet=quiet),
            )
    except KeyboardInterrupt as error:
        remark(f"interrupted: what is done is kept in {config.output}; the same call goes on from there")
        raise typer.Exit(INTERRUPTED) from error


def _finish(run: ComparedRun, *, json: bool, quiet: bool, n_skipped: int) -> None:
    """Say what came out and leave with the status that it deserves."""
    from attndiag.commands.compared_text import declared, declared_lines, short_lines, task_failed, task_line

    facts, frame = run.facts, run.comparison.methods
    edges = {} if run.edges is None else run.edges.whole
    if json:
        data_json(
            {
                "run": facts["run"],
                "folder": str(run.folder),
                "prompts": facts["n_prompts"],
                "failed": facts["n_failed"],
                "task_failed": task_failed(run),
                "skipped": n_skipped,
                "blocked": run.blocked,
                "blocked_by": [asdict(one) for one in blocked_checks(run)],
                "failed_everywhere": measured_nowhere(run),
                "passed": run.passed,
                "seconds": facts["seconds"],
                "primary": declared(run),
                "tokens": {
                    row["method"]: {"verdict": row["verdict"], "hit_rate": row["hit_rate"], "role": row["role"]}
                    for row in frame.to_dict("records")
                },
                "edges": {
                    name: {"verdict": one.verdict, "hit_rate": one.hit_rate.value} for name, one in edges.items()
                },
            }
        )
    else:
        for line in (*short_lines(run), *declared_lines(run), *task_line(run)):
            data(line.replace("\u00a0", " "))
        data(f"run: {run.folder}")
        place = shlex.quote(str(run.folder))
        remark(f"attndiag report {place}    makes its page and figures, in that folder", quiet=quiet)
        remark(f"attndiag compare {place}   prints its tables: verdicts, agreement, faithfulness", quiet=quiet)
    problems = run.comparison.problems
    failed = problems[problems["method"] == ""]
    for row in failed.head(5).itertuples():
        remark(f"prompt {row.prompt}: {row.reason}", quiet=quiet)
    if len(failed) > 5:
        remark(f"and {counted(len(failed) - 5, 'more such prompt')}; tables/problems.csv lists all", quiet=quiet)
    say_measured_nowhere(run, quiet=quiet)
    say_blocked(run, quiet=quiet)
    raise typer.Exit(FINE if run.passed and not n_skipped else SOME_FAILED)

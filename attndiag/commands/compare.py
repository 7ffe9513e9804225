"""`attndiag compare`: do methods tell what the model uses? Verdicts, agreement, faithfulness as tables and a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attndiag.commands import options
from attndiag.commands.choosing import EdgeChoice, choose_prompts, comma_names
from attndiag.commands.console import (
    FINE,
    INTERRUPTED,
    SOME_FAILED,
    counted,
    data,
    data_json,
    given_options,
    guarded,
    remark,
)
from attndiag.commands.endings import blocked_checks, measured_nowhere, say_blocked, say_measured_nowhere
from attndiag.commands.given_scores import OwnFiles, given_scores, own_files
from attndiag.commands.progress import progress_bar
from attndiag.commands.settings import method_parameters

if TYPE_CHECKING:
    import pandas as pd

    from attndiag.prompts import Prompt
    from attndiag.runs.compared_run import ComparedRun
    from attndiag.runs.plan import RunPlan

COMPARISON = "Comparison"
# what goes with a run that is there
_OF_READING = ("what", "output", "csv", "table", "offline", "quiet", "json", "debug")


class TableName(StrEnum):
    """Tables that can be printed as CSV."""

    methods = "methods"
    edges = "edges"
    heads = "heads"
    prompts = "prompts"
    agreement = "agreement"
    faithfulness = "faithfulness"
    differences = "differences"
    verdicts = "verdicts"
    problems = "problems"


@guarded
def compare(
    context: typer.Context,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="TEXT | RUN_DIR", help="A prompt, or the folder of a run that is there.", show_default=False
        ),
    ] = None,
    prompts: options.Prompts = None,
    prompt_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="One prompt of the set; all by default.", show_default=False),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help=options.TARGET_HELP,
            show_default=False,
        ),
    ] = None,
    foil: Annotated[str | None, typer.Option(metavar="TEXT", help=options.FOIL_HELP, show_default=False)] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--methods",
            metavar="NAMES",
            help=options.METHODS_HELP,
            rich_help_panel=COMPARISON,
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="METHOD.NAME=VALUE",
            help=options.SET_HELP,
            rich_help_panel=COMPARISON,
            show_default=False,
        ),
    ] = None,
    replacements: Annotated[
        list[str] | None,
        typer.Option(
            "--replacements",
            "--replacement",
            metavar="NAME[:draws=N,...]",
            help=options.REPLACEMENT_HELP,
            rich_help_panel=COMPARISON,
            show_default=False,
        ),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metrics",
            metavar="NAMES",
            help=options.METRICS_HELP,
            rich_help_panel=COMPARISON,
            show_default=False,
        ),
    ] = None,
    own: Annotated[
        list[str] | None,
        typer.Option(
            "--own",
            metavar="FILE[:METHOD]",
            help=options.OWN_HELP,
            rich_help_panel=COMPARISON,
            show_default=False,
        ),
    ] = None,
    primary: Annotated[
        str | None,
        typer.Option(metavar="A,B", help=options.PRIMARY_HELP, rich_help_panel=COMPARISON, show_default=False),
    ] = None,
    edges: Annotated[
        EdgeChoice,
        typer.Option(
            help=options.EDGES_HELP,
            rich_help_panel=COMPARISON,
            case_sensitive=False,
        ),
    ] = EdgeChoice.auto,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Keep the run, its page and figures here; of RUN_DIR, page and figures. Nothing is kept by default.",
            rich_help_panel=options.OUTPUT,
            show_default=False,
        ),
    ] = None,
    csv: Annotated[
        bool,
        typer.Option(
            "--csv", help="Print one table as CSV instead of the text, see --table.", rich_help_panel=options.OUTPUT
        ),
    ] = False,
    table: Annotated[
        TableName, typer.Option("--table", help="Which table --csv prints.", rich_help_panel=options.OUTPUT)
    ] = TableName.methods,
    limit: options.Limit = None,
    skip_bad: options.SkipBad = False,
    model: options.ModelName = "default",
    revision: options.Revision = None,
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    attn_implementation: options.AttnImplementation = None,
    offline: options.Offline = False,
    seed: options.Seed = 0,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Do methods tell what the model uses?

    Weights, contributions and attributions side by side on the same tokens: a verdict on each, against what replacing
    tokens and removing edges does to the answer; how far the methods agree; how faithful their rankings are. With
    RUN_DIR it reads a run of `attndiag run`. With -o it keeps everything and writes one page.

    Exit status: 0 fine; 1 some prompts failed or a self-check blocked verdicts; 2 misuse.

    \b
    Examples:
      attndiag compare "When Mary and John went to the store, John gave a drink to" --target " Mary" --foil " John"
      attndiag compare --prompts my.jsonl --methods weight,contribution --primary weight,contribution -o out
      attndiag compare --id ioi-1 --replacements sampled:draws=8 --replacements pair --edges none
      attndiag compare out --csv --table faithfulness
    """
    if json and csv:
        raise typer.BadParameter("--json and --csv both want standard output; give one of them")
    if what and Path(what).is_dir():
        unused = given_options(context, _OF_READING)
        if unused:
            ways = f"options about making one do not go with it: leave out {', '.join(unused)}"
            raise typer.BadParameter(f"{what} is a run that is there; {ways}")
        from attndiag.runs.compared_run import read_compared_run

        run, n_skipped = read_compared_run(what), 0
        if output is not None:
            from attndiag.reports.compared_report import require_page_place

            require_page_place(run, output)
    else:
        example = 'attndiag compare "The capital of France is"'
        batch, n_skipped = choose_prompts(
            what, prompts, prompt_id, example=example, target=target, foil=foil, limit=limit, skip_bad=skip_bad,
            quiet=quiet,
        )  # fmt: skip
        # cheap things first: a wrong plan or a score file that is not there should not wait for the model
        given = own_files(own or [])
        params = method_parameters(settings or [], {})
        plan = _plan(methods, replacements, metrics, primary, edges, seed, own=list(given), params=params)
        if output is not None:
            from attndiag.runs.folder import RunFolder

            RunFolder.require_place(output)
        loading = {
            "revision": revision,
            "device": device,
            "dtype": dtype,
            "attn_implementation": attn_implementation,
            # None follows the environment; the flag only ever forbids
            "offline": True if offline else None,
        }
        run = _measure(model, loading, batch, plan, given, output, n_skipped, overwrite=overwrite, quiet=quiet)
    page = _page(run, output, quiet)
    from attndiag.commands.compared_text import text_of, unfinished

    if json:
        data_json(_facts(run, page, n_skipped))
    elif csv:
        for line in unfinished(run):
            remark(line, quiet=quiet)
        data(_table(run, table).to_csv(index=False, lineterminator="\n").rstrip("\n"))
    else:
        for line in text_of(run):
            data(line)
        if page is not None:
            data(f"page: {page}")
    _say_what_is_missing(run, quiet)
    raise typer.Exit(FINE if run.passed and not n_skipped else SOME_FAILED)


def _plan(
    methods: list[str] | None,
    replacements: list[str] | None,
    metrics: list[str] | None,
    primary: str | None,
    edges: EdgeChoice,
    seed: int,
    *,
    own: Sequence[str],
    params: Mapping[str, Mapping[str, Any]],
) -> RunPlan:
    from attndiag.errors import AttnDiagError
    from attndiag.runs.plan import make_plan

    pair = comma_names([primary]) if primary is not None else None
    if pair is not None and len(pair) != 2:
        raise typer.BadParameter(f"--primary {primary!r} names {len(pair)} methods; expected two, with a comma")
    swaps = None if replacements is None else () if replacements == ["none"] else tuple(replacements)
    try:
        return make_plan(
            comma_names(methods),
            replacements=swaps,
            metrics=comma_names(metrics),
            params=params,
            edges=None if edges is EdgeChoice.none else edges.value,
            primary=None if pair is None else (pair[0], pair[1]),
            own=own,
            heads=False,
            seed=seed,
        )
    except AttnDiagError:
        raise
    except (ValueError, TypeError) as error:
        # of our own checks: what was asked for cannot be run
        raise typer.BadParameter(" ".join(str(error).split())) from error


def _measure(
    model: str,
    loading: dict[str, Any],
    batch: list[Prompt],
    plan: RunPlan,
    own: OwnFiles,
    output: Path | None,
    n_skipped: int,
    *,
    overwrite: bool,
    quiet: bool,
) -> ComparedRun:
    from attndiag.models.load import load
    from attndiag.runs.comparing import run
    from attndiag.runs.keys import with_ids
    from attndiag.runs.weights_run import estimate_run

    batch = with_ids(batch)
    with progress_bar(quiet=quiet) as bar:
        lm = load(model, progress=bar, **loading)
    scores = given_scores(lm, batch, own)
    remark(f"{counted(len(batch), 'prompt')} on {lm.info.name} ({lm.info.architecture}, {lm.info.device})", quiet=quiet)
    remark(f"{counted(len(plan.compared.methods), 'method')}; edges: {plan.edge_text}", quiet=quiet)
    remark(f"memory: {estimate_run(lm, batch)}", quiet=quiet)
    try:
        with progress_bar(quiet=quiet) as bar:
            return run(
                lm,
                batch,
                plan=plan,
                own=scores,
                output=output,
                overwrite=overwrite,
                about={"n_skipped": n_skipped},
                progress=bar,
                remark=lambda text: remark(text, quiet=quiet),
            )
    except KeyboardInterrupt as error:
        kept = f"what is done is kept in {output}; the same call goes on from there" if output else "nothing was kept"
        remark(f"interrupted: {kept}")
        raise typer.Exit(INTERRUPTED) from error


def _page(run: ComparedRun, output: Path | None, quiet: bool) -> Path | None:
    if output is None:
        return None
    from attndiag.reports.compared_report import render_comparison, write_page

    with progress_bar(quiet=quiet) as bar:
        if run.folder is not None and run.folder.resolve() == output.resolve():
            return render_comparison(output, progress=bar).page
        # the page of a run that lies elsewhere
        return write_page(run, output).page


def _table(run: ComparedRun, name: TableName) -> pd.DataFrame:
    import pandas as pd

    if name is TableName.edges:
        frames = [] if run.edges is None else [run.edges.edges(one).assign(method=one) for one in run.edges.judged]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["prompt", "method"])
    if name is TableName.heads:
        return run.heads if run.heads is not None else pd.DataFrame(columns=["layer", "head"])
    return getattr(run.comparison, name.value)


def _facts(run: ComparedRun, page: Path | None, n_skipped: int) -> dict[str, Any]:
    from attndiag.commands.compared_text import declared, task_failed
    from attndiag.reports import compared_tables as tables
    from attndiag.reports import compared_words as words

    comparison, edges = run.comparison, run.edges
    return {
        "run": run.facts["run"],
        "status": run.facts["status"],
        "n_done": run.facts["n_done"],
        "n_prompts": run.facts["n_prompts"],
        "folder": None if run.folder is None else str(run.folder),
        "page": None if page is None else str(page),
        "headline": words.headline(comparison, edges).replace("\u00a0", " "),
        "prompts": run.facts["n_prompts"],
        "failed": run.facts["n_failed"],
        "task_failed": task_failed(run),
        "skipped": n_skipped,
        "blocked": run.blocked,
        "blocked_by": [asdict(one) for one in blocked_checks(run)],
        "failed_everywhere": measured_nowhere(run),
        "passed": run.passed,
        "tokens": tables.method_rows(comparison),
        "edges": tables.edge_rows(edges),
        "primary": declared(run),
        "agreement": tables.agreement_rows(comparison),
        "faithfulness": [
            {"metric": metric, **{name: value for name, value in row.items() if name != "range"}}
            for metric, rows in tables.faithfulness_rows(comparison)
            for row in rows
        ],
        "problems": comparison.problems.to_dict("records"),
    }


def _say_what_is_missing(run: ComparedRun, quiet: bool) -> None:
    # what no prompt has is said once, not for each prompt
    nowhere = run.facts["failed_everywhere"]
    problems = [row for row in run.comparison.problems.to_dict("records") if row["method"] not in nowhere]
    for row in problems[:5]:
        about = f", {row['method']}" if row["method"] else ""
        remark(f"prompt {row['prompt']}{about}: {row['reason']}", quiet=quiet)
    if len(problems) > 5:
        remark(f"and {len(problems) - 5} more; the table of problems lists them", quiet=quiet)
    say_measured_nowhere(run, quiet=quiet)
    say_blocked(run, quiet=quiet)

"""`attndiag report`: a run, made or found, as tables, figures and one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attndiag.commands import options
from attndiag.commands.choosing import read_set
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
from attndiag.commands.progress import Progress, progress_bar
from attndiag.errors import RunFolderError

if TYPE_CHECKING:
    from attndiag.models.load import LoadedModel
    from attndiag.prompts import Prompt
    from attndiag.reports.page import Report
    from attndiag.runs.folder import RunFolder
    from attndiag.runs.weights_run import RunSettings

DEFAULT_OUTPUT = Path("attndiag-report")
# what goes with a run that is there
_OF_RENDERING = ("run_dir", "offline", "quiet", "json", "debug")


@guarded
def report(
    context: typer.Context,
    run_dir: Annotated[
        Path | None,
        typer.Argument(metavar="RUN_DIR", help="A run to render. Without it, one is made first.", show_default=False),
    ] = None,
    prompts: options.Prompts = None,
    model: options.ModelName = "default",
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Folder of the run and its report; not with RUN_DIR.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = DEFAULT_OUTPUT,
    revision: options.Revision = None,
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    attn_implementation: options.AttnImplementation = None,
    offline: options.Offline = False,
    limit: options.Limit = None,
    skip_bad: options.SkipBad = False,
    seed: options.Seed = 0,
    backend: options.BackendName = options.Backend.auto,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Weights against contributions on a prompt set: one page.

    Where attention weights and value-aware contributions part ways: measures every layer and head on every prompt,
    checks that what was captured is what the model used, and writes tables (Parquet, CSV), figures (PNG, SVG, PDF)
    and one self-contained page. With RUN_DIR it renders a run that is there, of weights or of `attndiag run`, finished
    or not.

    Exit status: 0 fine; 1 some prompts failed or a self-check failed; 2 misuse.

    \b
    Examples:
      attndiag report -o out                          default model, shipped prompts
      attndiag report --prompts my.jsonl -m gpt2 -o out
      attndiag report --limit 8 -o quick              the first eight prompts
      attndiag report out                             render the run in out/ again
    """
    from attndiag.runs.folder import COMPARISON, RunFolder, kind_of

    if run_dir is not None:
        unused = given_options(context, _OF_RENDERING)
        if unused:
            raise typer.BadParameter(
                "RUN_DIR is a run that is there, and its page goes into its folder; options about making one do not go "
                f"with it: leave out {', '.join(unused)}. `attndiag compare RUN_DIR -o DIR` writes the page of a "
                "comparison elsewhere"
            )
        if run_dir.is_dir() and kind_of(run_dir) == COMPARISON:
            _finish_comparison(run_dir, json=json, quiet=quiet)
        _finish(_render(RunFolder.open(run_dir), quiet), json=json, quiet=quiet)
    # cheap things first: a wrong prompt file should not wait for the model
    chosen, n_skipped = read_set(prompts, skip_bad=skip_bad, quiet=quiet)
    chosen = chosen[:limit]
    RunFolder.require_place(output)
    with progress_bar(quiet=quiet) as bar:
        lm = _load(model, revision, device, dtype, attn_implementation, offline, bar)
    from attndiag.runs.call_record import CallSettings
    from attndiag.runs.weights_run import RunSettings

    settings = RunSettings(calls=CallSettings(backend=backend.value), seed=seed)
    folder = _same_run(lm, chosen, settings, output) if not overwrite else None
    if folder is not None:
        remark(f"this very run is in {output} already; rendering it (--overwrite measures anew)", quiet=quiet)
    else:
        folder = _measure(lm, chosen, settings, output, prompts, n_skipped=n_skipped, overwrite=overwrite, quiet=quiet)
    _finish(_render(folder, quiet), json=json, quiet=quiet, n_skipped=n_skipped)


def _load(
    model: str,
    revision: str | None,
    device: str,
    dtype: str,
    attn_implementation: str | None,
    offline: bool,
    bar: Progress,
) -> LoadedModel:
    from attndiag.models.load import load

    return load(
        model,
        revision=revision,
        device=device,
        dtype=dtype,
        attn_implementation=attn_implementation,
        # None follows the environment; the flag only ever forbids
        offline=True if offline else None,
        progress=bar,
    )


def _same_run(lm: LoadedModel, prompts: list[Prompt], settings: RunSettings, output: Path) -> RunFolder | None:
    """The finished run in `output`, if it is the one that is asked for."""
    from attndiag.runs.folder import MARKER, RunFolder
    from attndiag.runs.weights_run import run_identity

    if not (output / MARKER).is_file():
        return None
    there = RunFolder.open(output)
    return there if there.finished and there.run_id == run_identity(lm, prompts, settings) else None


def _measure(
    lm: LoadedModel,
    prompts: list[Prompt],
    settings: RunSettings,
    output: Path,
    source: Path | None,
    *,
    n_skipped: int,
    overwrite: bool,
    quiet: bool,
) -> RunFolder:
    from attndiag.runs.prompt_files import SHIPPED
    from attndiag.runs.weights_run import estimate_run, measure_prompts

    remark(
        f"{counted(len(prompts), 'prompt')} on {lm.info.name} ({lm.info.architecture}, {lm.info.device})", quiet=quiet
    )
    remark(f"memory: {estimate_run(lm, prompts, backend=settings.calls.backend)}", quiet=quiet)
    try:
        with progress_bar(quiet=quiet) as bar:
            outcome = measure_prompts(
                lm,
                prompts,
                output,
                settings=settings,
                prompt_file=SHIPPED.name if source is None else source,
                n_skipped=n_skipped,
                overwrite=overwrite,
                progress=bar,
                remark=lambda text: remark(text, quiet=quiet),
            )
    except KeyboardInterrupt as error:
        remark(f"interrupted: {_kept(output)}")
        raise typer.Exit(INTERRUPTED) from error
    remark(f"measured in {outcome.seconds:.1f} s ({outcome.seconds / len(prompts):.2f} s a prompt)", quiet=quiet)
    return outcome.folder


def _kept(output: Path) -> str:
    from attndiag.runs.folder import RunFolder

    try:
        folder = RunFolder.open(output)
    except RunFolderError:
        return "nothing was written yet"
    done, asked = len(folder.done()), int(folder.about["n_prompts"])
    if not done:
        return f"no prompt was finished; {output} holds an empty run"
    kept = f"{done} of {counted(asked, 'prompt')} {'is' if done == 1 else 'are'} kept in {output}"
    return f"{kept}; `attndiag report {output}` renders {'it' if done == 1 else 'them'}"


def _render(folder: RunFolder, quiet: bool) -> Report:
    from attndiag.reports.page import render_run

    with progress_bar(quiet=quiet) as bar:
        return render_run(folder, progress=bar)


def _finish_comparison(run_dir: Path, *, json: bool, quiet: bool) -> None:
    """Render a comparison, say what it shows and leave with the status that it deserves."""
    from attndiag.reports.compared_report import render_comparison

    with progress_bar(quiet=quiet) as bar:
        made = render_comparison(run_dir, progress=bar)
    facts = made.run.facts
    if json:
        data_json(
            {
                "page": str(made.page),
                "folder": str(made.folder),
                "run": facts["run"],
                "headline": _plain(made.headline),
                "prompts": facts["n_prompts"],
                "failed": facts["n_failed"],
                "blocked": made.run.blocked,
                "passed": made.passed,
            }
        )
    else:
        data(_plain(made.headline))
        data(f"page: {made.page}")
    raise typer.Exit(FINE if made.passed else SOME_FAILED)


def _finish(report: Report, *, json: bool, quiet: bool, n_skipped: int = 0) -> None:
    """Say what came out and leave with the status that it deserves."""
    summary = report.summary
    failed = summary.failed
    facts: dict[str, Any] = {
        "page": str(report.page),
        "folder": str(report.folder),
        "run": summary.run["run"],
        "headline": _plain(report.headline),
        "prompts": len(summary.prompts),
        "failed": int((failed.status == "failed").sum()),
        "without_target": int((failed.status == "no_target").sum()),
        "skipped": n_skipped,
        "task_right": int(summary.by_prompt.task_ok.fillna(False).astype(bool).sum()),
        "calls": summary.coverage.calls,
        "certified": summary.coverage.certified,
        "checks_passed": bool(summary.checks.ok.all()),
        "finished": summary.finished,
        "passed": report.passed,
        "sink": {
            name: summary.overall(name)
            for name in ("sink_weight", "sink_head_contribution_share", "sink_contribution_share", "top_key_differs")
        },
    }
    if json:
        data_json(facts)
    else:
        data(facts["headline"])
        data(f"{summary.coverage}")
        data(f"page: {report.page}")
    for row in failed.head(5).itertuples():
        remark(f"prompt {row.prompt}: {row.error}", quiet=quiet)
    if len(failed) > 5:
        remark(f"and {len(failed) - 5} more such prompts; the page lists them", quiet=quiet)
    raise typer.Exit(FINE if report.passed and not n_skipped else SOME_FAILED)


def _plain(text: str) -> str:
    """Terminals and JSON get ordinary spaces."""
    return text.replace("\u00a0", " ")

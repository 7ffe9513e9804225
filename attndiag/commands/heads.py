"""`attndiag heads`: what every head looks at and what it is worth, as tables, maps and one page."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attndiag.commands import options
from attndiag.commands.console import FINE, SOME_FAILED, data, data_json, given_options, guarded, remark
from attndiag.commands.progress import progress_bar

if TYPE_CHECKING:
    from attndiag.explanations.head_table import HeadTable
    from attndiag.models.load import LoadedModel
    from attndiag.prompts import Prompt
    from attndiag.reports.heads_page import HeadsPage
    from attndiag.reports.phase_change import PhaseChange

HEADS = "Heads"
LAST = "last"


class Bos(StrEnum):
    """Whether random rows start with BOS."""

    auto = "auto"
    yes = "yes"
    no = "no"


@guarded
def heads(
    context: typer.Context,
    probe: Annotated[
        list[str] | None,
        typer.Option(
            "--probe",
            help="induction, duplicate, previous, current, sink, entropy, output, redundancy, copying, composition, or "
            "all; several with commas. induction,previous,sink by default.",
            rich_help_panel=HEADS,
            show_default=False,
        ),
    ] = None,
    ablate: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Take the N heads with the highest scores away, one at a time and together.",
            rich_help_panel=HEADS,
        ),
    ] = 0,
    ablate_by: Annotated[
        str,
        typer.Option(
            metavar="SCORE",
            help="Score that says which heads: prefix_matching, previous_token, sink, effect (every head once), or any "
            "measure of single heads.",
            rich_help_panel=HEADS,
        ),
    ] = "prefix_matching",
    composition: Annotated[
        bool,
        typer.Option(
            "--composition",
            help="Which earlier heads each head can read (queries, keys, values), from the weights.",
            rich_help_panel=HEADS,
        ),
    ] = False,
    checkpoints: Annotated[
        list[Path] | None,
        typer.Option(
            "--checkpoints",
            metavar="DIR",
            help="Checkpoint of one run, named by its step (checkpoint-500); give it twice or more.",
            rich_help_panel=HEADS,
            show_default=False,
        ),
    ] = None,
    revisions: Annotated[
        str | None,
        typer.Option(
            metavar="STEP,STEP",
            help="Revisions of --model, named by their steps: step1000,step2000.",
            rich_help_panel=HEADS,
            show_default=False,
        ),
    ] = None,
    relation: Annotated[
        list[str] | None,
        typer.Option(
            "--relation",
            metavar="QUERY:KEY",
            help="Names of two spans of the prompt set, the first attends; last:KEY for the last token.",
            rich_help_panel=HEADS,
            show_default=False,
        ),
    ] = None,
    phase_change: Annotated[
        bool,
        typer.Option(
            "--phase-change", help="Add the training series that comes along, measured anew.", rich_help_panel=HEADS
        ),
    ] = False,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the induction probe.", rich_help_panel=HEADS)] = 64,
    length: Annotated[int, typer.Option(min=5, help="Random tokens a copy.", rich_help_panel=HEADS)] = 50,
    bos: Annotated[
        Bos, typer.Option(help="Start random rows with BOS.", rich_help_panel=HEADS, case_sensitive=False)
    ] = Bos.auto,
    threshold: Annotated[
        float, typer.Option(help="Score above which heads are ablated together.", rich_help_panel=HEADS)
    ] = 0.4,
    prompts: options.Prompts = None,
    model: options.ModelName = "default",
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Folder of tables and page.", rich_help_panel=options.OUTPUT
        ),
    ] = Path("attndiag-heads"),
    revision: options.Revision = None,
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    attn_implementation: options.AttnImplementation = None,
    offline: options.Offline = False,
    seed: options.Seed = 0,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace the tables that are in the output folder.", rich_help_panel=options.OUTPUT
        ),
    ] = False,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """What each head looks at, and what it is worth.

    Scores every attention head on probes made for it (each beside its baseline and the sink mass), takes heads away to
    see what the model loses, tests claims about relations between tokens, and writes tables (Parquet, CSV), maps of
    layers by heads (PNG, SVG, PDF) and one self-contained page. With --relation or --phase-change alone, no probe is
    run.

    Exit status: 0 fine; 1 a self-check failed, nothing could be measured, or no head could be ablated; 2 misuse.

    \b
    Examples:
      attndiag heads -o out                                       default model, induction, previous and sink
      attndiag heads --probe all --ablate 20 -o out
      attndiag heads -m gpt2 --probe induction,copying -o gpt2
      attndiag heads --relation subject_again:subject -o rel      spans of the shipped prompts
      attndiag heads --phase-change -o phase                      induction heads form, no model needed
      attndiag heads --ablate 20 --ablate-by previous_token -o previous
      attndiag heads --composition -o pairs                       which heads read which
      attndiag heads --checkpoints run/checkpoint-100 --checkpoints run/checkpoint-200 -o history
      attndiag heads -m EleutherAI/pythia-70m --revisions step1000,step2000 -o history
    """
    import time

    from attndiag.reports.heads_page import prepare, save_heads

    asked = _probes(probe)
    series = _series(checkpoints, revisions)
    _no_idle_options(given_options(context), relations=bool(relation))
    if series and (relation or phase_change or composition):
        raise typer.BadParameter("a list of checkpoints is measured by itself; leave the other parts to a call without")
    if composition:
        asked = tuple(dict.fromkeys((*asked, "composition")))
    if not asked and not relation and not phase_change:
        asked = ("induction", "previous") if series else ("induction", "previous", "sink")
    if ablate and "induction" not in asked:
        raise typer.BadParameter(
            "effects are measured on the induction probe; add --probe induction, or leave --ablate"
        )
    if ablate:
        _ranked_by(ablate_by, asked)
    elif ablate_by != "prefix_matching":
        raise typer.BadParameter(
            f"{ablate_by!r} says which heads to take away; add --ablate 20", param_hint="--ablate-by"
        )
    relations = [_relation(text) for text in relation or []]
    chosen = _prompts(prompts) if relations else []
    prepare(output, overwrite=overwrite)
    about: dict[str, Any] = {}
    table, found, phase = None, [], None
    start = time.perf_counter()
    wanted = {Bos.auto: None, Bos.yes: True, Bos.no: False}[bos]
    settings: dict[str, Any] = {
        "probes": asked,
        "ablate": ablate,
        "ablate_by": ablate_by,
        "rows": rows,
        "length": length,
        "seed": seed,
        "bos": wanted,
        "threshold": threshold,
    }
    if series:
        load_options = {"device": device, "dtype": dtype, "attn_implementation": attn_implementation}
        phase = _history(series, model if revisions else None, settings, load_options, offline, quiet)
        about = phase.about | {"probes": ", ".join(asked), "rows asked for": rows, "seed": seed}
    elif asked or relations:
        from attndiag.models.load import load

        with progress_bar(quiet=quiet) as bar:
            lm = load(
                model,
                revision=revision,
                device=device,
                dtype=dtype,
                attn_implementation=attn_implementation,
                offline=True if offline else None,
                progress=bar,
            )
        about = _about(lm) | {
            "probes": ", ".join(asked),
            "ablated": ablate,
            "ablated by": ablate_by if ablate else None,
            "rows asked for": rows,
            "length asked for": length,
            "BOS": bos.value,
            "threshold": threshold,
            "relations": ", ".join(relation or []) or None,
            "seed": seed,
        }
        start = time.perf_counter()
        if asked:
            table = _measure(lm, settings, quiet)
        found = [_probe_relation(lm, chosen, pair, seed, quiet) for pair in relations]
    if phase_change:
        phase = _phase_change(quiet)
    about["seconds"] = round(time.perf_counter() - start, 1)
    page = save_heads(output, table, relations=found, phase=phase, about=about, overwrite=True)
    tables = [table] if table is not None else list(phase.run.tables) if series and phase is not None else []
    _finish(page, tables, about, ablate=ablate, json=json, quiet=quiet)


def _probes(given: list[str] | None) -> tuple[str, ...]:
    from attndiag.explanations.head_measures import PROBES

    names = [name.strip() for text in given or [] for name in text.split(",") if name.strip()]
    if "all" in names:
        return PROBES
    unknown = [name for name in names if name not in PROBES]
    if unknown:
        raise typer.BadParameter(f"there is no probe {unknown[0]!r}; expected {', '.join(PROBES)}, or all")
    return tuple(dict.fromkeys(names))


def _relation(text: str) -> tuple[str | None, str]:
    query, colon, key = text.partition(":")
    if not colon or not query.strip() or not key.strip():
        raise typer.BadParameter(f"--relation {text!r} is not QUERY:KEY, for example subject_again:subject")
    return (None if query.strip() == LAST else query.strip()), key.strip()


def _prompts(path: Path | None) -> list[Prompt]:
    from attndiag.runs.prompt_files import SHIPPED, read_prompts

    return read_prompts(SHIPPED if path is None else path)


def _about(lm: LoadedModel) -> dict[str, Any]:
    info = lm.info
    return {
        "model": info.name,
        "architecture": info.architecture,
        "revision": info.revision,
        "dtype": info.dtype,
        "device": str(info.device),
        "attention function": info.attn_implementation,
    }


def _series(checkpoints: list[Path] | None, revisions: str | None) -> list[str | Path]:
    """What `heads_over_checkpoints` takes; a folder that is not there is told before anything is loaded."""
    names = [name.strip() for name in (revisions or "").split(",") if name.strip()]
    if checkpoints and names:
        raise typer.BadParameter("give --checkpoints or --revisions, not both")
    missing = [place for place in checkpoints or [] if not place.is_dir()]
    if missing:
        raise typer.BadParameter(f"--checkpoints {missing[0]}: there is no such folder")
    found: list[str | Path] = [*(checkpoints or []), *names]
    if (checkpoints or revisions is not None) and len(found) < 2:
        raise typer.BadParameter(f"a history needs at least two checkpoints, got {len(found)}")
    return found


def _no_idle_options(given: list[str], *, relations: bool) -> None:
    """Refuse options that would do nothing beside the others."""
    named = "checkpoints are folders and need no other model; leave it out"
    for one, beside, why in (
        ("--model", "--checkpoints", named),
        ("--revision", "--checkpoints", named),
        ("--revision", "--revisions", "the list says which revisions; leave it out"),
    ):
        if one in given and beside in given:
            raise typer.BadParameter(f"it goes with no {beside}: {why}", param_hint=one)
    if "--prompts" in given and not relations:
        raise typer.BadParameter(
            "probes make their own texts, and only a relation reads a prompt set; add --relation subject_again:subject",
            param_hint="--prompts",
        )


def _ranked_by(name: str, probes: tuple[str, ...]) -> None:
    from attndiag.errors import NotApplicableError
    from attndiag.explanations.head_measures import ranking_measure

    try:
        ranking_measure(name, probes)
    except NotApplicableError as error:
        raise typer.BadParameter(str(error), param_hint="--ablate-by") from error


def _measure(lm: LoadedModel, settings: dict[str, Any], quiet: bool) -> HeadTable:
    from attndiag.explanations.head_scores import heads as measure

    with progress_bar(quiet=quiet) as bar:
        return measure(lm, **settings, progress=bar)


def _history(
    series: list[str | Path],
    model: str | None,
    settings: dict[str, Any],
    load_options: dict[str, Any],
    offline: bool,
    quiet: bool,
) -> PhaseChange:
    from attndiag.explanations.head_history import heads_over_checkpoints
    from attndiag.reports.phase_change import PhaseChange

    with progress_bar(quiet=quiet) as bar:
        history = heads_over_checkpoints(
            series,
            model=model,
            load_options={**load_options, "offline": True if offline else None},
            progress=bar,
            **settings,
        )
    return PhaseChange(
        history,
        about={
            "model": model or ", ".join(str(name) for name in series),
            "steps": ", ".join(map(str, history.steps)),
            "checkpoints": len(history.steps),
        },
    )


def _probe_relation(
    lm: LoadedModel, prompts: list[Prompt], pair: tuple[str | None, str], seed: int, quiet: bool
) -> HeadTable:
    from attndiag.explanations.relation_probe import probe_relation

    with progress_bar(quiet=quiet) as bar:
        return probe_relation(lm, prompts, *pair, seed=seed, progress=bar)


def _phase_change(quiet: bool) -> PhaseChange:
    from attndiag.reports.phase_change import shipped_phase_change

    with progress_bar(quiet=quiet) as bar:
        return shipped_phase_change(progress=bar)


def _finish(
    page: HeadsPage, tables: list[HeadTable], about: dict[str, Any], *, ablate: int, json: bool, quiet: bool
) -> None:
    """Say what came out and leave with the status that it deserves."""
    found = {tuple(vars(item).values()): vars(item) for table in tables for item in table.not_measurable}
    # what was asked for by name first: only a few are told here
    missing = sorted(found.values(), key=lambda item: item["probe"] != "ablation")
    empty = any(not table.scores or (ablate and "ablation_effect" not in table.scores) for table in tables)
    if json:
        facts = {"page": str(page.page), "headline": page.headline, "failures": list(page.failures), **about}
        data_json(facts | {"not_measurable": missing, "facts": dict(tables[0].facts) if len(tables) == 1 else {}})
    else:
        data(page.headline)
        data(f"page: {page.page}")
    for item in missing[:5]:
        where = "" if item["layer"] is None else f", layer {item['layer']}"
        remark(f"not measurable: {item['probe']}{where}: {item['reason']}", quiet=quiet and not empty)
    if len(missing) > 5:
        remark(f"and {len(missing) - 5} more; the page lists them", quiet=quiet)
    for text in page.failures[:5]:
        remark(f"not verified: {text}")
    raise typer.Exit(SOME_FAILED if page.failures or empty else FINE)

"""`attndiag view`: one prompt, every head, as a page or a figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attndiag.commands import options
from attndiag.commands.choosing import choose_prompts, comma_names, named
from attndiag.commands.console import FINE, SOME_FAILED, data, data_json, guarded, remark
from attndiag.commands.progress import progress_bar

if TYPE_CHECKING:
    from attndiag.prompts import Prompt, Target
    from attndiag.reports.prompt_view import PromptView
    from attndiag.runs.compared_run import ComparedRun


@guarded
def view(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="TEXT | RUN_DIR", help="A prompt, or the folder of a run that is there.", show_default=False
        ),
    ] = None,
    prompts: options.Prompts = None,
    prompt_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="Which prompt of the set; the first by default.", show_default=False),
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
            help="Token methods side by side, with commas, or none; weight, contribution, rollout and "
            "input_x_gradient by default.",
            rich_help_panel=options.RUN,
            show_default=False,
        ),
    ] = None,
    replacements: Annotated[
        list[str] | None,
        typer.Option(
            "--replacements",
            "--replacement",
            metavar="NAME[:draws=N,...]",
            help="Also the effect of replacing each token, as in sampled:draws=4; give it again for several. None by "
            "default.",
            rich_help_panel=options.RUN,
            show_default=False,
        ),
    ] = None,
    effects: Annotated[
        bool,
        typer.Option(
            "--effects",
            help="Also remove every edge of the last query and run the model again: exact effects, one run an edge. "
            "First-order estimates by default.",
            rich_help_panel=options.RUN,
        ),
    ] = False,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="A page (.html), or one layer as a figure (.png, .svg, .pdf).",
            rich_help_panel=options.OUTPUT,
        ),
    ] = Path("attndiag-view.html"),
    layer: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="For figures: which layer, from 0; by default where weight and contribution differ most.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help=options.MODEL_HELP + " The default model, or that of the run, by default.",
            rich_help_panel=options.MODEL,
            show_default=False,
        ),
    ] = None,
    revision: options.Revision = None,
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    attn_implementation: options.AttnImplementation = None,
    offline: options.Offline = False,
    backend: options.BackendName = options.Backend.auto,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """What every head of one prompt reads, writes and does.

    Maps of weight, contribution and effect for each layer and head, and methods side by side on the same tokens, in one
    page that loads nothing; or one layer as a figure. With RUN_DIR, a prompt of a run with the run's own methods,
    verdicts and exact effects; the maps are measured anew by its model.

    Exit status: 0 fine; 1 a layer is not certified; 2 misuse.

    \b
    Examples:
      attndiag view "When Mary and John went to the store, John gave a drink to" --target " Mary" -o ioi.html
      attndiag view --id code-1 --effects -o code.html         a prompt of the shipped set
      attndiag view --prompts my.jsonl --id first -o first.png --layer 20
      attndiag view out --id ioi-1 -o ioi.html                 a prompt of the run in out/
    """
    from attndiag.reports.prompt_view import METHODS, facts_of, require_saveable

    require_saveable(output)
    run, chosen, about = None, METHODS, None
    if what and Path(what).is_dir():
        if any(given is not None for given in (prompts, target, foil, methods, replacements)) or effects:
            raise typer.BadParameter(f"{what} is a run that is there: its methods, target and effects are shown")
        run, prompt, about = _of_run(Path(what), prompt_id)
        chosen = ()
    else:
        example = 'attndiag view "The capital of France is"'
        (prompt, *_), _ = choose_prompts(what, prompts, prompt_id, example=example, target=target, foil=foil)
        if methods is not None:
            chosen = comma_names(methods) or ()
    loading: dict[str, Any] = {"revision": revision, "dtype": dtype, "attn_implementation": attn_implementation}
    if run is not None and model is None:
        facts = run.facts
        model, loading["revision"] = str(facts["model"]), revision or _revision(facts)
        loading["dtype"] = facts["dtype"] if dtype == "auto" else dtype
    shown = _measure(
        model or "default",
        {**loading, "device": device, "offline": True if offline else None},
        prompt,
        {"target": about, "methods": chosen, "replacements": tuple(replacements or ()), "exact_effects": effects},
        backend.value,
        quiet,
    )
    if run is not None:
        shown = _joined(shown, run, prompt)
    path = shown.save(output, layer=layer)
    facts = facts_of(shown)
    if json:
        data_json({"page": str(path), **facts, "bytes": path.stat().st_size})
    else:
        data(str(path))
    for note in shown.notes:
        remark(note, quiet=quiet)
    uncertified = facts["uncertified_layers"]
    if uncertified:
        remark(f"layers {', '.join(uncertified)} are not certified; the page says so")
    raise typer.Exit(SOME_FAILED if uncertified else FINE)


def _measure(
    model: str, loading: dict[str, Any], prompt: Prompt, asked: dict[str, Any], backend: Any, quiet: bool
) -> PromptView:
    from attndiag.models.load import load
    from attndiag.reports.prompt_view import view_prompt

    with progress_bar(quiet=quiet) as bar:
        lm = load(model, progress=bar, **loading)
    with progress_bar(quiet=quiet) as bar:
        return view_prompt(lm, prompt, backend=backend, progress=bar, **asked)


def _revision(facts: Any) -> str | None:
    """Of a hub model; what pins other models is no revision that could be asked for."""
    return str(facts["revision"]) if facts.get("source") == "hub" and facts.get("revision") else None


def _of_run(folder: Path, prompt_id: str | None) -> tuple[ComparedRun, Prompt, Target]:
    """The run, its prompt of that id (the first measured one when None), and the target that was fixed for it.

    The text is what the model read, chat template and all.
    """
    from attndiag.errors import RunFolderError
    from attndiag.prompts import Prompt
    from attndiag.runs.compared_run import read_compared_run

    run = read_compared_run(folder)
    rows = {row["prompt"]: row for row in run.comparison.prompts.to_dict("records")}
    if not rows:
        raise RunFolderError(f"{folder} holds no prompt that was measured, so there is nothing to view")
    there = [Prompt(row["text"], id=label) for label, row in rows.items()]
    prompt = there[0] if prompt_id is None else named(there, prompt_id, str(folder))
    return run, prompt, _target(rows[str(prompt.id)])


def _target(row: Mapping[str, Any]) -> Target:
    """The target of a prompt of a run, from its row.

    Raises
    ------
    NotApplicableError : the row does not hold all of it, or the view has no place for it.
    """
    from attndiag.errors import NotApplicableError
    from attndiag.prompts import Target

    kind, answer, foil = row["target_kind"], row["target"] or None, row["foil"] or None
    if kind in ("logit_diff", "logprob", "logit", "prob", "masked_token_logit"):
        return Target(kind, answer, foil)
    if kind == "class_logit":
        return Target(kind, label=_label(answer), foil_label=_label(foil))
    why = {
        "cosine": "a run does not keep how it pools tokens",
        "continuation_logprob": "its tokens are among those of the run, and it is read at several positions",
    }.get(kind, "this version does not know it")
    raise NotApplicableError(
        f"prompt {row['prompt']!r} has the target {kind}, which cannot be viewed from a run: {why}. View the text by "
        "itself, or call view_prompt of attndiag.reports.prompt_view with the target"
    )


def _label(said: str | None) -> int | str | None:
    """A class as it was given: by number or by name."""
    return int(said) if said is not None and said.isdigit() else said


def _joined(shown: PromptView, run: ComparedRun, prompt: Prompt) -> PromptView:
    """The view with the run's methods, verdicts and exact effects; refused where the model reads other tokens."""
    from attndiag.errors import RunFolderError
    from attndiag.reports.prompt_view import with_run
    from attndiag.reports.view_tokens import exact_of_run, rows_of_run

    label = str(prompt.id)
    mine = run.tokens[run.tokens["prompt"] == label].sort_values("pos")["text"].tolist()
    if mine != list(shown.tokens):
        raise RunFolderError(
            f"prompt {label!r} has {len(mine)} tokens in the run and {len(shown.tokens)} now, or other ones; give the "
            "run's own model with --model, or view the text by itself (a text for the decoder is not kept in a run)"
        )
    row = next(row for row in run.comparison.prompts.to_dict("records") if row["prompt"] == label)
    if shown.edges is not None and not _alike(shown.edges.m, row["m"]):
        told = (
            f"m is {shown.edges.m:.4g} here and {row['m']:.4g} in the run: another model, dtype or device computed it"
        )
        shown = replace(shown, notes=(*shown.notes, told))
    edges = None
    found = exact_of_run(run.edges, label)
    if found is not None and shown.edges is not None:
        layers, exact = found
        edges = replace(shown.edges, exact=exact, layers=layers, first_order=None)
    return with_run(shown, rows_of_run(run.comparison, label), edges, str(run.facts["run"]))


def _alike(here: float, there: float) -> bool:
    """Equal within what dtypes and devices may change."""
    return abs(here - there) <= 0.01 * max(1.0, abs(there))

"""`attndiag explain` and `attndiag methods`: one method of the catalogue on prompts, and the list of them."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attndiag.commands import options
from attndiag.commands.choosing import choose_prompts
from attndiag.commands.console import FINE, SOME_FAILED, data, data_json, guarded, remark
from attndiag.commands.progress import progress_bar
from attndiag.commands.settings import parameters

if TYPE_CHECKING:
    import pandas as pd

    from attndiag.catalog import Method
    from attndiag.models.load import LoadedModel
    from attndiag.prompts import Prompt
    from attndiag.scores import Scores


class Usage(StrEnum):
    """Commands that compare methods; both take the same."""

    run = "run"
    compare = "compare"


@guarded
def methods(
    scope: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Only methods that speak of: token, edge, activation, head, layer, row, prompt.",
            show_default=False,
        ),
    ] = None,
    command: Annotated[
        Usage | None,
        typer.Option(
            "--for",
            metavar="COMMAND",
            help="What run and compare take, attention weights too, and how it becomes one number for each token.",
            show_default=False,
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Methods with their cost, sign, unit and source.

    \b
    Examples:
      attndiag methods
      attndiag methods --scope token --json
      attndiag methods --for run
    """
    from attndiag.catalog import CATALOG

    if command is not None:
        if scope is not None:
            raise typer.BadParameter(f"--for {command} lists what speaks of tokens in the end; leave --scope out")
        _list_readings(json)
        return
    chosen = [entry for entry in CATALOG.values() if scope in (None, entry.scope)]
    if not chosen:
        scopes = sorted({entry.scope for entry in CATALOG.values()})
        raise typer.BadParameter(f"there is no scope {scope!r}; expected one of {', '.join(scopes)}")
    if json:
        data_json([_facts(entry) for entry in chosen])
        return
    for entry in chosen:
        data(f"{entry.name:<22} {entry.what}")
        data(f"{'':<22} {entry.scope}, {entry.sign}, in {entry.unit}; {_price(entry)}")


def _list_readings(json: bool) -> None:
    from attndiag.comparison.readings import token_readings

    found = token_readings()
    if json:
        data_json([{**_facts(one.method), "reading": one.how, "placed": one.placed} for one in found])
        return
    for one in found:
        data(f"{one.method.name:<22} {one.method.what}")
        place = "; @L20 is one layer, @L20H3 one head where it has heads" if one.placed else ""
        data(f"{'':<22} {one.how}{place}; {_price(one.method)}")


def _price(entry: Method) -> str:
    needs = f"; needs {', '.join(entry.needs)}" if entry.needs else ""
    return f"{entry.cost}{needs}; {entry.source}"


@guarded
def explain(
    text: Annotated[str | None, typer.Argument(help="The prompt.", show_default=False)] = None,
    prompts: options.Prompts = None,
    prompt_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="One prompt of the set.", show_default=False)
    ] = None,
    method: Annotated[str, typer.Option("--method", help="A name from `attndiag methods`.")] = "replacement",
    target: Annotated[
        str | None,
        typer.Option(
            help="Answer, first token, leading space included; the model's own top-1 by default.", show_default=False
        ),
    ] = None,
    foil: Annotated[str | None, typer.Option(help="What the answer is measured against.", show_default=False)] = None,
    replacement: Annotated[
        str | None,
        typer.Option(
            help="For replacement: pair, sampled:draws=8,seed=1, uniform, delete, 'token: the', ...", show_default=False
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A parameter of the method: baseline=pair, steps=64, layers=3,4.",
            show_default=False,
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Edges shown for each prompt; tokens are all shown.")] = 20,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the table as .csv or .parquet.",
            show_default=False,
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    limit: options.Limit = None,
    skip_bad: options.SkipBad = False,
    model: options.ModelName = "default",
    revision: options.Revision = None,
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    attn_implementation: options.AttnImplementation = None,
    offline: options.Offline = False,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """What each token, or edge, does for one answer.

    Runs one method on a prompt, or on each prompt of a file, and prints a table. A prompt that cannot be measured is
    named with its reason and the others go on; scores that failed their own checks (a completeness gap above 5 %, say)
    are printed and marked.

    Exit status: 0 fine; 1 some prompts failed or a check failed; 2 misuse.

    \b
    Examples:
      attndiag explain "When Mary and John went to the store, John gave a drink to" --target " Mary" --foil " John"
      attndiag explain "The capital of France is" --method integrated_gradients --set baseline=zero
      attndiag explain --id ioi-1 --method replacement --replacement pair
      attndiag explain --id ioi-1 --method activation_patching --set site=head_out --set mode=noise --set layers=18,23
      attndiag explain --prompts my.jsonl --method kernel_shap -o scores.parquet
    """
    from attndiag.catalog import method_named

    entry = method_named(method)
    params = parameters(settings or [])
    if replacement is not None:
        params["replacement"] = replacement
    if output is not None and output.suffix not in (".csv", ".parquet"):
        raise typer.BadParameter(f"{output} ends neither in .csv nor in .parquet")
    example = 'attndiag explain "The capital of France is"'
    chosen, n_skipped = choose_prompts(
        text, prompts, prompt_id, example=example, target=target, foil=foil, limit=limit, skip_bad=skip_bad,
        quiet=quiet,
    )  # fmt: skip
    if text is not None:
        # one typed prompt: its whole text would be no name for it
        chosen = [replace(one, id="prompt") for one in chosen]

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
    with progress_bar(quiet=quiet) as bar:
        results, failed = _measure(lm, entry, chosen, params, bar, quiet=quiet)
    for label, reason in failed.items():
        remark(f"{label}: {reason}")
    if results:
        _show(results, entry, top, output, json=json)
    unverified = {label: scores.failures for label, scores in results.items() if scores.failures}
    for label, failures in unverified.items():
        remark(f"{label}: not verified: {'; '.join(failures)}")
    raise typer.Exit(SOME_FAILED if failed or unverified or n_skipped else FINE)


def _measure(
    lm: LoadedModel, entry: Method, prompts: list[Prompt], params: dict[str, Any], bar: Any, *, quiet: bool
) -> tuple[dict[str, Scores], dict[str, str]]:
    """Scores by prompt, and why others have none."""
    from attndiag import catalog
    from attndiag.errors import AttnDiagError
    from attndiag.explanations.resolve import prompt_label

    results: dict[str, Scores] = {}
    failed: dict[str, str] = {}
    bar("measuring", 0, len(prompts))
    for done, prompt in enumerate(prompts, start=1):
        label = prompt_label(prompt)
        inside = f"{entry.name} of {label}" if entry.reports else "measuring"
        try:
            work = catalog.work_of(lm, prompt, entry.name, params)
            if work is not None:
                remark(f"{label}: {work}", quiet=quiet)
            results[label] = catalog.explain(
                lm, prompt, method=entry.name, steps_done=lambda *counts, what=inside: bar(what, *counts), **params
            )
        except (catalog.UnknownParameterError, catalog.UnknownMethodError):
            raise
        except AttnDiagError as error:
            if len(prompts) == 1:
                raise
            failed[label] = " ".join(str(error).split())
        except (ValueError, TypeError) as error:
            if done == 1:
                # a parameter out of range: misuse, whatever the prompt
                raise typer.BadParameter(" ".join(str(error).split())) from error
            # it did for another prompt: what was measured is not thrown away
            failed[label] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        bar("measuring", done, len(prompts))
    return results, failed


def _show(results: dict[str, Scores], entry: Method, top: int, output: Path | None, *, json: bool) -> None:
    import pandas as pd

    frames = {label: _frame(scores) for label, scores in results.items()}
    if output is not None:
        whole = pd.concat([frame.assign(prompt=label) for label, frame in frames.items()], ignore_index=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.suffix == ".csv":
            whole.to_csv(output, index=False)
        else:
            whole.to_parquet(output, compression="zstd", index=False)
        data(str(output))
        return
    if json:
        data_json([_as_json(label, scores, frames[label]) for label, scores in results.items()])
        return
    for label, scores in results.items():
        frame = frames[label]
        if len(results) > 1:
            data(f"# {label}")
        about = [scores.method, f"in {scores.unit}", scores.sign]
        about += [f"{name}={value}" for name, value in scores.params.items() if isinstance(value, (str, int, float))]
        if isinstance(scores.checks.get("m"), float):
            about.append(f"m={scores.checks['m']:.4g}")
        if isinstance(scores.checks.get("completeness_gap"), float):
            about.append(f"completeness gap {scores.checks['completeness_gap']:.2%}")
        if isinstance(scores.checks.get("spearman_of_top"), float):
            about.append(f"rank correlation with the exact values {scores.checks['spearman_of_top']:.3f}")
        data("# " + ", ".join(about))
        if entry.scope != "token":
            known = frame[frame["value"].notna()]
            frame = known.loc[known["value"].abs().sort_values(ascending=False, kind="stable").index].head(top)
        shown = _visible_labels(frame.drop(columns=["method", "unit"]))
        data(shown.to_string(index=False, na_rep="-", float_format=lambda x: f"{x:.4g}"))


def _frame(scores: Scores) -> pd.DataFrame:
    """The tidy table, with what was measured beside each value."""
    frame = scores.to_frame()
    exact = scores.checks.get("exact")
    if isinstance(exact, dict):  # attribution patching: place -> the effect that the largest estimates really have
        layers = list(scores.labels["layer"])
        places = zip(*(frame[axis] for axis in scores.axes), strict=True)
        frame["exact"] = [exact.get((layers[layer], *place), float("nan")) for layer, *place in places]
    if len(scores.axes) == 1:
        for name in ("se", "distinct", "flip_share", "ood", "admissible"):
            values = scores.checks.get(name)
            if values is not None and len(values) == len(frame):
                frame[name] = values.tolist()
    return frame


def _visible_labels(frame: pd.DataFrame) -> pd.DataFrame:
    """Texts of tokens as pages show them: a piece of a character is no blank, and a line break breaks no row."""
    from attndiag.reports.token_text import visible

    labels = [name for name in frame if str(name).endswith("_label")]
    return frame.assign(
        **{name: [visible(one) if isinstance(one, str) else one for one in frame[name]] for name in labels}
    )


def _as_json(label: str, scores: Scores, frame: pd.DataFrame) -> dict[str, Any]:
    checks = {name: value for name, value in scores.checks.items() if isinstance(value, (str, int, float, bool))}
    return {
        "prompt": label,
        "method": scores.method,
        "unit": scores.unit,
        "sign": scores.sign,
        "params": {
            name: value if isinstance(value, (str, int, float)) else str(value) for name, value in scores.params.items()
        },
        "checks": checks,
        "failures": list(scores.failures),
        "rows": frame.drop(columns=["method", "unit"]).to_dict(orient="records"),
    }


def _facts(entry: Method) -> dict[str, Any]:
    return {
        "name": entry.name,
        "what": entry.what,
        "scope": entry.scope,
        "sign": entry.sign,
        "unit": entry.unit,
        "cost": entry.cost,
        "needs": list(entry.needs),
        "source": entry.source,
    }

"""`attndiag card` and `attndiag audit`: what attention a model computes, and whether its masks and scale are sound."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attndiag.commands import options
from attndiag.commands.console import FINE, SOME_FAILED, data, data_json, guarded
from attndiag.commands.progress import progress_bar
from attndiag.errors import RunFolderError

if TYPE_CHECKING:
    from attndiag.models.load import LoadedModel

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A short name, a hub id, a folder, or a .gguf file.", show_default=True)
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write to a .txt, .json or .html file.", show_default=False),
]
Length = Annotated[
    int | None, typer.Option(min=6, help="Tokens of the probe; chosen by the model otherwise.", show_default=False)
]


@guarded
def card(
    model: Model = "default",
    output: Output = None,
    length: Length = None,
    maps: Annotated[
        bool, typer.Option("--maps", help="Also the token-to-token maps that layers without a softmax imply.")
    ] = False,
    revision: options.Revision = None,
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    attn_implementation: options.AttnImplementation = None,
    offline: options.Offline = False,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """What kind of attention does each layer compute?

    Heads, widths, masks, windows, positions, kernel and dtype, from one probing forward; where the configuration says
    something else, both are told.

    Exit status: 0 fine; 1 the configuration and the model disagree without an explanation; 2 misuse.

    \b
    Examples:
      attndiag card
      attndiag card gpt2 --json
      attndiag card my-folder -o card.html
      attndiag card my-mamba --maps
    """
    _check_suffix(output, (".txt", ".json", ".html"))
    lm = _load(model, revision, device, dtype, attn_implementation, offline, quiet)
    from attndiag.explanations.attention_card import card as probe

    made = probe(lm, length=length, maps=maps)
    if output is not None:
        _write(output, made.to_text(), made.to_dict(), made.to_html())
        data(str(output))
    elif json:
        data_json(made.to_dict())
    else:
        data(made.to_text())
    disagrees = any(not difference.explained for difference in made.differences)
    raise typer.Exit(SOME_FAILED if disagrees else FINE)


@guarded
def audit(
    model: Model = "default",
    output: Output = None,
    causal: Annotated[
        bool | None, typer.Option("--causal/--two-way", help="What the model is meant to be.", show_default=False)
    ] = None,
    length: Annotated[int, typer.Option(min=6, help="Tokens of the probe.")] = 12,
    seed: options.Seed = 0,
    revision: options.Revision = None,
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    attn_implementation: options.AttnImplementation = None,
    offline: options.Offline = False,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Look for faults in a model's masks and scale, by intervention.

    Changes tokens, padding and neighbours in the batch and watches what must not move; finds leaks, hidden diagonals,
    inverted masks, wrong windows and wrong scales, and names the layer.

    Exit status: 0 nothing was found; 1 something was; 2 misuse.

    \b
    Examples:
      attndiag audit
      attndiag audit my-folder --causal -o audit.txt
      attndiag audit gpt2 --json
    """
    _check_suffix(output, (".txt", ".json"))
    lm = _load(model, revision, device, dtype, attn_implementation, offline, quiet)
    from attndiag.explanations.audit_run import audit as look

    with progress_bar(quiet=quiet) as bar:
        found = look(lm, causal=causal, length=length, seed=seed, progress=bar)
    if output is not None:
        _write(output, found.to_text(), found.to_dict(), "")
        data(str(output))
    elif json:
        data_json(found.to_dict())
    else:
        data(found.to_text())
    raise typer.Exit(FINE if found.passed else SOME_FAILED)


def _load(
    model: str,
    revision: str | None,
    device: str,
    dtype: str,
    attn_implementation: str | None,
    offline: bool,
    quiet: bool,
) -> LoadedModel:
    from attndiag.models.load import load

    with progress_bar(quiet=quiet) as bar:
        return load(
            model,
            revision=revision,
            device=device,
            dtype=dtype,
            attn_implementation=attn_implementation,
            offline=True if offline else None,
            progress=bar,
        )


def _check_suffix(output: Path | None, known: tuple[str, ...]) -> None:
    if output is not None and output.suffix not in known:
        raise typer.BadParameter(f"--output {output}: expected a file ending in {', '.join(known)}")


def _write(output: Path, text: str, facts: dict, html: str) -> None:
    import json

    page = (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>attention card</title><style>body{font-family:"
        "system-ui,sans-serif;margin:2em;color-scheme:light dark}table{border-collapse:collapse}th,td{text-align:left;"
        f"padding:.3em .8em;border-bottom:1px solid #8884}}</style><body>{html}</body></html>"
    )
    content = {".txt": text + "\n", ".json": json.dumps(facts, indent=2, default=str) + "\n", ".html": page}
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(content[output.suffix], encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{output} cannot be written: {error.strerror}") from error

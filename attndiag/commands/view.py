"""`attndiag view`: one prompt, every head, as a page or a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attndiag.commands import options
from attndiag.commands.console import FINE, SOME_FAILED, data, data_json, guarded, progress_bar, remark

if TYPE_CHECKING:
    from attndiag.prompts import Prompt


@guarded
def view(
    text: Annotated[str | None, typer.Argument(help="The prompt.", show_default=False)] = None,
    prompts: options.Prompts = None,
    prompt_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="Which prompt of the set; the first by default.", show_default=False),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="x.html, or x.png, x.svg, x.pdf.", rich_help_panel=options.OUTPUT
        ),
    ] = Path("attndiag-view.html"),
    layer: Annotated[
        int | None,
        typer.Option(min=0, help="For figures: which layer; the most telling one by default.", show_default=False),
    ] = None,
    model: options.ModelName = "default",
    revision: options.Revision = None,
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    attn_implementation: options.AttnImplementation = None,
    offline: options.Offline = False,
    backend: options.BackendName = options.Backend.auto,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Weight and contribution maps of one prompt.

    Every layer and head, in one page that loads nothing, or one layer as a figure.

    \b
    Examples:
      attndiag view "When Mary and John went to the store, John gave a drink to" -o ioi.html
      attndiag view --id code-1 -o code.html                   a prompt of the shipped set
      attndiag view --prompts my.jsonl --id first -o first.png --layer 20
    """
    prompt = _choose(text, prompts, prompt_id)
    from attndiag.models.load import load
    from attndiag.reports.prompt_view import require_saveable, view_prompt

    require_saveable(output)
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
        shown = view_prompt(lm, prompt, backend=backend.value, progress=bar)
    path = shown.save(output, layer=layer)
    uncertified = [each.label for each in shown.layers if not each.certified]
    if json:
        facts = {"page": str(path), "prompt": prompt.id, "tokens": len(shown.tokens), "layers": len(shown.layers)}
        data_json({**facts, "uncertified_layers": uncertified, "bytes": path.stat().st_size})
    else:
        data(str(path))
    if uncertified:
        remark(f"layers {', '.join(uncertified)} are not certified; the page says so")
    raise typer.Exit(SOME_FAILED if uncertified else FINE)


def _choose(text: str | None, path: Path | None, prompt_id: str | None) -> Prompt:
    from attndiag.prompts import Prompt

    if text is not None:
        if path is not None or prompt_id is not None:
            raise typer.BadParameter("give either a prompt or --prompts and --id, not both")
        return Prompt(text, id="prompt")
    if path is None and prompt_id is None:
        raise typer.BadParameter('give a prompt, for example: attndiag view "The capital of France is"')
    import difflib

    from attndiag.errors import PromptError
    from attndiag.runs.prompt_files import SHIPPED, read_prompts

    known = {str(prompt.id): prompt for prompt in read_prompts(SHIPPED if path is None else path)}
    if prompt_id is None:
        return next(iter(known.values()))
    if prompt_id not in known:
        near = difflib.get_close_matches(prompt_id, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it holds {', '.join(list(known)[:5])}, ..."
        raise PromptError(f"there is no prompt {prompt_id!r} in {path or 'the shipped set'}; {hint}")
    return known[prompt_id]

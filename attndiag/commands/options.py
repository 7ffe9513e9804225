"""Options that several commands share, each defined once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Backend(StrEnum):
    """Ways to compute contributions; all give the same numbers."""

    auto = "auto"
    reference = "reference"
    fused = "fused"
    streaming = "streaming"


MODEL, RUN, OUTPUT = "Model", "Run", "Output"

ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="A short name (`attndiag models` lists them), a hub id, a folder, or a .gguf file.",
        rich_help_panel=MODEL,
    ),
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a hub model.", rich_help_panel=MODEL, show_default=False)
]
Device = Annotated[
    str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, or a device map such as balanced.", rich_help_panel=MODEL)
]
DType = Annotated[
    str,
    typer.Option("--dtype", help="auto (the checkpoint's own), float32, bfloat16, ...", rich_help_panel=MODEL),
]
AttnImplementation = Annotated[
    str | None,
    typer.Option(
        "--attn-implementation",
        help="eager, sdpa, ...; transformers' own choice by default.",
        rich_help_panel=MODEL,
        show_default=False,
    ),
]
Offline = Annotated[
    bool, typer.Option("--offline", help="Ask no model hub and no package index.", rich_help_panel=MODEL)
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="A prompt set: .jsonl, .txt, .csv or .parquet. The shipped set by default.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(min=1, help="Take the first N prompts only.", rich_help_panel=RUN, show_default=False, metavar="N"),
]
SkipBad = Annotated[
    bool,
    typer.Option("--skip-bad", help="Leave out entries that cannot be used, and count them.", rich_help_panel=RUN),
]
Seed = Annotated[int, typer.Option(help="Seed of every draw; written down with the run.", rich_help_panel=RUN)]
BackendName = Annotated[
    Backend,
    typer.Option("--backend", help="How contributions are computed.", rich_help_panel=RUN, case_sensitive=False),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the run that is in the output folder.", rich_help_panel=OUTPUT)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no remarks.", rich_help_panel=OUTPUT)]
Json = Annotated[bool, typer.Option("--json", help="The result as JSON on standard output.", rich_help_panel=OUTPUT)]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=OUTPUT)]

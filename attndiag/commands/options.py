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
# said by commands that define such an option for themselves, too
MODEL_HELP = "A short name (`attndiag models` lists them), a hub id, a folder, or a .gguf file."
DEVICE_HELP = "auto (a GPU where there is one), cpu, cuda, cuda:1, mps, or a device map such as balanced."
DTYPE_HELP = "auto (the checkpoint's own), float32, bfloat16, ..."
SKIP_BAD_HELP = "Leave out entries of the file that cannot be used, and count them; without it they stop the command."
METRICS_HELP = (
    "Faithfulness metrics with commas, or none; aopc_comprehensiveness, aopc_sufficiency and effect_tau by default. "
    "An unknown name shows the list."
)
METHODS_HELP = (
    "Names with commas, see `attndiag methods --for run`; weight@L20H3 is one head. By default weight, value_norm, "
    "head_contribution, contribution, alti_rollout, pattern_attribution, input_x_gradient and integrated_gradients."
)
SET_HELP = (
    "A parameter of a method, as in integrated_gradients.max_steps=512; give it again for several. Where not "
    "given, the method's own default."
)
REPLACEMENT_HELP = (
    "How tokens are replaced to see what they do: sampled, uniform, pair, delete, mean_embedding, ..., with draws a "
    "token; give it again for several. sampled:draws=16 by default."
)
OWN_HELP = (
    "Scores made by another tool, a table that `attndiag.read_own_scores` reads; METHOD where it holds several. Judged "
    "under that name, or the file's. Give it again for several; none by default."
)
PRIMARY_HELP = "The pair of methods whose difference is the main question, tested by itself; none by default."
EDGES_HELP = (
    "Attention edges of the last query that are removed one by one: all, a screen (the 64 with the largest estimates "
    "or claims), or none. auto: all where a prompt has up to 8,192, else a screen."
)
TARGET_HELP = (
    "Answer that is explained: its first token, leading space included; the prompt's own, or the model's first choice, "
    "by default."
)
FOIL_HELP = (
    "A wrong answer: then the logit of the target minus that of the foil is explained, in logits; without one usually "
    "the log probability of the target, in nats. The prompt's own, if it has one, by default."
)

ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help=MODEL_HELP,
        rich_help_panel=MODEL,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Branch, tag or commit of a hub model; its main branch by default.",
        rich_help_panel=MODEL,
        show_default=False,
    ),
]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help=DEVICE_HELP, rich_help_panel=MODEL)]
DType = Annotated[
    str,
    typer.Option("--dtype", metavar="NAME", help=DTYPE_HELP, rich_help_panel=MODEL),
]
AttnImplementation = Annotated[
    str | None,
    typer.Option(
        "--attn-implementation",
        metavar="NAME",
        help="Attention kernel: eager, sdpa, ...; transformers' own choice by default.",
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
        help="A prompt set: .jsonl, .txt, .csv or .parquet, see `attndiag validate`. The shipped set by default.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1, help="Take the first N prompts; all by default.", rich_help_panel=RUN, show_default=False, metavar="N"
    ),
]
SkipBad = Annotated[
    bool,
    typer.Option("--skip-bad", help=SKIP_BAD_HELP, rich_help_panel=RUN),
]
Seed = Annotated[
    int, typer.Option(metavar="N", help="Seed of every draw; written down with the run.", rich_help_panel=RUN)
]
BackendName = Annotated[
    Backend,
    typer.Option(
        "--backend",
        help="How contributions are computed; all give the same numbers. auto goes by size and device.",
        rich_help_panel=RUN,
        case_sensitive=False,
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the run that is in the output folder.", rich_help_panel=OUTPUT)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no remarks.", rich_help_panel=OUTPUT)]
Json = Annotated[bool, typer.Option("--json", help="The result as JSON on standard output.", rich_help_panel=OUTPUT)]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=OUTPUT)]

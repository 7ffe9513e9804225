"""Token methods of a view, side by side on the same tokens: measured now, or read from a compared run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attndiag.errors import AttnDiagError

if TYPE_CHECKING:
    from attndiag.comparison.edges import EdgeVerdicts
    from attndiag.comparison.side_by_side import Comparison
    from attndiag.explanations.replacement import Replacement
    from attndiag.models.load import LoadedModel
    from attndiag.prompts import Prompt, Target


@dataclass(frozen=True, eq=False)
class TokenRow:
    """One method.

    Parameters
    ----------
    name, unit : of the method.
    values : [position], nan where undefined.
    signed : whether signs are about the target.
    verdicts : [position] of a compared run; empty text where not judged. None outside of one.
    """

    name: str
    unit: str
    values: NDArray[np.float64]
    signed: bool
    verdicts: tuple[str, ...] | None = None


def token_rows(
    lm: LoadedModel,
    prompt: Prompt,
    target: Target | None,
    methods: Sequence[str],
    replacements: Sequence[Replacement | str],
) -> tuple[tuple[TokenRow, ...], list[str]]:
    """The methods that can be measured, and why others cannot.

    Raises
    ------
    UnknownMethodError, ValueError : methods that do not exist, or one named twice.
    """
    from attndiag.comparison.axis import token_axis
    from attndiag.comparison.methods import PromptMethods, check_methods
    from attndiag.explanations.replacement import Replacement

    if methods:
        check_methods(methods)
    try:
        run = PromptMethods(lm, token_axis(lm, prompt, target))
    except AttnDiagError as error:
        return (), [f"No token methods: {' '.join(str(error).split())}"]
    rows: list[TokenRow] = []
    problems: list[str] = []
    jobs = [(name, lambda name=name: run.scores(name)) for name in methods]
    for one in replacements:
        swap = Replacement.parse(one) if isinstance(one, str) else one
        jobs.append((f"replacement[{swap.label}]", lambda swap=swap: run.replacement(swap)))
    for name, job in jobs:
        try:
            found = job()
        except AttnDiagError as error:
            problems.append(f"{name}: {' '.join(str(error).split())}")
            continue
        rows.append(TokenRow(name, found.unit, np.asarray(found.values, dtype=np.float64), found.signed))
    return tuple(rows), problems


def rows_of_run(comparison: Comparison, prompt: str) -> tuple[TokenRow, ...]:
    """The methods of a compared run on one prompt, each token with its verdict."""
    scores = comparison.scores[comparison.scores["prompt"] == prompt]
    verdicts = comparison.verdicts
    judged = {} if verdicts.empty else {
        (row["method"], row["position"]): row["verdict"]
        for row in verdicts[verdicts["prompt"] == prompt].to_dict("records")
    }  # fmt: skip
    rows: list[TokenRow] = []
    for method, found in scores.groupby("method", sort=False):
        ordered = found.sort_values("position")
        told = tuple(judged.get((method, place), "") for place in ordered["position"])
        rows.append(
            TokenRow(
                str(method),
                str(ordered["unit"].iloc[0]),
                ordered["score"].to_numpy(dtype=np.float64),
                bool(ordered["signed"].iloc[0]),
                told if any(told) else None,
            )
        )
    return tuple(rows)


def exact_of_run(edges: EdgeVerdicts | None, prompt: str) -> tuple[tuple[int, ...], NDArray[np.float64]] | None:
    """Layers, and exact effects [layer, head, key] of one prompt of a run; None where its edges were not measured."""
    if edges is None or prompt not in edges.tokens:
        return None
    width = len(edges.tokens[prompt])
    mine = [(index, layer, head) for index, (label, _, layer, head) in enumerate(edges.rows) if label == prompt]
    layers = tuple(sorted({layer for _, layer, _ in mine}))
    table = np.full((len(layers), 1 + max(head for _, _, head in mine), width), np.nan)
    for index, layer, head in mine:
        table[layers.index(layer), head] = edges.effects[index, :width]
    return layers, table

"""Verdicts on edges and heads: does a weight (or a contribution) tell which keys the last query needs?

A row is one head of one layer on one prompt, its items the keys that the query sees, sinks included. A method claims by
its share of the row; the evidence is the exact effect of removing each edge, +- the noise floor of m. The correction is
over all edges of all prompts; it changes nothing for deterministic knock-outs, whose only uncertainty is that floor.

From the edges follow a verdict on each head of each prompt, how often each head misleads over the prompts, and a
verdict on each method over all of them, by clusters of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from attndiag.comparison.axis import token_axis
from attndiag.comparison.methods import reason_of
from attndiag.comparison.one_prompt import check_task
from attndiag.errors import AttnDiagError, NotApplicableError
from attndiag.explanations.edge_truth import Mode, edge_effects
from attndiag.explanations.model_contributions import model_contributions
from attndiag.explanations.resolve import one_target_each, prompt_label
from attndiag.explanations.target import noise_floor, score
from attndiag.models.load import LoadedModel, as_prompts
from attndiag.prompts import Prompt, Target
from attndiag.stats.evidence import from_knockout
from attndiag.stats.verdict_sets import Catalogues, MethodVerdict, catalogues, method_verdict
from attndiag.stats.verdicts import VERDICTS, Thresholds, Verdicts, judge, row_verdicts

if TYPE_CHECKING:
    import pandas as pd

EDGE_METHODS = ("weight", "value_norm", "head_contribution")


@dataclass(frozen=True, eq=False)
class EdgeVerdicts:
    """Verdicts on edges, by method.

    Parameters
    ----------
    rows : what each row of the arrays is: (prompt, cluster, layer, head).
    tokens : prompt -> texts of its tokens.
    judged : method -> arrays [row, key].
    whole : method -> its verdict over all rows.
    cases : method -> catalogues of (row, key).
    problems : prompt -> why it could not be measured.
    """

    rows: tuple[tuple[str, str, int, int], ...]
    tokens: Mapping[str, tuple[str, ...]]
    judged: Mapping[str, Verdicts]
    whole: Mapping[str, MethodVerdict]
    cases: Mapping[str, Catalogues]
    problems: Mapping[str, str]

    @property
    def blocked(self) -> bool:
        """True when a failed self-check blocked any verdict."""
        return any(bool(found.blocked.any()) for found in self.judged.values())

    def edges(self, method: str) -> pd.DataFrame:
        """One row an edge: prompt, layer, head, key, token, and everything of `Verdicts.to_frame`."""
        frame = self.judged[method].to_frame()
        named = [self.rows[row] for row in frame["row"]]
        for column, name in enumerate(("prompt", "cluster", "layer", "head")):
            frame.insert(column, name, [one[column] for one in named])
        keys = frame["item"].tolist()
        frame.insert(4, "token", [self.tokens[one[0]][key] for one, key in zip(named, keys, strict=True)])
        return frame.rename(columns={"item": "key"}).drop(columns="row")

    def head_rows(self, method: str) -> pd.DataFrame:
        """One row a head and prompt: its verdict, with the counts of its edges."""
        import pandas as pd

        found = row_verdicts(self.judged[method])
        names = ("prompt", "cluster", "layer", "head")
        return pd.DataFrame([{**dict(zip(names, self.rows[one.pop("row")], strict=True)), **one} for one in found])

    def heads(self, method: str) -> pd.DataFrame:
        """One row a head: on how many prompts it got each verdict; `misleads` is disagree / (agree + disagree)."""
        table = self.head_rows(method).groupby(["layer", "head"])["verdict"].value_counts().unstack(fill_value=0)
        table = table.reindex(columns=list(VERDICTS), fill_value=0)
        decided = table["agree"] + table["disagree"]
        return table.assign(misleads=table["disagree"] / decided.where(decided > 0)).reset_index()


def edge_verdicts(
    lm: LoadedModel,
    prompts: Prompt | str | Sequence[Prompt | str],
    methods: Sequence[str] = ("weight", "head_contribution"),
    *,
    target: Target | Sequence[Target] | None = None,
    layers: Sequence[int] | None = None,
    mode: Mode = "remove",
    thresholds: Thresholds | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> EdgeVerdicts:
    """Verdicts on every edge of the query at which the target is read.

    Parameters
    ----------
    methods : out of `EDGE_METHODS`: what has a number for each head, query and key and needs no target.
    layers : all when None; each edge costs a restarted forward.
    mode : `"remove"` or `"renormalize"`, see `attndiag.edge_effects`.

    Raises
    ------
    ValueError : another method.
    NotApplicableError : no prompt could be measured; the text gives the reasons.
    """
    unknown = [name for name in methods if name not in EDGE_METHODS]
    if unknown or not methods:
        raise ValueError(f"methods are {list(methods)}; expected some of {', '.join(EDGE_METHODS)}")
    if mode not in get_args(Mode):
        raise ValueError(f"mode is {mode!r}; expected one of {', '.join(get_args(Mode))}")
    batch = as_prompts(prompts)
    measured: list[_Measured] = []
    problems: dict[str, str] = {}
    for index, (prompt, each) in enumerate(zip(batch, one_target_each(batch, target), strict=True)):
        try:
            measured.append(_measure(lm, prompt, each, methods, layers, mode, seed))
        except AttnDiagError as error:
            problems[prompt_label(prompt)] = reason_of(error)
        if progress is not None:
            progress(index + 1, len(batch))
    if not measured:
        raise NotApplicableError("no prompt could be measured: " + "; ".join(f"{k}: {v}" for k, v in problems.items()))
    rows = tuple(row for one in measured for row in one.rows)
    judged = {name: _judge(measured, name, thresholds) for name in methods}
    clusters = [cluster for _, cluster, _, _ in rows]
    return EdgeVerdicts(
        rows=rows,
        tokens={one.label: one.tokens for one in measured},
        judged=judged,
        whole={name: method_verdict(found, clusters, seed=seed) for name, found in judged.items()},
        cases={name: catalogues(found, seed=seed) for name, found in judged.items()},
        problems=problems,
    )


@dataclass(frozen=True, eq=False)
class _Measured:
    """One prompt: effects and scores [row, key] with a row for each layer and head."""

    label: str
    tokens: tuple[str, ...]
    rows: tuple[tuple[str, str, int, int], ...]
    effect: NDArray[np.float64]
    scores: Mapping[str, NDArray[np.float64]]
    failures: Mapping[str, tuple[str, ...]]
    m: float
    floor: float
    task: str


def _measure(
    lm: LoadedModel,
    prompt: Prompt,
    target: Target | None,
    methods: Sequence[str],
    layers: Sequence[int] | None,
    mode: Mode,
    seed: int,
) -> _Measured:
    axis = token_axis(lm, prompt, target)
    if len(axis.queries) != 1:
        raise NotApplicableError(f"the target of {axis.label!r} is read at {len(axis.queries)} positions, not at one")
    (query,) = axis.queries
    fixed = axis.resolved.targets[0]
    effects = edge_effects(lm, prompt, fixed, layers=layers, queries=[query], mode=mode)
    table = effects.numpy().astype(np.float64)[:, :, query]
    numbers = [int(layer) for layer in effects.labels["layer"]]
    scores: dict[str, NDArray[np.float64]] = {}
    failures: dict[str, tuple[str, ...]] = {}
    for name in methods:
        found = model_contributions(lm, prompt, name, layers=numbers)  # type: ignore[arg-type]
        scores[name] = found.numpy().astype(np.float64)[:, 0, :, query].reshape(-1, len(axis))
        failures[name] = found.failures
    cluster = prompt.cluster or axis.label
    measured = score(lm, prompt, axis.resolved)
    return _Measured(
        label=axis.label,
        tokens=axis.tokens,
        rows=tuple((axis.label, cluster, layer, head) for layer in numbers for head in range(table.shape[1])),
        effect=table.reshape(-1, len(axis)),
        scores=scores,
        failures=failures,
        m=float(measured.values[0]),
        floor=float(noise_floor(lm, prompt, fixed, seed=seed).values[0]),
        task=check_task(measured, axis),
    )


def _judge(measured: Sequence[_Measured], method: str, thresholds: Thresholds | None) -> Verdicts:
    width = max(one.effect.shape[1] for one in measured)

    def padded(tables: Sequence[NDArray[np.float64]], blank: float) -> NDArray[np.float64]:
        return np.concatenate(
            [np.pad(one, ((0, 0), (0, width - one.shape[1])), constant_values=blank) for one in tables]
        )

    effect = padded([one.effect for one in measured], np.nan)
    counts = [len(one.rows) for one in measured]
    task: list[str] = [one.task for one in measured for _ in one.rows]
    failed: list[list[Any]] = [list(one.failures[method]) for one in measured for _ in one.rows]
    return judge(
        padded([one.scores[method] for one in measured], 0.0),
        from_knockout(effect, np.repeat([one.floor for one in measured], counts)),
        np.repeat([one.m for one in measured], counts),
        # an edge exists where its removal could be measured
        admissible=np.isfinite(effect),
        task=task,
        failed_checks=failed,
        thresholds=thresholds,
    )

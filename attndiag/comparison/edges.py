"""Verdicts on edges and heads: does a weight (or a contribution) tell which keys the last query needs?

A row is one head of one layer on one prompt, its items the keys that the query sees, sinks included. A method claims by
its share of the row; the evidence is the exact effect of removing each edge, +- the noise floor of m. The correction is
over all edges of all prompts; it changes nothing for deterministic knock-outs, whose only uncertainty is that floor.

From the edges follow a verdict on each head of each prompt, how often each head misleads over the prompts, and a
verdict on each method over all of them, by clusters of prompts.

Where edges are too many, some are screened: half of those measured have the largest first-order estimates (where an
effect may hide), half the largest claims (where an effect may be missing). Claims stay shares of the whole row; edges
that were not measured get no verdict, and a head of which one edge is missing gets none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attndiag.comparison.edge_measuring import EdgePlan, EdgeResult, Extent, measure_edges
from attndiag.comparison.methods import reason_of
from attndiag.errors import AttnDiagError, NotApplicableError
from attndiag.explanations.edge_truth import Mode
from attndiag.explanations.resolve import one_target_each, prompt_label
from attndiag.models.load import LoadedModel, as_prompts
from attndiag.prompts import Prompt, Target
from attndiag.stats.evidence import from_knockout
from attndiag.stats.verdict_sets import Catalogues, MethodVerdict, catalogues, method_verdict
from attndiag.stats.verdicts import UNDEFINED, VERDICTS, Thresholds, Verdicts, judge, row_verdicts

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


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
    effects : [row, key] exact effects; nan where not measured.
    estimates : [row, key] first-order estimates; nan where none were made.
    present : [row, key] True where there is an edge, measured or not.
    head_effects : [row] effect of removing all edges of the head, for every query; nan where not measured.
    units : [row] of the effects.
    claims : method -> [row, key], what the method says.
    queries : prompt -> position at which its target is read.
    """

    rows: tuple[tuple[str, str, int, int], ...]
    tokens: Mapping[str, tuple[str, ...]]
    judged: Mapping[str, Verdicts]
    whole: Mapping[str, MethodVerdict]
    cases: Mapping[str, Catalogues]
    problems: Mapping[str, str]
    effects: Array
    estimates: Array
    present: Mask
    head_effects: Array
    units: tuple[str, ...]
    claims: Mapping[str, Array]
    queries: Mapping[str, int]

    # once for all rows: every table of heads asks row by row
    @cached_property
    def complete(self) -> Mask:
        """[row] True where every edge was measured."""
        return np.asarray((np.isfinite(self.effects) | ~self.present).all(axis=1))

    @property
    def measured_share(self) -> float:
        """Share of the edges that were measured exactly, 0 to 1."""
        return float(np.isfinite(self.effects).sum() / max(1, self.present.sum()))

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
        """One row a head and prompt: its verdict, with the counts of its edges; none where an edge was not measured."""
        if method not in self._head_rows:
            self._head_rows[method] = self._judge_heads(method)
        return self._head_rows[method].copy()

    @cached_property
    def _head_rows(self) -> dict[str, pd.DataFrame]:
        """Method -> `head_rows`, those that were asked for: a page asks for each a dozen times."""
        return {}

    def _judge_heads(self, method: str) -> pd.DataFrame:
        import pandas as pd

        found = row_verdicts(self.judged[method])
        names = ("prompt", "cluster", "layer", "head")
        measured = np.isfinite(self.effects).sum(axis=1)
        for one in found:
            row: int = one["row"]
            if not self.complete[row] and not one["reason"]:
                told = f"{measured[row]} of {self.present[row].sum()} edges were measured exactly"
                one |= {"verdict": UNDEFINED, "reason": told}
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
    extent: Extent = "all",
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
    extent : `"all"` edges or a `"screen"`, see `EdgePlan`.

    Raises
    ------
    ValueError : another method, mode or extent.
    NotApplicableError : no prompt could be measured; the text gives the reasons.
    """
    chosen = None if layers is None else tuple(layers)
    plan = EdgePlan(tuple(methods), extent, layers=chosen, mode=mode)
    batch = as_prompts(prompts)
    measured: list[EdgeResult] = []
    problems: dict[str, str] = {}
    for index, (prompt, each) in enumerate(zip(batch, one_target_each(batch, target), strict=True)):
        try:
            measured.append(measure_edges(lm, prompt, each, plan, seed=seed, thresholds=thresholds))
        except AttnDiagError as error:
            problems[prompt_label(prompt)] = reason_of(error)
        if progress is not None:
            progress(index + 1, len(batch))
    return judge_edges(measured, thresholds=thresholds, seed=seed, problems=problems)


def judge_edges(
    measured: Sequence[EdgeResult],
    *,
    thresholds: Thresholds | None = None,
    seed: int = 0,
    problems: Mapping[str, str] | None = None,
    broken: Mapping[str, Sequence[str]] | None = None,
) -> EdgeVerdicts:
    """Verdicts over prompts that were measured one by one with the same methods, in whatever process.

    Parameters
    ----------
    broken : prompt -> self-checks that failed on it, beside those of single methods; they block its verdicts.

    Raises
    ------
    NotApplicableError : there is no result; the text gives the problems.
    """
    why = dict(problems or {})
    if not measured:
        raise NotApplicableError("no prompt could be measured: " + "; ".join(f"{k}: {v}" for k, v in why.items()))
    rows = tuple(row for one in measured for row in one.rows)
    judged = {name: _judge(measured, name, thresholds, broken or {}) for name in measured[0].scores}
    clusters = [cluster for _, cluster, _, _ in rows]
    none = [np.full(one.effect.shape, np.nan) for one in measured]
    return EdgeVerdicts(
        rows=rows,
        tokens={one.label: one.tokens for one in measured},
        judged=judged,
        whole={name: method_verdict(found, clusters, seed=seed) for name, found in judged.items()},
        cases={name: catalogues(found, seed=seed) for name, found in judged.items()},
        problems=why,
        effects=_stacked([one.effect for one in measured], np.nan),
        estimates=_stacked(
            [blank if one.estimate is None else one.estimate for one, blank in zip(measured, none, strict=True)], np.nan
        ),
        present=_stacked([one.present for one in measured], False),
        head_effects=np.concatenate(
            [np.full(len(one.rows), np.nan) if one.head_effect is None else one.head_effect for one in measured]
        ),
        units=tuple(one.unit for one in measured for _ in one.rows),
        claims={name: _stacked([one.scores[name] for one in measured], 0.0) for name in judged},
        queries={one.label: one.query for one in measured},
    )


def _stacked(tables: Sequence[NDArray[Any]], blank: float | bool) -> NDArray[Any]:
    """Tables [row, key] of prompts of different length under each other."""
    width = max(one.shape[1] for one in tables)
    return np.concatenate([np.pad(one, ((0, 0), (0, width - one.shape[1])), constant_values=blank) for one in tables])


def _judge(
    measured: Sequence[EdgeResult], method: str, thresholds: Thresholds | None, broken: Mapping[str, Sequence[str]]
) -> Verdicts:
    effect = _stacked([one.effect for one in measured], np.nan)
    there = _stacked([one.present for one in measured], False)
    counts = [len(one.rows) for one in measured]
    task: list[str] = [one.task for one in measured for _ in one.rows]
    failed: list[list[Any]] = [
        [*one.failures[method], *broken.get(one.label, ())] for one in measured for _ in one.rows
    ]
    found = judge(
        _stacked([one.scores[method] for one in measured], 0.0),
        from_knockout(effect, np.repeat([one.floor for one in measured], counts)),
        np.repeat([one.m for one in measured], counts),
        admissible=there,
        task=task,
        failed_checks=failed,
        redundant=_stacked(
            [np.zeros(one.effect.shape, bool) if one.redundant is None else one.redundant for one in measured], False
        ),
        expected=_stacked(
            [np.full(one.effect.shape, np.nan) if one.estimate is None else one.estimate for one in measured], np.nan
        ),
        thresholds=thresholds,
    )
    # an edge that was only estimated takes part in the shares of its row, and gets no verdict
    return replace(found, verdict=np.where(np.isfinite(effect), found.verdict, ""))

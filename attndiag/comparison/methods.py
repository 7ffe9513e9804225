"""Every method as one number for each token of a prompt.

- Methods of the catalogue that speak of tokens (gradients, surrogates, replacement) are taken as they are.
- `weight`, `value_norm`, `head_contribution`, `contribution`, `contribution_norm`, `contribution_residual`, `alti`,
  `projection` speak of query and key. Their rows at the positions where the target is read become shares of the row,
  which are then averaged over layers, heads and those positions. `name@L20` is one layer, `name@L20H3` one head.
- `rollout`, `flow` (of the weights with a residual) and `alti_rollout` put the layers together first.
- `pattern_attribution` and `edge_effect` are in units of the target, so their edges at those positions are added up.

A method that does not fit the model is reported with its reason, never replaced by zeros.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attndiag.catalog import CATALOG, explain, method_named
from attndiag.comparison.axis import TokenAxis
from attndiag.core.mixing import alti_rollout, flow, rollout
from attndiag.errors import AttnDiagError, NotApplicableError
from attndiag.explanations.model_contributions import model_contributions
from attndiag.models.load import LoadedModel

if TYPE_CHECKING:
    from attndiag.explanations.replacement import Replacement
    from attndiag.scores import Scores

Array = NDArray[np.float64]

# query-key methods that become shares of their row
BY_ROW = (
    "weight",
    "value_norm",
    "head_contribution",
    "contribution",
    "contribution_residual",
    "contribution_norm",
    "alti",
    "projection",
)
ACROSS_LAYERS = ("rollout", "flow", "alti_rollout")
ADDED_UP = ("pattern_attribution", "edge_effect")
_PLACE = re.compile(r"(?P<name>\w+)@L(?P<layer>\d+)(H(?P<head>\d+))?")


@dataclass(frozen=True, eq=False)
class TokenScores:
    """One method on one prompt.

    Parameters
    ----------
    method : as asked for.
    values : [position], nan where undefined.
    signed : whether the signs are about the target.
    unit : of the values; `"share"` for rows that were normalised.
    replacement : label of the replacement that made them, None where nothing was replaced.
    draws : [draw, position] effects of each draw, for replacement.
    failures : self-checks that failed; they block verdicts.
    """

    method: str
    values: Array
    signed: bool
    unit: str
    replacement: str | None = None
    draws: Array | None = None
    failures: tuple[str, ...] = ()


class PromptMethods:
    """Runs methods on one prompt; what several of them need is computed once."""

    def __init__(self, lm: LoadedModel, axis: TokenAxis) -> None:
        self.lm, self.axis = lm, axis
        self._kept: dict[str, Scores] = {}

    def contributions(self, kind: str) -> Scores:
        """`model_contributions` of the prompt, [layer, batch, (head,) query_pos, key_pos], computed once a kind."""
        if kind not in self._kept:
            self._kept[kind] = model_contributions(self.lm, self.axis.prompt, kind)  # type: ignore[arg-type]
        return self._kept[kind]

    @property
    def pattern(self) -> Array:
        """[layer, head, query_pos, key_pos] attention weights."""
        return self.contributions("weight").numpy()[:, 0].astype(np.float64)

    def scores(self, method: str, **params: Any) -> TokenScores:
        """One method on the token axis.

        Raises
        ------
        UnknownMethodError : no such method; `check_methods` finds it before any work is done.
        NotApplicableError, UnsupportedModelError, TargetError, ... : as the method itself says.
        """
        if method in ACROSS_LAYERS:
            return self._across(method)
        name, layer, head = parse_method(method)
        if name in BY_ROW:
            return self._by_row(method, name, layer, head)
        if name in ADDED_UP:
            return self._added_up(method, **params)
        return _record(method, explain(self.lm, self.axis.prompt, self._target, method=name, **params), self.axis)

    def replacement(self, replacement: Replacement) -> TokenScores:
        """Effects of replacing each token, with every draw."""
        found = explain(
            self.lm, self.axis.prompt, self._target, method="replacement", replacement=replacement, ood=False
        )
        record = _record(f"replacement[{replacement.label}]", found, self.axis)
        draws = found.checks["draw_effects"].numpy().T.astype(np.float64)
        return TokenScores(record.method, record.values, True, record.unit, replacement.label, draws, record.failures)

    @property
    def _target(self) -> Any:
        return self.axis.resolved.targets[0]

    def _by_row(self, method: str, name: str, layer: int | None, head: int | None) -> TokenScores:
        found = self.contributions(name)
        values = found.numpy()[:, 0].astype(np.float64)
        with_heads = "head" in found.axes
        if layer is not None:
            numbers = list(found.labels["layer"])
            if layer not in numbers:
                raise NotApplicableError(f"{method}: the layers with attention weights are {numbers}")
            values = values[[numbers.index(layer)]]
        if head is not None:
            if not with_heads or head >= values.shape[1]:
                there = f"heads 0 to {values.shape[1] - 1}" if with_heads else "no heads, all are summed"
                raise NotApplicableError(f"{method}: {name} has {there}")
            values = values[:, [head]]
        rows = values[..., list(self.axis.queries), :].reshape(-1, values.shape[-1])
        size = np.abs(rows).sum(axis=1, keepdims=True)
        # an all-zero row is undefined: it has no shares, and no part in the mean
        some = np.isfinite(size[:, 0]) & (size[:, 0] > 0)
        if not some.any():
            raise NotApplicableError(f"{method}: every row at positions {list(self.axis.queries)} is undefined")
        mean = (rows[some] / size[some]).mean(axis=0)
        return TokenScores(method, mean, found.sign == "signed", "share", failures=found.failures)

    def _across(self, method: str) -> TokenScores:
        found = self.contributions("alti" if method == "alti_rollout" else "weight")
        layers = list(found.values.double())
        queries = list(self.axis.queries)
        if method == "flow":
            rows = flow(layers, holds_residual=False, queries=queries).values[0].cpu().numpy()
        else:
            mixed = alti_rollout(layers) if method == "alti_rollout" else rollout(layers, holds_residual=False)
            rows = mixed[0].cpu().numpy()[queries]
        return TokenScores(method, rows.mean(axis=0), False, "share", failures=found.failures)

    def _added_up(self, method: str, **params: Any) -> TokenScores:
        given = {"queries": list(self.axis.queries), **params} if method == "edge_effect" else params
        found = explain(self.lm, self.axis.prompt, self._target, method=method, **given)
        rows = found.numpy().astype(np.float64)[..., list(self.axis.queries), :]
        seen = np.isfinite(rows).any(axis=(0, 1, 2))
        total = np.where(np.isfinite(rows), rows, 0.0).sum(axis=(0, 1, 2))
        return TokenScores(method, np.where(seen, total, np.nan), True, found.unit, failures=found.failures)


def _record(method: str, found: Scores, axis: TokenAxis) -> TokenScores:
    if found.axes != ("position",):
        raise NotApplicableError(f"{method} gives numbers over {found.axes}, not one for each token")
    replacement = found.params.get("replacement")
    return TokenScores(
        method,
        axis.place(found.numpy(), method),
        found.sign == "signed",
        found.unit,
        None if replacement is None else str(replacement),
        failures=found.failures,
    )


def parse_method(method: str) -> tuple[str, int | None, int | None]:
    """`"weight@L20H3"` -> name, layer, head; None where not named.

    Raises
    ------
    NotApplicableError : a layer or head for a method that is not by query and key.
    """
    found = _PLACE.fullmatch(method)
    if found is None:
        return method, None, None
    name, head = found["name"], found["head"]
    if name not in BY_ROW:
        raise NotApplicableError(f"{method}: only {', '.join(BY_ROW)} can be asked for one layer or head")
    return name, int(found["layer"]), None if head is None else int(head)


def check_methods(methods: Sequence[str]) -> None:
    """Raise for unknown, repeated or unplaceable methods before any model runs.

    Raises
    ------
    UnknownMethodError, NotApplicableError, ValueError.
    """
    if not methods or len(set(methods)) < len(methods):
        raise ValueError(f"methods are {list(methods)}; expected at least one, each once")
    for method in methods:
        if method in ACROSS_LAYERS:
            continue
        name, _, _ = parse_method(method)
        entry = CATALOG[name] if name in CATALOG else method_named(name)
        if entry.scope != "token" and name not in (*BY_ROW, *ADDED_UP):
            raise NotApplicableError(f"{method} speaks of {entry.scope}s and has no reading on the token axis")
        if name == "replacement":
            raise NotApplicableError("name replacements in `replacements`; they are compared and judged there")


def reason_of(error: AttnDiagError) -> str:
    """An error as a table cell: its kind and text in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"

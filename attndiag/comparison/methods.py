"""Every method as one number for each token of a prompt.

- Methods of the catalogue that speak of tokens (gradients, surrogates, replacement, `value_zeroing_effect`,
  `mean_value_effect`, `induction`) are taken as they are.
- `weight`, `value_norm`, `head_contribution`, `contribution`, `contribution_norm`, `contribution_residual`, `alti`,
  `projection`, `value_zeroing` speak of query and key. Their rows at the positions where the target is read become
  shares of the row, which are then averaged over layers, heads and those positions.
- `rollout`, `flow` (of the weights with a residual), `alti_rollout` and `value_zeroing_rollout` put the layers together
  first.
- `pattern_attribution`, `edge_effect` and `target_attribution` are in units of the target, so their edges at those
  positions are added up.

`name@L20` is one layer, `name@L20H3` one head, of everything that has layers and heads (`PLACED`). Values zeroed in one
layer are zeroed there alone.

A method that does not fit the model is reported with its reason, never replaced by zeros.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attndiag.catalog import CATALOG, UnknownParameterError, explain, method_named
from attndiag.comparison.axis import TokenAxis
from attndiag.comparison.readings import ACROSS_LAYERS, ADDED_UP, BY_ROW, BY_VALUE, PLACED
from attndiag.core.mixing import alti_rollout, flow, rollout
from attndiag.errors import AttnDiagError, NotApplicableError
from attndiag.explanations.induction_attention import THRESHOLD, prefix_matching
from attndiag.models.load import LoadedModel

if TYPE_CHECKING:
    from attndiag.explanations.replacement import Replacement
    from attndiag.scores import Scores

Array = NDArray[np.float64]

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
        self._kept: dict[tuple[str, str], Scores] = {}

    def contributions(self, kind: str, params: Mapping[str, Any] | None = None) -> Scores:
        """A query-key method about no target, [layer, batch, (head,) query_pos, key_pos], once for its params."""
        key = (kind, repr(sorted((params or {}).items())))
        if key not in self._kept:
            found = explain(self.lm, self.axis.prompt, method=kind, **(params or {}))
            if found.values.shape[-1] != len(self.axis):
                raise NotApplicableError(
                    f"{kind} speaks of the {found.values.shape[-1]} tokens of {self.axis.label!r}, and its target is "
                    f"read behind a continuation, on {len(self.axis)} tokens; put the continuation into the prompt "
                    "and take a target of its next token, or leave this method out"
                )
            self._kept[key] = found
        return self._kept[key]

    @property
    def pattern(self) -> Array:
        """[layer, head, query_pos, key_pos] attention weights."""
        return self.contributions("weight").numpy()[:, 0].astype(np.float64)

    def scores(self, method: str, **params: Any) -> TokenScores:
        """One method on the token axis.

        Raises
        ------
        UnknownMethodError : no such method; `check_methods` finds it before any work is done.
        UnknownParameterError : the method has no such parameter.
        NotApplicableError, UnsupportedModelError, TargetError, ... : as the method itself says.
        """
        if method in ACROSS_LAYERS:
            if params:
                raise UnknownParameterError(f"{method} has no parameter {next(iter(params))!r}; it takes none")
            return self._across(method)
        name, layer, head = parse_method(method)
        if name in BY_ROW:
            return self._by_row(method, name, layer, head, params)
        if name in ADDED_UP:
            return self._added_up(method, name, layer, head, params)
        if name in BY_VALUE:
            given = dict(params)
            given.update({} if layer is None else {"layers": [layer]}, **({} if head is None else {"heads": [head]}))
            return _record(method, explain(self.lm, self.axis.prompt, self._target, method=name, **given), self.axis)
        if name == "induction" and layer is not None:
            params = {**params, "heads": self._induction_heads(method, layer, head, params)}
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

    def _by_row(
        self, method: str, name: str, layer: int | None, head: int | None, params: Mapping[str, Any]
    ) -> TokenScores:
        given = dict(params)
        if name == "value_zeroing":
            # zeroing is by layer and head itself: only what is asked for is run
            given.update({} if layer is None else {"layers": [layer]}, **({} if head is None else {"heads": [head]}))
            head = None
        found = self.contributions(name, given)
        values = _placed(method, found, found.numpy()[:, 0].astype(np.float64), layer, head)
        rows = values[..., list(self.axis.queries), :].reshape(-1, values.shape[-1])
        size = np.abs(rows).sum(axis=1, keepdims=True)
        # an all-zero row is undefined: it has no shares, and no part in the mean
        some = np.isfinite(size[:, 0]) & (size[:, 0] > 0)
        if not some.any():
            raise NotApplicableError(f"{method}: every row at positions {list(self.axis.queries)} is undefined")
        mean = (rows[some] / size[some]).mean(axis=0)
        return TokenScores(method, mean, found.sign == "signed", "share", failures=found.failures)

    def _across(self, method: str) -> TokenScores:
        kind = {"alti_rollout": "alti", "value_zeroing_rollout": "value_zeroing"}.get(method, "weight")
        found = self.contributions(kind)
        layers = list(found.values.double())
        queries = list(self.axis.queries)
        if method == "flow":
            rows = flow(layers, holds_residual=False, queries=queries).values[0].cpu().numpy()
        else:
            # a block's output holds the residual, and so does every row that was made of it
            whole = kind == "value_zeroing"
            mixed = alti_rollout(layers) if method == "alti_rollout" else rollout(layers, holds_residual=whole)
            rows = mixed[0].cpu().numpy()[queries]
        return TokenScores(method, rows.mean(axis=0), False, "share", failures=found.failures)

    def _added_up(
        self, method: str, name: str, layer: int | None, head: int | None, params: Mapping[str, Any]
    ) -> TokenScores:
        given = {"queries": list(self.axis.queries), **params} if name == "edge_effect" else dict(params)
        if layer is not None:
            given["layers"] = [layer]
        found = explain(self.lm, self.axis.prompt, self._target, method=name, **given)
        rows = _placed(method, found, found.numpy().astype(np.float64), layer, head)[..., list(self.axis.queries), :]
        seen = np.isfinite(rows).any(axis=(0, 1, 2))
        total = np.where(np.isfinite(rows), rows, 0.0).sum(axis=(0, 1, 2))
        return TokenScores(method, np.where(seen, total, np.nan), True, found.unit, failures=found.failures)

    def _induction_heads(
        self, method: str, layer: int, head: int | None, params: Mapping[str, Any]
    ) -> list[tuple[int, int]]:
        """The induction heads of one layer; a head that is none is refused with its score."""
        if "heads" in params:
            raise NotApplicableError(f"{method} names its heads itself; leave the parameter heads out")
        scores = prefix_matching(self.lm)
        here = {each: score for each, score in scores.items() if each[0] == layer and head in (None, each[1])}
        least = float(params.get("threshold", THRESHOLD))
        chosen = [each for each, score in here.items() if score >= least]
        if not chosen:
            best = max(here, key=lambda each: here[each], default=None)
            most = "none was measured there" if best is None else f"the highest is L{layer}H{best[1]}, {here[best]:.2f}"
            raise NotApplicableError(f"{method}: no head with a prefix-matching score of {least:g} or more ({most})")
        return chosen


def _placed(method: str, found: Scores, values: Array, layer: int | None, head: int | None) -> Array:
    """`values` [layer, (head,) query_pos, key_pos] of one layer or head alone; both axes stay.

    Raises
    ------
    NotApplicableError : there is no such layer or head.
    """
    if layer is not None:
        numbers = list(found.labels["layer"])
        if layer not in numbers:
            raise NotApplicableError(f"{method}: the layers with attention weights are {numbers}")
        values = values[[numbers.index(layer)]]
    if head is not None:
        if "head" not in found.axes or head >= values.shape[1]:
            there = f"heads 0 to {values.shape[1] - 1}" if "head" in found.axes else "no heads, all are summed"
            raise NotApplicableError(f"{method}: {found.method} has {there}")
        values = values[:, [head]]
    return values


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
    NotApplicableError : a layer or head for a method that has none.
    """
    found = _PLACE.fullmatch(method)
    if found is None:
        return method, None, None
    name, head = found["name"], found["head"]
    if name not in PLACED:
        raise NotApplicableError(f"{method}: only {', '.join(PLACED)} can be asked for one layer or head")
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

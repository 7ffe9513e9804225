"""Claims and exact effects of the edges of one prompt's last query, measured as a function of model, prompt and plan.

Where edges are too many, some are screened: half of those measured have the largest first-order estimates (where an
effect may hide), half the largest claims (where an effect may be missing). Claims stay shares of the whole row.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from attndiag.comparison.axis import token_axis
from attndiag.comparison.methods import reason_of
from attndiag.comparison.one_prompt import check_task
from attndiag.comparison.redundant_edges import redundant_edges
from attndiag.errors import NotApplicableError, UnsupportedModelError
from attndiag.explanations.edge_estimators import edge_estimates
from attndiag.explanations.edge_truth import Edge, Mode, edge_effects
from attndiag.explanations.model_contributions import model_contributions
from attndiag.explanations.target import noise_floor, score
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt, Target
from attndiag.stats.verdicts import Thresholds

EDGE_METHODS = ("weight", "value_norm", "head_contribution")
Extent = Literal["auto", "all", "screen"]
Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class EdgePlan:
    """Which edges of the query at which the target is read are taken away.

    Parameters
    ----------
    methods : whose claims are judged, out of `EDGE_METHODS`.
    extent : `"all"` edges, a `"screen"` of `most`, or `"auto"`: all where they are at most `limit`, else a screen.
    most : edges that a screen measures.
    limit : see `extent`.
    layers : all when None.
    mode : `"remove"` or `"renormalize"`, see `attndiag.edge_effects`.
    whole_heads : also measure what each whole head is worth.
    stand_ins : edges to one key, without an effect of their own, that are also removed together, to tell redundant ones
        from idle ones; below 2 none are.
    """

    methods: tuple[str, ...] = ("weight", "head_contribution")
    extent: Extent = "auto"
    most: int = 64
    limit: int = 8192
    layers: tuple[int, ...] | None = None
    mode: Mode = "remove"
    whole_heads: bool = False
    stand_ins: int = 4

    def __post_init__(self) -> None:
        unknown = [name for name in self.methods if name not in EDGE_METHODS]
        if unknown or not self.methods:
            raise ValueError(f"methods are {list(self.methods)}; expected some of {', '.join(EDGE_METHODS)}")
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode is {self.mode!r}; expected one of {', '.join(get_args(Mode))}")
        if self.extent not in get_args(Extent):
            known = ", ".join(get_args(Extent))
            raise ValueError(f"extent is {self.extent!r}; expected one of {known}; edges=None measures no edges")
        if self.most < 2 or self.limit < 1:
            raise ValueError(
                f"most is {self.most} and limit {self.limit}; expected at least 2 edges and a limit above 0"
            )


@dataclass(frozen=True, eq=False)
class EdgeResult:
    """One prompt: effects and scores [row, key] with a row for each layer and head. Plain data.

    Parameters
    ----------
    label, tokens : of the prompt.
    query : position at which the target is read.
    rows : (prompt, cluster, layer, head).
    effect : exact, nan where there is no edge or it was not measured.
    estimate : first-order, nan without an edge; None where no gradient reaches the weights.
    present : True where there is an edge.
    scores : method -> claims; 0 without an edge.
    failures : method -> self-checks that failed.
    head_effect : [row] of removing the whole head; None where not asked for.
    m, floor, unit : target, its noise floor and unit.
    task : why the task check failed; empty where it passed.
    extent : what was measured, `"all"` or `"screen"`.
    route, restart_error : how, and the error of a restarted unedited run relative to the spread of the logits.
    seconds : what was done -> wall time; of no influence on any other number.
    redundant : [row, key] edges that stand in for each other; None where that was not asked for.
    """

    label: str
    tokens: tuple[str, ...]
    query: int
    rows: tuple[tuple[str, str, int, int], ...]
    effect: Array
    estimate: Array | None
    present: Mask
    scores: Mapping[str, Array]
    failures: Mapping[str, tuple[str, ...]]
    head_effect: Array | None
    m: float
    floor: float
    unit: str
    task: str
    extent: Literal["all", "screen"]
    route: str
    restart_error: float | None
    seconds: Mapping[str, float] = field(default_factory=dict)
    redundant: Mask | None = None


def measure_edges(
    lm: LoadedModel,
    prompt: Prompt,
    target: Target | None,
    plan: EdgePlan | None = None,
    *,
    floor: float | None = None,
    seed: int = 0,
    thresholds: Thresholds | None = None,
) -> EdgeResult:
    """Claims and exact effects of the edges of one prompt's last query: a function of model, prompt and plan.

    Parameters
    ----------
    floor : noise floor of m; measured when None.
    seed : of the noise floor.
    thresholds : their high claim and margin decide which edges are also removed together.

    Raises
    ------
    NotApplicableError : the target is read at several positions.
    TargetError, UnsupportedModelError : see `attndiag.edge_effects`.
    """
    plan = plan or EdgePlan()
    axis = token_axis(lm, prompt, target)
    if len(axis.queries) != 1:
        raise NotApplicableError(f"the target of {axis.label!r} is read at {len(axis.queries)} positions, not at one")
    (query,) = axis.queries
    fixed = axis.resolved.targets[0]
    seconds: dict[str, float] = {}
    began = time.perf_counter()
    claims = {name: model_contributions(lm, prompt, name, layers=plan.layers) for name in plan.methods}  # type: ignore[arg-type]
    numbers = [int(layer) for layer in next(iter(claims.values())).labels["layer"]]
    tables = {name: found.numpy().astype(np.float64)[:, 0, :, query] for name, found in claims.items()}
    estimate, why_not = _estimates(lm, prompt, fixed, plan, numbers, query)
    seconds["edge claims and estimates"] = time.perf_counter() - began
    chosen: list[Edge] | None = None
    # without estimates, every key counts as seen
    shape = next(iter(tables.values())).shape
    count = int(np.isfinite(estimate).sum()) if estimate is not None else int(np.prod(shape))
    if plan.extent == "screen" or (plan.extent == "auto" and count > plan.limit):
        if estimate is None:
            raise NotApplicableError(f"{count} edges are too many to measure all, and none can be screened: {why_not}")
        chosen = _screen(estimate, tables, numbers, query, plan.most)
    began = time.perf_counter()
    asked = {"queries": [query]} if chosen is None else {"edges": chosen}
    effects = edge_effects(lm, prompt, fixed, layers=numbers, mode=plan.mode, **asked)  # type: ignore[arg-type]
    there = [int(layer) for layer in effects.labels["layer"]]
    effect = np.full(shape, np.nan)
    effect[[numbers.index(layer) for layer in there]] = effects.numpy().astype(np.float64)[:, :, query]
    seconds["edge effects"] = time.perf_counter() - began
    whole = None
    if plan.whole_heads:
        began = time.perf_counter()
        of_heads = edge_effects(lm, prompt, fixed, layers=numbers, grain="head").numpy().astype(np.float64)
        whole = of_heads.reshape(-1)
        seconds["head effects"] = time.perf_counter() - began
    measured = score(lm, prompt, axis.resolved)
    if floor is None:
        floor = float(noise_floor(lm, prompt, fixed, seed=seed).values[0])
    cluster = prompt.cluster or axis.label
    present = np.isfinite(effect if chosen is None or estimate is None else estimate)
    width = len(axis)
    redundant = None
    if plan.stand_ins >= 2:
        began = time.perf_counter()
        redundant = redundant_edges(
            lm,
            prompt,
            axis.resolved,
            rows=[(layer, head) for layer in numbers for head in range(shape[1])],
            query=query,
            effect=effect.reshape(-1, width),
            scores={name: table.reshape(-1, width) for name, table in tables.items()},
            present=present.reshape(-1, width),
            estimate=None if estimate is None else estimate.reshape(-1, width),
            m=float(measured.values[0]),
            floor=floor,
            mode=plan.mode,
            most=plan.stand_ins,
            thresholds=thresholds,
        )
        seconds["edges together"] = time.perf_counter() - began
    return EdgeResult(
        label=axis.label,
        tokens=axis.tokens,
        query=query,
        rows=tuple((axis.label, cluster, layer, head) for layer in numbers for head in range(shape[1])),
        effect=effect.reshape(-1, width),
        estimate=None if estimate is None else estimate.reshape(-1, width),
        present=present.reshape(-1, width),
        scores={name: table.reshape(-1, width) for name, table in tables.items()},
        failures={name: found.failures for name, found in claims.items()},
        head_effect=whole,
        m=float(measured.values[0]),
        floor=floor,
        unit=axis.resolved.unit,
        task=check_task(measured, axis),
        extent="all" if chosen is None else "screen",
        route=str(effects.provenance["route"]),
        restart_error=effects.checks["restart_error"],
        seconds=seconds,
        redundant=redundant,
    )


def _estimates(
    lm: LoadedModel, prompt: Prompt, target: Target, plan: EdgePlan, numbers: Sequence[int], query: int
) -> tuple[Array | None, str]:
    """First-order effects [layer, head, key] of the query's edges, nan without an edge; or None and the reason."""
    try:
        found = edge_estimates(lm, prompt, target, mode=plan.mode)
    except UnsupportedModelError as error:
        return None, reason_of(error)
    order = [int(layer) for layer in found.labels["layer"]]
    places = [order.index(layer) for layer in numbers]
    return found.numpy().astype(np.float64)[places][:, :, query], ""


def _screen(estimate: Array, claims: Mapping[str, Array], numbers: Sequence[int], query: int, most: int) -> list[Edge]:
    """Half the edges by the size of the estimate, half by the largest share of its row over the methods.

    Estimates alone would find only edges that have an effect, never a claim without one.
    """
    there = np.isfinite(estimate)
    share = np.zeros(estimate.shape)
    for table in claims.values():
        size = np.where(there & np.isfinite(table), np.abs(table), 0.0)
        total = size.sum(axis=-1, keepdims=True)
        mine = np.divide(size, total, out=np.zeros(size.shape), where=total > 0)
        share = np.maximum(share, mine)
    by_effect = np.argsort(-np.where(there, np.abs(estimate), -1.0), axis=None, kind="stable")
    by_claim = np.argsort(-np.where(there, share, -1.0), axis=None, kind="stable")
    most = min(most, int(there.sum()))
    taken = dict.fromkeys(by_effect[: most - most // 2].tolist())
    for place in by_claim.tolist():
        if len(taken) >= most:
            break
        taken[place] = None
    layer, head, key = np.unravel_index(np.array(sorted(taken), dtype=np.int64), estimate.shape)
    return [(numbers[a], int(b), query, int(c)) for a, b, c in zip(layer, head, key, strict=True)]

"""`RunPlan`: everything that decides the numbers of a compared run, apart from model and prompts.

Two plans stand ready. The default one takes eight methods, replacement by draws of the model's own distribution, and
all edges of the last query (a screen of them where a prompt has more than 8,192). The deep one takes more methods and
draws, all edges however many, and what whole heads are worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from attndiag.comparison.edge_measuring import EdgePlan
from attndiag.comparison.methods import check_methods
from attndiag.comparison.one_prompt import DEFAULT_METRICS, Plan
from attndiag.explanations.replacement import Replacement
from attndiag.runs.keys import plain, plain_replacement
from attndiag.stats.controls import CONTROLS, METRICS
from attndiag.stats.verdicts import Thresholds

DEFAULT_METHODS = (
    "weight",
    "value_norm",
    "head_contribution",
    "contribution",
    "alti_rollout",
    "pattern_attribution",
    "input_x_gradient",
    "integrated_gradients",
)
DEEP_METHODS = (*DEFAULT_METHODS, "rollout", "flow", "saliency", "gradient_shap", "occlusion", "edge_effect")
DEFAULT_DRAWS, DEEP_DRAWS = 16, 32
# steps double as long as the scores do not add up: 15 of 16 shipped prompts close by 128, and those that never do cost
# most; deep runs go on to 512
DEFAULT_PARAMS: Mapping[str, Mapping[str, Any]] = {"integrated_gradients": {"steps": 64, "max_steps": 128}}
DEEP_PARAMS: Mapping[str, Mapping[str, Any]] = {"integrated_gradients": {"steps": 64}}


@dataclass(frozen=True)
class StoredReplacement(Replacement):
    """A replacement of a run that was read back: it has the name that its results go by, and cannot draw."""

    said: str = ""

    @property
    def label(self) -> str:
        """As it was when the results were made."""
        return self.said


@dataclass(frozen=True)
class RunPlan:
    """What is done with every prompt, and what once for the model.

    Parameters
    ----------
    compared : methods, replacements, metrics, thresholds and seed, see `comparison.one_prompt.Plan`.
    edges : which edges are measured; None leaves them out.
    heads : run the induction, previous-token and sink probes once.
    primary : the pair of methods whose difference is the main question; None without one.
    deep : which of the two plans this came from; named in tables only.
    """

    compared: Plan
    edges: EdgePlan | None = field(default_factory=EdgePlan)
    heads: bool = True
    primary: tuple[str, str] | None = None
    deep: bool = False

    @property
    def seed(self) -> int:
        """Of everything drawn."""
        return self.compared.seed

    def plain(self) -> dict[str, Any]:
        """As JSON-like values: what two runs must share to be the same."""
        compared = self.compared
        return {
            "methods": list(compared.methods),
            "params": plain(dict(sorted(compared.params.items())), "params"),
            "replacements": [plain_replacement(one) for one in compared.replacements],
            "metrics": list(compared.metrics),
            "metric_draws": compared.metric_draws,
            "random_orders": compared.random_orders,
            "thresholds": asdict(compared.thresholds),
            "edges": None if self.edges is None else plain(asdict(self.edges)),
            "heads": self.heads,
            "primary": None if self.primary is None else list(self.primary),
            "seed": compared.seed,
        }

    @property
    def edge_text(self) -> str:
        """The edge plan in words."""
        if self.edges is None:
            return "not measured"
        screen = f"the {self.edges.most} edges with the largest estimates or claims"
        return {
            "all": "every edge of the last query, exactly",
            "screen": f"{screen} of each prompt, exactly",
            "auto": f"every edge of the last query, exactly; above {self.edges.limit} edges {screen}",
        }[self.edges.extent]


def make_plan(
    methods: Sequence[str] | None = None,
    *,
    replacements: Sequence[Replacement | str] | None = None,
    metrics: Sequence[str] | None = None,
    params: Mapping[str, Mapping[str, Any]] | None = None,
    thresholds: Thresholds | None = None,
    edges: EdgePlan | str | None = "auto",
    heads: bool = True,
    primary: tuple[str, str] | None = None,
    own: Sequence[str] = (),
    deep: bool = False,
    seed: int = 0,
) -> RunPlan:
    """A plan, the default one or the deep one where nothing else is given.

    Parameters
    ----------
    methods : see `attndiag.compare`.
    replacements : seeds that are not given are `seed`.
    edges : `"auto"`, `"all"`, `"screen"`, an `EdgePlan`, or None for none.
    params : on top of the plan's own.
    own : names of scores that are made elsewhere.

    Raises
    ------
    UnknownMethodError, NotApplicableError, ValueError : what cannot be run, before any model runs.
    """
    names = tuple(methods) if methods is not None else DEEP_METHODS if deep else DEFAULT_METHODS
    check_methods(names)
    usual = DEEP_PARAMS if deep else DEFAULT_PARAMS
    given = {name: {**usual.get(name, {}), **(params or {}).get(name, {})} for name in names}
    unused = sorted(set(params or {}) - set(names))
    if unused:
        raise ValueError(f"params name {unused}, which are not among the methods {list(names)}")
    # what has no plain form is refused here, before any model runs
    plain(given, "params")
    if replacements is None:
        replacements = (f"sampled:draws={DEEP_DRAWS if deep else DEFAULT_DRAWS}",)
    compared = Plan(
        methods=names,
        replacements=tuple(_seeded(one, seed) for one in replacements),
        metrics=DEFAULT_METRICS if metrics is None else tuple(metrics),
        params={name: found for name, found in given.items() if found},
        thresholds=thresholds or Thresholds(),
        seed=seed,
    )
    labels = [f"replacement[{one.label}]" for one in compared.replacements]
    everything = [*names, *labels, *own]
    if len(set(everything)) < len(everything):
        raise ValueError(f"methods, replacements and own scores are named {everything}; expected each name once")
    taken = sorted(set(own) & set(CONTROLS))
    if taken:
        raise ValueError(f"own scores are named {taken}, as the controls are; give them another name")
    for what, wanted, known in (("metrics", compared.metrics, METRICS), ("primary", primary or (), everything)):
        unknown = [name for name in wanted if name not in known]
        if unknown:
            raise ValueError(f"{what} names {unknown}; there are {', '.join(known)}")
    if primary is not None and primary[0] == primary[1]:
        raise ValueError(f"primary compares {primary[0]!r} with itself; name two methods")
    extent = edges
    if isinstance(edges, str):
        extent = EdgePlan(extent="all" if deep and edges == "auto" else edges, whole_heads=deep)  # type: ignore[arg-type]
    return RunPlan(compared, extent, heads, primary, deep)  # type: ignore[arg-type]


def plan_from_plain(plain: Mapping[str, Any], thresholds: Thresholds | None = None) -> RunPlan:
    """The plan that judges results which were measured before; it cannot measure (a masked model is not kept).

    Parameters
    ----------
    thresholds : instead of the plan's own.
    """
    swaps = tuple(
        StoredReplacement(
            one["name"],
            one["draws"],
            one["seed"],
            token=one["token"],
            width=one["width"],
            variants=one["variants"],
            said=one["label"],
        )
        for one in plain["replacements"]
    )
    edges = plain["edges"]
    if edges is not None:
        lists = {name: tuple(edges[name]) for name in ("methods", "layers") if edges[name] is not None}
        edges = EdgePlan(**{**edges, **lists})
    compared = Plan(
        methods=tuple(plain["methods"]),
        replacements=swaps,
        metrics=tuple(plain["metrics"]),
        params=plain["params"],
        thresholds=thresholds or Thresholds(**plain["thresholds"]),
        random_orders=plain["random_orders"],
        metric_draws=plain["metric_draws"],
        seed=plain["seed"],
    )
    primary = None if plain["primary"] is None else (plain["primary"][0], plain["primary"][1])
    return RunPlan(compared, edges, plain["heads"], primary)


def plan_differences(there: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What differs between two plain plans, one text an entry."""
    found: list[str] = []
    for name in dict.fromkeys([*there, *now]):
        old, new = there.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += plan_differences(old, new, f"{prefix}{name}.")
        elif old != new:
            found.append(f"{prefix}{name}: {_short(old)} there, {_short(new)} now")
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 160 else text[:157] + "..."


def _seeded(one: Replacement | str, seed: int) -> Replacement:
    if not isinstance(one, str):
        return one
    found = Replacement.parse(one)
    return replace(found, seed=seed) if found.random and "seed=" not in one else found

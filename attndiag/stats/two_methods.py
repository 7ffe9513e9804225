"""Two methods on one prompt: every measure of their agreement, each with its null, and the summary over prompts.

`agree` takes the scores of two methods over the admissible items of one prompt. `MEASURES` tells how to read each
measure. Agreement is description, not validity (Neely et al. 2022): two methods can agree and both be wrong. What is
undefined on a prompt is returned with its reason and counted by `summarise`, never turned into 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attndiag.errors import ShapeError
from attndiag.stats import agreement, lists, masses
from attndiag.stats.lists import Array, as_pair
from attndiag.stats.nulls import DRAWS, Null, Tail, null_from_draws, pair_sum_null, shuffles


@dataclass(frozen=True)
class Measure:
    """How to read one measure of agreement.

    Parameters
    ----------
    direction : `"higher"` or `"lower"` means more alike.
    range : its smallest and largest value.
    by_chance : value for unrelated vectors, in words.
    tail : which values of the null count as extreme.
    """

    direction: Literal["higher", "lower"]
    range: tuple[float, float]
    by_chance: str
    tail: Tail


MEASURES: dict[str, Measure] = {
    "tau_b": Measure("higher", (-1.0, 1.0), "0", "both"),
    "spearman": Measure("higher", (-1.0, 1.0), "0", "both"),
    "partial_tau": Measure("higher", (-1.0, 1.0), "about 0", "both"),
    "top_k_overlap": Measure("higher", (0.0, 1.0), "k / n", "high"),
    "top_k_jaccard": Measure("higher", (0.0, 1.0), "about k / (2n - k)", "high"),
    "rbo": Measure("higher", (0.0, 1.0), "the expectation with d / n common items at every depth d", "high"),
    "jensen_shannon": Measure("lower", (0.0, float(np.log(2))), "depends on the two shapes", "low"),
    "total_variation": Measure("lower", (0.0, 1.0), "depends on the two shapes", "low"),
    "sign_agreement": Measure("higher", (0.0, 1.0), "depends on the shares of positive items", "both"),
}
_BY_RANK = ("tau_b", "spearman", "partial_tau", "top_k_overlap", "top_k_jaccard", "rbo")
_ADJUSTED = ("top_k_overlap", "top_k_jaccard", "rbo")


@dataclass(frozen=True)
class Agreement:
    """One measure of agreement between two methods on one prompt.

    Parameters
    ----------
    measure : key of `MEASURES`.
    params : `{"k": 3}`, `{"p": 0.9}` or nothing.
    value : nan where undefined.
    adjusted : (value - chance) / (1 - chance) for the top-k measures and rank-biased overlap: 0 by chance, 1 for equal
        lists; nan for the others, which have no common scale of that kind or are centred already.
    n_items : items compared.
    null : what chance gives; None where undefined.
    undefined : why there is no value; empty where there is one.
    ranked_by : `"value"`, or `"magnitude"` where at least one of the two methods has no sign.
    """

    measure: str
    params: dict[str, float]
    value: float
    adjusted: float
    n_items: int
    null: Null | None
    undefined: str
    ranked_by: Literal["value", "magnitude"]


class _Job(NamedTuple):
    measure: str
    params: dict[str, float]
    value: Callable[[], float]
    null: Callable[[], Null]


def agree(
    a: NDArray[np.floating],
    b: NDArray[np.floating],
    *,
    admissible: NDArray[np.bool_] | None = None,
    signed: tuple[bool, bool] = (False, False),
    position: NDArray[np.floating] | None = None,
    top: Sequence[int] = (1, 3, 5),
    p: float = 0.9,
    draws: int = DRAWS,
    seed: int = 0,
) -> tuple[Agreement, ...]:
    """Every measure of agreement between two methods on one prompt, over the admissible items.

    Parameters
    ----------
    a, b : [item] scores of the two methods.
    admissible : [item], True for the items to compare; all when None. Leave out the future, padding, special tokens,
        sinks and the target: what both methods share by construction would make the number.
    signed : whether each method is signed. Two signed methods are ranked by value, otherwise both by magnitude.
    position : [item], for `partial_tau`; the index when None.
    top : k of the top-k measures; those not below the number of items are left out, as all items would be on top.
    p : of the rank-biased overlap.
    draws, seed : of the permutation nulls.

    Returns
    -------
    One `Agreement` for each measure (and k), `sign_agreement` between two signed methods only. Undefined ones are
    there too, with the reason. The order in which the items are given has no influence on anything.

    Raises
    ------
    ShapeError : scores, mask or positions differ in length.
    ValueError : an admissible entry is nan.
    """
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    keep = np.ones(a.shape, dtype=bool) if admissible is None else np.asarray(admissible, dtype=bool)
    place = np.arange(a.size, dtype=np.float64) if position is None else np.asarray(position, dtype=np.float64)
    if a.ndim != 1 or not a.shape == b.shape == keep.shape == place.shape:
        given = f"a {a.shape}, b {b.shape}, admissible {keep.shape}, position {place.shape}"
        raise ShapeError(f"{given}: expected vectors over the same items")
    one, two = as_pair(a[keep], b[keep])
    place = place[keep]
    # one fixed order of the items, so that seeded shuffles do not depend on the order given
    order = np.lexsort((place, two, one))
    one, two, place = one[order], two[order], place[order]
    jobs = _jobs(one, two, place, signed=signed, top=top, p=p, draws=draws, seed=seed)
    return tuple(_run(job, one, two, by_value=all(signed)) for job in jobs)


def _jobs(
    one: Array,
    two: Array,
    place: Array,
    *,
    signed: tuple[bool, bool],
    top: Sequence[int],
    p: float,
    draws: int,
    seed: int,
) -> Iterator[_Job]:
    """Each measure with how to compute it and its null, not yet computed: some are undefined for these vectors."""

    def sums(terms: Callable[[], Array], tail: Tail) -> Callable[[], Null]:
        return lambda: pair_sum_null(terms(), tail=tail, draws=draws, seed=seed)

    x, y = (one, two) if all(signed) else (np.abs(one), np.abs(two))
    how = {"draws": draws, "seed": seed}
    yield _Job("tau_b", {}, lambda: agreement.tau_b(x, y), lambda: agreement.tau_null(x, y, **how))
    yield _Job("spearman", {}, lambda: agreement.spearman(x, y), lambda: agreement.spearman_null(x, y, **how))
    yield _Job(
        "partial_tau",
        {},
        lambda: agreement.partial_tau(x, y, place),
        lambda: agreement.partial_tau_null(x, y, place, **how),
    )
    for k in sorted(k for k in set(top) if 1 <= k < len(x)):
        yield _Job(
            "top_k_overlap",
            {"k": k},
            lambda k=k: lists.top_k_overlap(x, y, k),
            sums(lambda k=k: np.outer(lists.inclusion(x, k), lists.inclusion(y, k)) / k, "high"),
        )
        yield _Job(
            "top_k_jaccard",
            {"k": k},
            lambda k=k: lists.top_k_jaccard(x, y, k),
            lambda k=k: _jaccard_null(x, y, k, draws, seed),
        )
    yield _Job("rbo", {"p": p}, lambda: lists.rbo_ext(x, y, p), sums(lambda: lists.rbo_terms(x, y, p), "high"))
    of_one, of_two = masses.shares(one), masses.shares(two)
    yield _Job(
        "jensen_shannon",
        {},
        lambda: masses.jensen_shannon(one, two),
        sums(lambda: masses.jensen_shannon_terms(of_one, of_two), "low"),
    )
    yield _Job(
        "total_variation",
        {},
        lambda: masses.total_variation(one, two),
        sums(lambda: np.abs(of_one[:, None] - of_two[None]) / 2, "low"),
    )
    if all(signed):
        yield _Job(
            "sign_agreement",
            {},
            lambda: masses.sign_agreement(one, two, signed=signed),
            lambda: _sign_null(one, two, draws, seed),
        )


def _run(job: _Job, one: Array, two: Array, *, by_value: bool) -> Agreement:
    reason = _why_undefined(job.measure, one, two, by_value)
    value = float("nan") if reason else job.value()
    if not reason and np.isnan(value):
        reason = "one vector is an order of the positions" if job.measure == "partial_tau" else "no item is left"
    null = None if reason else job.null()
    adjusted = float("nan")
    if null is not None and job.measure in _ADJUSTED and null.mean < 1:
        # the mean of the overlap and of rank-biased overlap is known; only Jaccard's comes from the null
        n = len(one)
        chance = {"top_k_overlap": job.params.get("k", n) / n, "rbo": lists.rbo_chance(n, job.params.get("p", 0.9))}
        expected = chance.get(job.measure, null.mean)
        adjusted = (value - expected) / (1 - expected)
    by: Literal["value", "magnitude"] = "value" if by_value else "magnitude"
    return Agreement(job.measure, dict(job.params), value, adjusted, len(one), null, reason, by)


def _why_undefined(measure: str, one: Array, two: Array, by_value: bool) -> str:
    if len(one) < agreement.LEAST_ITEMS:
        return f"{len(one)} admissible items, at least {agreement.LEAST_ITEMS} are needed"
    if measure in _BY_RANK:
        for name, scores in (("first", one), ("second", two)):
            ranked = scores if by_value else np.abs(scores)
            if (ranked == ranked[0]).all():
                return f"constant scores of the {name} method"
    if measure in ("jensen_shannon", "total_variation"):
        for name, scores in (("first", one), ("second", two)):
            if not scores.any():
                return f"all scores of the {name} method are 0"
    return ""


def _jaccard_null(x: Array, y: Array, k: int, draws: int, seed: int) -> Null:
    orders, exact = shuffles(len(x), draws, seed)
    # few ways to meet, many shuffles
    different, which = np.unique(lists.meetings(x, y[orders], k), axis=0, return_inverse=True)
    values = np.array([lists.jaccard_of(row, k) for row in different])
    return null_from_draws(lists.top_k_jaccard(x, y, k), values[which.reshape(-1)], tail="high", exact=exact)


def _sign_null(x: Array, y: Array, draws: int, seed: int) -> Null:
    orders, exact = shuffles(len(x), draws, seed)
    products = np.sign(x)[None] * np.sign(y)[orders]
    told = (products != 0).sum(axis=1)
    drawn = np.divide((products > 0).sum(axis=1), told, out=np.full(len(told), np.nan), where=told > 0)
    return null_from_draws(masses.sign_agreement(x, y, signed=(True, True)), drawn, tail="both", exact=exact)


@dataclass(frozen=True)
class AgreementSummary:
    """One measure over many prompts.

    Parameters
    ----------
    mean : over the prompts where it is defined; nan when there is none.
    null_low, null_high : mean ends of the prompts' null bands.
    beyond_chance : share of the defined prompts whose value lies outside the band of chance. A description of the
        prompts, not a test.
    n_prompts, n_undefined : all prompts, and those without a value.
    reasons : how often each reason for an undefined value occurred.
    """

    measure: str
    params: dict[str, float]
    mean: float
    null_low: float
    null_high: float
    beyond_chance: float
    n_prompts: int
    n_undefined: int
    reasons: dict[str, int]

    @property
    def undefined_share(self) -> float:
        """Share of prompts without a value, 0 to 1."""
        return self.n_undefined / self.n_prompts


def summarise(prompts: Sequence[Sequence[Agreement]]) -> tuple[AgreementSummary, ...]:
    """Each measure over prompts, what `agree` returned for each prompt; prompts too short for a k do not count for it.

    Raises
    ------
    ValueError : no prompts.
    """
    if not prompts:
        raise ValueError("no prompts to summarise; expected at least one result of agree")
    groups: dict[tuple[str, tuple[tuple[str, float], ...]], list[Agreement]] = {}
    for one in (one for prompt in prompts for one in prompt):
        groups.setdefault((one.measure, tuple(sorted(one.params.items()))), []).append(one)
    return tuple(_summary(group) for group in groups.values())


def _summary(group: Sequence[Agreement]) -> AgreementSummary:
    defined = [(one.value, one.null) for one in group if one.null is not None]
    reasons: dict[str, int] = {}
    for one in group:
        if one.undefined:
            reasons[one.undefined] = reasons.get(one.undefined, 0) + 1

    def mean(values: list[float]) -> float:
        return float(np.mean(values)) if values else float("nan")

    return AgreementSummary(
        measure=group[0].measure,
        params=group[0].params,
        mean=mean([value for value, _ in defined]),
        null_low=mean([null.low for _, null in defined]),
        null_high=mean([null.high for _, null in defined]),
        beyond_chance=mean([float(not null.covers(value)) for value, null in defined]),
        n_prompts=len(group),
        n_undefined=len(group) - len(defined),
        reasons=reasons,
    )

"""How often a method misleads, by head, by layer and over prompts, with intervals over clusters of prompts.

Prompts of one template are not independent, so an interval draws whole clusters (`clustered_bootstrap`). Where every
decided case is of one kind there is nothing to draw; then each cluster counts as one case of an exact binomial
interval (Clopper and Pearson 1934), as if its prompts said nothing new.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from attndiag.stats.inference import LEAST_CLUSTERS, clustered_bootstrap

if TYPE_CHECKING:
    import pandas as pd

    from attndiag.comparison.edges import EdgeVerdicts


@dataclass(frozen=True)
class Rate:
    """A share of decided cases.

    Parameters
    ----------
    wrong, decided : cases.
    low, high : 95 % interval over clusters, 0 to 1; nan with fewer than 2 clusters.
    clusters : of prompts, with a decided case.
    """

    wrong: int
    decided: int
    low: float
    high: float
    clusters: int

    @property
    def share(self) -> float:
        """Wrong ones of the decided, 0 to 1; nan without any."""
        return self.wrong / self.decided if self.decided else math.nan

    @property
    def enough_clusters(self) -> bool:
        """Whether the interval may be trusted to be wide enough."""
        return self.clusters >= LEAST_CLUSTERS


def rate_over_clusters(wrong: Sequence[bool], clusters: Sequence[Any]) -> Rate:
    """The share of wrong cases with its interval.

    Parameters
    ----------
    wrong : one entry a decided case.
    clusters : of its prompt.
    """
    cells: dict[Any, list[int]] = {}
    for is_wrong, cluster in zip(wrong, clusters, strict=True):
        cell = cells.setdefault(cluster, [0, 0])
        cell[0] += bool(is_wrong)
        cell[1] += 1
    low, high = _interval(tuple(sorted((one, of) for one, of in cells.values())))
    return Rate(sum(one for one, _ in cells.values()), sum(of for _, of in cells.values()), low, high, len(cells))


# many heads have the same counts
@lru_cache(maxsize=10_000)
def _interval(cells: tuple[tuple[int, int], ...]) -> tuple[float, float]:
    """95 % interval of a rate from (wrong, decided) of each cluster."""
    if len(cells) < 2:
        return math.nan, math.nan
    wrong, decided = (sum(column) for column in zip(*cells, strict=True))
    if wrong in (0, decided):
        return binomial_interval(len(cells) if wrong else 0, len(cells))
    values = np.concatenate([np.repeat([1.0, 0.0], [one, of - one]) for one, of in cells])
    found = clustered_bootstrap(values, np.repeat(np.arange(len(cells)), [of for _, of in cells]).tolist())
    return found.low, found.high


def binomial_interval(wrong: int, decided: int) -> tuple[float, float]:
    """95 % interval of a rate of independent cases (Clopper and Pearson 1934, exact); nan without a case."""
    if decided == 0:
        return math.nan, math.nan
    from scipy.stats import binomtest

    found = binomtest(wrong, decided).proportion_ci(0.95, method="exact")
    return float(found.low), float(found.high)


def rates_by_head(edges: EdgeVerdicts, method: str) -> dict[tuple[int, int], Rate]:
    """(layer, head) -> on how many of its decided prompts the method misleads there; every head has an entry."""
    return {(int(place[0]), int(place[1])): rate for place, rate in _rates(edges, method, ["layer", "head"]).items()}


def rates_by_layer(edges: EdgeVerdicts, method: str) -> dict[int, Rate]:
    """Layer -> the same over its rows, a head on a prompt each."""
    return {int(place[0]): rate for place, rate in _rates(edges, method, ["layer"]).items()}


def rates_by_prompt(edges: EdgeVerdicts, method: str) -> dict[str, tuple[int, int]]:
    """Prompt -> (misleading, decided) heads. No interval: one prompt is one case, however many heads there are."""
    return {str(place[0]): (rate.wrong, rate.decided) for place, rate in _rates(edges, method, ["prompt"]).items()}


def rate_of_prompts(edges: EdgeVerdicts, method: str) -> Rate:
    """On how many prompts the method misleads in more than half of the decided heads."""
    cluster = {prompt: cluster for prompt, cluster, _, _ in edges.rows}
    found = {prompt: counts for prompt, counts in rates_by_prompt(edges, method).items() if counts[1]}
    return rate_over_clusters([2 * wrong > decided for wrong, decided in found.values()], [cluster[p] for p in found])


def _rates(edges: EdgeVerdicts, method: str, by: list[str]) -> dict[tuple[Any, ...], Rate]:
    frame: pd.DataFrame = edges.head_rows(method)
    found: dict[tuple[Any, ...], Rate] = {}
    for place, rows in frame.groupby(by, sort=True):
        decided = rows[rows["verdict"].isin(["agree", "disagree"])]
        key = place if isinstance(place, tuple) else (place,)
        found[key] = rate_over_clusters((decided["verdict"] == "disagree").tolist(), decided["cluster"].tolist())
    return found

"""A rate of wrong cases with an interval over clusters of prompts.

Prompts of one template are not independent, and most rates lie near 1, where a bootstrap of clusters is far too narrow.
So an interval is the exact binomial one (Clopper and Pearson 1934) over the effective number of cases (Korn and
Graubard 1998, Survey Methodology 24): their number over the design effect, how much more the rate varies with whole
clusters than with single cases, and fewer for few clusters.

A rate whose cases are (nearly) all of one kind cannot tell its design effect. Beside other rates of the same kind, the
heads of a model, it takes at least what they tell together: `least_effects`. Alone, the least is 1, which takes its
cases as independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from attndiag.stats.inference import LEAST_CLUSTERS

# (wrong, decided) of each cluster of one rate, sorted
Cells = tuple[tuple[int, int], ...]


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
        """As many clusters as conclusions need elsewhere in this package."""
        return self.clusters >= LEAST_CLUSTERS


def rate_over_clusters(
    wrong: Sequence[bool], clusters: Sequence[Any], *, least_effect: float = 1.0, level: float = 0.95
) -> Rate:
    """The share of wrong cases with its interval.

    Parameters
    ----------
    wrong : one entry a decided case.
    clusters : of its prompt.
    least_effect : the design effect is taken as at least this, see `least_effects`.
    level : of the interval.

    Raises
    ------
    ValueError : a least effect below 1, or nan; or another number of clusters than of cases.
    """
    if not least_effect >= 1:
        raise ValueError(f"least_effect is {least_effect}; expected 1 (independent cases) or more")
    cells = _cells(wrong, clusters)
    low, high = _interval(cells, float(least_effect), level)
    return Rate(sum(one for one, _ in cells), sum(of for _, of in cells), low, high, len(cells))


def least_effects(groups: Sequence[tuple[Sequence[bool], Sequence[Any]]]) -> list[float]:
    """For each of many rates of one kind, the design effect that all of them together tell.

    1 + r (s - 1), with s = sum size^2 / sum size over the group's clusters (what the design effect is where the cases
    of a cluster are all alike), and r the correlation within clusters, from 0 to 1: the mean over groups of
    (design effect - 1) / (s - 1), weighted by n p (1 - p) (s - 1). So a group counts by how many of its n cases are of
    the rarer kind: one odd case has a design effect of 1 whatever the correlation.

    Parameters
    ----------
    groups : wrong and clusters of each, as for `rate_over_clusters`.

    Returns
    -------
    One number of at least 1 for each group; all are 1 where no group can tell (each has cases of one kind, one cluster,
    or one case a cluster).

    Raises
    ------
    ValueError : another number of clusters than of cases.
    """
    cells = [_cells(wrong, clusters) for wrong, clusters in groups]
    excess, weight = 0.0, 0.0
    for one in cells:
        variance = _variances(one)
        if variance is not None:
            together, alone = variance
            # alone is p (1 - p) / n
            cases = alone * sum(of for _, of in one) ** 2
            excess += cases * (together / alone - 1)
            weight += cases * (_alike(one) - 1)
    correlation = min(1.0, max(0.0, excess / weight)) if weight > 0 else 0.0
    return [1 + correlation * (_alike(one) - 1) for one in cells]


def _cells(wrong: Sequence[bool], clusters: Sequence[Any]) -> Cells:
    found: dict[Any, list[int]] = {}
    for is_wrong, cluster in zip(wrong, clusters, strict=True):
        cell = found.setdefault(cluster, [0, 0])
        cell[0] += bool(is_wrong)
        cell[1] += 1
    return tuple(sorted((one, of) for one, of in found.values()))


def _alike(cells: Cells) -> float:
    """The design effect if all cases of a cluster were alike: the size of the cluster of a case, in the mean."""
    n = sum(of for _, of in cells)
    return sum(of**2 for _, of in cells) / n if n else 1.0


def _variances(cells: Cells) -> tuple[float, float] | None:
    """Variance of the rate over whole clusters and as of single cases; None where they cannot be compared."""
    if len(cells) < 2:
        return None
    wrong, decided = np.array(cells, dtype=np.float64).T
    n = decided.sum()
    rate = wrong.sum() / n
    if rate in (0, 1):
        return None
    together = len(cells) / (len(cells) - 1) * ((wrong - rate * decided) ** 2).sum() / n**2
    return float(together), float(rate * (1 - rate) / n)


# many heads have the same counts
@lru_cache(maxsize=10_000)
def _interval(cells: Cells, least_effect: float, level: float) -> tuple[float, float]:
    """Interval of a rate from (wrong, decided) of each cluster."""
    from scipy.stats import t

    n_clusters = len(cells)
    if n_clusters < 2:
        return math.nan, math.nan
    n = sum(of for _, of in cells)
    variance = _variances(cells)
    effect = least_effect if variance is None else max(least_effect, variance[0] / variance[1])
    upper = (1 + level) / 2
    fewer = (t.ppf(upper, n - 1) / t.ppf(upper, n_clusters - 1)) ** 2
    return binomial_interval(sum(one for one, _ in cells) / n, float(min(n, n / effect * fewer)), level=level)


def binomial_interval(rate: float, cases: float, *, level: float = 0.95) -> tuple[float, float]:
    """Interval of a rate of independent cases (Clopper and Pearson 1934), whose number may be a fraction."""
    from scipy.stats import beta

    wrong, right, outside = rate * cases, (1 - rate) * cases, (1 - level) / 2
    low = float(beta.ppf(outside, wrong, right + 1)) if wrong > 0 else 0.0
    high = float(beta.ppf(1 - outside, wrong + 1, right)) if right > 0 else 1.0
    return low, high

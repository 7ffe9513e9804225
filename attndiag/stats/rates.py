"""A rate of wrong cases with an interval over clusters of prompts.

Prompts of one template are not independent, and most rates lie near 1, where a bootstrap of clusters is far too narrow.
So an interval is the exact binomial one (Clopper and Pearson 1934) over the effective number of cases (Korn and
Graubard 1998, Survey Methodology 24): their number over the design effect, how much more the rate varies with whole
clusters than with single cases, and fewer for few clusters. Where all cases are of one kind the design effect cannot
be known and is taken as 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from attndiag.stats.inference import LEAST_CLUSTERS


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
    from scipy.stats import t

    n_clusters = len(cells)
    if n_clusters < 2:
        return math.nan, math.nan
    wrong, decided = np.array(cells, dtype=np.float64).T
    n = decided.sum()
    rate = wrong.sum() / n
    alone = rate * (1 - rate) / n
    together = n_clusters / (n_clusters - 1) * ((wrong - rate * decided) ** 2).sum() / n**2
    effect = max(1.0, together / alone) if alone > 0 else 1.0
    fewer = (t.ppf(0.975, n - 1) / t.ppf(0.975, n_clusters - 1)) ** 2
    return binomial_interval(float(rate), float(min(n, n / effect * fewer)))


def binomial_interval(rate: float, cases: float) -> tuple[float, float]:
    """95 % interval of a rate of independent cases (Clopper and Pearson 1934), whose number may be a fraction."""
    from scipy.stats import beta

    wrong, right = rate * cases, (1 - rate) * cases
    low = float(beta.ppf(0.025, wrong, right + 1)) if wrong > 0 else 0.0
    high = float(beta.ppf(0.975, wrong + 1, right)) if right > 0 else 1.0
    return low, high

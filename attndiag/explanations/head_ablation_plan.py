"""Which heads are taken away once they are ranked: each of the first by itself, a set as one, random sets beside it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attndiag.explanations.head_ablation import WAYS, Head, NamedSet, random_sets
from attndiag.explanations.head_measures import MEASURES

RANDOM_SETS = 20
TITLES_OF_SETS = {"prefix_matching_score": "", "ablation_effect": "effect"}


def plan_sets(
    ranked: Sequence[tuple[Head, float]],
    everyone: Collection[Head],
    *,
    count: int,
    by: str,
    threshold: float,
    seed: int,
) -> tuple[list[NamedSet], str]:
    """The first `count` heads one at a time, a set together in each way, `RANDOM_SETS` random sets of its size.

    Parameters
    ----------
    ranked : (head, score), highest first.
    everyone : all heads that a random set may be drawn from, those of the set itself left out.
    by : the measure that made the scores. A mass or share puts the heads above `threshold` together, others the first
        `count`.
    seed : of the draws.

    Returns
    -------
    The sets, and why there are no random ones (empty where there are).
    """
    single = [head for head, _ in ranked[:count]]
    said = TITLES_OF_SETS.get(by, by.replace("_", " "))
    if MEASURES[by].unit in ("mass", "share"):
        together = tuple(sorted(head for head, score in ranked if score > threshold))
        name = f"above {threshold}" + (f" by {said}" if said else "")
    else:
        together, name = tuple(sorted(single)), f"highest by {said}"
    plan = [NamedSet("single", (head,), way) for head in single for way in WAYS]
    if not together:
        return plan, ""
    plan += [NamedSet(name, together, way) for way in WAYS]
    others = [head for head in everyone if head not in together]
    if len(others) < len(together):
        return plan, f"no random sets: only {len(others)} heads are not {name}"
    plan += [NamedSet("random", some, "zero") for some in random_sets(others, len(together), RANDOM_SETS, seed)]
    return plan, ""

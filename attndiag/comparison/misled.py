"""How often a method misleads, by head, by layer and over prompts, with intervals over clusters of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attndiag.stats.rates import Rate, least_effects, rate_over_clusters

if TYPE_CHECKING:
    import pandas as pd

    from attndiag.comparison.edges import EdgeVerdicts


def rates_by_head(edges: EdgeVerdicts, method: str) -> dict[tuple[int, int], Rate]:
    """(layer, head) -> on how many of its decided prompts the method misleads there; every head has an entry.

    How alike prompts of one cluster are is pooled over all heads, see `stats.rates.least_effects`.
    """
    return {(int(place[0]), int(place[1])): rate for place, rate in _rates(edges, method, ["layer", "head"]).items()}


def rates_by_layer(edges: EdgeVerdicts, method: str) -> dict[int, Rate]:
    """Layer -> the same over its rows, a head on a prompt each; pooled over all layers."""
    return {int(place[0]): rate for place, rate in _rates(edges, method, ["layer"]).items()}


def rates_by_prompt(edges: EdgeVerdicts, method: str) -> dict[str, tuple[int, int]]:
    """Prompt -> (misleading, decided) heads. No interval: one prompt is one case, however many heads there are."""
    return {str(place[0]): (sum(wrong), len(wrong)) for place, (wrong, _) in _cases(edges, method, ["prompt"]).items()}


def rate_of_prompts(edges: EdgeVerdicts, method: str) -> Rate:
    """On how many prompts the method misleads in more than half of the decided heads.

    One group alone: where all prompts say the same, its interval takes them as independent.
    """
    cluster = {prompt: cluster for prompt, cluster, _, _ in edges.rows}
    found = {prompt: counts for prompt, counts in rates_by_prompt(edges, method).items() if counts[1]}
    return rate_over_clusters([2 * wrong > decided for wrong, decided in found.values()], [cluster[p] for p in found])


def _rates(edges: EdgeVerdicts, method: str, by: list[str]) -> dict[tuple[Any, ...], Rate]:
    groups = _cases(edges, method, by)
    least = least_effects(list(groups.values()))
    return {
        place: rate_over_clusters(wrong, clusters, least_effect=effect)
        for (place, (wrong, clusters)), effect in zip(groups.items(), least, strict=True)
    }


def _cases(edges: EdgeVerdicts, method: str, by: list[str]) -> dict[tuple[Any, ...], tuple[list[bool], list[str]]]:
    """Place -> of its decided rows, whether each is wrong and in which cluster; empty lists where none is decided."""
    frame: pd.DataFrame = edges.head_rows(method)
    found: dict[tuple[Any, ...], tuple[list[bool], list[str]]] = {}
    for place, rows in frame.groupby(by, sort=True):
        decided = rows[rows["verdict"].isin(["agree", "disagree"])]
        key = place if isinstance(place, tuple) else (place,)
        found[key] = ((decided["verdict"] == "disagree").tolist(), decided["cluster"].tolist())
    return found

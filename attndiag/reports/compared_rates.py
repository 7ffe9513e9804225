"""How often a method misleads, by head, by layer and over prompts, with intervals over clusters of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attndiag.stats.rates import Rate, rate_over_clusters

if TYPE_CHECKING:
    import pandas as pd

    from attndiag.comparison.edges import EdgeVerdicts


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

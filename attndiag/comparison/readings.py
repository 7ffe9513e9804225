"""Which methods have a reading on the token axis, and which. Imports no torch: lists are made from it.

The catalogue says what a method gives by itself (most attention methods: an edge). A comparison wants one number for
each token; how it gets it stands here, and `comparison.methods` does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from attndiag.catalog.entries import CATALOG
from attndiag.catalog.record import Method

# query-key methods that become shares of their row
BY_ROW = (
    "weight",
    "value_norm",
    "head_contribution",
    "contribution",
    "contribution_residual",
    "contribution_norm",
    "alti",
    "projection",
    "value_zeroing",
)
ADDED_UP = ("pattern_attribution", "edge_effect", "target_attribution")
# each token's values are replaced in the layers and heads that are asked for
BY_VALUE = ("value_zeroing_effect", "mean_value_effect")
PLACED = (*BY_ROW, *ADDED_UP, *BY_VALUE, "induction")

_ABNAR = "Abnar 2020, arXiv 2005.00928"
# name -> what of each layer is put together, in one line, and whose paper; "" for that of the layers' own method
_LAYERED: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "rollout": ("weight", "attention weights with the residual, multiplied from layer to layer", _ABNAR),
        "flow": ("weight", "largest flow of attention weights with the residual through all layers", _ABNAR),
        "alti_rollout": ("alti", "ALTI, multiplied from layer to layer", ""),
        "value_zeroing_rollout": ("value_zeroing", "value zeroing, multiplied from layer to layer", ""),
    }
)
ACROSS_LAYERS = tuple(_LAYERED)


@dataclass(frozen=True)
class Reading:
    """A method that `attndiag.compare` and `attndiag.run` take.

    Parameters
    ----------
    method : what it is; across layers, with the cost and needs of the method that is put together.
    how : how it becomes one number for each token.
    placed : True where one layer or head of it can be asked for, as in `weight@L20H3`.
    """

    method: Method
    how: str
    placed: bool


def token_readings() -> list[Reading]:
    """Every method that can be compared on tokens, in the order of the catalogue; then those across layers."""
    found = [
        Reading(entry, how, entry.name in PLACED) for entry in CATALOG.values() if (how := _how(entry)) is not None
    ]
    for name, (of, what, source) in _LAYERED.items():
        entry = CATALOG[of]
        made = replace(
            entry, name=name, what=what, scope="token", sign="non-negative", unit="share", source=source or entry.source
        )
        found.append(Reading(made, "the row of the position where the target is read", False))
    return found


def _how(entry: Method) -> str | None:
    """None for what has no reading, or stands elsewhere: replacements are named by themselves."""
    if entry.name in BY_ROW:
        return "shares of the row where the target is read, mean over layers and heads"
    if entry.name in ADDED_UP:
        return "sum over layers and heads of the row where the target is read"
    if entry.scope == "token" and entry.name != "replacement":
        return "one number a token as it is"
    return None

"""Edges without an effect of their own that have one together: heads that read the same key and write the same.

For each key, the heads that claim it highly while removing their edge shows nothing are candidates, the strongest
claims first. All their edges to that key are removed together; where that has an effect, each is left in once
(`stats.redundancy`). At most 1 + number of candidates forwards a key, one where nothing is redundant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from attndiag.explanations.edge_truth import Mode
from attndiag.explanations.resolved import ResolvedTarget
from attndiag.explanations.target import score
from attndiag.hooks.edit_kinds import Knockout
from attndiag.hooks.edits import edit
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt
from attndiag.stats.evidence import margins
from attndiag.stats.redundancy import stand_ins
from attndiag.stats.verdicts import HIGH, Thresholds, claims

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


def redundant_edges(
    lm: LoadedModel,
    prompt: Prompt,
    resolved: ResolvedTarget,
    *,
    rows: Sequence[tuple[int, int]],
    query: int,
    effect: Array,
    scores: Mapping[str, Array],
    present: Mask,
    estimate: Array | None,
    m: float,
    floor: float,
    mode: Mode = "remove",
    most: int = 4,
    thresholds: Thresholds | None = None,
) -> Mask:
    """[row, key] True for edges that stand in for each other.

    Parameters
    ----------
    rows : (layer, head) of each row.
    effect : [row, key] exact effects of single edges; nan where not measured.
    scores : method -> [row, key]; a high claim of any of them makes a candidate.
    present : [row, key] True where there is an edge.
    estimate : [row, key] first-order estimates, which stand for edges that were not measured; None without them.
    m, floor : target on the unedited prompt, and its noise floor.
    most : candidates a key.
    thresholds : of claims and margins.
    """
    limits = thresholds or Thresholds()
    below, upwards = margins(
        effect,
        np.full(len(effect), floor),
        np.full(len(effect), m),
        margin=limits.margin,
        absent_below=limits.absent_below,
        present_from=limits.present_from,
        expected=estimate,
    )
    found = np.zeros(effect.shape, dtype=bool)
    absent = np.isfinite(effect) & (np.abs(np.nan_to_num(effect, nan=np.inf)) + floor < below[:, None])
    high, size = np.zeros(effect.shape, dtype=bool), np.zeros(effect.shape)
    for table in scores.values():
        claim, share = claims(np.where(present, table, 0.0), present, limits)
        high |= claim == HIGH
        size = np.maximum(size, np.nan_to_num(share))

    def removed(members: Sequence[int], key: int) -> float:
        edits = [Knockout(layer=rows[row][0], head=rows[row][1], query=query, key=key, mode=mode) for row in members]
        with edit(lm, *edits):
            return m - float(score(lm, prompt, resolved).values[0])

    for key in range(effect.shape[1]):
        candidates = np.flatnonzero(absent[:, key] & high[:, key])
        members = candidates[np.argsort(-size[candidates, key], kind="stable")][:most].tolist()
        if len(members) < 2:
            continue
        joint = removed(members, key)
        if abs(joint) - floor < upwards[members].min():
            continue
        # of two, each left in alone is the single effect of the other
        rest = [removed([other for other in members if other != row], key) for row in members]
        chosen = stand_ins(effect[members, key], joint, np.array(rest), below[members], upwards[members], floor=floor)
        found[np.array(members)[chosen], key] = True
    return found

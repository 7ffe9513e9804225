"""The measures of the table `heads`: name, unit, direction and meaning of each, in one place.

Rows are the queries that count: all but position 0 of a self-attention call (a causal query 0 sees only itself), every
query of a cross-attention call, rows without an allowed key left out. The sink is key position 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Measure:
    """One measure.

    Parameters
    ----------
    name : value of the column `measure`.
    of : `"head"`, or `"layer"` for a number that only all heads together have.
    unit : as in the column `unit`.
    direction : what a larger number says, for table headers.
    meaning : the definition.
    """

    name: str
    of: Literal["head", "layer"]
    unit: str
    direction: str
    meaning: str


_ALL = (
    Measure("sink_weight", "head", "mass", "↑ more weight on the sink", "mean over rows of A_i0"),
    Measure(
        "sink_head_contribution_share",
        "head",
        "share",
        "↑ more of the head's writing comes from the sink",
        "mean over rows of A_i0 ‖f_0‖ / sum_j A_ij ‖f_j‖",
    ),
    Measure(
        "learned_sink_mass",
        "head",
        "mass",
        "↑ more weight on a learned sink, which writes nothing",
        "mean over rows of the mass that a learned sink takes; 0 where the model has none",
    ),
    Measure(
        "special_weight",
        "head",
        "mass",
        "↑ more weight on special tokens",
        "mean over rows of the mass on special and chat-template tokens other than position 0",
    ),
    Measure(
        "head_written",
        "head",
        "residual norm",
        "↑ the head writes more",
        "mean over rows of sum_j A_ij ‖f_j‖, the magnitude behind the shares",
    ),
    Measure("sink_v_norm", "head", "value norm", "↑ longer value", "‖v_0‖; depends on the basis of v"),
    Measure("other_v_norm", "head", "value norm", "↑ longer values", "median over the other tokens of ‖v_j‖"),
    Measure("sink_f_norm", "head", "residual norm", "↑ the sink can write more", "‖f_0‖, f_j = v_j W_O"),
    Measure("other_f_norm", "head", "residual norm", "↑ tokens can write more", "median over other tokens of ‖f_j‖"),
    Measure(
        "rank_agreement",
        "head",
        "tau-b",
        "↑ weight and head contribution order the keys alike",
        "mean over rows of Kendall's tau-b between A_ij and A_ij ‖f_j‖, sink and special tokens set aside",
    ),
    Measure(
        "rank_agreement_above_chance",
        "head",
        "rate",
        "↑ more rows agree beyond chance",
        "share of rows whose tau-b is at least what unrelated orders of that length reach in 5 % of cases",
    ),
    Measure(
        "top_key_differs",
        "head",
        "rate",
        "↑ weight and head contribution name different tokens",
        "1 where the largest weight and the largest head contribution of the last query are on different keys, else 0",
    ),
    Measure(
        "sink_contribution_share",
        "layer",
        "share",
        "↑ more of the layer's writing comes from the sink",
        "mean over rows of ‖T_i0‖ / sum_j ‖T_ij‖, T_ij = sum_h A_ij f_j",
    ),
    Measure(
        "layer_written",
        "layer",
        "residual norm",
        "↑ the layer writes more",
        "mean over rows of sum_j ‖T_ij‖, the magnitude behind the share",
    ),
    Measure(
        "cancellation",
        "layer",
        "ratio",
        "↑ less cancellation between heads",
        "median over pairs of ‖T_ij‖ / sum_h A_ij ‖f_j‖; 1 where all heads write the same way",
    ),
    Measure(
        "layer_rank_agreement",
        "layer",
        "tau-b",
        "↑ weight and contribution order the keys alike",
        "mean over rows of tau-b between the mean weight over heads and ‖T_ij‖, sink and special tokens set aside",
    ),
    Measure(
        "layer_top_key_differs",
        "layer",
        "rate",
        "↑ weight and contribution name different tokens",
        "1 where the largest mean weight and the largest ‖T_ij‖ of the last query are on different keys, else 0",
    ),
    Measure(
        "sink_keys",
        "layer",
        "keys",
        "↑ more keys set aside",
        "keys that rankings set aside: position 0, and any with mean mass above .3 over heads and later queries",
    ),
)

MEASURES: dict[str, Measure] = {measure.name: measure for measure in _ALL}
HEAD_MEASURES = tuple(m.name for m in _ALL if m.of == "head")
LAYER_MEASURES = tuple(m.name for m in _ALL if m.of == "layer")

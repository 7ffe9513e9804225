"""One mixer's implied map: who writes into whom without a softmax, and how far the numbers are off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attndiag.errors import UnsupportedModelError


@dataclass(frozen=True, eq=False)
class ImpliedMap:
    """Who writes into whom in one mixer.

    Attributes
    ----------
    module_name, module_class, layer : of the mixer.
    map : [batch, query_pos, key_pos, head, d_value]; the last axis is 1 where all channels of a head share a map.
    values : [batch, key_pos, head, d_value].
    core : [batch, query_pos, head, d_value], what the scan returned.
    factor : [batch, query_pos, head, d_value], norm and gate frozen at what they were; None where they are not
        elementwise, and then `parts` is refused.
    columns : `"token"` or `"post_convolution"`.
    core_error, output_error, unfrozen_error : largest differences relative to the largest entry; None where the module
        has no output projection or factor to measure them with.
    """

    module_name: str
    module_class: str
    layer: int | None
    map: Tensor
    values: Tensor
    core: Tensor
    factor: Tensor | None
    output_weight: Tensor | None
    columns: str
    core_error: float
    output_error: float | None
    unfrozen_error: float | None

    @property
    def head_map(self) -> Tensor:
        """[batch, head, query_pos, key_pos], the mean over a head's channels (exact where they share one map)."""
        return self.map.mean(-1).permute(0, 3, 1, 2)

    @property
    def row_sums(self) -> Tensor:
        """[batch, head, query_pos]; 1 for a softmax, anything here."""
        return self.head_map.sum(-1)

    @property
    def negative_share(self) -> float:
        """Share of negative entries among those that are not zero."""
        live = self.map != 0
        return float((self.map[live] < 0).float().mean()) if bool(live.any()) else 0.0

    def facts(self) -> dict[str, Any]:
        """What a card says about the map, JSON-able: columns, errors, row sums, negative share."""
        sums = self.row_sums
        return {
            "module_name": self.module_name,
            "module_class": self.module_class,
            "layer": self.layer,
            "columns": self.columns,
            "map_of": "head" if self.map.shape[-1] == 1 else "channel",
            "core_error": self.core_error,
            "output_error": self.output_error,
            "unfrozen_error": self.unfrozen_error,
            "row_sum_smallest": float(sums.min()),
            "row_sum_largest": float(sums.max()),
            "negative_share": self.negative_share,
        }

    def contributions(self) -> Tensor:
        """||W_O (factor_i * M_ij v_j)||, [batch, query_pos, key_pos], residual norm.

        Raises
        ------
        UnsupportedModelError : norm and gate are not elementwise, or no output projection was found.
        """
        if self.factor is None or self.output_weight is None:
            raise UnsupportedModelError(
                f"{self.module_name}: what stands between the scan and the output is not elementwise, so the output is "
                "no sum over tokens; `map` and `values` are defined"
            )
        parts = self.map * self.values[:, None] * self.factor[:, :, None]
        return (parts.flatten(3) @ self.output_weight.T).norm(dim=-1)

    def __repr__(self) -> str:
        shared = "one map a head" if self.map.shape[-1] == 1 else "one map a channel"
        return (
            f"ImpliedMap({self.module_name}, {self.columns} columns, {shared}, core error {self.core_error:.1e}, "
            f"negative {self.negative_share:.1%})"
        )

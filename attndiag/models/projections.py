"""The output projection W_O of an attention module, found by what it does rather than by its name.

The first linear map whose input equals the flattened head outputs z is W_O, whatever it is called and wherever
it is kept (BERT keeps it in a sibling module). Its matrix is read from `.weight` for plain layers and measured by
applying the module to unit vectors for anything else (quantised weights, adapters), so that the matrix is always
the one that the model used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attndiag.errors import ShapeError, UnsupportedModelError


def is_linear_like(module: nn.Module) -> bool:
    """True for plain linear layers, GPT-2's Conv1D, and wrappers that say their in and out features."""
    return isinstance(module, nn.Linear | Conv1D) or (
        hasattr(module, "in_features") and hasattr(module, "out_features")
    )


def reference_parameter(module: nn.Module) -> nn.Parameter | None:
    """The first parameter in whose device and dtype the module computes; None where all are packed.

    Integers and floats of one byte are quantised storage: what such a module reads has another dtype.
    """
    return next((p for p in module.parameters() if p.is_floating_point() and p.element_size() > 1), None)


@dataclass(frozen=True, eq=False)
class OutputProjection:
    """W_O and b_O of one attention module.

    Attributes
    ----------
    module_name : where the linear map lives in the model.
    module : the linear map itself.
    n_heads, d_value : how its input splits into heads.
    device, dtype : of what it was seen to read, where that is known. A module is measured in these where it has no
        `reference_parameter`.
    """

    module_name: str
    module: nn.Module
    n_heads: int
    d_value: int
    device: torch.device | None = None
    dtype: torch.dtype | None = None

    @cached_property
    def b_o(self) -> Tensor:
        """[d_model], what the module adds without any input; zeros where it has no bias."""
        kind = type(self.module)
        if kind in (nn.Linear, Conv1D):
            bias = getattr(self.module, "bias", None)
            if bias is not None:
                return bias.detach()
            weight = self.module.weight
            return torch.zeros(weight.shape[0 if kind is nn.Linear else 1], dtype=weight.dtype, device=weight.device)
        return self._apply(self._inputs(torch.zeros(1, self.n_heads * self.d_value)))[0]

    @cached_property
    def w_o(self) -> Tensor:
        """[head, d_value, d_model], so that attn_out = sum_h z_h @ w_o[h] + b_o."""
        width = self.n_heads * self.d_value
        kind = type(self.module)
        if kind is nn.Linear:
            matrix = self.module.weight.detach().T
        elif kind is Conv1D:
            matrix = self.module.weight.detach()
        else:
            matrix = self._apply(self._inputs(torch.eye(width))) - self.b_o
        if matrix.shape[0] != width:
            raise ShapeError(
                f"{self.module_name} takes {matrix.shape[0]} features but {self.n_heads} heads of {self.d_value} "
                f"make {width}"
            )
        return matrix.reshape(self.n_heads, self.d_value, -1)

    def _inputs(self, rows: Tensor) -> Tensor:
        reference = reference_parameter(self.module)
        if reference is not None:
            return rows.to(device=reference.device, dtype=reference.dtype)
        if self.device is None or self.dtype is None:
            raise UnsupportedModelError(
                f"{self.module_name} ({type(self.module).__name__}) has no floating parameter, so the device and dtype "
                "that it reads are not known; give OutputProjection those of its input"
            )
        return rows.to(device=self.device, dtype=self.dtype)

    def _apply(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            return self.module.forward(rows)  # not through hooks: an edit or a capture may be on

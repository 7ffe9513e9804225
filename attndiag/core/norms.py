"""Norm layers as linear maps, and everything after W_O folded away.

A norm layer is affine in its input once its scale s_i is frozen at the input that it really read
(Kobayashi 2021, arXiv 2109.07152): L_i(u) = gain * (u - mean u) / s_i, plus a bias that belongs to no token. So every
affine step between the attention output and the vector whose parts are measured can be folded into the pieces that
`core.contributions` takes:

    x'_i = residual'_i + row_scale_i * sum_j sum_h A_ij^h v_j^h W'_O^h + bias'_i

`fold_output` does that for residual multipliers, a sandwich norm (after attention, before the residual) and a norm
after the residual (post-norm models, or the next norm where it is asked for).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attndiag.errors import ShapeError
from attndiag.shapes import OutputWeights, PerQuery, Residual, check_rank

NormKind = Literal["layer", "rms"]


@dataclass(frozen=True, eq=False)
class LinearisedNorm:
    """A norm layer frozen at the input that it really read: L_i(u) = gain * (u - centre * mean u) / scale_i.

    Parameters
    ----------
    gain : [d_model]. Families that store an offset (Gemma: 1 + weight) give the sum.
    scale : s_i > 0, [batch, query_pos].
    centre : True for LayerNorm, False for RMSNorm.
    bias : [d_model] or None; not part of L_i, since it belongs to no token.
    error : largest difference from what the layer returned, relative to the largest output; 0 where none was compared.
    """

    gain: Tensor
    scale: PerQuery
    centre: bool
    bias: Tensor | None = None
    error: float = 0.0

    def __post_init__(self) -> None:
        check_rank("gain", self.gain, "d_model")
        check_rank("scale", self.scale, "batch query_pos")
        if self.bias is not None and self.bias.shape != self.gain.shape:
            raise ShapeError(f"bias {tuple(self.bias.shape)} and gain {tuple(self.gain.shape)} must be equal in shape")
        if (self.scale <= 0).any():
            raise ValueError("the norm's scale is not positive at some position (a constant input and eps = 0?)")

    @classmethod
    def at(
        cls,
        hidden: Residual,
        *,
        gain: Tensor | None,
        bias: Tensor | None = None,
        eps: float,
        kind: NormKind = "layer",
    ) -> LinearisedNorm:
        """Freeze a norm at its real input `hidden` [batch, query_pos, d_model].

        s_i = sqrt(var(hidden_i) + eps) for "layer" (biased variance), sqrt(mean(hidden_i^2) + eps) for "rms"; eps is
        inside the root. `gain=None` is a norm without one. Half-precision inputs are lifted to float32 first.

        Raises
        ------
        ShapeError : `gain` and `hidden` differ in d_model.
        ValueError : unknown kind, or a scale that is not positive (constant row with eps = 0).
        """
        check_rank("hidden", hidden, "batch query_pos d_model")
        if kind not in ("layer", "rms"):
            raise ValueError(f"norm kind is {kind!r}; expected 'layer' or 'rms'")
        hidden = hidden if hidden.dtype == torch.float64 else hidden.float()
        gain = hidden.new_ones(hidden.shape[-1]) if gain is None else gain
        if gain.shape != hidden.shape[-1:]:
            raise ShapeError(f"gain {tuple(gain.shape)} does not fit hidden {tuple(hidden.shape)}: d_model differs")
        centre = kind == "layer"
        moment = hidden.var(dim=-1, correction=0) if centre else hidden.square().mean(dim=-1)
        return cls(gain=gain, scale=(moment + eps).sqrt(), centre=centre, bias=bias)

    def linear(self, u: Tensor) -> Tensor:
        """L_i(u) for u [batch, query_pos, d_model], without the bias."""
        return self.project(u) / self.scale[..., None]

    def project(self, u: Tensor) -> Tensor:
        """The part of L_i that is the same for every position: gain * (u - centre * mean u), on the last axis."""
        return (u - u.mean(dim=-1, keepdim=True) if self.centre else u) * self.gain

    def output(self, hidden: Tensor) -> Tensor:
        """What the layer returns for the input it was frozen at: L_i(hidden) + bias."""
        return self.linear(hidden) if self.bias is None else self.linear(hidden) + self.bias

    def pull_back(self, direction: Tensor, query: int | Tensor) -> Tensor:
        """L_t^T u: the direction before the norm that reads off `direction` after it, at position `query`.

        <L_t(x), u> = <x, L_t^T u>, so for a logit difference give W_U[target] - W_U[foil] and the final norm.

        Parameters
        ----------
        direction : [d_model] or [batch, d_model].
        query : the position t, one for all or one a batch row [batch].

        Returns
        -------
        [batch, d_model].
        """
        pulled = self.gain * direction
        if self.centre:
            pulled = pulled - pulled.mean(dim=-1, keepdim=True)
        return pulled / select_query(self.scale, query)[:, None]


@dataclass(frozen=True, eq=False)
class FoldedOutput:
    """Everything after W_O, folded into the arguments of `core.contributions`.

    w_o : [head, d_value, d_model]. row_scale : [batch, query_pos] or None (1). residual : [batch, query_pos, d_model]
    or None (not counted), final: row_scale does not apply to it. bias : broadcastable to [batch, query_pos, d_model],
    or None; final too. norm_error : the larger `LinearisedNorm.error` of the norms folded in; None without any.
    """

    w_o: OutputWeights
    row_scale: PerQuery | None
    residual: Residual | None
    bias: Tensor | None
    norm_error: float | None = None


def fold_output(
    w_o: OutputWeights,
    b_o: Tensor | None = None,
    *,
    resid_pre: Residual | None = None,
    multiplier: float = 1.0,
    sandwich: LinearisedNorm | None = None,
    norm: LinearisedNorm | None = None,
) -> FoldedOutput:
    """Fold what follows the heads into (w_o', row_scale, residual', bias').

    y_i = N_i(x_i + multiplier * S_i(o_i)), o_i = sum_j T_ij + b_o, S the sandwich norm and N the norm after the
    residual, each frozen at its real input and each with its bias. The parts of y_i are
    N_i(multiplier * S_i(T_ij)) for the keys, N_i(x_i) for the residual, and the bias part
    N_i(multiplier * (S_i(b_o) + b_S)) + b_N.

    Parameters
    ----------
    w_o, b_o : [head, d_value, d_model], [d_model].
    resid_pre : x_i [batch, query_pos, d_model]; None leaves the residual out.
    multiplier : factor on the attention branch before the residual (Granite), bias included.
    sandwich : norm after attention and before the residual (Gemma 2, OLMo 2): it scales the attention parts only.
    norm : norm after the residual, frozen at x_i + multiplier * S_i(o_i).

    Returns
    -------
    `FoldedOutput`.

    Raises
    ------
    ShapeError : the pieces differ in d_model.
    """
    check_rank("w_o", w_o, "head d_value d_model")
    sizes = {"b_o": b_o, "resid_pre": resid_pre}
    sizes |= {"sandwich gain": sandwich and sandwich.gain, "norm gain": norm and norm.gain}
    for name, tensor in sizes.items():
        if tensor is not None and tensor.shape[-1] != w_o.shape[-1]:
            raise ShapeError(f"{name} {tuple(tensor.shape)} and w_o {tuple(w_o.shape)} differ in d_model (last axis)")
    row_scale, residual, bias = None, resid_pre, b_o
    if sandwich is not None:
        w_o, row_scale = sandwich.project(w_o), 1 / sandwich.scale
        bias = None if bias is None else sandwich.linear(bias)
        bias = _sum(bias, sandwich.bias)
    if multiplier != 1.0:
        w_o, bias = w_o * multiplier, None if bias is None else bias * multiplier
    if norm is not None:
        w_o = norm.project(w_o)
        row_scale = 1 / norm.scale if row_scale is None else row_scale / norm.scale
        residual = None if residual is None else norm.linear(residual)
        bias = _sum(None if bias is None else norm.linear(bias), norm.bias)
    error = max((one.error for one in (sandwich, norm) if one is not None), default=None)
    return FoldedOutput(w_o=w_o, row_scale=row_scale, residual=residual, bias=bias, norm_error=error)


def select_query(tensor: Tensor, query: int | Tensor) -> Tensor:
    """Take position `query` (one for all, or one a batch row) from [batch, query_pos, ...]: [batch, ...].

    Raises
    ------
    ShapeError : `query` is not an int or [batch], or lies outside the positions. Negative positions are not taken.
    """
    n_batch, n_queries = tensor.shape[:2]
    positions = torch.as_tensor(query, device=tensor.device)
    if positions.ndim > 1 or (positions.ndim == 1 and positions.shape[0] != n_batch):
        raise ShapeError(f"query has shape {tuple(positions.shape)}; expected one position, or [{n_batch}], one a row")
    if (positions < 0).any() or (positions >= n_queries).any():
        raise ShapeError(f"query {positions.tolist()} is outside the {n_queries} query positions")
    return tensor[torch.arange(n_batch, device=tensor.device), positions.expand(n_batch)]


def _sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right

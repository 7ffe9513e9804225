"""From single layers to the whole depth: how much of an input token is left in a position after several layers.

Every layer is a matrix [query_pos, key_pos] whose row says where that position's new vector came from. Two ways to
put them together (Abnar 2020, arXiv 2005.00928):

- `rollout`: the product of the layers, all paths at once.
- `flow`: the largest amount that could travel from a position at the top to an input token when each layer's entry is
  the capacity of one edge; a bottleneck, not a product.

Plain attention patterns know nothing of the residual stream, so (mean_h A + I) / 2 stands in for it
(`residual_mixing`). Matrices that already hold the residual (`contribution_residual`, `contribution_norm`, `alti`)
get no I added: rollout of those is value-aware mixing, with `alti` the ALTI rollout (Ferrando 2022, arXiv 2203.04212).
Which of the two holds cannot be seen in the numbers, so the caller must say it: `holds_residual=`.

Rows are normalised first. A row without anything in it is undefined: it makes undefined (nan) every row that draws
on it, and no others.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow
from torch import Tensor

from attndiag.core.parts import lift
from attndiag.errors import ShapeError, UndefinedScoreWarning
from attndiag.shapes import PairScores, Pattern

# Max-flow takes 32-bit integers. 2^24 keeps float32's digits; 2^40 silently overflows to a flow of 0.
CAPACITY_SCALE = 2**24


@dataclass(frozen=True, eq=False)
class Flow:
    """Maximum flow from query positions at the top to input tokens.

    values : [batch, query, key_pos], mass in [0, 1], a lower bound; nan where undefined.
    error : [batch, query, key_pos]; the exact flow lies in [values, values + error]. Both are float64 whatever the
        layers are, since the bound would drown in float32.
    queries : the query positions of the second axis.
    """

    values: Tensor
    error: Tensor
    queries: tuple[int, ...]


def residual_mixing(pattern: Pattern) -> PairScores:
    """(mean_h A + I) / 2 with rows normalised: a pattern with a stand-in for the residual stream (Abnar 2020).

    A row without any weight becomes the identity row: nothing is written, the residual passes on.

    Parameters
    ----------
    pattern : [batch, head, pos, pos].

    Returns
    -------
    [batch, pos, pos], mass in [0, 1], rows sum to 1.
    """
    if pattern.ndim != 4:
        raise ShapeError(f"pattern has shape {tuple(pattern.shape)}; expected [batch, head, pos, pos]")
    _check_square("pattern", pattern)
    (mean,) = lift(pattern)
    mean = mean.mean(dim=1)
    mixed = (mean + torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)) / 2
    return mixed / mixed.sum(dim=-1, keepdim=True)


def rollout(layers: Sequence[Tensor], *, holds_residual: bool) -> PairScores:
    """M_L ... M_1: the share of each input token in each position after the last layer (Abnar 2020, arXiv 2005.00928).

    Parameters
    ----------
    layers : from the first layer to the last. With `holds_residual=False` plain patterns [batch, head, pos, pos];
        with `holds_residual=True` non-negative matrices [batch, pos, pos], normalised or not.
    holds_residual : whether the matrices already count the residual stream. No default.

    Returns
    -------
    [batch, pos, pos], mass in [0, 1], rows sum to 1; nan with an `UndefinedScoreWarning` where a row is undefined.

    Raises
    ------
    ShapeError : matrices are not square or differ in shape (behind a cache the earlier queries are missing: run the
        whole sequence at once).
    ValueError : a negative entry; signed scores have no rollout.
    """
    matrices, undefined = _row_shares(layers, holds_residual)
    total = matrices[0]
    for matrix in matrices[1:]:
        total = matrix @ total
    lost = _spread(matrices, undefined)
    _warn_undefined("rollout", lost)
    return total.masked_fill(lost[..., None], torch.nan)


def alti_rollout(layers: Sequence[Tensor]) -> PairScores:
    """Value-aware mixing across layers: the rollout of ALTI matrices, which hold the residual (arXiv 2203.04212).

    Parameters
    ----------
    layers : `alti` scores [batch, pos, pos] from the first layer to the last, raw or as shares.

    Returns
    -------
    [batch, pos, pos] as from `rollout`.
    """
    return rollout(layers, holds_residual=True)


def flow(layers: Sequence[Tensor], *, holds_residual: bool, queries: Sequence[int] | None = None) -> Flow:
    """Maximum flow from each query position, through the layers, to each input token (Abnar 2020, arXiv 2005.00928).

    The graph has one node for each position and level; entry (i, j) of layer l is the capacity of the edge from
    position i above the layer to position j below it. Capacities are scaled by 2^24 and rounded **down** to integers,
    so that the flow found is possible in the real graph; the cut that stops it, measured with the real capacities,
    bounds the exact flow from above. Both are returned.

    Parameters
    ----------
    layers, holds_residual : as in `rollout`.
    queries : positions at the top to start from; None: all of them. One max-flow for each pair of query and token:
        the cost grows with layers * pos^2 edges a pair.

    Returns
    -------
    `Flow`.

    Raises
    ------
    ShapeError, ValueError : as in `rollout`.
    """
    matrices, undefined = _row_shares(layers, holds_residual)
    n_batch, n_pos = matrices[0].shape[:2]
    chosen = tuple(range(n_pos)) if queries is None else tuple(queries)
    if any(not 0 <= query < n_pos for query in chosen):
        raise ShapeError(f"queries {chosen} leave the {n_pos} positions")
    lost = _spread(matrices, undefined)[:, list(chosen)]
    _warn_undefined("flow", lost)
    values = np.full((n_batch, len(chosen), n_pos), np.nan)
    error = np.full_like(values, np.nan)
    for row in range(n_batch):
        graph = _layered_graph([matrix[row].detach().double().cpu().numpy() for matrix in matrices])
        whole = np.floor(graph.data * CAPACITY_SCALE).astype(np.int32)
        integer = csr_array((whole, graph.indices, graph.indptr), shape=graph.shape)
        for column, query in enumerate(chosen):
            if not lost[row, column]:
                top = len(matrices) * n_pos + query
                found = [_bounded_flow(graph, integer, top, token) for token in range(n_pos)]
                values[row, column], error[row, column] = np.transpose(found)
    device = matrices[0].device
    return Flow(torch.from_numpy(values).to(device), torch.from_numpy(error).to(device), chosen)


def _row_shares(layers: Sequence[Tensor], holds_residual: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Row-normalised matrices [batch, pos, pos], and for each which rows are undefined (left at zero)."""
    if not layers:
        raise ValueError("no layers given; expected at least one matrix")
    for index, layer in enumerate(layers):
        _check_square(f"layer {index}", layer)
        if layer.shape != layers[0].shape:
            raise ShapeError(f"layer {index} {tuple(layer.shape)} and layer 0 {tuple(layers[0].shape)} differ in shape")
        if (layer < 0).any():
            raise ValueError(f"layer {index} has negative entries; only non-negative matrices can be put together")
    expected = 3 if holds_residual else 4
    if layers[0].ndim != expected:
        raise ShapeError(
            f"layers have shape {tuple(layers[0].shape)}; holds_residual={holds_residual} expects "
            f"{'[batch, pos, pos]' if holds_residual else '[batch, head, pos, pos] softmax patterns'}"
        )
    matrices = list(lift(*(layers if holds_residual else [residual_mixing(layer) for layer in layers])))
    undefined: list[Tensor] = []
    for index, matrix in enumerate(matrices):
        total = matrix.sum(dim=-1, keepdim=True)
        # nan comes from an earlier normalisation of an all-zero row
        empty = (total == 0) | total.isnan()
        matrices[index] = (matrix / total.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)
        undefined.append(empty[..., 0])
    return matrices, undefined


def _spread(matrices: Sequence[Tensor], undefined: Sequence[Tensor]) -> Tensor:
    """Rows at the top that are undefined or draw on an undefined row below, [batch, pos]."""
    lost = torch.zeros_like(undefined[0])
    for matrix, here in zip(matrices, undefined, strict=True):
        lost = here | ((matrix > 0) & lost[:, None, :]).any(dim=-1)
    return lost


def _warn_undefined(name: str, lost: Tensor) -> None:
    if lost.any():
        warnings.warn(
            f"{name} is undefined for {int(lost.sum())} of {lost.numel()} query rows, which draw on an all-zero row "
            "of some layer; they come back as nan",
            UndefinedScoreWarning,
            stacklevel=3,
        )


def _check_square(name: str, matrix: Tensor) -> None:
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ShapeError(
            f"{name} has shape {tuple(matrix.shape)}; layers can be put together only where queries and keys are the "
            "same positions (square). Behind a cache, run the whole sequence at once"
        )


def _layered_graph(matrices: Sequence[np.ndarray]) -> csr_array:
    """Real capacities between nodes level * pos + position; level 0 holds the input tokens."""
    n_pos = matrices[0].shape[0]
    heads, tails, capacities = [], [], []
    for level, matrix in enumerate(matrices):
        above, below = np.nonzero(matrix)
        heads.append((level + 1) * n_pos + above)
        tails.append(level * n_pos + below)
        capacities.append(matrix[above, below])
    size = (len(matrices) + 1) * n_pos
    edges = (np.concatenate(heads), np.concatenate(tails))
    return csr_array((np.concatenate(capacities), edges), shape=(size, size))


def _bounded_flow(graph: csr_array, integer: csr_array, source: int, sink: int) -> tuple[float, float]:
    """(flow with capacities rounded down, distance to the real capacity of the cut that stops it)."""
    result = maximum_flow(integer, source, sink)
    left = csr_array(integer - result.flow)
    left.eliminate_zeros()
    reached = np.zeros(len(integer.indptr) - 1, dtype=bool)
    reached[np.asarray(breadth_first_order(left, source, return_predecessors=False))] = True
    value = result.flow_value / CAPACITY_SCALE
    edges = graph.tocoo()
    cut = edges.data[reached[edges.row] & ~reached[edges.col]].sum()
    return float(value), float(max(cut - value, 0.0))

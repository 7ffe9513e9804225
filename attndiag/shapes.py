"""Tensor shapes, named once.

Axis order is always `layer batch head query_pos key_pos`; queries are rows and keys are columns.
The aliases are jaxtyping annotations: documentation at run time, checked in the tests only.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attndiag.errors import ShapeError

Pattern = Float[Tensor, "batch head query_pos key_pos"]
Queries = Float[Tensor, "batch head query_pos d_head"]
Keys = Float[Tensor, "batch kv_head key_pos d_head"]
Values = Float[Tensor, "batch kv_head key_pos d_value"]
HeadOutputs = Float[Tensor, "batch query_pos head d_value"]
OutputWeights = Float[Tensor, "head d_value d_model"]
Residual = Float[Tensor, "batch query_pos d_model"]
PerQuery = Float[Tensor, "batch query_pos"]
PairScores = Float[Tensor, "batch query_pos key_pos"]
AllowedMask = Bool[Tensor, "batch head query_pos key_pos"]

AXES = ("layer", "batch", "head", "query_pos", "key_pos")


def check_rank(name: str, tensor: Tensor, axes: str) -> None:
    """Raise `ShapeError` unless `tensor` has one dimension for each word in `axes`."""
    words = axes.split()
    if tensor.ndim != len(words):
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; expected {len(words)} axes [{', '.join(words)}]")


def check_same_size(left: str, left_size: int, right: str, right_size: int) -> None:
    """Raise `ShapeError` unless two axis sizes that must agree do."""
    if left_size != right_size:
        raise ShapeError(f"{left} is {left_size} but {right} is {right_size}; they must be equal")


def group_size(n_heads: int, n_kv_heads: int) -> int:
    """Number of query heads that read one key/value head (1 for plain multi-head attention)."""
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ShapeError(f"{n_heads} query heads cannot share {n_kv_heads} key/value heads evenly")
    return n_heads // n_kv_heads


def expand_kv_heads(tensor: Tensor, n_heads: int) -> Tensor:
    """Repeat [batch, kv_head, ...] to [batch, head, ...]; query head h reads kv head `h // group_size`."""
    repeats = group_size(n_heads, tensor.shape[1])
    return tensor if repeats == 1 else torch.repeat_interleave(tensor, repeats, dim=1)


def check_broadcast(name: str, tensor: Tensor, shape: torch.Size) -> None:
    """Raise `ShapeError` unless `tensor` broadcasts to exactly `shape`."""
    # by hand: torch.broadcast_shapes costs half a millisecond, which every attention call would pay
    missing = len(shape) - tensor.ndim
    if missing < 0 or any(size not in (1, full) for size, full in zip(tensor.shape, shape[missing:], strict=True)):
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, which does not broadcast to {tuple(shape)}")

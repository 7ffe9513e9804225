"""Other patterns in the place of a real one: uniform, permuted, sharper or flatter; and how far apart two are.

A row keeps its mass r_i (1, or less where a sink takes some) and puts nothing on keys that the mask hides: only the
distribution of the mass over the visible keys changes.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attndiag.errors import ShapeError

Rows = Float[Tensor, "*rows key_pos"]
Visible = Bool[Tensor, "*rows key_pos"]


def jensen_shannon(one: Rows, two: Rows) -> Tensor:
    """Jensen-Shannon divergence of the rows' distributions, H((p + q) / 2) - (H(p) + H(q)) / 2.

    Rows are normalised first.

    Returns
    -------
    [*rows], nats, in [0, ln 2]; nan for rows without mass.

    Raises
    ------
    ShapeError : rows of different shapes.
    """
    if one.shape[-1] != two.shape[-1]:
        raise ShapeError(f"rows of {one.shape[-1]} keys cannot be compared with rows of {two.shape[-1]}")
    p, q = one / one.sum(-1, keepdim=True), two / two.sum(-1, keepdim=True)
    found = entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2
    return found.clamp(0.0, math.log(2))


def entropy(distribution: Rows) -> Tensor:
    """-sum p ln p of each row, nats; 0 ln 0 = 0, and empty keys have no part in the gradient."""
    safe = torch.where(distribution > 0, distribution, torch.ones_like(distribution))
    return -(distribution * safe.log()).sum(-1)


def uniform_rows(pattern: Rows, visible: Visible) -> Rows:
    """Each row's mass spread evenly over its visible keys; rows without a visible key stay empty."""
    count = visible.sum(-1, keepdim=True).clamp_min(1)
    return visible.to(pattern) * pattern.sum(-1, keepdim=True) / count


def permuted_rows(pattern: Rows, visible: Visible, draws: int, seed: int) -> Float[Tensor, "draw *rows key_pos"]:
    """The weights of each row dealt out anew among its visible keys, each row by itself.

    Returns
    -------
    [draw, *rows, key_pos]; the same seed gives the same permutations for the same shape.
    """
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(draws, *pattern.shape, generator=generator).to(pattern.device)
    hidden = ~visible.expand_as(pattern)
    # hidden keys sort to the end in both orders, so visible ranks are dealt to visible places
    places = keys.masked_fill(hidden, 2.0).argsort(-1)
    order = torch.arange(pattern.shape[-1], device=pattern.device).expand_as(pattern)
    ranks = torch.where(hidden, order + pattern.shape[-1], order).argsort(-1).expand_as(places)
    weights = pattern.expand_as(keys).gather(-1, ranks)
    return torch.zeros_like(weights).scatter(-1, places, weights)


def tempered_rows(pattern: Rows, temperature: float) -> Rows:
    """The softmax of the same scores divided by t: A^(1/t), scaled back to the row's mass. Zeros stay zeros.

    Raises
    ------
    ValueError : a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; expected a positive number")
    mass = pattern.sum(-1, keepdim=True)
    # by logarithms, so that small weights do not vanish before they are scaled back
    logs = torch.where(pattern > 0, pattern, torch.ones_like(pattern)).log() / temperature
    logs = logs.masked_fill(pattern <= 0, -torch.inf)
    scaled = torch.softmax(logs, dim=-1)
    return torch.where(mass > 0, scaled * mass, torch.zeros_like(pattern))

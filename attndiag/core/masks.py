"""Who may attend to whom.

One convention throughout: a mask is bool and **True means allowed**, shaped to broadcast to
[batch, head, query_pos, key_pos]. Masks combine by intersection (`intersect`). Frameworks disagree on the
convention (`nn.MultiheadAttention` reads True as forbidden, `F.scaled_dot_product_attention` as allowed), so
convert at the border: `to_additive` gives 0 where allowed and -inf where forbidden, which all of them read alike.

`offset` is the key position of query 0: 0 where queries and keys are the same tokens, n_keys - n_queries where a
key/value cache holds what came before.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from attndiag.core.attention import NEG_INF, forbidden_entries
from attndiag.errors import ShapeError
from attndiag.shapes import AllowedMask, check_rank


def causal_mask(n_queries: int, n_keys: int, *, offset: int = 0, device: torch.device | None = None) -> AllowedMask:
    """No look into the future: key j is allowed for query i where j <= i + offset, the diagonal included.

    Returns [1, 1, query_pos, key_pos].
    """
    return _distance(n_queries, n_keys, offset, device) >= 0


def window_mask(
    n_queries: int,
    n_keys: int,
    *,
    window: int,
    offset: int = 0,
    symmetric: bool = False,
    device: torch.device | None = None,
) -> AllowedMask:
    """Sliding window: key j is allowed for query i where (i + offset) - j < window.

    The window counts the query's own position, so `window=1` sees itself only. Alone it limits the past only:
    intersect it with `causal_mask`, or give `symmetric=True` for |i + offset - j| < window (encoders).

    Returns [1, 1, query_pos, key_pos].
    """
    if window < 1:
        raise ValueError(f"window is {window}; expected at least 1 (the position itself)")
    distance = _distance(n_queries, n_keys, offset, device)
    return (distance.abs() if symmetric else distance) < window


def chunk_mask(
    n_queries: int, n_keys: int, *, chunk: int, offset: int = 0, device: torch.device | None = None
) -> AllowedMask:
    """Chunked attention: both in the same run of `chunk` positions, counted from key 0.

    Returns [1, 1, query_pos, key_pos].
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; expected at least 1")
    query_chunk = (torch.arange(n_queries, device=device) + offset).div(chunk, rounding_mode="floor")
    key_chunk = torch.arange(n_keys, device=device).div(chunk, rounding_mode="floor")
    return (query_chunk[:, None] == key_chunk[None, :])[None, None]


def block_mask(query_blocks: Tensor, key_blocks: Tensor | None = None) -> AllowedMask:
    """Blocks by name: allowed where query and key carry the same block id (packed documents).

    Parameters
    ----------
    query_blocks : integer ids [batch, query_pos].
    key_blocks : integer ids [batch, key_pos]. None: the same as the queries'.

    Returns
    -------
    [batch, 1, query_pos, key_pos].
    """
    key_blocks = query_blocks if key_blocks is None else key_blocks
    check_rank("query_blocks", query_blocks, "batch query_pos")
    check_rank("key_blocks", key_blocks, "batch key_pos")
    if query_blocks.shape[0] != key_blocks.shape[0]:
        raise ShapeError(
            f"query_blocks {tuple(query_blocks.shape)} and key_blocks {tuple(key_blocks.shape)} must agree in batch"
        )
    return (query_blocks[:, :, None] == key_blocks[:, None, :])[:, None]


def graph_mask(
    edges: Iterable[tuple[int, int]],
    n_queries: int,
    n_keys: int,
    *,
    self_loops: bool,
    device: torch.device | None = None,
) -> AllowedMask:
    """Attention along the edges of a graph.

    Parameters
    ----------
    edges : pairs (query, key): the query may read the key. Directed; give both directions for an undirected graph.
    self_loops : whether every position may read itself. Stated by the caller, never added silently.

    Returns
    -------
    [1, 1, query_pos, key_pos].

    Raises
    ------
    ShapeError : an edge leaves the range of positions.
    """
    allowed = torch.zeros(n_queries, n_keys, dtype=torch.bool, device=device)
    for query, key in edges:
        if not (0 <= query < n_queries and 0 <= key < n_keys):
            raise ShapeError(f"edge ({query}, {key}) is outside {n_queries} queries and {n_keys} keys")
        allowed[query, key] = True
    if self_loops:
        allowed.fill_diagonal_(True)
    return allowed[None, None]


def padding_mask(real_tokens: Tensor) -> AllowedMask:
    """Keys that are tokens: `real_tokens` [batch, key_pos], True or 1 for a token, False or 0 for padding.

    Only keys are masked. Rows of padded **queries** stay defined and must be left out of every aggregate.

    Returns [batch, 1, 1, key_pos].
    """
    check_rank("real_tokens", real_tokens, "batch key_pos")
    if real_tokens.dtype != torch.bool:
        if not ((real_tokens == 0) | (real_tokens == 1)).all():
            raise ValueError("real_tokens holds values other than 0 and 1; an additive mask is not a padding mask")
        real_tokens = real_tokens.bool()
    return real_tokens[:, None, None, :]


def intersect(*masks: AllowedMask) -> AllowedMask:
    """Allowed where every mask allows. Broadcasts; raises `ShapeError` naming the shapes that do not fit."""
    if not masks:
        raise ValueError("intersect() needs at least one mask")
    combined = masks[0]
    for mask in masks:
        if mask.dtype != torch.bool:
            raise TypeError(f"a mask has dtype {mask.dtype}; expected bool (True = allowed), see from_additive")
        try:
            combined = combined & mask
        except RuntimeError as error:
            raise ShapeError(f"masks {tuple(combined.shape)} and {tuple(mask.shape)} do not broadcast") from error
    return combined


def to_additive(mask: AllowedMask, *, dtype: torch.dtype) -> Tensor:
    """0 where allowed, -inf where forbidden, in the given float dtype."""
    if mask.dtype != torch.bool:
        raise TypeError(f"mask has dtype {mask.dtype}; expected bool (True = allowed)")
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, NEG_INF)


def from_additive(mask: Tensor) -> AllowedMask:
    """True where an additive mask allows; -inf and `torch.finfo(dtype).min` both count as forbidden.

    Any other non-zero entry is a position bias, which a bool mask cannot hold: `ValueError`.
    """
    if not mask.is_floating_point():
        raise TypeError(f"mask has dtype {mask.dtype}; expected an additive float mask")
    forbidden = forbidden_entries(mask)
    if ((mask != 0) & ~forbidden).any():
        raise ValueError("the additive mask holds finite biases; pass it as position_bias instead")
    return ~forbidden


def fully_masked_rows(mask: AllowedMask) -> Tensor:
    """Query rows with no allowed key, [..., query_pos]: zero weights by definition, nan in every statistic."""
    return ~mask.any(dim=-1)


def _distance(n_queries: int, n_keys: int, offset: int, device: torch.device | None) -> Tensor:
    """(i + offset) - j, [1, 1, query_pos, key_pos]: how far in the past the key lies."""
    queries = torch.arange(n_queries, device=device) + offset
    return (queries[:, None] - torch.arange(n_keys, device=device)[None, :])[None, None]

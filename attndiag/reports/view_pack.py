"""Arrays for a page: integers of 16 bits in two planes of bytes, deflated, base64, within a budget.

A share x in [0, 1] is kept as round(65535 sqrt(x)): finest near 0, at most 1.6e-5 off. A signed number x with largest
size s is kept as sign(x) sqrt(|x| / s) in 32767 steps. The high bytes alone draw a picture (at most .004 off); the low
bytes, which hardly compress, follow for as many layers as the budget has room for.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attndiag.reports.html import BUDGET
from attndiag.reports.view_maps import LayerMaps

# of the budget, what arrays may take as text; the rest of the page needs some 200 kB, token texts of long prompts more
MAP_CHARACTERS = BUDGET - 2**19


@dataclass(frozen=True)
class Planes:
    """One array as text: high bytes, low bytes, and the scale of a signed one (0 for shares)."""

    high: str
    low: str
    scale: float = 0.0


def pack_shares(values: NDArray[np.floating]) -> Planes:
    """Shares in [0, 1]."""
    code = np.round(65535 * np.sqrt(np.clip(values, 0, 1))).astype(np.uint16)
    return Planes(text_of(code >> 8), text_of(code & 255))


def pack_signed(values: NDArray[np.floating]) -> Planes:
    """Signed numbers; nan becomes 0, which is hidden where no query reads a key."""
    known = np.nan_to_num(np.asarray(values, dtype=np.float64))
    scale = float(np.abs(known).max(initial=0.0))
    part = known / scale if scale else known
    code = (32768 + np.round(32767 * np.sign(part) * np.sqrt(np.abs(part)))).astype(np.uint16)
    return Planes(text_of(code >> 8), text_of(code & 255), scale)


def text_of(array: NDArray[Any]) -> str:
    """Bytes of an array, deflated and base64; wider integers than a byte lose nothing here since they hold bytes."""
    if array.dtype == np.uint16:
        array = array.astype(np.uint8)
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 6)).decode("ascii")


def pack_layers(
    layers: Sequence[LayerMaps], effects: Sequence[NDArray[np.floating] | None]
) -> tuple[list[dict[str, Any]], list[int], list[str]]:
    """Layers as they go into the page, which ones those are, and the labels of those kept in coarse steps.

    The layers with the largest difference between weight and contribution come first, pictures of all before the low
    bytes of any.
    """
    planes = [_planes(layer, effect) for layer, effect in zip(layers, effects, strict=True)]
    order = sorted(range(len(layers)), key=lambda index: -layers[index].difference)
    room = MAP_CHARACTERS
    kept: set[int] = set()
    for index in order:
        size = sum(len(one.high) for one in planes[index].values())
        if size <= room or not kept:
            kept.add(index)
            room -= size
    fine: set[int] = set()
    for index in (index for index in order if index in kept):
        size = sum(len(one.low) for one in planes[index].values())
        if size <= room:
            fine.add(index)
            room -= size
    there = sorted(kept)
    packed = [_packed(layers[i], planes[i], i in fine) for i in there]
    return packed, there, [layers[i].label for i in there if i not in fine]


def _planes(layer: LayerMaps, effect: NDArray[np.floating] | None) -> dict[str, Planes]:
    found = {"weight": pack_shares(layer.weight)}
    if layer.written is not None and layer.together is not None:
        found |= {"written": pack_shares(layer.written), "together": pack_shares(layer.together)}
    elif layer.written is not None:
        found["written"] = pack_shares(layer.written)
    if effect is not None:
        found["effect"] = pack_signed(effect)
    if layer.overview is not None:
        found["pooledWeight"] = pack_shares(layer.overview.weight)
        if layer.overview.written is not None:
            found["pooledWritten"] = pack_shares(layer.overview.written)
    return found


def _packed(layer: LayerMaps, planes: dict[str, Planes], fine: bool) -> dict[str, Any]:
    packed: dict[str, Any] = {
        "label": layer.label,
        "heads": int(layer.weight.shape[0]),
        "certified": layer.certified,
        "note": layer.note,
        "fine": fine,
        "scale": planes["effect"].scale if "effect" in planes else 0.0,
        # which pairs any head reads: the others are the future, or out of reach
        "seen": text_of(np.packbits((layer.weight > 0).any(axis=0).reshape(-1))),
        "maps": {name: [one.high, one.low] if fine else [one.high] for name, one in planes.items()},
    }
    for name, rows in (("rowWritten", layer.row_written), ("rowTogether", layer.row_together)):
        if rows is not None:
            packed[name] = text_of(np.ascontiguousarray(rows, dtype="<f4").view(np.uint8))
    if layer.overview is not None:
        packed["block"] = layer.overview.block
        packed["strongest"] = [
            [one.head, one.query, one.key, round(one.weight, 4), None if one.written is None else round(one.written, 4)]
            for one in layer.overview.strongest
        ]
    return packed

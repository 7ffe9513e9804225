"""How far links between two sequences are from the right ones (word alignment, Och and Ney 2003)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attndiag.errors import ShapeError

Links = NDArray[np.bool_]


def strongest_links(scores: NDArray[np.floating]) -> Links:
    """One link for each target: its source with the largest score.

    Parameters
    ----------
    scores : [..., target, source]. Rows that hold a nan get no link; of equal scores the first source is taken.

    Returns
    -------
    [..., target, source] boolean.
    """
    scores = np.asarray(scores, dtype=float)
    undefined = np.isnan(scores).any(axis=-1)
    best = np.where(undefined, 0, np.argmax(np.where(np.isnan(scores), -np.inf, scores), axis=-1))
    links = np.arange(scores.shape[-1]) == best[..., None]
    return links & ~undefined[..., None]


def alignment_error_rate(found: Links, sure: Links, possible: Links | None = None) -> NDArray[np.float64]:
    """AER = 1 - (|A and S| + |A and P|) / (|A| + |S|), over the last two axes.

    Parameters
    ----------
    found : A, [..., target, source] boolean.
    sure : S, the same shape; links that have to be there.
    possible : P, links that may be there; S is always part of it. None: S alone.

    Returns
    -------
    [...], in [0, 1], smaller is better; nan where neither A nor S holds a link. With one link a target in both, it is
    the share of targets that are linked wrongly.

    Raises
    ------
    ShapeError : the shapes differ.

    References
    ----------
    Och and Ney 2003, A systematic comparison of various statistical alignment models (Computational Linguistics 29),
    section 5.
    """
    found, sure = np.asarray(found, dtype=bool), np.asarray(sure, dtype=bool)
    allowed = sure if possible is None else np.asarray(possible, dtype=bool) | sure
    if not found.shape == sure.shape == allowed.shape or found.ndim < 2:
        raise ShapeError(
            f"found {found.shape}, sure {sure.shape} and possible {allowed.shape} links do not fit; expected one shape "
            "[..., target, source]"
        )
    axes = (-2, -1)
    hits = (found & sure).sum(axis=axes) + (found & allowed).sum(axis=axes)
    total = found.sum(axis=axes) + sure.sum(axis=axes)
    return np.where(total > 0, 1.0 - hits / np.maximum(total, 1), np.nan)

"""A switch that lets edits of a running model rest: reference quantities belong to the unedited model.

A target without an answer stands for the model's own top-1 *in the unperturbed run*, and a cosine target is compared
with an unperturbed embedding. Both may be asked for inside an edit, so the forward that fixes them pauses the edits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_paused: ContextVar[bool] = ContextVar("attndiag_edits_paused", default=False)


@contextmanager
def edits_paused() -> Iterator[None]:
    """Every active edit passes the model's own numbers on until the block is left."""
    token = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(token)


def are_edits_paused() -> bool:
    """True inside `edits_paused`."""
    return _paused.get()

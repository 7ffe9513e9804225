"""How much memory a run will need, said before it starts.

The estimate is for one prompt beyond the loaded weights: what the model itself holds for a block, and what the
measures of one attention call hold at a time (calls are analysed one after the other, nothing of them is kept).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attndiag.core.dispatch import available_bytes
from attndiag.core.parts import BLOCK_ELEMENTS
from attndiag.errors import InsufficientMemoryError
from attndiag.models.load import LoadedModel

# maps of [head, query, key] alive at once: pattern, head contribution and their float64 copies, shares, masks
_MAPS_FLOAT32, _MAPS_FLOAT64 = 6, 8
# queries whose scores a streaming block holds at once, with workspace
_STREAM_BLOCKS = 256
# share of the free memory that a run may take
USABLE = 0.9


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes, in parts.

    Parameters
    ----------
    weights : of the model, already there.
    forward : activations of one block and the logits.
    measures : what is held while one attention call is measured.
    available : free on the device; None where it cannot be told.
    n_tokens : length of the longest prompt, which the estimate is for.
    streamed : the measures form no maps, whether that was asked for or they would not have fitted.
    """

    weights: int
    forward: int
    measures: int
    available: int | None
    n_tokens: int
    streamed: bool = False

    @property
    def needed(self) -> int:
        """Bytes beyond the loaded weights."""
        return self.forward + self.measures

    @property
    def fits(self) -> bool:
        """False only where it is known not to."""
        return self.available is None or self.needed <= USABLE * self.available

    def __str__(self) -> str:
        free = "" if self.available is None else f" of {_gigabytes(self.available)} free"
        way = ", streamed" if self.streamed else ""
        return (
            f"about {_gigabytes(self.needed)}{free} for prompts of up to {self.n_tokens} tokens{way}, "
            f"beside {_gigabytes(self.weights)} of weights"
        )

    def require_fit(self, name: str) -> None:
        """Raise `InsufficientMemoryError` for a prompt that does not fit."""
        if not self.fits:
            raise InsufficientMemoryError(
                f"{name} has {self.n_tokens} tokens and needs about {_gigabytes(self.needed)}, but "
                f"{_gigabytes(self.available or 0)} are free; shorten the prompt, or free some memory"
            )


def map_bytes(heads: int, n_queries: int, n_keys: int) -> int:
    """Bytes of the [head, query, key] maps alive at once while one call is measured."""
    return heads * n_queries * n_keys * (4 * _MAPS_FLOAT32 + 8 * _MAPS_FLOAT64)


def estimate_memory(lm: LoadedModel, n_tokens: int, *, backend: str = "auto", rows: int = 128) -> MemoryEstimate:
    """What one prompt of `n_tokens` will need.

    Parameters
    ----------
    backend : `"streaming"` forms no maps; `"auto"` does not where they would not fit.
    rows : whole rows that a streamed call keeps.
    """
    weights = sum(weight.numel() * weight.element_size() for weight in lm.model.parameters())
    config = _text_config(lm.config)
    width = _number(config, "hidden_size", "d_model", "n_embd", default=1024)
    inner = _number(config, "intermediate_size", "d_ff", "n_inner", "ffn_dim", default=4 * width)
    heads = _number(config, "num_attention_heads", "n_head", "num_heads", default=16)
    vocabulary = _number(config, "vocab_size", default=0)
    size = next((weight.element_size() for weight in lm.model.parameters()), 4)
    # residual stream, q, k, v, attention output, gate and up projections, and a copy kept by the capture
    forward = n_tokens * (10 * width + 3 * inner) * size + n_tokens * vocabulary * size
    parts = 4 * (min(BLOCK_ELEMENTS, n_tokens**2 * width) + heads * n_tokens * width)
    maps = map_bytes(heads, n_tokens, n_tokens) + parts
    # factors [head², key], kept rows and their copies, blocks of scores, totals
    streamed = n_tokens * heads * (4 * heads + 4 * width // heads + rows * (4 + 8 * 5) + 4 * _STREAM_BLOCKS)
    available = available_bytes(torch.device(lm.device))
    fits = available is None or forward + maps <= USABLE * available
    streams = backend == "streaming" or (backend == "auto" and not fits)
    return MemoryEstimate(weights, forward, streamed if streams else maps, available, n_tokens, streams)


def _text_config(config: Any) -> Any:
    getter = getattr(config, "get_text_config", None)
    return getter() if callable(getter) else config


def _number(config: Any, *names: str, default: int) -> int:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), default)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"

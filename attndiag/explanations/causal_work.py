"""What exact effects will cost, said before the work begins: forwards and memory, and a refusal where it cannot fit.

Exact effects take one run for each edge or activation. The estimate counts those runs, adds them up in forwards of the
prompt itself (tokens times blocks, an upper bound: rows of a batch share the reading of the weights), and adds up what
the largest batch holds: activations of one block, keys and values of all blocks, logits, and the stored unedited run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from attndiag.core.dispatch import available_bytes
from attndiag.errors import InsufficientMemoryError
from attndiag.hooks.activations import layers_with
from attndiag.hooks.edit_kinds import Site, Stream
from attndiag.models.load import LoadedModel, as_prompts
from attndiag.prompts import Prompt

USABLE = 0.9
"""Share of the free memory that may be taken."""
LEEWAY = 1.5
"""Allocators and temporaries beyond the tensors that are counted."""


@dataclass(frozen=True)
class CausalWork:
    """Runs and bytes.

    Parameters
    ----------
    what : the unit of work: `"edges"` or `"patches"`.
    count : how many of them.
    forwards : the same in forwards of the prompt by tokens and blocks; an upper bound.
    needed : bytes beyond the loaded weights.
    available : free bytes on the device; None where it cannot be told.
    n_tokens : length of the prompt.
    cheaper : what to change where it does not fit.
    """

    what: str
    count: int
    forwards: float
    needed: int
    available: int | None
    n_tokens: int
    cheaper: str

    @property
    def fits(self) -> bool:
        """False only where it is known not to."""
        return self.available is None or self.needed <= USABLE * self.available

    def __str__(self) -> str:
        free = "" if self.available is None else f" of {_size(self.available)} free"
        return (
            f"{self.count:,} {self.what}, at most {self.forwards:,.0f} forwards of its {self.n_tokens} tokens, about "
            f"{_size(self.needed)}{free}"
        )

    def require_fit(self) -> None:
        """Raise `InsufficientMemoryError` where the largest batch does not fit."""
        if not self.fits:
            raise InsufficientMemoryError(
                f"{self.count:,} {self.what} of a prompt of {self.n_tokens} tokens need about {_size(self.needed)} at "
                f"a time, but {_size(self.available or 0)} are free; {self.cheaper}"
            )


def edge_work(
    lm: LoadedModel,
    prompt: Prompt | str,
    *,
    layers: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
    edges: Iterable[Sequence[int]] | None = None,
    grain: Literal["edge", "key", "head", "layer"] = "edge",
    batch_tokens: int = 2048,
    **_rest: Any,
) -> CausalWork:
    """Cost of `edge_effects` with these arguments; parameters that cost nothing are taken and left unread.

    Masks are not looked at: as many edges as a causal model without a window has.
    """
    sizes = _Sizes(lm)
    n = int(lm.encode(as_prompts(prompt)[0]).input_ids.shape[1])
    chosen = range(sizes.layers) if layers is None else sorted({int(layer) for layer in layers})
    starts: list[tuple[int, int, int]] = []  # layer, first position that changes, runs
    if edges is not None:
        starts = [(int(edge[0]), int(edge[2]), 1) for edge in edges]
    else:
        asked = range(n) if queries is None else sorted({int(query) % n for query in queries})
        for layer in chosen:
            if grain == "edge":
                starts += [(layer, query, sizes.heads * (query + 1)) for query in asked]
            elif grain == "key":
                starts += [(layer, key, sizes.heads) for key in range(n)]
            else:
                starts.append((layer, 0, sizes.heads if grain == "head" else 1))
    count = sum(runs for _, _, runs in starts)
    forwards = sum(runs * (sizes.layers - layer) * (n - start) for layer, start, runs in starts) / (sizes.layers * n)
    stored = n * sizes.layers * (sizes.width + 2 * sizes.kv_width) * sizes.item
    pattern = sizes.heads * n * n * 4
    # whole forwards lay out whole prompts; restarts the later positions, with keys and values of all of them
    shapes = {(min(runs, rows_of_batch(batch_tokens, n - start, n)) + 1, n - start) for _, start, runs in starts}
    shapes |= {(min(max((runs for *_, runs in starts), default=1), rows_of_batch(batch_tokens, n, n)) + 1, n)}
    largest = max(sizes.batch(rows, width, n, logits=1) for rows, width in shapes)
    needed = int(LEEWAY * (stored + pattern + largest))
    cheaper = "take a shorter prompt" if batch_tokens <= n else "give a smaller batch_tokens, or take a shorter prompt"
    return CausalWork("edges", count, forwards, needed, _free(lm), n, cheaper)


def patching_work(
    lm: LoadedModel,
    prompt: Prompt | str,
    *,
    site: Site,
    layers: Sequence[int] | None = None,
    stream: Stream = "self",
    batch_size: int = 16,
    **_rest: Any,
) -> CausalWork:
    """Cost of `activation_patching` with these arguments; parameters that cost nothing are taken and left unread."""
    sizes = _Sizes(lm)
    n = int(lm.encode(as_prompts(prompt)[0]).input_ids.shape[1])
    chosen = len(layers_with(lm.model, site, stream) if layers is None else set(layers))
    count = chosen * n * (sizes.heads if site == "head_out" else 1)
    kept = 2 * chosen * n * sizes.width * sizes.item
    needed = int(LEEWAY * (kept + sizes.batch(batch_size + 1, n, n, logits=n)))
    cheaper = "take a shorter prompt" if batch_size <= 1 else "give a smaller batch_size, or take a shorter prompt"
    return CausalWork("patches", count, count * (1 + 1 / batch_size), needed, _free(lm), n, cheaper)


def rows_of_batch(batch_tokens: int, width: int, n: int) -> int:
    """Edited rows of one batch: `width` tokens each, and keys and values of all n are laid out for every row."""
    return max(min(batch_tokens // max(width, 1), 16 * batch_tokens // n) - 1, 1)


class _Sizes:
    """The sizes of a model that decide what a batch holds."""

    def __init__(self, lm: LoadedModel) -> None:
        config: Any = lm.config
        getter = getattr(config, "get_text_config", None)
        config = getter() if callable(getter) else config

        def number(*names: str, default: int) -> int:
            values = (getattr(config, name, None) for name in names)
            return next((value for value in values if isinstance(value, int)), default)

        self.width = number("hidden_size", "d_model", "n_embd", "dim", default=1024)
        self.inner = number("intermediate_size", "d_ff", "n_inner", "ffn_dim", "hidden_dim", default=4 * self.width)
        self.heads = number("num_attention_heads", "n_head", "n_heads", "num_heads", default=16)
        kv_heads = number("num_key_value_heads", default=self.heads)
        self.kv_width = kv_heads * number("head_dim", default=self.width // self.heads)
        self.layers = number("num_hidden_layers", "n_layer", "n_layers", "num_layers", default=24)
        self.vocabulary = number("vocab_size", default=0)
        self.item = next((weight.element_size() for weight in lm.model.parameters()), 4)
        self.eager = lm.info.attn_implementation == "eager"

    def batch(self, rows: int, width: int, n: int, *, logits: int) -> int:
        """Bytes of a forward of `rows` times `width` tokens behind a cache, with logits at some positions."""
        block = rows * width * (10 * self.width + 3 * self.inner) * self.item
        cache = rows * n * 2 * self.kv_width * self.layers * self.item
        weights = rows * self.heads * width * n * 4 if self.eager else 0
        return block + cache + weights + rows * logits * self.vocabulary * self.item


def _free(lm: LoadedModel) -> int | None:
    return available_bytes(torch.device(lm.device))


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"

"""Many edits at once: every row of a batch of copies of one prompt loses its own edges at one attention call.

A variant names one head, query and key, each of which may be "all": a single edge, a key for every query, a whole head,
a whole layer. Because the copies are equal until the edit, pattern and values are computed once, from the first row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attndiag.errors import ShapeError, UnsupportedModelError
from attndiag.hooks.live import LiveCall, TokenFrame
from attndiag.hooks.routed import RoutedArguments, as_heads, listening
from attndiag.hooks.structure import head_count, modules_to_trace
from attndiag.hooks.traced import TracedSoftmax, watching_softmax

Mode = Literal["remove", "renormalize"]
ALL = -1
NONE = -2


@dataclass(frozen=True, eq=False)
class Variants:
    """One edit for each row: [row] tensors of heads, queries and keys; `ALL` for every one, head `NONE` for no edit.

    `first_query` is the position of the first query of the call, so that queries and keys count from the start of
    the prompt.
    """

    heads: Tensor
    queries: Tensor
    keys: Tensor
    mode: Mode = "remove"
    first_query: int = 0

    def __len__(self) -> int:
        return len(self.heads)

    def applied_to(self, call: LiveCall) -> Tensor:
        """Head outputs [row, query_pos, head, d_value] after each row lost its edges."""
        n_queries = call.z.shape[1]
        one = LiveCall(
            call.module, call.module_name, call.layer, call.stream, call.v[:1], call.z[:1], call.queries, call.keys,
            _first_row(call.source),
        )  # fmt: skip
        if bool(((self.heads < NONE) | (self.heads >= call.n_heads)).any()):
            raise ShapeError(f"{call.module_name} has heads 0 to {call.n_heads - 1}, got {self.heads.tolist()}")
        z = call.z.clone()
        everything = (self.heads == ALL) & (self.queries == ALL) & (self.keys == ALL)
        z[everything] = 0  # a row without any key writes nothing, in both modes
        # one entry for each row and head that loses something
        named = torch.arange(call.n_heads, device=z.device) == self.heads[:, None]
        named |= (self.heads[:, None] == ALL) & ~everything[:, None]
        single, heads = named.nonzero(as_tuple=True)
        if len(single) == 0:
            return z
        needed, place = heads.unique(return_inverse=True)
        wanted = self.queries[single]
        columns = torch.arange(n_queries, device=z.device)
        if bool((wanted != ALL).all()):
            columns = (wanted - self.first_query).unique()
        rows = one.rows(needed, columns)
        n_keys = rows.pattern.shape[-1]
        # a sliding cache holds the last keys only
        keys = torch.arange(n_keys, device=z.device)
        if call.stream != "cross":
            keys = keys + max(self.first_query + n_queries - n_keys, 0)
        removed = (wanted[:, None, None] == ALL) | (
            wanted[:, None, None] == (columns + self.first_query)[None, :, None]
        )
        removed = removed & ((self.keys[single, None, None] == ALL) | (self.keys[single, None, None] == keys))
        pattern = rows.pattern[0, place]
        if self.mode == "remove":
            change = -pattern.masked_fill(~removed, 0.0)
        else:
            scores = None if rows.scores is None else rows.scores[0, place][None]
            sinks = rows.sinks
            if sinks is not None:
                sinks = sinks[place] if sinks.ndim == 1 else sinks[:1, place]
            chosen = type(rows)(pattern[None], rows.sink_mass[:1, place], scores, sinks)
            change = chosen.without(removed[None])[0] - pattern
        values = one.values_of(needed)[0, place].to(change.dtype)
        moved = z[single[:, None], columns[None, :], heads[:, None]] + (change @ values).to(z.dtype)
        z[single[:, None], columns[None, :], heads[:, None]] = moved
        return z


def _first_row(source: RoutedArguments | TracedSoftmax) -> RoutedArguments | TracedSoftmax:
    """The same call for the first row of the batch."""

    def first(tensor: Any) -> Any:
        return tensor[:1] if isinstance(tensor, Tensor) and tensor.ndim > 2 else tensor

    if isinstance(source, TracedSoftmax):
        return TracedSoftmax(
            v=source.v[:1], z=source.z[:1], kernel=source.kernel, pattern=first(source.pattern), q=first(source.q),
            k=first(source.k), scale=source.scale, mask=first(source.mask), is_causal=source.is_causal,
        )  # fmt: skip
    options = {
        name: value[:1] if isinstance(value, Tensor) and value.ndim == 4 else value
        for name, value in source.options.items()
    }
    return RoutedArguments(
        source.module, source.q[:1], source.k[:1], source.v[:1], first(source.mask), options, source.function
    )


class _VariantListener:
    """Applies the current variants at one attention module."""

    def __init__(self, module: nn.Module, name: str, stream: str) -> None:
        self.modules = {id(module)}
        self.variants: Variants | None = None
        self.seen = 0
        self._module, self._name, self._stream = module, name, stream

    def on_routed(self, arguments: RoutedArguments, output: Any) -> Any:
        """The routed result with every row's edges gone."""
        if self.variants is None:
            return output
        z = output[0] if isinstance(output, tuple | list) else output
        heads = as_heads(z, arguments.q.shape[1], arguments.v.shape[-1], arguments.q.shape[2])
        if heads is None:
            raise UnsupportedModelError(f"{self._name}: its attention function returns {tuple(z.shape)}")
        edited = self._edited(arguments.v, heads, arguments).reshape(z.shape)
        return (edited, *output[1:]) if isinstance(output, tuple | list) else edited

    def on_softmax(self, seen: TracedSoftmax) -> Tensor | None:
        """The watched product with every row's edges gone."""
        return None if self.variants is None else self._edited(seen.v, seen.z, seen)

    def _edited(self, v: Tensor, z: Tensor, source: RoutedArguments | TracedSoftmax) -> Tensor:
        variants = self.variants
        if variants is None or z.shape[0] != len(variants):
            raise UnsupportedModelError(f"{self._name} was called for {z.shape[0]} rows, the variants are other ones")
        self.seen += 1
        if self.seen > 1:
            raise UnsupportedModelError(f"{self._name} makes several attention calls in one forward")
        # copies of one prompt: no padding, and the variants count positions themselves
        frame = TokenFrame(None)
        return variants.applied_to(LiveCall(self._module, self._name, None, self._stream, v, z, frame, frame, source))


@contextmanager
def losing_edges(model: nn.Module, name: str, stream: str) -> Iterator[_VariantListener]:
    """Have attention module `name` apply `listener.variants`; set it (and `seen = 0`) before each forward."""
    module = model.get_submodule(name)
    listener = _VariantListener(module, name, stream)
    handles: list[Any] = []
    open_watches: list[ExitStack] = []

    def start(module: nn.Module, _args: tuple, _kwargs: dict) -> None:
        stack = ExitStack()
        stack.enter_context(watching_softmax(listener.on_softmax, head_count(module)))
        open_watches.append(stack)

    def stop(_module: nn.Module, _args: tuple, _output: Any) -> None:
        if open_watches:
            open_watches.pop().close()

    try:
        if name in modules_to_trace(dict(model.named_modules())):
            handles.append(module.register_forward_pre_hook(start, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(stop, always_call=True))
        with listening(listener, first=True):
            yield listener
    finally:
        for handle in handles:
            handle.remove()
        while open_watches:
            open_watches.pop().close()

"""Run edited positions, and a few later ones, apart from the rest: some tokens a row, from the row's own layer on.

After an edit of query i at layer l, position i of a causal model depends on nothing but itself and the unedited
positions before it. So one forward over rows of one token each gives the *exact* later residual stream, keys and values
of every edited position, for edits of any layers and positions at once. A later position that is taken along (the one
that the target is read at, say) feels the changed keys and values of the row's earlier tokens through all layers, and
the unedited ones of every position that is not taken along. What those others make of the change is not run here;
`SomePositions.changes` hands keys and values out layer by layer.

Whether such rows reproduce the unedited run is measured on unedited rows among them (`error`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from attndiag.errors import UnsupportedModelError
from attndiag.hooks.live import LiveCall, TokenFrame
from attndiag.hooks.restart import Restart
from attndiag.hooks.routed import RoutedArguments, as_heads, listening
from attndiag.hooks.structure import first_tensor, stubbed
from attndiag.hooks.variants import NONE, Mode
from attndiag.models.access import accepts


@dataclass(frozen=True, eq=False)
class Change:
    """Keys and values of the tokens of some rows at one layer.

    `rows` [row] indexes the edges as they were given; k, v: [row, token, kv_head, d_head].
    """

    layer: int
    rows: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True, eq=False)
class SomePositions:
    """Changes by layer, final logits [row, token, vocabulary] of the tokens asked for, the error of unedited rows."""

    changes: list[Change]
    logits: Tensor
    error: float


class _SharedPrefix(DynamicCache):
    """Every row sees the unedited keys and values of the whole prompt, then its own; a mask sorts them out."""

    def __init__(self, config: Any, kept: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(config=config)
        self._kept = kept

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any) -> Any:
        """Prefix and own, nothing stored."""
        rows = key_states.shape[0]
        k, v = self._kept[layer_idx]
        return (
            torch.cat([k.expand(rows, -1, -1, -1), key_states], dim=2),
            torch.cat([v.expand(rows, -1, -1, -1), value_states], dim=2),
        )

    def get_seq_length(self, *_args: Any, **_kwargs: Any) -> int:
        """Length of the shared prefix."""
        return self._kept[0][0].shape[2]


def run_some_positions(restart: Restart, edges: Tensor, positions: Tensor, mode: Mode, read: Tensor) -> SomePositions:
    """Edit every row's own edge and follow its tokens through the model.

    Parameters
    ----------
    restart : the stored unedited run.
    edges : [row, 4] layer, head, query, key.
    positions : [row, token], ascending; the first is the edge's query.
    read : [row, token] boolean, where final logits are wanted; equally many in each row.

    Raises
    ------
    UnsupportedModelError : the model takes no positions or no four-dimensional masks.
    """
    model = restart.model
    if not accepts(model, "position_ids"):
        raise UnsupportedModelError(f"{type(model).__name__} takes no position ids, so positions cannot be run alone")
    device, n, width = edges.device, restart.length, positions.shape[1]
    # unedited rows, followed from the first layer on, certify the rest
    starts = sorted({0, (n - width) // 2, n - width})
    own = torch.tensor([[start + token for token in range(width)] for start in starts], device=device)
    checks = torch.tensor([[0, NONE, start, 0] for start in starts], device=device)
    table, places = torch.cat([checks, edges]), torch.cat([own, positions])
    order = table[:, 0].argsort(stable=True)
    back = order - len(starts)  # row of the given edges, negative for the unedited ones
    table, places = table[order], places[order]
    watch = _Watch(restart, table, places, mode)
    given = {
        "input_ids": restart.ids[0, places],
        "position_ids": places,
        "attention_mask": _mask(places, n, restart.dtype),
        "use_cache": True,
        restart.cache_argument: _SharedPrefix(restart.config, restart.kept),
    }
    wanted = torch.zeros_like(places, dtype=torch.bool)
    wanted[back >= 0] = read[back[back >= 0]]
    with watch.attached(wanted):
        logits = restart.run(given).logits[0]
    per_row = int(read[0].sum()) if len(read) else 0
    found = torch.empty(len(edges), per_row, logits.shape[-1], dtype=logits.dtype, device=device)
    found[back[back >= 0]] = logits.unflatten(0, (len(edges), per_row))
    changes, error = [], 0.0
    for layer, rows, k, v in watch.seen:
        given_rows = back[rows]
        unedited = given_rows < 0
        error = max(error, _error(restart.kept[layer], k[unedited], v[unedited], places[rows][unedited]))
        changes.append(Change(layer, given_rows[~unedited], k[~unedited], v[~unedited]))
    return SomePositions(changes, found, error)


def _mask(places: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """[row, 1, token, n + token]: unedited keys of positions before, but for those that the row has itself; its own."""
    keys = torch.arange(n, device=places.device)
    taken = (places[:, :, None] == keys).any(1)
    prefix = (keys < places[:, :, None]) & ~taken[:, None]
    own = places[:, None, :] <= places[:, :, None]
    blocked = ~torch.cat([prefix, own], dim=2)
    return torch.zeros(blocked.shape, dtype=dtype, device=places.device).masked_fill(blocked, torch.finfo(dtype).min)[
        :, None
    ]


def _error(kept: tuple[Tensor, Tensor], k: Tensor, v: Tensor, places: Tensor) -> float:
    """Largest difference of unedited rows from the stored keys and values, relative to the largest of those."""
    worst = 0.0
    for stored, own in ((kept[0], k), (kept[1], v)):
        if own.numel():
            wanted = stored[0][:, places].permute(1, 2, 0, 3)
            worst = max(worst, float((own - wanted).abs().max() / stored.abs().max()))
    return worst


class _Watch:
    """Wraps the blocks so that a row starts at its own layer, edits it there, and keeps its keys and values later."""

    def __init__(self, restart: Restart, table: Tensor, places: Tensor, mode: Mode) -> None:
        self.table, self.places = table, places
        self.seen: list[tuple[int, Tensor, Tensor, Tensor]] = []
        self._restart, self._mode = restart, mode
        self.modules = {id(restart.model.get_submodule(site.attention)) for site in restart.sites.values()}
        self._layers = {id(restart.model.get_submodule(s.attention)): layer for layer, s in restart.sites.items()}

    def active(self, layer: int) -> int:
        """Rows that have started by this layer: they come first."""
        return int((self.table[:, 0] <= layer).sum())

    @contextmanager
    def attached(self, wanted: Tensor) -> Iterator[None]:
        """Blocks wrapped, attention listened to, logits of the wanted tokens only, [1, token]; undone afterwards."""
        forwards = [(block, self._wrapped(layer, block.forward)) for layer, block in enumerate(self._restart.blocks)]
        handle = self._restart.head.register_forward_pre_hook(lambda _, args: (args[0][wanted][None], *args[1:]))
        try:
            with stubbed(forwards), listening(self, first=True):
                yield
        finally:
            handle.remove()

    def _wrapped(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        total = len(self.table)

        def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            before, active = self.active(layer - 1), self.active(layer)
            if active == 0:
                return self._restart.shaped(layer, hidden)
            stream = hidden.clone()
            if active > before:
                stream[before:active] = self._restart.entering(layer)[0, self.places[before:active]]
            few, named = _sliced((args, kwargs), total, active)
            output = first_tensor(forward(stream[:active], *few, **named))
            if output is None:
                raise UnsupportedModelError("its blocks return no residual stream")
            return self._restart.shaped(layer, torch.cat([output, stream[active:]]))

        return run

    def on_routed(self, arguments: RoutedArguments, output: Any) -> Any:
        """Edit the rows that start at this layer; keep the own keys and values of those that started earlier."""
        layer = self._layers[id(arguments.module)]
        before, active = self.active(layer - 1), self.active(layer)
        z = output[0] if isinstance(output, tuple | list) else output
        heads = as_heads(z, arguments.q.shape[1], arguments.v.shape[-1], arguments.q.shape[2])
        width = self.places.shape[1]
        if heads is None or heads.shape[:2] != (active, width):
            raise UnsupportedModelError(f"layer {layer} was not run for {width} tokens a row")
        # at its own layer a row's keys and values are still the unedited ones
        rows = torch.arange(before, device=z.device)
        k, v = (tensor[:before, :, -width:].detach().transpose(1, 2) for tensor in (arguments.k, arguments.v))
        self.seen.append((layer, rows, k, v))
        starting = torch.arange(before, active, device=z.device)[self.table[before:active, 1] != NONE]
        if len(starting) == 0:
            return output
        edited = heads.clone()
        edited[starting, 0, self.table[starting, 1]] += self._change(layer, arguments, heads, starting)
        edited = edited.reshape(z.shape)
        return (edited, *output[1:]) if isinstance(output, tuple | list) else edited

    def _change(self, layer: int, arguments: RoutedArguments, heads: Tensor, rows: Tensor) -> Tensor:
        """[row, d_value]: what the head output gains when the row's own edge goes."""
        options = {
            name: value[rows] if isinstance(value, Tensor) and value.ndim == 4 and len(value) > 1 else value
            for name, value in arguments.options.items()
        }
        mask = arguments.mask
        mask = mask[rows] if isinstance(mask, Tensor) and mask.shape[0] > 1 else mask
        few = RoutedArguments(
            arguments.module, arguments.q[rows], arguments.k[rows], arguments.v[rows], mask, options, arguments.function
        )
        frame = TokenFrame(None)
        call = LiveCall(arguments.module, str(layer), layer, "self", few.v, heads[rows], frame, frame, few)
        every = torch.arange(call.n_heads, device=heads.device)
        found = call.rows(every, torch.zeros(1, dtype=torch.long, device=heads.device))
        picked = torch.arange(len(rows), device=heads.device)
        head, query, key = (self.table[rows, column] for column in (1, 2, 3))
        place = torch.where(key == query, torch.full_like(key, self._restart.length), key)
        removed = torch.zeros_like(found.pattern, dtype=torch.bool)
        removed[picked, head, 0, place] = True
        after = found.pattern.masked_fill(removed, 0.0) if self._mode == "remove" else found.without(removed)
        change = (after - found.pattern)[picked, head, 0]
        values = call.values_of(every)[picked, head].to(change.dtype)
        return (change[:, None] @ values)[:, 0].to(heads.dtype)


def _sliced(value: Any, total: int, active: int) -> Any:
    """Every tensor with one entry for each row, cut to the active rows."""
    if isinstance(value, Tensor):
        return value[:active] if value.ndim > 0 and value.shape[0] == total and total > 1 else value
    if isinstance(value, tuple):
        return tuple(_sliced(part, total, active) for part in value)
    if isinstance(value, dict):
        return {name: _sliced(part, total, active) for name, part in value.items()}
    return value

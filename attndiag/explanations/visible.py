"""Which keys can each query read? Asked of the kernel itself, by intervention.

While the model runs, every attention function that it calls is called once more with the queries set to zero (so that
no weight is lost by underflow), the keys as they are and the values replaced by unit vectors: what comes out is the
weights, and a key is visible where its weight is not exactly zero. Neither a mask nor a configuration is read.

Modules that compute their softmax themselves cannot be called again; there the weights of the forward are used
(`source = "weights"`), where an underflow would look like a mask.

`shape_of` then says what the visible keys look like: causal or not, a window and its width, chunks, anything else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attndiag.hooks.record import AttentionCall
from attndiag.hooks.routed import RoutedArguments, as_heads, listening


@dataclass(frozen=True, eq=False)
class Visible:
    """Who reads whom in one attention call.

    Attributes
    ----------
    module_name, layer, kind, window : of the call; `window` is the width that the kernel was told, None without one.
    keys : [batch, head, query_pos, key_pos] boolean.
    source : `"kernel"` (the attention function was asked) or `"weights"` (weights of the forward above zero).
    query_valid : [batch, query_pos] boolean, False for padding; None where nothing is padded.
    """

    module_name: str
    layer: int | None
    kind: str
    window: int | None
    keys: Tensor
    source: str
    query_valid: Tensor | None


@dataclass(eq=False)
class KernelProbe:
    """Listener that asks every attention function which keys it let through; results by module, in call order."""

    modules: dict[int, str]
    found: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def on_routed(self, arguments: RoutedArguments, output: Any) -> Any:
        """Ask, and hand the output on untouched."""
        name = self.modules[id(arguments.module)]
        if arguments.q.ndim == 4 and arguments.v.ndim == 4:
            self.found[name].append(keys_let_through(arguments))
        return output


@contextmanager
def asking_kernels(model: nn.Module) -> Iterator[KernelProbe]:
    """Within the block every routed attention call of `model` is asked for its visible keys."""
    probe = KernelProbe({id(module): name for name, module in model.named_modules()})
    with listening(probe):
        yield probe


def keys_let_through(arguments: RoutedArguments) -> Tensor:
    """[batch, head, query_pos, key_pos] boolean: keys whose value reaches the output of this attention function."""
    q, v = arguments.q, arguments.v
    n_keys, width = v.shape[2], v.shape[3]
    blocks = []
    for start in range(0, n_keys, width):
        stop = min(start + width, n_keys)
        identity = torch.zeros_like(v)
        identity[:, :, torch.arange(start, stop), torch.arange(stop - start)] = 1.0
        result = arguments.run(q=torch.zeros_like(q), v=identity)
        z = as_heads(result[0], q.shape[1], width, q.shape[2])
        if z is None:
            # not a plain attention function; the capture refuses it too
            return torch.zeros(q.shape[0], q.shape[1], q.shape[2], n_keys, dtype=torch.bool, device=q.device)
        blocks.append(z[..., : stop - start] != 0)
    return torch.cat(blocks, dim=-1).transpose(1, 2)


def visible_of(calls: list[AttentionCall], probe: KernelProbe) -> list[Visible]:
    """Visible keys of captured calls: the kernel's answer where it was asked, else the weights of the forward."""
    found = []
    for call in calls:
        asked = probe.found.get(call.module_name, [])
        if call.call_index < len(asked):
            keys, source = asked[call.call_index], "kernel"
        else:
            keys, source = call.pattern != 0, "weights"
        dead = call.fully_masked
        if dead is not None:
            # a row without a key holds whatever the framework's convention is
            keys = keys & ~dead[..., None]
        found.append(
            Visible(call.module_name, call.layer, call.kind, call.window, keys.cpu(), source, _cpu(call.query_valid))
        )
    return found


@dataclass(frozen=True)
class MaskShape:
    """What the visible keys of one call look like.

    Attributes
    ----------
    causal : no query reads a key after its own position.
    future_reach : how many positions ahead the farthest visible key lies (0 for causal calls).
    past_reach : how many positions back the farthest visible key lies.
    window : keys that the query with the most sees in the past, itself included, when that is less than all; else None.
    chunk : length of the chunks where queries see their own chunk only; None otherwise.
    diagonal : every query that reads anything reads its own position.
    hidden_heads : heads in which no query but the first reads its own position.
    """

    causal: bool
    future_reach: int
    past_reach: int
    window: int | None
    chunk: int | None
    diagonal: bool
    hidden_heads: tuple[int, ...]

    def describe(self) -> str:
        """In one or two words."""
        if self.chunk is not None:
            return f"chunks of {self.chunk}"
        few = 0 < self.future_reach < self.past_reach and self.window is None
        base = "causal" if self.causal else f"{self.future_reach} ahead" if few else "bidirectional"
        return base if self.window is None else f"{base}, window {self.window}"


def shape_of(visible: Visible) -> MaskShape:
    """Describe the visible keys of a self-attention call; padded queries are left out."""
    keys = visible.keys
    n_queries, n_keys = keys.shape[-2:]
    offset = n_keys - n_queries
    valid = torch.ones(keys.shape[0], n_queries, dtype=torch.bool)
    if visible.query_valid is not None:
        valid = visible.query_valid.bool()
    distance = (torch.arange(n_queries)[:, None] + offset) - torch.arange(n_keys)[None, :]
    seen = (keys & valid[:, None, :, None]).any(1).any(0)  # [query_pos, key_pos], any batch row, any head
    ahead = int((-distance[seen]).max().clamp_min(0)) if bool(seen.any()) else 0
    back = int(distance[seen].max().clamp_min(0)) if bool(seen.any()) else 0
    own = keys.diagonal(offset=offset, dim1=-2, dim2=-1)  # [batch, head, query_pos]
    alive = keys.any(-1) & valid[:, None]
    later = alive.clone()
    later[..., 0] = False
    hidden = [h for h in range(keys.shape[1]) if bool(later[:, h].any()) and not bool((own & later)[:, h].any())]
    return MaskShape(
        causal=ahead == 0,
        future_reach=ahead,
        past_reach=back,
        window=back + 1 if back + 1 < n_keys and ahead in (0, back) and _is_band(seen, distance, ahead, back) else None,
        chunk=_chunk(seen, ahead),
        diagonal=bool((own | ~alive).all()),
        hidden_heads=tuple(hidden),
    )


def _is_band(seen: Tensor, distance: Tensor, ahead: int, back: int) -> bool:
    """True when the visible keys are exactly those between two distances; one's own position may be missing."""
    return bool(seen.any()) and bool((seen | (distance > back) | (distance < -ahead) | (distance == 0)).all())


def _chunk(seen: Tensor, ahead: int) -> int | None:
    """Length of the chunks when visible keys are the past of one's own chunk, and there are at least two chunks."""
    n = seen.shape[0]
    if ahead or seen.shape[0] != seen.shape[1] or not bool(seen[0, 0]):
        return None
    first = int(seen[:, 0].sum())
    if not 1 < first < n:
        return None
    position = torch.arange(n)
    same = (position[:, None] // first) == (position[None, :] // first)
    return first if torch.equal(seen, same & (position[None, :] <= position[:, None])) else None


def _cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()

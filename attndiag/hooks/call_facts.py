"""Facts about one call that its module's arguments tell: what it reads, what its keys are, which queries are tokens.

Nothing here knows families. Which sequence the keys come from is told by the names of the arguments; whether the keys
are tokens at all, by where the positions of the module's input stand in q; how many keys came from a cache, by the
cache itself before the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from attndiag.hooks.structure import CACHE_NAMES, bound_arguments, module_parts

_OTHER_SEQUENCE = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "kv")


def reads_another_sequence(module: nn.Module, given: Mapping[str, Any]) -> bool:
    """True where keys and values come from another sequence than the queries."""
    return any(given.get(name) is not None for name in _OTHER_SEQUENCE) or bool(
        getattr(module, "is_cross_attention", False)
    )


def past_length(module: nn.Module, given: Mapping[str, Any]) -> int | None:
    """Positions that the cache among a module's arguments holds already; None without one that can tell.

    Ask before the module runs: it puts the new keys there.
    """
    cache = next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)
    layer = getattr(module, "layer_idx", None)
    if cache is None or not isinstance(layer, int) or not hasattr(cache, "get_seq_length"):
        return None
    try:
        return int(cache.get_seq_length(layer))
    except ValueError:  # how transformers says that this layer's state has no length (linear attention)
        return None


def attends_over(q: Tensor, given: Mapping[str, Any]) -> Literal["tokens", "channels", "states"]:
    """What the keys of a self-attention call are.

    Parameters
    ----------
    q : [batch, head, query_pos, d_head].
    given : the module's arguments; its first floating tensor [batch, position, ..., width] is what it reads.

    Returns
    -------
    `"channels"` where q holds the width as head x query and the positions as its features (DaViT, Florence-2);
    `"states"` where q holds the positions as heads, each as wide as the input (attention over earlier blocks);
    else `"tokens"`, also where the sizes coincide.
    """
    read = next((a for a in given.values() if isinstance(a, Tensor) and a.is_floating_point() and a.ndim >= 3), None)
    if read is None:
        return "tokens"
    positions, width = read.shape[1], read.shape[-1]
    _, heads, queries, d_head = q.shape
    if queries == positions:
        return "tokens"
    if d_head == positions and heads * queries == width:
        return "channels"
    return "states" if heads == positions and d_head == width else "tokens"


class TokenMasks:
    """The padding masks of one forward, read from the model's own arguments."""

    def __init__(self, model: nn.Module) -> None:
        self._both = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self._masks: dict[str, Tensor] = {}

    def read(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Take the masks of a forward that begins; those without padding count as none."""
        self._masks = {}
        given = bound_arguments(module, args, kwargs)
        for name in ("attention_mask", "decoder_attention_mask"):
            mask = given.get(name)
            if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.bool().all()):
                self._masks[name] = mask.bool()

    def valid_queries(self, name: str, cross: bool, z: Tensor, n_keys: int) -> Tensor | None:
        """Which queries are tokens. A mask as long as the keys covers the cache too: its tail is the queries."""
        decodes = self._both and "decoder" in module_parts(name)
        mask = self._masks.get("decoder_attention_mask" if decodes else "attention_mask")
        n_queries = z.shape[1]
        lengths = (n_queries,) if cross else (n_queries, n_keys)
        if mask is None or mask.shape[0] != z.shape[0] or mask.shape[1] not in lengths or mask.shape[1] < n_queries:
            return None
        return mask[:, -n_queries:]

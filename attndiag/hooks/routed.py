"""Route A: wrap the attention function that the model would have used.

Models of transformers fetch their attention function from `AttentionInterface` at every call. While at least one
listener is active, `get_interface` and `__getitem__` return a wrapper round the real function, the model's own eager
one included. The configuration is not touched, so masks and kernels stay what they were and outputs are bit-equal.

The patch is process-wide, so it is guarded by a lock, counts its users, filters on module identity and is undone when
the last listener leaves. Muting listeners for a trial run is a matter of the thread that makes it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers.modeling_utils import AttentionInterface

from attndiag.core.masks import causal_mask, intersect, padding_mask, window_mask
from attndiag.errors import UnsupportedModelError

_REAL_GET_INTERFACE = AttentionInterface.get_interface
_REAL_GETITEM = AttentionInterface.__getitem__
DROPOUT_IS_ACTIVE = (
    "dropout acts on the attention weights, so identical inputs give different weights. Call model.eval()"
)
_lock = threading.RLock()
_listeners: list[RoutedListener] = []
_muted: ContextVar[frozenset[int]] = ContextVar("attndiag_muted_listeners", default=frozenset())


@dataclass(frozen=True, eq=False)
class RoutedArguments:
    """What an attention function was called with."""

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    options: dict[str, Any]
    function: Callable[..., Any]

    def run(self, **changes: Tensor) -> tuple[Tensor, Tensor | None]:
        """Call the function again, with `q`, `k`, `v` or `mask` replaced; dropout off."""
        tensors = {"q": self.q, "k": self.k, "v": self.v, "mask": self.mask} | changes
        options = self.options | ({"dropout": 0.0} if "dropout" in self.options else {})
        with torch.no_grad():
            return self.function(self.module, tensors["q"], tensors["k"], tensors["v"], tensors["mask"], **options)

    @property
    def kernel(self) -> str:
        """Short name of the function in use."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return name.removesuffix("_forward").removesuffix("_attention") if name != "flex_attention_forward" else "flex"


class RoutedListener(Protocol):
    """Somebody who watches, or edits, attention calls of some modules."""

    modules: Collection[int]

    def on_routed(self, arguments: RoutedArguments, output: Any) -> Any:
        """See a finished call; return its output, or an edited one."""
        ...


@contextmanager
def listening(listener: RoutedListener, *, first: bool = False):
    """Have `listener` see every routed attention call of its modules until the context is left.

    With `first` it comes before those that listen already: edits, so that a capture around them sees their result.
    """
    with _lock:
        _listeners.insert(0 if first else len(_listeners), listener)
        if len(_listeners) == 1:
            AttentionInterface.get_interface = _get_interface  # type: ignore[method-assign]
            AttentionInterface.__getitem__ = _getitem  # type: ignore[method-assign]
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)
            if not _listeners:
                AttentionInterface.get_interface = _REAL_GET_INTERFACE  # type: ignore[method-assign]
                AttentionInterface.__getitem__ = _REAL_GETITEM  # type: ignore[method-assign]


@contextmanager
def listening_apart():
    """Listeners that are active now hear nothing of this thread until the context is left; new ones do.

    Other threads go on: a replay in one must not cost a capture in another its calls.
    """
    with _lock:
        active = list(_listeners)  # kept alive, so that no other listener can take one of their ids meanwhile
    token = _muted.set(_muted.get() | {id(listener) for listener in active})
    try:
        yield
    finally:
        _muted.reset(token)


def _get_interface(self: AttentionInterface, attn_implementation: str, default: Callable) -> Callable:
    return _wrapped(_REAL_GET_INTERFACE(self, attn_implementation, default))


def _getitem(self: AttentionInterface, key: str) -> Callable:
    return _wrapped(_REAL_GETITEM(self, key))


def _wrapped(function: Callable) -> Callable:
    if hasattr(function, "_attndiag_real"):
        return function

    @functools.wraps(function)
    def watched(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = function(module, query, key, value, *args, **kwargs)
        muted = _muted.get()
        interested = [each for each in _listeners if id(module) in each.modules and id(each) not in muted]
        if interested:
            options = dict(kwargs)
            mask = args[0] if args else options.pop("attention_mask", None)
            if len(args) > 1:  # a few families pass scaling and dropout by position
                options |= dict(zip(_positional_names(function)[5:], args[1:], strict=False))
            arguments = RoutedArguments(module, query, key, value, mask, options, function)
            for listener in interested:
                output = listener.on_routed(arguments, output)
        return output

    watched._attndiag_real = function  # type: ignore[attr-defined]
    return watched


def _positional_names(function: Callable) -> list[str]:
    code = getattr(function, "__code__", None)
    return list(code.co_varnames[: code.co_argcount]) if code is not None else []


def goes_through_interface(module: nn.Module) -> bool:
    """True when the module's own forward fetches its attention function from transformers' interface."""
    return _class_goes_through_interface(type(module))


@functools.cache
def _class_goes_through_interface(kind: type[nn.Module]) -> bool:
    for klass in kind.__mro__:
        if klass.__module__ == "transformers.modeling_utils":
            continue  # the base class of every model, which names the interface to check configurations
        for value in vars(klass).values():
            code = getattr(getattr(value, "__wrapped__", value), "__code__", None)
            if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
                return True
        if klass.__module__.startswith("torch."):
            break
    return False


@dataclass(frozen=True, eq=False)
class KernelTerms:
    """The terms of one call in the form that `AttentionCall` records."""

    scale: float
    mask: Tensor | None
    is_causal: bool
    softcap: float | None
    sinks: Tensor | None
    window: int | None
    position_bias: Tensor | None


def kernel_terms(arguments: RoutedArguments) -> KernelTerms:
    """Read scale, mask, soft-cap, sinks, window and position bias as the kernel in use understands them."""
    options, module = arguments.options, arguments.module
    scale = options.get("scaling")
    window = options.get("sliding_window", getattr(module, "sliding_window", None))
    window = window if isinstance(window, int) and window > 0 else None
    # sdpa knows no sinks: what a module keeps under that name does not take part in its softmax
    sinks = (
        None
        if arguments.kernel == "sdpa"
        else _first_tensor(options.get("s_aux"), options.get("sinks"), getattr(module, "sinks", None))
    )
    if sinks is not None and sinks.ndim == 4:
        sinks = sinks.squeeze(-1)  # one logit a query, kept as a column beside the scores
    mask, is_causal = _applied_mask(arguments, window)
    return KernelTerms(
        scale=float(arguments.q.shape[-1] ** -0.5 if scale is None else scale),
        mask=mask,
        is_causal=is_causal,
        softcap=options.get("softcap"),
        sinks=sinks,
        window=window,
        position_bias=options.get("position_bias"),
    )


def _first_tensor(*values: Any) -> Tensor | None:
    return next((value for value in values if isinstance(value, Tensor)), None)


def _applied_mask(arguments: RoutedArguments, window: int | None) -> tuple[Tensor | None, bool]:
    """The mask that the kernel applied (None: all allowed), and whether it hid the future without being given one."""
    mask, kernel = arguments.mask, arguments.kernel
    if isinstance(mask, Tensor) and mask.dtype != torch.bool and not mask.is_floating_point():
        raise UnsupportedModelError(
            f"the attention function of {type(arguments.module).__name__} was given a mask of {mask.dtype}, which adds "
            "its numbers to the scores and hides nothing; expected bool (True = allowed) or an additive float mask"
        )
    n_queries, n_keys, device = arguments.q.shape[2], arguments.k.shape[2], arguments.q.device
    if isinstance(mask, BlockMask):
        return create_mask(mask.mask_mod, mask.shape[0], mask.shape[1], n_queries, n_keys, device=device), False
    is_causal = arguments.options.get("is_causal")
    is_causal = bool(getattr(arguments.module, "is_causal", True) if is_causal is None else is_causal)
    if kernel == "sdpa":
        if mask is not None or not is_causal or n_queries <= 1:
            return mask, False
        if n_queries == n_keys:
            return None, True
        # torch aligns is_causal at the upper left: with a longer static cache the later keys are cut off
        return causal_mask(n_queries, n_keys, offset=0, device=device), False
    if kernel.startswith("flash"):
        offset = n_keys - n_queries  # flash kernels align at the lower right
        masks = [] if mask is None else [padding_mask(mask.bool())]
        if is_causal and window is None and not masks and offset == 0:
            return None, True
        if is_causal:
            masks.append(causal_mask(n_queries, n_keys, offset=offset, device=device))
        if window is not None:
            masks.append(window_mask(n_queries, n_keys, window=window, offset=offset, symmetric=True, device=device))
        return (intersect(*masks) if masks else None), False
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-1] > n_keys:
        mask = mask[..., :n_keys]  # eager functions cut a mask that was made for a longer cache
    return (mask if isinstance(mask, Tensor) else None), False


def replay_of(arguments: RoutedArguments, n_heads: int) -> Callable[[Tensor], tuple[Tensor, Tensor | None]]:
    """The kernel of a call as a function of the values alone."""

    def replay(values: Tensor) -> tuple[Tensor, Tensor | None]:
        result = arguments.run(v=values)
        z = as_heads(result[0], n_heads, values.shape[-1], arguments.q.shape[2])
        if z is None:
            raise UnsupportedModelError(f"the attention function returned {tuple(result[0].shape)} when run again")
        return z, result[1] if len(result) > 1 else None

    return replay


def as_heads(z: Tensor, n_heads: int, d_value: int, n_queries: int) -> Tensor | None:
    """[batch, query_pos, head, d_value] from that or from its flattened form; None for anything else."""
    if z.ndim == 4 and tuple(z.shape[1:]) == (n_queries, n_heads, d_value):
        return z
    if z.ndim == 3 and tuple(z.shape[1:]) == (n_queries, n_heads * d_value):
        return z.unflatten(-1, (n_heads, d_value))
    return None

"""Where to listen in a model: blocks, norms, attention-like modules.

Class names decide only where to listen and how to word a refusal, never a number: what is found there is accepted by
what it does.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from attndiag.hooks.routed import goes_through_interface

MODEL_CACHE_NAMES = ("cache", "past_key_values")
"""What models call their key/value cache, as an argument and in what they return; the newer name first."""
CACHE_NAMES = (*MODEL_CACHE_NAMES, "past_key_value", "layer_past")
"""The same with the older names that attention modules still use."""
_ATTENTION_LIKE = re.compile(r"attention|attn", re.IGNORECASE)
_MIXER_LIKE = re.compile(
    r"Mixer|Mamba|SSM|Rwkv|RWKV|LinearAttention|GatedDelta|DeltaNet|Lightning|RgLru|RecurrentBlock|Retention|Hyena|"
    r"ShortConv|[ms]LSTM|LSH|Fourier"
)


def looks_like_attention(module: nn.Module) -> bool:
    """True for modules that call themselves attention or fetch an attention function."""
    return _ATTENTION_LIKE.search(type(module).__name__) is not None or goes_through_interface(module)


def looks_like_mixer(module: nn.Module) -> bool:
    """True for modules whose class names a token mixer without a softmax."""
    name = type(module).__name__
    return _MIXER_LIKE.search(name) is not None and "norm" not in name.lower()


def module_parts(name: str) -> list[str]:
    """`"model.layers.3.self_attn"` -> `["model", "layers", "3", "self_attn"]`."""
    return name.split(".") if name else []


def layer_of(name: str, module: nn.Module, model: nn.Module) -> int | None:
    """Index of the outermost numbered block that holds the module; its own `layer_idx` where nothing is numbered."""
    parent: nn.Module = model
    for part in module_parts(name):
        if isinstance(parent, nn.ModuleList | nn.Sequential) and part.isdigit():
            return int(part)
        child = parent._modules.get(part)
        if child is None:
            break
        parent = child
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else None


def block_names(modules: Mapping[str, nn.Module]) -> set[str]:
    """Entries of module lists that hold something like attention: the blocks of the model."""
    names: set[str] = set()
    for name, module in modules.items():
        if not looks_like_attention(module):
            continue
        parts = module_parts(name)
        for end in range(len(parts) - 1, 0, -1):
            # the attention module itself may be an entry; its block then is the one further out
            parent = modules.get(".".join(parts[: end - 1]))
            if isinstance(parent, nn.ModuleList | nn.Sequential) and parts[end - 1].isdigit():
                names.add(".".join(parts[:end]))
    return names


def modules_to_trace(modules: Mapping[str, nn.Module]) -> set[str]:
    """Outermost attention-like modules of which no part fetches its function from transformers."""
    chosen: set[str] = set()
    for name, module in modules.items():
        if _ATTENTION_LIKE.search(type(module).__name__) is None or name == "":
            continue
        if any(goes_through_interface(part) for part in module.modules()):
            continue
        if not any(name.startswith(f"{outer}.") for outer in chosen):
            chosen.add(name)
    return chosen


def head_count(module: nn.Module) -> int | None:
    """How many heads an attention module says it has, itself or the part of it that computes; None if it does not."""
    for part in module.modules():
        for name in ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead"):
            value = getattr(part, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def is_norm(module: nn.Module) -> bool:
    """True for leaf modules that call themselves a norm and hold vectors at most."""
    if "norm" not in type(module).__name__.lower() or next(module.children(), None) is not None:
        return False
    return all(parameter.ndim == 1 for parameter in module.parameters(recurse=False))


def first_tensor(output: Any) -> Tensor | None:
    """The first tensor in a module's arguments or output, whatever they are packed in."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list):
        return next((item for item in output if isinstance(item, Tensor)), None)
    if hasattr(output, "to_tuple"):
        return first_tensor(output.to_tuple())
    return None


def bound_arguments(module: nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments of a forward by name, those given by position included."""
    return dict(zip(_parameter_names(type(module)), args, strict=False)) | kwargs if args else kwargs


@functools.cache
def _parameter_names(kind: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """The model without the hooks that it has now: whoever listens must not take a trial for the user's run."""
    kept = [(module, name, getattr(module, name)) for module in model.modules() for name in _HOOK_TABLES]
    try:
        for module, name, table in kept:
            setattr(module, name, type(table)())
        yield
    finally:
        for module, name, table in kept:
            setattr(module, name, table)


_MISSING = object()


@contextmanager
def stubbed(forwards: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Modules that run other functions as their `forward`; one that was set on the instance (offloading) comes back."""
    before: list[tuple[nn.Module, Any]] = []
    try:
        for module, forward in forwards:
            before.append((module, vars(module).get("forward", _MISSING)))
            module.forward = forward
        yield
    finally:
        for module, own in reversed(before):
            if own is _MISSING:
                del module.forward
            else:
                module.forward = own

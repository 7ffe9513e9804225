"""`Method`: what the catalogue knows of a method. Reading it imports no torch; `Method.function` imports the code.

Scopes: `token`, one number for each position of the prompt; `edge`, for each layer, head, query and key (or query and
key); `activation`, for each layer and position (or layer, head and position); `head`; `layer`; `row`, for each layer
and query; `prompt`, one number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any, Literal

from attndiag.errors import AttnDiagError

Scope = Literal["token", "edge", "activation", "head", "layer", "row", "prompt"]
Call = Literal["prompts", "prompt", "pair", "untargeted"]


REQUIRED = "required"
"""Stands for the default of a parameter that has none."""


class UnknownMethodError(AttnDiagError, ValueError):
    """No entry of the catalogue has this name; the text names those that are near."""


class UnknownParameterError(AttnDiagError, TypeError):
    """The method has no such parameter, or one that it needs is missing; the text lists what it has."""


@dataclass(frozen=True)
class Method:
    """One entry.

    Parameters
    ----------
    name : unique; what `Scores.method` says, except where one function serves several entries.
    what : one line.
    home : `"module:function"`.
    scope, sign, unit : of the values. The unit `target` is that of the target (logits, nats, ...).
    cost : in forwards and backwards of one prompt of n tokens.
    needs : what the model or prompt must have; empty where any model will do.
    source : paper, or "definition".
    call : how the function is called: with many prompts and a target, with one, with one and its counterfactual
        (`Prompt.pair`, or `corrupted=`), or with prompts alone.
    fixed : parameters that make the function this entry.
    work : `"module:function"` that tells the cost of a call before it is made; empty where it is short.
    """

    name: str
    what: str
    home: str
    scope: Scope
    sign: Literal["signed", "non-negative"]
    unit: str
    cost: str
    needs: tuple[str, ...] = ()
    source: str = "definition"
    call: Call = "prompts"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    work: str = ""

    @property
    def function(self) -> Callable[..., Any]:
        """The code behind the entry."""
        return _imported(self.home)

    @property
    def estimate(self) -> Callable[..., Any] | None:
        """What tells the cost of a call, None for methods that are short."""
        return _imported(self.work) if self.work else None

    @property
    def targeted(self) -> bool:
        """False where the numbers are about no target."""
        return self.call != "untargeted"

    @property
    def parameters(self) -> dict[str, Any]:
        """Keyword parameters with their defaults, as the function has them; `REQUIRED` where there is none."""
        known = {"lm", "prompt", "prompts", "clean", "target", "progress", *self.fixed}
        given = inspect.signature(self.function).parameters.values()
        found = {
            each.name: REQUIRED if each.default is each.empty else each.default
            for each in given
            if each.name not in known
        }
        # without one, the prompt's own counterfactual is taken
        return found | {"corrupted": None} if self.call == "pair" else found

    @property
    def reports(self) -> bool:
        """True where the function tells its progress within one prompt."""
        return self.call != "prompts" and "progress" in inspect.signature(self.function).parameters


def _imported(home: str) -> Callable[..., Any]:
    module, _, name = home.partition(":")
    return getattr(import_module(module), name)


def catalogue(methods: Sequence[Method]) -> Mapping[str, Method]:
    """Entries by name, read-only.

    Raises
    ------
    ValueError : two entries have one name.
    """
    found: dict[str, Method] = {}
    for method in methods:
        if method.name in found:
            raise ValueError(f"two methods are called {method.name!r}: {found[method.name].home} and {method.home}")
        found[method.name] = method
    return MappingProxyType(found)

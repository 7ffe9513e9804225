"""A person's own attention module, captured through three statements about it.

    adapter = Adapter(weights="output:1", values="argument:memory", output="output:0")
    with capture(model, modules={"decoder.attention": adapter}) as captured: ...

An adapter says where a module keeps its weights A, its values v and what it gathers, z. Each is a function of the
module's run, or a string:

- `"NAME"` and `"NAME:input"`: output and first input of a module inside;
- `"argument:NAME"`: an argument of the module's forward;
- `"output"` and `"output:1"`: what the forward returned, or an item of it.

The statements are not believed: A v must equal z, to the tolerance of every certificate, or the capture raises and says
by how much they differ. The record that comes out is the same `AttentionCall` as any other.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from attndiag.errors import ShapeError, UnsupportedModelError, UnverifiedCaptureError
from attndiag.hooks.record import AttentionCall
from attndiag.hooks.structure import bound_arguments, first_tensor

if TYPE_CHECKING:
    from attndiag.hooks.recorder import Recorder


@dataclass(frozen=True, eq=False)
class ModuleRun:
    """One forward of an adapted module.

    Attributes
    ----------
    module : the module.
    arguments : what its forward was called with, by name.
    output : what it returned.
    inside : name of a module inside -> (its first input, its output), from its last call in this forward.
    """

    module: nn.Module
    arguments: Mapping[str, Any]
    output: Any
    inside: Mapping[str, tuple[Tensor | None, Any]] = field(default_factory=dict)


Part = str | Callable[[ModuleRun], Tensor]


class CustomAttention(Protocol):
    """What an adapter has to answer; write a class with these methods, or use `Adapter`."""

    def weights(self, run: ModuleRun) -> Tensor:
        """A: [batch, head, query_pos, key_pos], [batch, query_pos, key_pos] or, for one query, [batch, key_pos]."""
        ...

    def values(self, run: ModuleRun) -> Tensor:
        """v: [batch, kv_head, key_pos, d_value] or, for one head, [batch, key_pos, d_value]."""
        ...

    def output(self, run: ModuleRun) -> Tensor:
        """z = A v: [batch, query_pos, head, d_value], [batch, query_pos, width] or, for one query, [batch, width]."""
        ...


class Adapter:
    """Three statements about a module, and optionally a fourth.

    Parameters
    ----------
    weights, values, output : strings or functions, see the module's text.
    projection : name of the linear map inside that reads z (W_O); needed where it runs before the module returns. A map
        behind the module is found by itself.
    kind : `"self"` or `"cross"`.
    """

    def __init__(
        self, *, weights: Part, values: Part, output: Part, projection: str | None = None, kind: str = "cross"
    ) -> None:
        if kind not in ("self", "cross"):
            raise ValueError(f"kind is {kind!r}; expected 'self' or 'cross'")
        self.parts: dict[str, Part] = {"weights": weights, "values": values, "output": output}
        self.projection = projection
        self.kind = kind

    def weights(self, run: ModuleRun) -> Tensor:
        """A."""
        return self._take("weights", run)

    def values(self, run: ModuleRun) -> Tensor:
        """v."""
        return self._take("values", run)

    def output(self, run: ModuleRun) -> Tensor:
        """z."""
        return self._take("output", run)

    def _take(self, name: str, run: ModuleRun) -> Tensor:
        part = self.parts[name]
        found = part(run) if callable(part) else _named(part, run)
        if not isinstance(found, Tensor):
            raise UnsupportedModelError(
                f"the adapter's {name} ({part!r}) of {type(run.module).__name__} is a {type(found).__name__}; "
                "expected a tensor"
            )
        return found


@contextmanager
def adapting(recorder: Recorder, model: nn.Module, adapters: Mapping[str, CustomAttention]) -> Iterator[None]:
    """Have `recorder` note every run of the adapted modules until the context is left.

    Raises
    ------
    UnsupportedModelError : a name that the model does not have, or an adapter whose parts cannot be found.
    UnverifiedCaptureError : A v is not z; the text says by how much.
    """
    modules = dict(model.named_modules())
    handles: list[Any] = []
    try:
        for name, adapter in adapters.items():
            if name not in modules:
                near = difflib.get_close_matches(name, modules, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "model.named_modules() lists them"
                raise UnsupportedModelError(f"the model has no module {name!r}; {hint}")
            inside: dict[str, tuple[Tensor | None, Any]] = {}
            for inner, part in modules[name].named_modules():
                if inner:
                    handles.append(part.register_forward_hook(_watch(inner, inside), with_kwargs=True))
            # a module inside that is skipped this time must not lend its parts from the last
            handles.append(modules[name].register_forward_pre_hook(_cleared(inside), prepend=True))
            hook = _after(recorder, name, adapter, inside)
            handles.append(modules[name].register_forward_hook(hook, with_kwargs=True, prepend=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def join_steps(calls: Sequence[AttentionCall]) -> AttentionCall:
    """The steps of one decoder as one call with all queries.

    It stands on the weights of the steps: q, k, masks and replays were each step's own and are not joined.

    Parameters
    ----------
    calls : calls of one module that read the same values, in order (a recurrent decoder asks once a step).

    Raises
    ------
    UnsupportedModelError : the calls are of different modules, or read different values.
    """
    if not calls:
        raise UnsupportedModelError("join_steps needs at least one call")
    first = calls[0]
    for call in calls[1:]:
        if call.module_name != first.module_name:
            raise UnsupportedModelError(f"{call.module_name} and {first.module_name} are not steps of one module")
        if call.v.shape != first.v.shape or not torch.equal(call.v, first.v):
            raise UnsupportedModelError(
                f"call {call.call_index} of {call.module_name} reads other values than call {first.call_index}"
            )
    return replace(
        first,
        q=None,
        k=None,
        scale=None,
        mask=None,
        is_causal=False,
        softcap=None,
        sinks=None,
        window=None,
        position_bias=None,
        replay=None,
        z=torch.cat([call.z for call in calls], 1),
        traced_pattern=torch.cat([call.pattern for call in calls], 2),
        attn_out=_joined([call.attn_out for call in calls]),
        output_gate=_joined([call.output_gate for call in calls]),
        query_valid=_joined([call.query_valid for call in calls]),
        trace=None,
        past=None,
    )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The steps' tensors along the queries; None where a step has none."""
    known = [part for part in parts if part is not None]
    return torch.cat(known, 1) if len(known) == len(parts) else None


def _watch(name: str, inside: dict[str, tuple[Tensor | None, Any]]) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        inside[name] = (first_tensor(args or tuple(kwargs.values())), output)

    return hook


def _cleared(inside: dict[str, tuple[Tensor | None, Any]]) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: tuple) -> None:
        inside.clear()

    return hook


def _after(
    recorder: Recorder, name: str, adapter: CustomAttention, inside: dict[str, tuple[Tensor | None, Any]]
) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        run = ModuleRun(module, bound_arguments(module, args, kwargs), output, dict(inside))
        weights, values, z = canonical(name, adapter.weights(run), adapter.values(run), adapter.output(run))
        projection = None
        inner = getattr(adapter, "projection", None)
        if inner is not None:
            seen = first_tensor(_inside(inner, run)[1])
            projection = (f"{name}.{inner}", module.get_submodule(inner), seen)
        recorder.on_custom(module, weights, values, z, getattr(adapter, "kind", "cross"), projection)

    return hook


def canonical(name: str, weights: Tensor, values: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [batch, head, query_pos, key_pos], values [batch, kv_head, key_pos, d_value], z [batch, query_pos, head,
    d_value] from the shorter forms that an adapter may give; raises unless A v = z.
    """
    given = tuple(weights.shape), tuple(values.shape), tuple(z.shape)
    if weights.ndim == 2:
        weights = weights[:, None]
    if weights.ndim == 3:
        weights = weights[:, None]
    if values.ndim == 3:
        values = values[:, None]
    if z.ndim == 2:
        z = z[:, None]
    fits = (
        weights.ndim == values.ndim == 4
        and z.ndim in (3, 4)
        and weights.shape[0] == values.shape[0] == z.shape[0]
        and weights.shape[3] == values.shape[2]
        and weights.shape[1] % values.shape[1] == 0
        and z.shape[1] == weights.shape[2]
        and z[0, 0].numel() == weights.shape[1] * values.shape[3]
    )
    if not fits:
        raise ShapeError(
            f"{name}: weights {given[0]}, values {given[1]} and output {given[2]} do not fit. Expected [batch, head, "
            "query_pos, key_pos], [batch, kv_head, key_pos, d_value] and [batch, query_pos, head, d_value]; the head "
            "axis may be left out where there is one head"
        )
    return weights, values, z.reshape(z.shape[0], z.shape[1], weights.shape[1], values.shape[3])


def require_product(call: AttentionCall) -> None:
    """Raise `UnverifiedCaptureError` with the size of the error unless A v = z."""
    certificate = call.certificate
    if not certificate.value_error <= certificate.tolerance:
        raise UnverifiedCaptureError(
            f"{call.module_name}: the adapter's weights times its values differ from its output by "
            f"{certificate.value_error:.1e} of the output's size (allowed {certificate.tolerance:.0e}). Are the "
            "weights those after softmax and mask, the values those behind their projection, the output the one before "
            "W_O?"
        )


def _named(part: str, run: ModuleRun) -> Any:
    head, _, tail = part.partition(":")
    if head == "output":
        if not tail:
            return first_tensor(run.output)
        items = run.output if isinstance(run.output, tuple | list) else (run.output,)
        if not tail.isdigit() or int(tail) >= len(items):
            raise UnsupportedModelError(f"{part!r}: {type(run.module).__name__} returned {len(items)} items")
        return items[int(tail)]
    if head == "argument":
        if tail not in run.arguments:
            raise UnsupportedModelError(
                f"{part!r}: {type(run.module).__name__} was called with {', '.join(run.arguments) or 'nothing'}"
            )
        return run.arguments[tail]
    seen = _inside(head, run)
    return seen[0] if tail == "input" else first_tensor(seen[1])


def _inside(name: str, run: ModuleRun) -> tuple[Tensor | None, Any]:
    if name not in run.inside:
        raise UnsupportedModelError(
            f"no module {name!r} ran inside {type(run.module).__name__}; these did: {', '.join(run.inside) or 'none'}"
        )
    return run.inside[name]

"""The recorder: events of a running model become `AttentionCall` records.

It hooks blocks (where a call belongs and when it is finished), norms and other children (where the output enters the
residual stream), linear maps (which one is W_O), and listens to routed and traced attention calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attndiag.errors import NothingCapturedError, UnsupportedModelError
from attndiag.hooks.adapters import require_product
from attndiag.hooks.call_facts import TokenMasks, attends_over, past_length, reads_another_sequence
from attndiag.hooks.captured import Captured, Refusal
from attndiag.hooks.gates import find_output_gate
from attndiag.hooks.pending import GateCandidate, PendingCall, find_projection
from attndiag.hooks.record import AttentionCall
from attndiag.hooks.residual import BlockTrace, SeenChild, SeenNorm
from attndiag.hooks.routed import DROPOUT_IS_ACTIVE, RoutedArguments, as_heads, kernel_terms, replay_of
from attndiag.hooks.structure import (
    block_names,
    bound_arguments,
    first_tensor,
    head_count,
    is_norm,
    layer_of,
    looks_like_attention,
    looks_like_mixer,
    modules_to_trace,
)
from attndiag.hooks.traced import TracedSoftmax, watching_softmax
from attndiag.models.projections import is_linear_like


class Recorder:
    """Turns events of a running model into `AttentionCall` records."""

    def __init__(
        self,
        model: nn.Module,
        layers: Collection[int] | None,
        on_call: Callable[[AttentionCall], None] | None,
        certify: bool,
    ) -> None:
        self.captured = Captured()
        self._model = model
        self._layers = None if layers is None else {int(layer) for layer in layers}
        self._on_call = on_call
        self._certify = certify
        self._names = {id(module): name for name, module in model.named_modules()}
        self.modules = self._names
        self._handles: list[Any] = []
        self._call_counts: dict[str, int] = defaultdict(int)
        self._layers_seen: set[int] = set()
        self._blocks: list[BlockTrace] = []
        self._pending: list[PendingCall] = []
        self._arguments: dict[int, dict[str, Any]] = {}
        self._ran_without_call: dict[str, nn.Module] = {}
        self._past: dict[int, int | None] = {}
        self._token_masks = TokenMasks(model)
        self._tracers: list[Any] = []
        self._replaying = False

    # -------------------------------------------------------------- attaching
    def attach(self, adapted: Collection[str] = ()) -> None:
        """Hook blocks, norms, linear maps and attention-like modules. Undone by `remove_hooks`.

        Modules in `adapted`, and those inside them, are not traced: an adapter tells about them.
        """
        if self._model.training:
            active = [n for n, m in self._model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0 and m.training]
            if active:
                raise UnsupportedModelError(
                    f"the model is in train mode with active dropout ({active[0]} and {len(active) - 1} more), so "
                    "identical inputs give different weights. Call model.eval() first"
                )
        modules = dict(self._model.named_modules())
        blocks, traced = block_names(modules), modules_to_trace(modules)
        traced = {n for n in traced if not any(n == own or n.startswith(f"{own}.") for own in adapted)}
        self._hook_pre(self._model, self._before_model)
        for name, module in modules.items():
            if name in blocks:
                self._hook_pre(module, self._before_block)
            if looks_like_attention(module) or looks_like_mixer(module):
                self._hook_pre(module, self._before_attention)
            if name in traced:
                self._hook_pre(module, self._start_tracing)
                # watches nest: the one that was entered last has to be left first
                self._handles.append(module.register_forward_hook(self._stop_tracing, always_call=True, prepend=True))
            if is_linear_like(module):
                self._hook_post(module, self._after_linear)
            elif is_norm(module):
                self._hook_post(module, self._after_norm)
            if name in blocks:
                for child in module.children():
                    self._hook_post(child, self._after_child)
                self._handles.append(module.register_forward_hook(self._after_block, always_call=True))

    def _hook_pre(self, module: nn.Module, hook: Callable) -> None:
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _hook_post(self, module: nn.Module, hook: Callable) -> None:
        self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def remove_hooks(self) -> None:
        """Remove every hook and stop every tracer that is still on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        while self._tracers:
            self._tracers.pop().close()
        self._blocks.clear()
        self._pending.clear()
        self._arguments.clear()

    # ------------------------------------------------------------- the model's own events
    def _before_model(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not self._replaying:
            self._token_masks.read(module, args, kwargs)

    def _before_block(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._replaying:
            return
        hidden = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point()), None)
        if hidden is None:
            hidden = torch.empty(0)
        self._blocks.append(BlockTrace(self._names.get(id(module), ""), hidden))

    def _after_block(self, module: nn.Module, _args: tuple, output: Any) -> None:
        name = self._names.get(id(module), "")
        # an exception inside can leave inner blocks open
        while self._blocks and self._blocks[-1].name != name:
            self._blocks.pop()
        if not self._blocks:
            return
        trace = self._blocks.pop()
        trace.output = first_tensor(output)
        if output is None:  # the block raised: its calls are incomplete
            self._pending = [p for p in self._pending if p.trace is not trace]
        else:
            self._emit(trace)
        if not self._blocks:
            self._arguments.clear()  # they hold the hidden states of every layer

    def _after_child(self, module: nn.Module, _args: tuple, _kwargs: dict, output: Any) -> None:
        tensor = first_tensor(output)
        if self._replaying or not self._blocks or tensor is None:
            return
        name, trace = self._names[id(module)], self._blocks[-1]
        mine = [p for p in self._pending if p.trace is trace]
        if mine and not any(p.call.module_name == name or p.call.module_name.startswith(f"{name}.") for p in mine):
            if not any(norm.order > mine[0].order for norm in trace.norms):
                # attention and MLP side by side: some families add one to the other in place
                tensor = tensor.detach().clone()
            trace.children.append(SeenChild(tensor, trace.next_order()))

    def _after_norm(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if self._blocks and isinstance(output, Tensor) and not self._replaying:
            trace, hidden = self._blocks[-1], first_tensor(args or tuple(kwargs.values()))
            if hidden is not None:
                if hidden.ndim == 2 and hidden.numel() == trace.input.numel():
                    hidden = hidden.reshape(trace.input.shape)  # OPT flattens rows and positions before its MLP
                trace.norms.append(SeenNorm(self._names[id(module)], module, hidden, trace.next_order()))

    def _before_attention(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not self._replaying:
            self._ran_without_call[self._names[id(module)]] = module
            given = self._arguments[id(module)] = bound_arguments(module, args, kwargs)
            self._past[id(module)] = past_length(module, given)

    # ---------------------------------------------------------------- attention calls
    def on_routed(self, arguments: RoutedArguments, output: Any) -> Any:
        """Note a routed call; its output is returned untouched."""
        if self._replaying:
            return output
        z = output[0] if isinstance(output, tuple | list) else output
        if arguments.options.get("dropout"):
            raise UnsupportedModelError(DROPOUT_IS_ACTIVE)
        q, k, v = arguments.q, arguments.k, arguments.v
        if q.ndim == k.ndim == 4 and q.shape[0] == 1 < k.shape[0]:
            q = q.expand(k.shape[0], -1, -1, -1)  # learned queries, the same for every row
        name = self._names[id(arguments.module)]
        if not isinstance(z, Tensor) or q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
            self._refuse(name, arguments.module, "its attention function does not take [batch, head, position, d_head]")
            return output
        z_heads = as_heads(z, q.shape[1], v.shape[-1], q.shape[2])
        if z_heads is None:
            self._refuse(
                name, arguments.module, f"its attention function returns {tuple(z.shape)}, not one vector a head"
            )
            return output
        terms = kernel_terms(arguments)
        self._note(
            AttentionCall(
                **self._origin(arguments.module, z_heads, k.shape[2]),
                route="routed",
                kernel=arguments.kernel,
                q=q,
                k=k,
                v=v,
                z=z_heads,
                scale=terms.scale,
                mask=terms.mask,
                is_causal=terms.is_causal,
                softcap=terms.softcap,
                sinks=terms.sinks,
                window=terms.window,
                position_bias=terms.position_bias,
                replay=replay_of(arguments, q.shape[1]),
                attends=attends_over(q, self._arguments.get(id(arguments.module), {})),
            ),
        )
        return output

    def _on_softmax(self, module: nn.Module, seen: TracedSoftmax) -> None:
        """Note a call whose softmax was traced."""
        pending = self._note(
            AttentionCall(
                **self._origin(module, seen.z, seen.v.shape[2]),
                route="traced",
                kernel=seen.kernel,
                q=seen.q,
                k=seen.k,
                v=seen.v,
                z=seen.z,
                scale=seen.scale,
                mask=seen.mask,
                is_causal=seen.is_causal,
                traced_pattern=seen.pattern,
                replay=seen.replay,
            ),
        )
        if pending is not None:
            pending.windows = seen.windows
        if pending is not None and seen.output_weight is not None:
            for inner, part in module.named_modules():
                if getattr(part, "weight", None) is seen.output_weight:
                    pending.projection = (f"{pending.call.module_name}.{inner}", part)
                    pending.attn_out = seen.attn_out

    def on_custom(
        self,
        module: nn.Module,
        weights: Tensor,
        values: Tensor,
        z: Tensor,
        kind: Literal["self", "cross"],
        projection: tuple[str, nn.Module, Tensor] | None,
    ) -> None:
        """Note a run of a module that an adapter describes; its parts are held to A v = z."""
        origin = self._origin(module, z, values.shape[2]) | {"kind": kind}
        call = AttentionCall(
            **origin,
            route="adapter",
            kernel="custom",
            q=None,
            k=None,
            v=values,
            z=z,
            scale=None,
            traced_pattern=weights,
        )
        require_product(call)
        pending = self._note(call)
        if pending is not None and projection is not None:
            pending.projection, pending.attn_out = projection[:2], projection[2]

    def _origin(self, module: nn.Module, z: Tensor, n_keys: int) -> dict[str, Any]:
        name = self._names[id(module)]
        index = self._call_counts[name]
        self._call_counts[name] += 1
        given = self._arguments.get(id(module), {})
        cross = reads_another_sequence(module, given)
        return {
            "module_name": name,
            "module_class": type(module).__name__,
            "layer": layer_of(name, module, self._model),
            "call_index": index,
            "kind": "cross" if cross else "self",
            "query_valid": self._token_masks.valid_queries(name, cross, z, n_keys),
            "past": None if cross else self._past.get(id(module)),
        }

    def _note(self, call: AttentionCall) -> PendingCall | None:
        """Keep a call until its block is left; None when its layer was not asked for."""
        for name in list(self._ran_without_call):
            if (
                call.module_name == name
                or call.module_name.startswith(f"{name}.")
                or name.startswith(f"{call.module_name}.")
            ):
                del self._ran_without_call[name]
        if call.layer is not None:
            self._layers_seen.add(call.layer)
        if self._layers is not None and call.layer not in self._layers:
            self.captured.n_calls += 1
            return None
        trace = self._blocks[-1] if self._blocks else None
        order = trace.next_order() if trace is not None else 0
        pending = PendingCall(call, trace, order)
        self._pending.append(pending)
        if trace is None and len(self._pending) > 1 and self._pending[0].trace is None:
            # outside any block there is no end to wait for: finish the calls of modules that are done
            while len(self._pending) > 1 and self._pending[0].call.module_name != call.module_name:
                self._deliver(self._pending.pop(0))
        return pending

    def _after_linear(self, module: nn.Module, args: tuple, _kwargs: dict, output: Any) -> None:
        if self._replaying or not self._pending or not args or not isinstance(args[0], Tensor):
            return
        find_projection(self._pending, self._names[id(module)], module, args[0], output)

    # -------------------------------------------------------------------- finishing
    def _emit(self, trace: BlockTrace) -> None:
        mine = [p for p in self._pending if p.trace is trace]
        self._pending = [p for p in self._pending if p.trace is not trace]
        for pending in mine:
            self._deliver(pending)

    def _deliver(self, pending: PendingCall) -> None:
        self.deliver(pending.finished(self._find_gate, self._model.get_submodule(pending.call.module_name)))

    def deliver(self, call: AttentionCall) -> None:
        """Hand a finished record over: checked if asked, kept or passed on."""
        self.captured.n_calls += 1
        if call.layer is not None:
            self._layers_seen.add(call.layer)
        if self._certify:
            call.sampled_certificate.check()
        if self._on_call is None:
            self.captured.calls.append(call)
        else:
            self._on_call(call)

    def _find_gate(self, call: AttentionCall, candidate: GateCandidate) -> tuple[Tensor | None, str]:
        """The elementwise factor between z and its projection, if whatever stands there does not depend on z itself."""
        module = self._model.get_submodule(call.module_name)
        self._replaying = True
        try:
            return find_output_gate(module, candidate.module, call.z, candidate.inputs, self._arguments[id(module)])
        finally:
            self._replaying = False

    def _refuse(self, name: str, module: nn.Module, reason: str) -> None:
        self.captured.refusals.append(Refusal(name, type(module).__name__, reason))

    def finish(self) -> None:
        """Deliver what is left, list layers without a call, and raise when nothing was seen at all."""
        while self._pending:
            self._deliver(self._pending.pop(0))
        silent = self._ran_without_call
        for name, module in silent.items():
            if any(inner != name and (name == "" or inner.startswith(f"{name}.")) for inner in silent):
                continue  # the innermost module says best what it is
            quiet = (
                "it mixes tokens without a softmax"
                if looks_like_mixer(module)
                else "no softmax over keys was seen in it"
            )
            self._refuse(name, module, quiet)
        if self.captured.n_calls == 0:
            what = ", ".join(sorted({f"{r.module_class} ({r.reason})" for r in self.captured.refusals})[:4])
            raise NothingCapturedError(
                f"no attention call of {type(self._model).__name__} was seen. "
                + (f"Layers: {what}. " if what else "Did a forward run inside the `with` block? ")
                + "Weights and contributions are undefined there; token replacement and layer ablation still work"
            )
        if self._layers is not None and not self._layers <= self._layers_seen:
            missing = sorted(self._layers - self._layers_seen)
            raise UnsupportedModelError(
                f"no attention call at layer {missing}; this forward made calls at layers {sorted(self._layers_seen)}"
            )

    # ---------------------------------------------------------------------- tracing
    def _start_tracing(self, module: nn.Module, _args: tuple, _kwargs: dict) -> None:
        stack = ExitStack()
        stack.enter_context(watching_softmax(lambda seen: self._on_softmax(module, seen), head_count(module)))
        self._tracers.append(stack)

    def _stop_tracing(self, _module: nn.Module, _args: tuple, _output: Any) -> None:
        if self._tracers:
            self._tracers.pop().close()

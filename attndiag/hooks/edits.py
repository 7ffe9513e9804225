"""`edit`: change a running model inside a `with` block, under its own attention function.

    with attndiag.edit(lm, attndiag.Knockout(layer=20, head=3, query=13, key=0)) as log:
        without = attndiag.score(lm, prompt, target)

Edits of heads are made on the head outputs z that the model's kernel returned, by the amount that the edited weights
and values differ from the real ones, so the kernel itself (sdpa, eager, flash, a watched softmax) stays in place and
entries that no edit names keep their bits. Edits of a module's output are made by hooks.

Each edit proves itself: entries outside what it names must keep their bits, what the edit returned must reach the
output projection (or change what the attention module returns), and an edit that no forward reached raises when the
context is left. Several edits, nested contexts included, act together.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attndiag.errors import UnsupportedModelError, UnverifiedCaptureError
from attndiag.hooks.edit_kinds import AttentionOff, Edit, Patch, acts_on_heads, edited_heads, fitted
from attndiag.hooks.edit_log import Applied, EditLog
from attndiag.hooks.edit_proof import EditProofs
from attndiag.hooks.live import LiveCall, TokenFrame
from attndiag.hooks.pausing import are_edits_paused
from attndiag.hooks.routed import RoutedArguments, as_heads, listening
from attndiag.hooks.sites import BlockSites, site_of
from attndiag.hooks.structure import CACHE_NAMES, bound_arguments, head_count, modules_to_trace
from attndiag.hooks.traced import TracedSoftmax, watching_softmax
from attndiag.models.load import LoadedModel
from attndiag.models.projections import is_linear_like

_sessions: list[_Session] = []
# held while a session looks for those that are open and joins them
_joining = threading.RLock()


@contextmanager
def edit(model: nn.Module | LoadedModel, *edits: Edit) -> Iterator[EditLog]:
    """Apply edits to every forward of `model` inside a `with` block.

    Parameters
    ----------
    model : a PyTorch module (compiled ones run as written meanwhile) or what `attndiag.load` returned.
    edits : see `attndiag.hooks.edit_kinds`; together with those of enclosing contexts.

    Yields
    ------
    EditLog : what each edit did.

    Raises
    ------
    UnsupportedModelError : a layer, stream or site that the model does not have; a module that makes several attention
        calls in one forward; an edit that reached no forward of the model, or whose result the model did not use; a
        model that another thread is editing.
    ShapeError : a head, position or tensor that does not fit the call, an edge that the mask hides.
    UnverifiedCaptureError : an edit changed entries that it does not name.

    Notes
    -----
    Results of several edits on one row: pattern and value edits are joined before they act, so removing an edge and
    zeroing its value is not counted twice. Gradients flow through edits. The model has to be run as a whole.
    """
    root = model.model if isinstance(model, LoadedModel) else model
    compiled = getattr(root, "_orig_mod", None)
    inner = compiled if isinstance(compiled, nn.Module) else root
    if not edits:
        raise ValueError("no edits were given; pass at least one, for example attndiag.Knockout(layer=0, key=0)")
    with ExitStack() as stack:
        with _joining:
            _require_this_thread(inner)
            session = _Session(inner, edits)
            _sessions.append(session)
        stack.callback(_sessions.remove, session)
        if compiled is not None or any(part._compiled_call_impl is not None for part in root.modules()):
            # a compiled graph never reaches the wrapped functions; inside the context the model runs as written
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(session.remove_hooks)
        session.attach()
        stack.enter_context(listening(session, first=True))
        yield session.log
        session.require_applied()


def _require_this_thread(model: nn.Module) -> None:
    """Refuse a model that another thread is editing: the hooks of both would act on the forwards of both."""
    if any(each._model is model and each.thread != threading.get_ident() for each in _sessions):
        raise UnsupportedModelError(
            f"another thread is editing this {type(model).__name__}, and edits act on every forward of a model; edit "
            "one thread at a time, or give each thread a copy of the model"
        )


class _Session:
    """The edits of one context, attached to one model."""

    def __init__(self, model: nn.Module, edits: tuple[Edit, ...]) -> None:
        self.log = EditLog()
        self.thread = threading.get_ident()
        self._model = model
        self._own = edits
        self._outer = next((each for each in reversed(_sessions) if each._model is model), None)
        self._edits: list[Edit] = [*(self._outer._edits if self._outer else ()), *edits]
        self._sites: dict[int, BlockSites] = {id(e): site_of(model, e.layer, e.stream) for e in self._edits}
        for each in edits:
            self._check(each)
        self._names = {id(module): name for name, module in model.named_modules()}
        self.modules = {
            id(model.get_submodule(site.attention))
            for each in self._edits
            if acts_on_heads(each) and (site := self._sites[id(each)])
        }
        self._handles: list[Any] = []
        self._tracers: list[ExitStack] = []
        self._masks: dict[str, Tensor | None] = {}
        self._past = 0
        self._running = False
        self._calls: dict[str, int] = {}
        self._proofs = EditProofs(model)

    def _check(self, edit: Edit) -> None:
        """Refuse what cannot work before anything runs."""
        site = self._sites[id(edit)]
        if not acts_on_heads(edit) and site.runs != 1:
            raise UnsupportedModelError(
                f"{site.block} runs {site.runs} times in one forward (layers share it), so an edit of one layer is "
                "undefined there"
            )
        if acts_on_heads(edit) and site.calls != 1:
            raise UnsupportedModelError(
                f"{site.attention} makes {site.calls} attention calls in one forward (a shared block, or differential "
                "attention), so an edit of one layer is undefined there"
            )
        where = edit.site if isinstance(edit, Patch) else "attn_out"
        if acts_on_heads(edit):
            return
        if where == "attn_out" and site.projection is None:
            raise UnsupportedModelError(f"{site.attention} has no output projection to edit: {site.reason}")
        if where == "mlp_out" and site.mlp is None:
            raise UnsupportedModelError(
                f"no module of {site.block} adds a feed-forward branch to the stream; patch resid_post instead"
            )
        if where in ("resid_pre", "resid_post") and site.block is None:
            raise UnsupportedModelError(f"{site.attention} sits in no numbered block, so it has no {where}")

    # ------------------------------------------------------------------------------------------------- attaching
    def attach(self) -> None:
        """Hook the model, the edited attention modules, and the modules whose outputs are edited."""
        self._handles.append(self._model.register_forward_pre_hook(self._before_model, with_kwargs=True))
        self._handles.append(self._model.register_forward_hook(self._after_model, always_call=True))
        for site in {self._sites[id(e)] for e in self._edits if acts_on_heads(e)}:
            self._attach_heads(site)
        for each in self._edits:
            if not acts_on_heads(each):
                self._attach_output(each)

    def _attach_heads(self, site: BlockSites) -> None:
        attention = self._model.get_submodule(site.attention)
        self._handles.append(
            attention.register_forward_pre_hook(self._before_attention, with_kwargs=True, prepend=True)
        )
        self._handles.append(attention.register_forward_hook(self._after_attention, always_call=True))
        if site.attention in modules_to_trace(dict(self._model.named_modules())):
            # entered before and left after any capture's watch, whichever context was opened first
            self._handles.append(
                attention.register_forward_pre_hook(self._start_tracing, with_kwargs=True, prepend=True)
            )
            self._handles.append(attention.register_forward_hook(self._stop_tracing, always_call=True))
        holder = site.block if site.block is not None else site.attention
        for part in self._model.get_submodule(holder).modules():
            if is_linear_like(part):
                self._handles.append(part.register_forward_pre_hook(self._before_linear))

    def _attach_output(self, edit: AttentionOff | Patch) -> None:
        site = self._sites[id(edit)]
        where = edit.site if isinstance(edit, Patch) else "attn_out"
        name = {"attn_out": site.projection, "mlp_out": site.mlp}.get(where, site.block)
        module = self._model.get_submodule(str(name))

        def changed(tensor: Tensor) -> Tensor:
            return self._edited_output(edit, str(name), tensor)

        if where == "resid_pre":
            self._handles.append(
                module.register_forward_pre_hook(
                    lambda _, args, kwargs: None if self._silent() else _with_first(args, kwargs, changed),
                    with_kwargs=True,
                )
            )
        else:
            self._handles.append(
                module.register_forward_hook(
                    lambda _, __, output: None if self._silent() else _with_first_output(output, changed)
                )
            )

    def remove_hooks(self) -> None:
        """Undo everything that `attach` and a running forward left behind."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        while self._tracers:
            self._tracers.pop().close()

    def _silent(self) -> bool:
        """True while a context inside this one has taken its edits over, or while edits rest."""
        return (
            are_edits_paused()
            or next((each for each in reversed(_sessions) if each._model is self._model), None) is not self
        )

    # ---------------------------------------------------------------------------------------------- the model's events
    def _before_model(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        given = bound_arguments(module, args, kwargs)
        for name in ("attention_mask", "decoder_attention_mask"):
            mask = given.get(name)
            self._masks[name] = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
        cache = next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)
        self._past = int(cache.get_seq_length()) if cache is not None and hasattr(cache, "get_seq_length") else 0
        self._running, self._calls = True, {}
        self._proofs.clear()

    def _after_model(self, _module: nn.Module, _args: tuple, _output: Any) -> None:
        self._running = False

    def _before_attention(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._proofs.enter(self._names[id(module)], bound_arguments(module, args, kwargs))

    def _before_linear(self, _module: nn.Module, args: tuple) -> None:
        self._proofs.reached(args)

    def _after_attention(self, module: nn.Module, _args: tuple, output: Any) -> None:
        self._proofs.leave(module, self._names[id(module)], output, silent=self._silent)

    # ---------------------------------------------------------------------------------------------------- head edits
    def on_routed(self, arguments: RoutedArguments, output: Any) -> Any:
        """Edit the result of a routed call."""
        if self._silent():
            return output
        z = output[0] if isinstance(output, tuple | list) else output
        name = self._names[id(arguments.module)]
        heads = None
        if isinstance(z, Tensor) and arguments.q.ndim == 4 and arguments.v.ndim == 4:
            heads = as_heads(z, arguments.q.shape[1], arguments.v.shape[-1], arguments.q.shape[2])
        if heads is None:
            raise UnsupportedModelError(f"{name}: its attention function returns no [batch, position, head, d_value]")
        edited = self._edit(arguments.module, name, arguments.v, heads, arguments)
        edited = edited.reshape(z.shape)
        return (edited, *output[1:]) if isinstance(output, tuple | list) else edited

    def _on_softmax(self, module: nn.Module, seen: TracedSoftmax) -> Tensor | None:
        if self._silent():
            return None
        return self._edit(module, self._names[id(module)], seen.v, seen.z, seen)

    def _edit(
        self, module: nn.Module, name: str, v: Tensor, z: Tensor, source: RoutedArguments | TracedSoftmax
    ) -> Tensor:
        if not self._running:
            raise UnsupportedModelError(
                f"{name} ran outside a forward of {type(self._model).__name__}; inside an edit run the model as a whole"
            )
        self._calls[name] = self._calls.get(name, 0) + 1
        if self._calls[name] > 1:
            raise UnsupportedModelError(f"{name} made a second attention call in this forward; edits need exactly one")
        edits = [e for e in self._edits if acts_on_heads(e) and self._sites[id(e)].attention == name]
        site = self._sites[id(edits[0])]
        queries, keys = self._frames(site.stream)
        call = LiveCall(module, name, site.layer, site.stream, v, z, queries, keys, source)
        edited, touched = edited_heads(call, edits)
        self._note(name, z, edited, edits, touched)
        if not torch.equal(edited, z) and getattr(source, "output_weight", None) is None:
            self._proofs.expect(name, z.detach(), edited.detach(), edits)
        return edited

    def _note(self, name: str, before: Tensor, after: Tensor, edits: list[Edit], touched: list[Tensor]) -> None:
        """Log what happened, and hold the edits to what they named."""
        change = (after.detach() - before.detach()).abs().amax(-1)
        named = torch.stack([t.expand(change.shape) for t in touched]).any(0)
        if bool((change[~named] != 0).any()):
            raise UnverifiedCaptureError(f"{name}: an edit changed entries that it does not name; please report it")
        for each, where in zip(edits, touched, strict=True):
            largest = float(change.masked_fill(~where, 0.0).max()) if change.numel() else 0.0
            self.log.applied.append(Applied(each, name, int(where.sum()), largest))

    def _frames(self, stream: str) -> tuple[TokenFrame, TokenFrame]:
        source = TokenFrame(self._masks.get("attention_mask"))
        both = bool(getattr(getattr(self._model, "config", None), "is_encoder_decoder", False))
        if stream == "encoder":
            return source, source
        own = TokenFrame(self._masks.get("decoder_attention_mask" if both else "attention_mask"), self._past)
        return own, source if stream == "cross" else own

    # -------------------------------------------------------------------------------------------------- output edits
    def _edited_output(self, edit: AttentionOff | Patch, name: str, tensor: Tensor) -> Tensor:
        if isinstance(edit, AttentionOff):
            self._note(
                name, tensor, torch.zeros_like(tensor), [edit], [torch.ones_like(tensor[..., 0], dtype=torch.bool)]
            )
            return torch.zeros_like(tensor)
        queries, _ = self._frames(edit.stream)
        flat = tensor.ndim == 2  # a few families project [batch * position, d]
        rows = 1 if queries.mask is None else queries.mask.shape[0]
        full = tensor.unflatten(0, (rows, -1)) if flat else tensor
        values = fitted(edit.values, tuple(full.shape), f"{name}: values", full)
        n_positions = full.shape[1]
        which = (
            None
            if edit.position is None
            else [edit.position]
            if isinstance(edit.position, int)
            else list(edit.position)
        )
        chosen = queries.present(which, full.shape[0], queries.past + n_positions, "position")[:, -n_positions:]
        chosen = chosen.to(full.device)
        if edit.where is not None:
            chosen = chosen & fitted(edit.where, tuple(chosen.shape), f"{name}: where", chosen)
        edited = torch.where(chosen[..., None], values, full)
        self._note(name, full, edited, [edit], [chosen])
        return edited.reshape(tensor.shape)

    # ------------------------------------------------------------------------------------------------------- tracing
    def _start_tracing(self, module: nn.Module, _args: tuple, _kwargs: dict) -> None:
        stack = ExitStack()
        stack.enter_context(watching_softmax(lambda seen: self._on_softmax(module, seen), head_count(module)))
        self._tracers.append(stack)

    def _stop_tracing(self, _module: nn.Module, _args: tuple, _output: Any) -> None:
        if self._tracers:
            self._tracers.pop().close()

    def require_applied(self) -> None:
        """Raise unless every edit of this context was applied, by it or by a context inside it."""
        if self._outer is not None:
            self._outer.log.applied.extend(each for each in self.log.applied if each.edit in self._outer._edits)
        for each in self._own:
            if not self.log.of(each):
                site = self._sites[id(each)]
                raise UnsupportedModelError(
                    f"{type(each).__name__} at layer {each.layer} never reached {site.attention}: no forward of the "
                    "model ran inside the block, or what ran was a copy that was traced, exported or compiled before"
                )


def _with_first(args: tuple, kwargs: dict, change: Any) -> tuple[tuple, dict]:
    """The arguments with their first floating tensor changed."""
    for index, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point():
            return (*args[:index], change(value), *args[index + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            return args, kwargs | {name: change(value)}
    raise UnsupportedModelError("the block was called without a residual stream to patch")


def _with_first_output(output: Any, change: Any) -> Any:
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        return (change(output[0]), *output[1:])
    raise UnsupportedModelError(f"a module returned {type(output).__name__}, which cannot be patched")

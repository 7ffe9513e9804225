"""`capture`: record the attention calls of a running model.

    with attndiag.capture(model) as captured:
        model(**inputs)
    captured.calls[0].pattern

Inside the context every attention call of the model leaves an `AttentionCall`. Routed calls come from
`hooks.routed`; modules that compute their softmax themselves are watched by `hooks.traced`; layers that are neither
are listed in `captured.refusals` with what they are. The model computes what it would have computed: outputs are
bit-equal with and without a capture. Everything is undone when the context is left, however it is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from attndiag.errors import UnsupportedModelError
from attndiag.hooks.adapters import CustomAttention, adapting
from attndiag.hooks.bridge import bridge_listening
from attndiag.hooks.captured import Captured
from attndiag.hooks.record import AttentionCall
from attndiag.hooks.recorder import Recorder
from attndiag.hooks.routed import listening
from attndiag.models.bridge_model import BridgeModel, is_bridge
from attndiag.models.load import LoadedModel


@contextmanager
def capture(
    model: nn.Module | LoadedModel,
    layers: Collection[int] | None = None,
    on_call: Callable[[AttentionCall], None] | None = None,
    *,
    certify: bool = False,
    modules: Mapping[str, CustomAttention] | None = None,
) -> Iterator[Captured]:
    """Record every attention call of `model` inside a `with` block.

    Parameters
    ----------
    model : a PyTorch module (compiled ones too), a TransformerLens `TransformerBridge`, or what `attndiag.load`
        returned.
    layers : keep calls of these layers only; all when None.
    on_call : called with each `AttentionCall` as soon as its block is left. Nothing is then kept in `captured.calls`,
        so a whole model can be analysed with one layer in memory.
    modules : adapters for attention modules of a person's own, by module name; see `attndiag.hooks.adapters`.
    certify : also measure each call's sampled certificate on the way and raise if it fails.

    Yields
    ------
    Captured, whose `calls` are in the order in which the model made them.

    Raises
    ------
    NothingCapturedError : the block ended without a single attention call (no forward ran, or none of the model's
        layers has softmax weights; the text lists what they are).
    UnsupportedModelError : dropout is active, so identical inputs would give different weights.
    UnverifiedCaptureError : `certify=True` and a call does not reproduce what the model computed; or the parts that an
        adapter names do not multiply to its output.

    Notes
    -----
    Tensors are kept by reference, not copied. Gradients flow as without a capture.
    """
    root = model.model if isinstance(model, LoadedModel) else model
    bridge = root.bridge if isinstance(root, BridgeModel) else root if is_bridge(root) else None
    if bridge is not None:
        if modules:
            raise UnsupportedModelError("adapters are for plain PyTorch models; a bridge has hook points of its own")
        recorder = Recorder(bridge, layers, on_call, certify)
        with bridge_listening(recorder, bridge, layers):
            yield recorder.captured
        recorder.finish()
        return
    compiled = getattr(root, "_orig_mod", None)  # what torch.compile wraps
    recorder = Recorder(compiled if isinstance(compiled, nn.Module) else root, layers, on_call, certify)
    with ExitStack() as stack:
        if compiled is not None or any(m._compiled_call_impl is not None for m in root.modules()):
            # a compiled model never reaches the wrapped functions; inside the context it runs as written
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(recorder.remove_hooks)
        recorder.attach(modules or ())
        if modules:
            stack.enter_context(adapting(recorder, compiled if isinstance(compiled, nn.Module) else root, modules))
        stack.enter_context(listening(recorder))
        yield recorder.captured
        recorder.finish()

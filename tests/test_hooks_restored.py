"""A capture leaves no trace, however its block is left: normally, by an error inside, by an error while attaching."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.modeling_utils import AttentionInterface

import attndiag
from attndiag.hooks import recorder

IDS = torch.arange(2, 12)[None]


def state(model: nn.Module) -> list:
    hooks = [
        (name, dict(m._forward_hooks), dict(m._forward_pre_hooks), dict(m._forward_hooks_with_kwargs), m.training)
        for name, m in model.named_modules()
    ]
    return [*hooks, AttentionInterface.get_interface, AttentionInterface.__getitem__, model.config.to_dict()]


@pytest.mark.parametrize("where", ["normal", "before the forward", "after the forward", "inside a block", "in on_call"])
def test_everything_is_restored(tiny_llama, where):
    before = state(tiny_llama)

    def fail(*_args) -> None:
        raise RuntimeError("planted")

    def run() -> None:
        with torch.no_grad(), attndiag.capture(tiny_llama, on_call=fail if where == "in on_call" else None):
            if where == "before the forward":
                fail()
            if where == "inside a block":
                handle = tiny_llama.model.layers[1].mlp.register_forward_hook(fail)
                try:
                    tiny_llama(IDS)
                finally:
                    handle.remove()
            tiny_llama(IDS)
            if where == "after the forward":
                fail()

    if where == "normal":
        run()
    else:
        with pytest.raises(RuntimeError, match="planted"):
            run()
    assert state(tiny_llama) == before


def test_an_error_while_attaching_restores_too(tiny_llama, monkeypatch):
    before = state(tiny_llama)

    def fail(module: nn.Module) -> bool:
        if module is tiny_llama.model.layers[1].self_attn.o_proj:
            raise RuntimeError("planted")
        return isinstance(module, nn.Linear)

    monkeypatch.setattr(recorder, "is_linear_like", fail)
    with pytest.raises(RuntimeError, match="planted"), attndiag.capture(tiny_llama):
        tiny_llama(IDS)
    assert state(tiny_llama) == before


def test_a_capture_after_a_failed_one_works(tiny_llama):
    with pytest.raises(ZeroDivisionError), attndiag.capture(tiny_llama):
        tiny_llama(IDS)
        raise ZeroDivisionError
    with torch.no_grad(), attndiag.capture(tiny_llama) as captured:
        tiny_llama(IDS)
    assert len(captured.calls) == 2

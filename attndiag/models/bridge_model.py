"""TransformerLens models (`TransformerBridge`, 4.x) with the face of any other model.

A bridge reads `input`, a loaded model is called with `input_ids`; `BridgeModel` stands between. TransformerLens is
never imported here unless a bridge is to be made: what is a bridge is told by its class's module.

`bridge_from` makes a bridge of a transformers model. Booting one replaces submodules of the model that it is given, so
a copy on disk is booted and the caller's model stays as it is.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from attndiag.errors import ModelLoadError


def is_bridge(model: Any) -> bool:
    """True for a `TransformerBridge`; imports nothing."""
    return any(kind.__module__.startswith("transformer_lens.") for kind in type(model).__mro__) and hasattr(
        model, "blocks"
    )


class BridgeModel(nn.Module):
    """A bridge that is called like a transformers model.

    Parameters
    ----------
    bridge : a `TransformerBridge`; shared, not copied.
    """

    def __init__(self, bridge: nn.Module) -> None:
        super().__init__()
        if not is_bridge(bridge):
            raise ModelLoadError(f"{type(bridge).__name__} is not a TransformerBridge")
        self.bridge = bridge
        self.config = bridge.original_model.config  # type: ignore[union-attr]
        self.train(bridge.training)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> CausalLMOutput:
        """Logits of token ids; [batch, position] both."""
        return CausalLMOutput(
            logits=self.bridge(input_ids, return_type="logits", attention_mask=attention_mask, prepend_bos=False)
        )

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of the model inside."""
        embedding = self.bridge.original_model.get_input_embeddings()  # type: ignore[union-attr, operator]
        return getattr(embedding, "original_component", embedding)


def bridge_from(model: nn.Module, tokenizer: Any) -> Any:
    """A bridge of a copy of a transformers model; the model itself is not touched.

    Parameters
    ----------
    model : a transformers model.
    tokenizer : its tokenizer, which TransformerLens insists on.

    Raises
    ------
    ModelLoadError : TransformerLens is not installed, or knows no adapter for this family.
    """
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError as error:
        raise ModelLoadError("transformer-lens is not installed; pip install 'transformer-lens>=4.3,<5'") from error
    device = next(model.parameters()).device
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        model.save_pretrained(folder)  # type: ignore[operator]
        tokenizer.save_pretrained(folder)
        try:
            bridge = TransformerBridge.boot_transformers(folder, device=str(device))
            bridge = bridge.to(next(model.parameters()).dtype).eval()
        except (ValueError, KeyError, NotImplementedError, RuntimeError, TypeError) as error:
            raise ModelLoadError(
                f"TransformerLens cannot boot {type(model).__name__}: {type(error).__name__}: {error}"
            ) from error
    return bridge


@contextlib.contextmanager
def quiet_transformers():
    """TransformerLens turns transformers' logging up and prints; within the block neither is seen."""
    logger = logging.getLogger("transformers")
    level, disabled = logger.level, logger.disabled
    logger.disabled = True
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.disabled = disabled
        logger.setLevel(level)

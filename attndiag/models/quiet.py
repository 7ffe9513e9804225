"""Keep third-party progress bars off the terminal: the library prints nothing itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_bars() -> Iterator[None]:
    """Within the block, transformers' loading and dequantising bars are not drawn; as before afterwards."""
    from transformers import modeling_gguf_pytorch_utils as gguf_loading
    from transformers.utils import logging as hf_logging

    def undrawn(*args: Any, **kwargs: Any) -> Any:
        return bar(*args, **{**kwargs, "disable": True})

    bar = gguf_loading.tqdm
    drawn = hf_logging.is_progress_bar_enabled()
    gguf_loading.tqdm = undrawn
    if drawn:
        hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        gguf_loading.tqdm = bar
        if drawn:
            hf_logging.enable_progress_bar()

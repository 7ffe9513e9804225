"""Small questions to any model: where inputs go, what its forward takes, what fills a batch, which mode it is in."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def accepts(model: nn.Module, argument: str) -> bool:
    """True where `model.forward` names `argument`; `**kwargs` promises nothing."""
    return argument in inspect.signature(model.forward).parameters


def pad_id(tokenizer: Any, config: Any = None) -> int | None:
    """Id that fills ragged batches: pad, the config's pad, EOS, BOS or unknown token; None where all are missing."""
    candidates = (
        tokenizer.pad_token_id,
        getattr(config, "pad_token_id", None),
        tokenizer.eos_token_id,
        tokenizer.bos_token_id,
        tokenizer.unk_token_id,
    )
    return next((int(index) for index in candidates if index is not None and index >= 0), None)


def input_device(model: nn.Module) -> torch.device:
    """Device of the input embedding (of the first parameter where there is none); cpu for offloaded weights."""
    embedding = input_embedding(model)
    weight = embedding.weight if embedding is not None else next(model.parameters(), None)
    return torch.device("cpu") if weight is None or weight.device.type == "meta" else weight.device


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode within the block; every module's own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def input_embedding(model: nn.Module) -> nn.Embedding | None:
    """The module that turns token ids into vectors, None for a model without one."""
    if not hasattr(model, "get_input_embeddings"):
        return None
    try:
        embedding = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    except (NotImplementedError, AttributeError):
        return None  # transformers' way of saying that there is none
    return embedding if isinstance(embedding, nn.Embedding) else None

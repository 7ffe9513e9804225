"""Forwards that many variants of a prompt share: the target on chosen rows, edited input embeddings, few logits.

`take_rows` repeats rows of a resolved target, `measure_rows` runs one batch and reads m, and `editing_embeddings`
changes what the model's input embedding returns. The embedding is edited where it is computed, not handed over as
`inputs_embeds`: position ids, scales and masks then stay exactly what the model makes of its token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attndiag.errors import UnsupportedModelError
from attndiag.explanations.resolved import ResolvedTarget, logits_of
from attndiag.models.access import accepts, input_embedding
from attndiag.models.encoding import Encoded
from attndiag.models.load import LoadedModel

NO_SEQUENCE_LOGITS = ("cosine", "class_logit")
"""Kinds of target that are read off the whole output and not at positions of it."""


def take_rows(resolved: ResolvedTarget, rows: Tensor) -> ResolvedTarget:
    """The same targets with rows chosen, in any order and any number of times."""
    chosen = rows.tolist()

    def take(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[rows.to(tensor.device)]

    return replace(
        resolved,
        targets=tuple(resolved.targets[row] for row in chosen),
        encoded=_take_encoded(resolved.encoded, rows, chosen),
        positions=take(resolved.positions),
        answer_ids=take(resolved.answer_ids),
        foil_ids=take(resolved.foil_ids),
        counted=take(resolved.counted),
        reference=take(resolved.reference),
    )


def _take_encoded(encoded: Encoded, rows: Tensor, chosen: list[int]) -> Encoded:
    changed: dict[str, Any] = {}
    for name, value in vars(encoded).items():
        if isinstance(value, Tensor):
            changed[name] = value[rows.to(value.device)]
        elif isinstance(value, Encoded):
            changed[name] = _take_encoded(value, rows, chosen)
        elif isinstance(value, tuple):
            changed[name] = tuple(value[row] for row in chosen)
    return replace(encoded, **changed)


def measure_rows(lm: LoadedModel, resolved: ResolvedTarget, *, grad: bool = False) -> Tensor:
    """m of every row, [batch], computing logits only where they are read."""
    keep = kept_positions(lm, resolved)
    if keep is None:
        return resolved.value(lm.run(resolved.inputs, grad=grad))
    output = lm.run(resolved.inputs, grad=grad, logits_to_keep=keep)
    logits = logits_of(output, resolved.kind)
    if logits.shape[1] != len(keep):  # a family that takes the argument and does something else with it
        return resolved.value(output)
    places = torch.searchsorted(keep, resolved.positions.to(keep.device)).to(logits.device)  # type: ignore[union-attr]
    return resolved.measure(logits[torch.arange(len(places), device=logits.device)[:, None], places])


def kept_positions(lm: LoadedModel, resolved: ResolvedTarget) -> Tensor | None:
    """Sorted positions at which the batch's logits are read; None where the model computes them all anyway."""
    if resolved.positions is None or not accepts(lm.model, "logits_to_keep") or resolved.encoded.decoder is not None:
        return None
    return torch.unique(resolved.positions)


def embedding_modules(model: nn.Module) -> list[nn.Embedding]:
    """Modules that hold the input embedding's table (encoder-decoders have one for each side)."""
    embedding = input_embedding(model)
    if embedding is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no input embedding, so nothing can be differentiated or replaced there"
        )
    return [m for m in model.modules() if isinstance(m, nn.Embedding) and m.weight is embedding.weight]


@contextmanager
def editing_embeddings(model: nn.Module, ids: Tensor, edit: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within the block, the embedding of `ids` is `edit(its own output)`; exactly one lookup must be edited.

    Raises
    ------
    UnsupportedModelError : the block ends and the ids were never looked up, so nothing was edited.
    """
    count = 0

    def hook(_module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        nonlocal count
        if count or not args or args[0].shape != ids.shape or not torch.equal(args[0], ids):
            return None
        count += 1
        return edit(output)

    handles = [module.register_forward_hook(hook) for module in embedding_modules(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if count == 0:
        raise UnsupportedModelError(
            f"{type(model).__name__} never looked the token ids up in its input embedding, so the edit did not reach "
            "it; use replacements that change the tokens themselves"
        )


def embed(model: nn.Module, ids: Tensor) -> Tensor:
    """What the input embedding returns for token ids, without gradients."""
    with torch.no_grad():
        return embedding_modules(model)[0](ids)


def mean_embedding(lm: LoadedModel, *, chunk: int = 16384) -> Tensor:
    """[d_model], mean of the input embedding over the whole vocabulary."""
    count = lm.vocabulary
    total: Tensor | None = None
    for start in range(0, count, chunk):
        ids = torch.arange(start, min(start + chunk, count), device=lm.device)
        # summed in float64, which some accelerators do not have
        part = embed(lm.model, ids).cpu().double().sum(0)
        total = part if total is None else total + part
    if total is None:
        raise UnsupportedModelError(f"the input embedding of {lm.info.name} is empty")
    return (total / count).to(embed(lm.model, torch.zeros(1, dtype=torch.int64, device=lm.device)))

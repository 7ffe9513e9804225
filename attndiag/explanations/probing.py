"""Probe inputs and their runs: what a card and an audit feed a model that they know nothing about.

Token ids are drawn by seed from the vocabulary without its special ids, because the questions asked here (who reads
whom, how large are the scores) have answers for any input. A model that does not run on token ids alone is told to be
given `inputs`; nothing is made up for pictures or sounds.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attndiag.errors import ShapeError, UnsupportedModelError
from attndiag.models.access import accepts, evaluating, input_embedding
from attndiag.models.load import LoadedModel, load

RELATIVE_NOISE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""Changes below this share of the largest entry are rounding, not an effect."""


@dataclass(frozen=True, eq=False)
class Probe:
    """Inputs that a model has been given, and which of them are the tokens under study.

    Attributes
    ----------
    inputs : keyword arguments of the forward.
    tokens : name of the ids that are edited (`decoder_input_ids` for encoder-decoders); None for other inputs.
    """

    inputs: dict[str, Any]
    tokens: str | None

    @property
    def ids(self) -> Tensor:
        """The ids under study, [batch, position]."""
        if self.tokens is None:
            raise UnsupportedModelError("this probe holds no token ids; edits of single tokens need some")
        return self.inputs[self.tokens]

    @property
    def first(self) -> Tensor:
        """The ids under study, or the first tensor of other inputs."""
        return self.inputs[self.tokens] if self.tokens is not None else next(iter(self.inputs.values()))

    def with_(self, **changes: Any) -> Probe:
        """The same probe with some inputs replaced or added."""
        return replace(self, inputs={**self.inputs, **changes})


def as_loaded(model: nn.Module | LoadedModel) -> LoadedModel:
    """A plain module gets the same face as a loaded one; it keeps its device, its mode and its weights."""
    return model if isinstance(model, LoadedModel) else load(model)


def probe_of(
    lm: LoadedModel, *, batch: int, length: int, seed: int = 0, inputs: Mapping[str, Any] | None = None
) -> Probe:
    """Random token ids for a text model, or what the caller gave.

    Raises
    ------
    UnsupportedModelError : the forward needs more than token ids; the text says which arguments.
    ShapeError : a padding mask is not as long as its ids.
    """
    if inputs is not None:
        given = {name: value.to(lm.device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        named = [name for name in ("decoder_input_ids", "input_ids") if _is_ids(given.get(name))]
        # a module of one's own may call its ids anything; masks and positions are not ids
        other = [n for n, v in given.items() if _is_ids(v) and not any(w in n for w in ("mask", "position", "type"))]
        for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
            _require_same_shape(given, ids, mask)
        return Probe(given, next(iter(named or other), None))
    if not accepts(lm.model, "input_ids"):
        raise UnsupportedModelError(
            f"{type(lm.model).__name__} reads no token ids; its forward takes {_arguments(lm.model)}. "
            "Give one example batch as inputs={...}"
        )
    made: dict[str, Any] = {"input_ids": draw_ids(lm, batch, length, seed)}
    tokens = "input_ids"
    if getattr(lm.config, "is_encoder_decoder", False) and accepts(lm.model, "decoder_input_ids"):
        made["decoder_input_ids"] = draw_ids(lm, batch, length, seed + 1)
        tokens = "decoder_input_ids"
    return Probe(made, tokens)


def _require_same_shape(given: Mapping[str, Any], ids: str, mask: str) -> None:
    """Refuse a padding mask of another length than its ids: transformers would take it and pad or cut it silently."""
    tokens, allowed = given.get(ids), given.get(mask)
    if not (isinstance(tokens, Tensor) and isinstance(allowed, Tensor) and allowed.ndim == 2):
        return
    if allowed.shape != tokens.shape:
        raise ShapeError(
            f"{mask} is {tuple(allowed.shape)} but {ids} is {tuple(tokens.shape)}; expected one entry for each token"
        )


def draw_ids(lm: LoadedModel, batch: int, length: int, seed: int) -> Tensor:
    """[batch, position] ordinary token ids, every row drawn without repetition where the vocabulary allows it."""
    ordinary = ordinary_ids(lm)
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(batch):
        order = torch.randperm(len(ordinary), generator=generator)[:length]
        while len(order) < length:
            order = torch.cat([order, torch.randperm(len(ordinary), generator=generator)])[:length]
        rows.append(ordinary[order])
    return torch.stack(rows).to(lm.device)


def ordinary_ids(lm: LoadedModel, given: Tensor | None = None) -> Tensor:
    """Ids that stand for text, sorted: all rows of the embedding but the special ones that are known.

    Of a module that does not say which of its embeddings reads the ids, only the `given` ids are known to be valid.
    """
    if given is not None and input_embedding(lm.model) is None:
        known = torch.unique(given.cpu())
        if len(known) < 3:
            raise UnsupportedModelError(f"the given ids hold {len(known)} different values; at least 3 are needed")
        return known
    special = set(lm.special_ids) if lm.tokenizer is not None else set()
    for config in (lm.config, getattr(lm.config, "text_config", None)):
        for name, value in vars(config).items() if config is not None else ():
            if name.endswith(("_token_id", "_token_index")):
                special |= {index for index in (value if isinstance(value, list) else [value]) if _is_index(index)}
    ids = torch.tensor([index for index in range(lm.vocabulary) if index not in special])
    if len(ids) < 3:
        raise UnsupportedModelError(f"{lm.info.name} has {len(ids)} ordinary token ids; a probe needs at least 3")
    return ids


def run_probe(lm: LoadedModel, probe: Probe, **options: Any) -> Any:
    """One forward of a probe, in eval mode and without gradients.

    Raises
    ------
    UnsupportedModelError : the model does not run on these inputs; the text names what its forward takes.
    """
    try:
        return lm.run(probe.inputs, **options)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"{type(lm.model).__name__} does not run on {', '.join(probe.inputs)}: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}. Its forward takes {_arguments(lm.model)}; give one "
            "example batch as inputs={...}"
        ) from error


def per_position(output: Any, batch: int, length: int) -> Tensor | None:
    """[batch, position, width] logits or hidden states at the positions under study; None where there are none."""
    for name in ("logits", "last_hidden_state", "prediction_logits"):
        found = getattr(output, name, None)
        if isinstance(found, Tensor) and found.ndim == 3 and tuple(found.shape[:2]) == (batch, length):
            return found
    candidates = output.to_tuple() if hasattr(output, "to_tuple") else output
    candidates = candidates if isinstance(candidates, tuple | list) else (candidates,)
    for found in candidates:
        if isinstance(found, Tensor) and found.ndim == 3 and tuple(found.shape[:2]) == (batch, length):
            return found
    return None


def pooled(output: Any, batch: int, length: int) -> dict[str, Tensor]:
    """What an output says about whole rows of `length` positions: pooled vectors, class logits, losses."""
    found: dict[str, Tensor] = {}
    for name, value in output.items() if hasattr(output, "items") else ():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        by_position = value.ndim == 2 and value.shape[1] == length
        if value.ndim == 0 or (value.ndim in (1, 2) and value.shape[0] == batch and not by_position):
            found[name] = value
    return found


def noise_level(dtype: torch.dtype) -> float:
    """Relative size below which a difference is rounding."""
    return RELATIVE_NOISE.get(dtype, 2e-5)


def moved(changed: Tensor, clean: Tensor) -> Tensor:
    """Largest difference over the last axis, relative to the largest entry of `clean`; nan counts as moved."""
    scale = clean.abs().amax().clamp_min(torch.finfo(clean.dtype).tiny)
    return torch.nan_to_num((changed - clean).abs().amax(-1) / scale, nan=torch.inf)


@contextmanager
def hooked(*hooks: tuple[nn.Module, str, Any]) -> Iterator[None]:
    """Forward hooks (`"pre"` or `"post"`, both with keywords) that are gone when the block is left."""
    handles: list[Any] = []
    try:
        for module, place, function in hooks:
            if place == "pre":
                handles.append(module.register_forward_pre_hook(function, with_kwargs=True))
            else:
                handles.append(module.register_forward_hook(function, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def replace_first_tensor(output: Any, change: Any) -> Any:
    """A module's output with `change` applied to its first tensor."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, tuple | list):
        index = next((i for i, item in enumerate(output) if isinstance(item, Tensor)), None)
        if index is not None:
            parts = [change(item) if i == index else item for i, item in enumerate(output)]
            return type(output)(parts) if type(output) in (tuple, list) else tuple(parts)
    raise UnsupportedModelError(
        f"a block returned {type(output).__name__}, in which no tensor is known to be its state"
    )


@contextmanager
def quiet_eval(lm: LoadedModel) -> Iterator[None]:
    """Eval mode and no gradients for direct calls of parts of a model."""
    with evaluating(lm.model), torch.no_grad():
        yield


def _is_ids(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point()


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _arguments(model: nn.Module) -> str:
    names = [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
        and not name.startswith(("output_", "return_", "use_cache", "past_", "labels", "logits_to_keep"))
    ]
    return ", ".join(names[:8]) or "no named arguments"

"""`ModelInfo`: what was loaded, from where, and what was decided on the way."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from attndiag.models.access import input_device, pad_id


@dataclass(frozen=True)
class ModelInfo:
    """What was loaded, from where, and what was decided on the way. All of it goes into provenance.

    Parameters
    ----------
    name : as the caller said it; the class name for a model object.
    source : `"package wheel"`, `"hub"`, `"folder"`, `"gguf"` or `"object"`.
    location : folder, file or hub id.
    revision : commit of a hub model; wheel, version and SHA-256 of a packaged one; None where nothing pins it.
    architecture : model class.
    dtype : of most parameters.
    device : where inputs go; with a device map, the map.
    attn_implementation : as the config holds it; None for a model without one.
    n_parameters : shared ones once.
    tokenizer_hash : first 16 hex digits of the SHA-256 of the tokenizer's definition; None without tokenizer.
    bos_token : None where the tokenizer has none.
    adds_bos : True where encoding a plain text puts it in front.
    pad_token : what fills ragged batches (behind a mask); None where nothing can.
    chat_template : the template that messages go through, None where the tokenizer has none.
    notes : what was missing and what is used instead, in words.
    """

    name: str
    source: str
    location: str | None
    revision: str | None
    architecture: str
    dtype: str
    device: str
    attn_implementation: str | None
    n_parameters: int
    tokenizer_hash: str | None
    bos_token: str | None
    adds_bos: bool
    pad_token: str | None
    chat_template: str | None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for provenance and tables."""
        return asdict(self)


def describe(
    model: nn.Module,
    tokenizer: Any,
    *,
    name: str,
    source: str,
    location: str | None = None,
    revision: str | None = None,
    remarks: tuple[str, ...] = (),
) -> ModelInfo:
    """The facts about a model and its tokenizer; `remarks` come first among the notes."""
    config = getattr(model, "config", None)
    notes = list(remarks)
    bos = pad = template = digest = None
    adds_bos = False
    if tokenizer is not None:
        bos, template, digest = tokenizer.bos_token, tokenizer.chat_template, tokenizer_hash(tokenizer)
        # an empty text: a tokenizer with a closed vocabulary raises on any word that it does not know
        adds_bos = bos is not None and tokenizer("", verbose=False)["input_ids"][:1] == [tokenizer.bos_token_id]
        filler = pad_id(tokenizer, config)
        pad = None if filler is None else str(tokenizer.convert_ids_to_tokens(filler))
        if tokenizer.pad_token is None:
            notes.append(
                "no pad token and nothing to take its place: prompts of unequal length cannot be batched"
                if pad is None
                else f"no pad token: {pad} fills ragged batches, behind the attention mask"
            )
        if bos is None and tokenizer.cls_token is None:
            notes.append("no BOS token: texts start with their first word")
    placement = getattr(model, "hf_device_map", None)
    return ModelInfo(
        name=name,
        source=source,
        location=location,
        revision=revision,
        architecture=type(model).__name__,
        dtype=str(main_dtype(model)).removeprefix("torch."),
        device=str(placement) if placement and len(placement) > 1 else str(input_device(model)),
        attn_implementation=getattr(config, "_attn_implementation", None),
        n_parameters=sum(weight.numel() for weight in model.parameters()),
        tokenizer_hash=digest,
        bos_token=bos,
        adds_bos=adds_bos,
        pad_token=pad,
        chat_template=template if isinstance(template, str) or template is None else json.dumps(template),
        notes=tuple(notes),
    )


def tokenizer_hash(tokenizer: Any) -> str:
    """First 16 hex digits of the SHA-256 of what the tokenizer does; padding and truncation settings left out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        definition = json.loads(backend.to_str())
        definition.pop("padding", None)
        definition.pop("truncation", None)
    else:
        definition = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    definition["special"] = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()[:16]


def main_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of most of the floating parameters; the default dtype for a model without any."""
    sizes: dict[torch.dtype, int] = {}
    for weight in model.parameters():
        if weight.is_floating_point():
            sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.numel()
    return max(sizes, key=lambda kind: sizes[kind]) if sizes else torch.get_default_dtype()

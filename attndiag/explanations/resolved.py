"""`ResolvedTarget`: the scalar m of one batch with nothing left open, and how it is read off a model output.

Glossary: *position*, index in the padded batch at which logits are read; *step*, one token of a continuation (one
step for every other kind).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attndiag.errors import ShapeError, TargetError
from attndiag.models.encoding import Encoded
from attndiag.prompts import Target, TargetKind

UNITS: dict[TargetKind, str] = {
    "logit_diff": "logits",
    "logprob": "nats",
    "logit": "logits",
    "prob": "probability",
    "class_logit": "logits",
    "masked_token_logit": "logits",
    "cosine": "cosine",
    "continuation_logprob": "nats",
}


@dataclass(frozen=True, eq=False)
class ResolvedTarget:
    """Targets of one batch, with everything that the text left open decided.

    Attributes
    ----------
    targets : one for each row, all of one kind.
    encoded : the model inputs; for `continuation_logprob` the continuation is part of them (marked special).
    positions : [batch, step], where logits are read; None for classes and embeddings.
    answer_ids, foil_ids : [batch, step] token ids, or [batch, 1] class numbers; foil None where there is none.
    counted : [batch, step] boolean, False where a shorter continuation is filled up; None when all count.
    reference : [batch, d_model], unit vectors that `cosine` compares with.
    """

    targets: tuple[Target, ...]
    encoded: Encoded
    positions: Tensor | None = None
    answer_ids: Tensor | None = None
    foil_ids: Tensor | None = None
    counted: Tensor | None = None
    reference: Tensor | None = None

    @property
    def kind(self) -> TargetKind:
        """What is measured."""
        return self.targets[0].kind

    @property
    def unit(self) -> str:
        """Unit of m."""
        return UNITS[self.kind]

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Keyword arguments for the model."""
        return self.encoded.inputs

    def __len__(self) -> int:
        return len(self.targets)

    def value(self, output: Any) -> Tensor:
        """m of each row, [batch], from what the model returned; gradients flow through it.

        A target of one row measures every row of a larger batch (variants of one prompt).

        Raises
        ------
        ShapeError : the output has another number of rows.
        TargetError : the output holds nothing that this kind can be read from.
        """
        if self.kind == "cosine":
            return self._cosine(output)
        logits = logits_of(output, self.kind)
        if self.kind == "class_logit":
            return self.measure(logits[:, None])
        positions = self._for_batch(self.positions, logits.shape[0], "positions")
        if int(positions.max()) >= logits.shape[1]:
            raise ShapeError(f"the target is read at position {int(positions.max())}, logits have {logits.shape[1]}")
        rows = torch.arange(logits.shape[0], device=logits.device)[:, None]
        return self.measure(logits[rows, positions.to(logits.device)])

    def measure(self, logits: Tensor) -> Tensor:
        """m of each row, [batch], from logits that were already picked out: [batch, step, vocabulary or class]."""
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        answers = self._for_batch(self.answer_ids, logits.shape[0], "answer ids").to(logits.device)
        if self.kind in ("logprob", "continuation_logprob"):
            logits = torch.log_softmax(logits, dim=-1)
        elif self.kind == "prob":
            logits = torch.softmax(logits, dim=-1)
        values = logits.gather(-1, answers[..., None])[..., 0]
        if self.foil_ids is not None:
            foils = self._for_batch(self.foil_ids, logits.shape[0], "foil ids").to(logits.device)
            values = values - logits.gather(-1, foils[..., None])[..., 0]
        if self.counted is not None:
            counted = self._for_batch(self.counted, logits.shape[0], "counted").to(logits.device)
            values = values.masked_fill(~counted, 0.0)
        return values.sum(-1)

    def top1(self, output: Any) -> list[int]:
        """The first choice of each row where the target is read: token id (of the first step) or class number."""
        logits = logits_of(output, self.kind)
        if self.kind != "class_logit":
            positions = self._for_batch(self.positions, logits.shape[0], "positions")
            rows = torch.arange(logits.shape[0], device=logits.device)
            logits = logits[rows, positions[:, 0].to(logits.device)]
        return logits.argmax(-1).tolist()

    def row(self, index: int) -> ResolvedTarget:
        """The target of one row alone, with its ids fixed; its inputs keep the padding of the batch."""
        if not -len(self) <= index < len(self):
            raise ShapeError(f"row {index} of a batch of {len(self)}")
        index %= len(self)

        def take(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[index : index + 1]

        return ResolvedTarget(
            targets=self.targets[index : index + 1],
            encoded=_encoded_row(self.encoded, index),
            positions=take(self.positions),
            answer_ids=take(self.answer_ids),
            foil_ids=take(self.foil_ids),
            counted=take(self.counted),
            reference=take(self.reference),
        )

    def _cosine(self, output: Any) -> Tensor:
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is None:
            raise TargetError(
                f"{type(output).__name__} has no last_hidden_state to make a sentence embedding of; load the model "
                "without its head, or choose a target on its logits"
            )
        side = self.encoded if self.encoded.decoder is None else self.encoded.decoder
        mask = self._for_batch(side.attention_mask, hidden.shape[0], "attention mask").to(hidden.device)
        embedding = sentence_embedding(hidden, mask, self.targets[0].pooling)
        reference = self._for_batch(self.reference, hidden.shape[0], "reference").to(embedding)
        return (embedding * reference).sum(-1)

    def _for_batch(self, tensor: Tensor | None, batch: int, what: str) -> Tensor:
        if tensor is None:
            raise TargetError(f"a {self.kind} target without {what}; make it with resolve_target")
        if tensor.shape[0] == batch:
            return tensor
        if tensor.shape[0] == 1:
            return tensor.expand(batch, *tensor.shape[1:])
        raise ShapeError(f"the target has {tensor.shape[0]} rows ({what}), the model's output {batch}")


def sentence_embedding(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """Unit vectors [batch, d_model] from token vectors [batch, position, d_model]: mean without padding, or the first.

    The first token is the first that is not padding.
    """
    if hidden.dtype in (torch.bfloat16, torch.float16):
        hidden = hidden.float()
    if pooling == "mean":
        weights = mask[..., None].to(hidden)
        pooled = (hidden * weights).sum(1) / weights.sum(1)
    else:
        pooled = hidden[torch.arange(hidden.shape[0], device=hidden.device), mask.argmax(1)]
    return torch.nn.functional.normalize(pooled, dim=-1)


def logits_of(output: Any, kind: TargetKind) -> Tensor:
    """The logits in a model output; raises `TargetError` where it has none of the shape that `kind` needs."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise TargetError(
            f"{type(output).__name__} holds no logits, so {kind} cannot be read from it; load the model with its head, "
            "or use Target.cosine for a sentence encoder"
        )
    expected = 2 if kind == "class_logit" else 3
    if logits.ndim != expected:
        raise TargetError(f"{kind} is read from logits with {expected} axes, this model returns {tuple(logits.shape)}")
    return logits


def _encoded_row(encoded: Encoded, index: int) -> Encoded:
    def take(value: Any) -> Any:
        if isinstance(value, Tensor | tuple):
            return value[index : index + 1]
        return _encoded_row(value, index) if isinstance(value, Encoded) else value

    return Encoded(**{name: take(value) for name, value in vars(encoded).items()})

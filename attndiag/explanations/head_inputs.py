"""Inputs for the probes of `attndiag.heads`: repeated random tokens, and plain text.

What a probe can be depends on the model: its vocabulary without special tokens, its BOS, its trained context, its
sliding windows. Everything decided here is said in `facts` of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from attndiag.core.probes import InductionProbe, fit_length, repeated_random_tokens
from attndiag.errors import AttnDiagError, NotApplicableError
from attndiag.models.load import LoadedModel

_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
BATCH_BYTES = 2**28


@dataclass(frozen=True, eq=False)
class HeadInput:
    """One set of rows, and which of their positions count.

    Parameters
    ----------
    tokens : [row, position] token ids.
    valid : [row, position] bool, False for padding.
    queries : [row, position] bool, positions whose row of the pattern counts.
    sinks : [row, position] bool, position 0 and special tokens.
    about : what it is, in words.
    probe : the induction probe that it came from, if it did.
    """

    tokens: Tensor
    valid: Tensor
    queries: Tensor
    sinks: Tensor
    about: str
    probe: InductionProbe | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def take(self, rows: slice | Tensor) -> HeadInput:
        """Some of the rows: a slice, or their indices, which may repeat."""
        probe = self.probe
        if probe is not None:
            probe = InductionProbe(probe.tokens[rows], probe.length, probe.bos)
        return HeadInput(self.tokens[rows], self.valid[rows], self.queries[rows], self.sinks[rows], self.about, probe)

    def batches(self, lm: LoadedModel) -> Iterator[HeadInput]:
        """Batches of which neither the logits nor one layer's patterns take more than 256 MB."""
        size = self.room(lm)
        for start in range(0, len(self), size):
            yield self.take(slice(start, start + size))

    def room(self, lm: LoadedModel) -> int:
        """How many rows of this length such a batch may have; at least one."""
        n = self.tokens.shape[1]
        heads = int(getattr(text_config(lm), "num_attention_heads", None) or 16)
        return max(1, BATCH_BYTES // (4 * n * max(lm.vocabulary, heads * n)))

    def model_inputs(self, lm: LoadedModel) -> dict[str, Tensor]:
        """Keyword arguments for the model; an encoder-decoder reads the same rows on both sides."""
        tokens = self.tokens.to(lm.device)
        inputs = {"input_ids": tokens}
        if not bool(self.valid.all()):
            inputs["attention_mask"] = self.valid.long().to(lm.device)
        if getattr(lm.config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = tokens
            if "attention_mask" in inputs:
                inputs["decoder_attention_mask"] = inputs["attention_mask"]
        return inputs


def text_config(lm: LoadedModel) -> Any:
    """The configuration of the text part, where a model has several."""
    config = lm.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def trained_context(lm: LoadedModel) -> int | None:
    """How many positions the model was trained on, as its configuration says; None where it does not say."""
    config = text_config(lm)
    for name in _CONTEXT:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def first_token(lm: LoadedModel) -> int | None:
    """BOS (CLS) of the tokenizer, BOS of the configuration without a tokenizer; None where there is none."""
    if lm.tokenizer is not None:
        found = lm.tokenizer.bos_token_id
        found = lm.tokenizer.cls_token_id if found is None else found
    else:
        found = getattr(text_config(lm), "bos_token_id", None)
    return found if isinstance(found, int) and 0 <= found < lm.vocabulary else None


def admissible_tokens(lm: LoadedModel) -> Tensor:
    """Every token id that stands for text: special tokens and rows of the embedding without a token are left out."""
    if lm.tokenizer is not None:
        special, count = set(lm.special_ids), min(len(lm.tokenizer), lm.vocabulary)
    else:
        config, count = text_config(lm), lm.vocabulary
        special = set()
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
            value = getattr(config, name, None)
            special |= set(value) if isinstance(value, list) else {value}
    return torch.tensor([index for index in range(count) if index not in special])


def induction_input(
    lm: LoadedModel, *, rows: int, length: int, seed: int, window: int | None, bos: bool | None
) -> HeadInput:
    """`[BOS] s s`, shortened to what context and window allow.

    Raises
    ------
    NotApplicableError : no such probe fits this model, or `bos=True` and there is no BOS.
    """
    start = _chosen_bos(lm, bos)
    admissible = admissible_tokens(lm)
    if start is not None:
        admissible = admissible[admissible != start]
    fitted = fit_length(
        length,
        admissible=admissible.numel(),
        context=trained_context(lm),
        window=window,
        bos=start is not None,
    )
    probe = repeated_random_tokens(rows, fitted, admissible=admissible, bos=start, seed=seed)
    said = "without BOS" if start is None else f"BOS {start}"
    return HeadInput(
        tokens=probe.tokens,
        valid=torch.ones_like(probe.tokens, dtype=torch.bool),
        queries=probe.queries,
        sinks=_first_position(probe.tokens),
        about=f"random tokens without replacement, twice: {fitted} a copy, {said}",
        probe=probe,
    )


def text_input(
    lm: LoadedModel, texts: Sequence[str] | None, *, rows: int, length: int, seed: int, bos: bool | None
) -> HeadInput:
    """Plain text as the model's tokenizer encodes it; random tokens (no repeats) for a model without a tokenizer.

    The first two positions are no queries: at position 1 the previous token is the sink.

    Raises
    ------
    NotApplicableError : the texts cannot be encoded, or nothing is left of them.
    """
    if lm.tokenizer is None:
        if texts is not None:
            raise NotApplicableError("texts need a tokenizer; give one to attndiag.load with the model")
        return _random_rows(lm, rows=rows, length=length, seed=seed, bos=bos)
    chosen = list(texts) if texts is not None else plain_texts()
    try:
        encoded = lm.encode(chosen)
    except AttnDiagError as error:
        raise NotApplicableError(f"the texts cannot be encoded for this model: {error}") from error
    valid = encoded.attention_mask.bool().cpu()
    special = encoded.special.cpu()
    queries = valid & ~special
    queries[:, :2] = False
    if not bool(queries.any(dim=1).all()):
        raise NotApplicableError("every text needs at least three tokens; give longer `texts`")
    return HeadInput(
        tokens=encoded.input_ids.cpu(),
        valid=valid,
        queries=queries,
        sinks=(_first_position(encoded.input_ids.cpu()) | special) & valid,
        about=f"{len(chosen)} {'given' if texts is not None else 'built-in English'} texts",
    )


def plain_texts() -> list[str]:
    """Sixteen short paragraphs of plain English that come with the package."""
    return (files("attndiag") / "data" / "plain_text.txt").read_text(encoding="utf-8").splitlines()


def _random_rows(lm: LoadedModel, *, rows: int, length: int, seed: int, bos: bool | None) -> HeadInput:
    start = _chosen_bos(lm, bos)
    admissible = admissible_tokens(lm)
    if start is not None:
        admissible = admissible[admissible != start]
    context = trained_context(lm)
    room = length if context is None else min(length, context - (start is not None))
    if min(room, admissible.numel()) < 3:
        raise NotApplicableError(
            f"{admissible.numel()} admissible tokens and a context of {context} leave no row of three different tokens"
        )
    room = min(room, admissible.numel())
    generator = torch.Generator().manual_seed(seed)
    picks = torch.stack([torch.randperm(admissible.numel(), generator=generator)[:room] for _ in range(rows)])
    tokens = admissible[picks]
    if start is not None:
        tokens = torch.cat([torch.full((rows, 1), start), tokens], dim=1)
    queries = torch.ones_like(tokens, dtype=torch.bool)
    queries[:, :2] = False
    return HeadInput(
        tokens, torch.ones_like(queries), queries, _first_position(tokens),
        f"random tokens without repeats (no tokenizer): {room} a row, "
        + ("without BOS" if start is None else f"BOS {start}"),
    )  # fmt: skip


def _chosen_bos(lm: LoadedModel, bos: bool | None) -> int | None:
    start = None if bos is False else first_token(lm)
    if bos and start is None:
        raise NotApplicableError("bos=True, but neither tokenizer nor configuration names a BOS token; use bos=False")
    return start


def _first_position(tokens: Tensor) -> Tensor:
    first = torch.zeros_like(tokens, dtype=torch.bool)
    first[:, 0] = True
    return first

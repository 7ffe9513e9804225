"""Prompts to model inputs: ids, masks, positions, and where each token stands in the text.

Every prompt is tokenised by itself, without padding or truncation, and the batch is padded here: the tokenizer is
never changed, and a pad token that the tokenizer lacks is no obstacle, because the attention mask, not the id,
says what is padding.

Steps: text, or messages through the chat template -> ids with character offsets -> special and template tokens
labelled -> padded batch. A text that comes out of a chat template already holds its special tokens, so none are
added to it; a text that starts with the BOS text itself keeps one.

Glossary: *special*, a position to leave out of rankings (special token, template text or padding); *template*, a
token that comes from the chat template and not from a message; *offsets*, [start, end) in the text as tokenised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from attndiag.errors import PromptError
from attndiag.prompts import Prompt

PaddingSide = Literal["left", "right"]
NO_TEXT = -1


@dataclass(frozen=True, eq=False)
class Encoded:
    """A batch of prompts as the model reads it. Pass `inputs` to the model.

    Parameters
    ----------
    input_ids : [batch, position], int64.
    attention_mask : [batch, position], int64, 1 for real tokens.
    special : [batch, position], bool; special tokens, chat-template tokens and padding: never ranked or replaced.
    template : [batch, position], bool; tokens that the chat template added around the messages.
    offsets : [batch, position, 2], int64; characters [start, end) of `texts[batch]`; -1 where a token has none.
    texts : what was tokenised, after the chat template; with `messages` offsets count in this text.
    tokens : [batch][position], text of each token; joined, the tokens with offsets rebuild the text, white space
        that the tokenizer drops included with the token after it.
    padding_side : where padding stands in a ragged batch.
    position_ids : [batch, position] where the model must be told (left padding), else None.
    token_type_ids : [batch, position] for models that read them, else None.
    decoder : the decoder's side of an encoder-decoder, else None.
    """

    input_ids: Tensor
    attention_mask: Tensor
    special: Tensor
    template: Tensor
    offsets: Tensor
    texts: tuple[str, ...]
    tokens: tuple[tuple[str, ...], ...]
    padding_side: PaddingSide
    position_ids: Tensor | None = None
    token_type_ids: Tensor | None = None
    decoder: Encoded | None = None

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Keyword arguments for the model's forward."""
        inputs = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        if self.position_ids is not None:
            inputs["position_ids"] = self.position_ids
        if self.token_type_ids is not None:
            inputs["token_type_ids"] = self.token_type_ids
        if self.decoder is not None:
            inputs["decoder_input_ids"] = self.decoder.input_ids
            inputs["decoder_attention_mask"] = self.decoder.attention_mask
        return inputs

    @property
    def lengths(self) -> Tensor:
        """[batch]; real tokens of each prompt."""
        return self.attention_mask.sum(-1)

    @property
    def last(self) -> Tensor:
        """[batch]; index of each prompt's last real token."""
        width = self.input_ids.shape[1]
        return torch.full_like(self.lengths, width - 1) if self.padding_side == "left" else self.lengths - 1

    @property
    def ragged(self) -> bool:
        """True where the batch holds padding."""
        return not bool(self.attention_mask.all())


@dataclass(frozen=True)
class _Row:
    """One tokenised text, unpadded."""

    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]
    special: list[bool]
    template: list[bool]
    types: list[int] | None = None


def encode_rows(
    prompts: Sequence[Prompt],
    tokenizer: Any,
    *,
    pad_id: int | None,
    padding_side: PaddingSide,
    device: torch.device,
    limit: int | None,
) -> Encoded:
    """Tokenise and pad. `limit` is the model's number of positions; `pad_id` None allows no ragged batch.

    Raises
    ------
    PromptError
        No prompts; a prompt without tokens or longer than `limit`; messages without a chat template; a ragged batch
        and no token to pad it with.
    """
    if not prompts:
        raise PromptError("no prompts were given; give at least one")
    rows = [_row(prompt, tokenizer) for prompt in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        check_length(_name(prompt), len(row.ids), limit)
    return _pad(rows, tokenizer, pad_id=pad_id, padding_side=padding_side, device=device)


def encode_decoder(
    prompts: Sequence[Prompt], tokenizer: Any, *, start_id: int, pad_id: int | None, device: torch.device
) -> Encoded:
    """The decoder's inputs: its start token, then `decoder_text` without special tokens. Padded on the right."""
    rows = []
    for prompt in prompts:
        row = _tokenize(prompt.decoder_text or "", tokenizer, add_special_tokens=False)
        rows.append(
            _Row(
                row.text,
                [start_id, *row.ids],
                [(NO_TEXT, NO_TEXT), *row.offsets],
                [True, *row.special],
                [False, *row.template],
            )
        )
    return _pad(rows, tokenizer, pad_id=pad_id, padding_side="right", device=device)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that stand for no text: the named special tokens and the added ones marked as special."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {index for index, token in added.items() if token.special}


def check_length(name: str, length: int, limit: int | None) -> None:
    """Raise `PromptError` for a prompt without tokens, or with more than the model has positions."""
    if length == 0:
        raise PromptError(f"{name} has no tokens after tokenisation; give text that is more than white space")
    if limit is not None and length > limit:
        raise PromptError(f"{name} has {length} tokens but the model has {limit} positions; shorten it")


def _name(prompt: Prompt) -> str:
    if prompt.id is not None:
        return f"prompt {prompt.id!r}"
    text = prompt.text if prompt.text is not None else "(messages)"
    return f"prompt {text[:40]!r}"


def _row(prompt: Prompt, tokenizer: Any) -> _Row:
    if prompt.messages is None:
        row = _tokenize(prompt.text or "", tokenizer, add_special_tokens=True)
        return _without_second_bos(row, tokenizer.bos_token_id)
    text = render_messages(prompt.messages, tokenizer, name=_name(prompt))
    row = _tokenize(text, tokenizer, add_special_tokens=False)
    inside = _message_spans(text, prompt.messages)
    template = [not any(begin < stop and start < end for start, stop in inside) for begin, end in row.offsets]
    special = [a or b for a, b in zip(row.special, template, strict=True)]
    return _Row(row.text, row.ids, row.offsets, special, template, row.types)


def render_messages(messages: Sequence[Mapping[str, str]], tokenizer: Any, *, name: str = "the prompt") -> str:
    """Messages through the tokenizer's chat template, with the opening of the assistant's turn where it is next."""
    import jinja2

    if getattr(tokenizer, "chat_template", None) is None:
        raise PromptError(f"{name} has messages, but this tokenizer has no chat template; give text instead")
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=messages[-1].get("role") != "assistant",
        )
    except (jinja2.TemplateError, KeyError, TypeError, ValueError) as error:
        raise PromptError(
            f"the chat template refused the messages of {name}: {error}; each turn needs a role and a content "
            "that the template knows"
        ) from error


def _message_spans(text: str, messages: Sequence[Mapping[str, str]]) -> list[tuple[int, int]]:
    """Where each message's content stands in the rendered text; templates may strip it or leave a turn out."""
    spans: list[tuple[int, int]] = []
    cursor = 0
    for message in messages:
        content = str(message.get("content", ""))
        for wording in (content, content.strip()):
            at = text.find(wording, cursor) if wording else -1
            if at >= 0:
                spans.append((at, at + len(wording)))
                cursor = at + len(wording)
                break
    return spans


def _tokenize(text: str, tokenizer: Any, *, add_special_tokens: bool) -> _Row:
    fast = bool(getattr(tokenizer, "is_fast", False))
    # a text longer than the tokenizer's own idea of a limit is no news: check_length knows the model's
    try:
        batch = tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            padding=False,
            truncation=False,
            return_offsets_mapping=fast,
            return_special_tokens_mask=True,
            verbose=False,
        )
    except Exception as error:
        # tokenizers raises a bare Exception, for a word outside a closed vocabulary for one
        if type(error) is not Exception:
            raise
        raise PromptError(f"the tokenizer cannot read {text[:60]!r}: {error}; use words of its vocabulary") from error
    ids: list[int] = list(batch["input_ids"])
    added = batch["special_tokens_mask"]
    spans = batch["offset_mapping"] if fast else [(NO_TEXT, NO_TEXT)] * len(ids)
    offsets = [
        (NO_TEXT, NO_TEXT) if is_added or end <= start else (start, end)
        for (start, end), is_added in zip(spans, added, strict=True)
    ]
    never_text = special_ids(tokenizer)
    unknown = tokenizer.unk_token_id
    special = [
        bool(is_added) or (index in never_text and not (index == unknown and _stands_for_text(text, span, tokenizer)))
        for index, is_added, span in zip(ids, added, offsets, strict=True)
    ]
    types = batch.get("token_type_ids")
    return _Row(text, ids, offsets, special, [False] * len(ids), list(types) if types is not None else None)


def _stands_for_text(text: str, span: tuple[int, int], tokenizer: Any) -> bool:
    """An unknown token that replaces a word, as opposed to its own name written in the text."""
    return span[0] >= 0 and text[span[0] : span[1]].strip() != tokenizer.unk_token


def _without_second_bos(row: _Row, bos: int | None) -> _Row:
    if bos is None or row.ids[:2] != [bos, bos]:
        return row
    types = row.types[1:] if row.types is not None else None
    return _Row(row.text, row.ids[1:], row.offsets[1:], row.special[1:], row.template[1:], types)


def _token_texts(row: _Row, tokenizer: Any) -> tuple[str, ...]:
    texts: list[str] = []
    cursor = 0
    for index, (start, end) in zip(row.ids, row.offsets, strict=True):
        if start == NO_TEXT:
            texts.append(str(tokenizer.convert_ids_to_tokens(index)))
        elif end <= cursor:  # one character spread over several byte tokens: the first of them shows it
            texts.append("")
        else:
            # white space between two tokens belongs to the second
            texts.append(row.text[cursor:end] if not row.text[cursor:start].strip() else row.text[start:end])
            cursor = end
    return tuple(texts)


def _pad(
    rows: Sequence[_Row], tokenizer: Any, *, pad_id: int | None, padding_side: PaddingSide, device: torch.device
) -> Encoded:
    width = max(len(row.ids) for row in rows)
    if pad_id is None and any(len(row.ids) != width for row in rows):
        raise PromptError(
            f"prompts of {sorted({len(row.ids) for row in rows})} tokens need padding, and this tokenizer has neither "
            "a pad, EOS, BOS nor unknown token; set tokenizer.pad_token before loading, or encode one at a time"
        )
    filler = 0 if pad_id is None else pad_id
    pad_text = "" if pad_id is None else str(tokenizer.convert_ids_to_tokens(pad_id))

    def fill(values: Sequence[Any], blank: Any) -> list[Any]:
        blanks = [blank] * (width - len(values))
        return [*blanks, *values] if padding_side == "left" else [*values, *blanks]

    def tensor(values: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    types = None
    if all(row.types is not None for row in rows):
        types = tensor([fill(row.types or [], 0) for row in rows])
    return Encoded(
        input_ids=tensor([fill(row.ids, filler) for row in rows]),
        attention_mask=tensor([fill([1] * len(row.ids), 0) for row in rows]),
        special=tensor([fill(row.special, True) for row in rows], torch.bool),
        template=tensor([fill(row.template, False) for row in rows], torch.bool),
        offsets=tensor([fill(row.offsets, (NO_TEXT, NO_TEXT)) for row in rows]),
        texts=tuple(row.text for row in rows),
        tokens=tuple(tuple(fill(_token_texts(row, tokenizer), pad_text)) for row in rows),
        padding_side=padding_side,
        token_type_ids=types,
    )

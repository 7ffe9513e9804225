"""What is replaced together: single tokens, words, or the prompt's named spans, found through character offsets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from attndiag.errors import PromptError
from attndiag.explanations.baselines import continuation_tokens
from attndiag.explanations.resolve import prompt_label
from attndiag.explanations.resolved import ResolvedTarget
from attndiag.prompts import Prompt

Granularity = Literal["token", "word", "span"]


@dataclass(frozen=True)
class Item:
    """A set of positions that are replaced together.

    Attributes
    ----------
    label : how it is shown.
    positions : ascending, in the prompt's own token ids.
    reason : why it cannot be replaced; empty where it can.
    """

    label: str
    positions: tuple[int, ...]
    reason: str = ""


def admissible(resolved: ResolvedTarget) -> Tensor:
    """[position] boolean for a batch of one: tokens that may be replaced or ranked."""
    encoded = resolved.encoded
    return ~encoded.special[0] & encoded.attention_mask[0].bool() & ~continuation_tokens(resolved)[0]


def items_of(prompt: Prompt, resolved: ResolvedTarget, by: Granularity) -> list[Item]:
    """The items of one prompt, in the order of the text; `resolved` is a batch of one.

    A token belongs to the word, and to the spans, that hold its characters other than white space. With `"token"` every
    position is an item, inadmissible ones with their reason; words and spans hold admissible tokens only.

    Raises
    ------
    PromptError : no admissible position; spans asked for and none given; a span without tokens; a tokenizer without
        offsets where they are needed.
    """
    if by not in get_args(Granularity):
        raise ValueError(f"by is {by!r}; expected one of {', '.join(get_args(Granularity))}")
    encoded = resolved.encoded
    allowed = admissible(resolved).tolist()
    if not any(allowed):
        raise PromptError(
            f"{prompt_label(prompt)!r} has no token that may be replaced: all of {list(encoded.tokens[0])} are special"
        )
    if by == "token":
        return [
            Item(text, (place,), "" if free else "special token or scored continuation")
            for place, (text, free) in enumerate(zip(encoded.tokens[0], allowed, strict=True))
        ]
    text = encoded.texts[0]
    places = _characters(text, encoded.offsets[0].tolist())
    if all(start < 0 for start, _ in places):
        raise PromptError(f"the tokenizer gives no character offsets, so {by}s cannot be found; use by='token'")
    if by == "word":
        groups = [(match.group(), match.span()) for match in re.finditer(r"\S+", text)]
    else:
        groups = _spans(prompt, text)
    items = []
    for label, (start, end) in groups:
        inside = [
            place
            for place, (first, last) in enumerate(places)
            if allowed[place] and first >= 0 and first < end and start < last
        ]
        if inside:
            items.append(Item(label, tuple(inside)))
        elif by == "span":
            raise PromptError(f"span {label!r} of {prompt_label(prompt)!r} holds no token that may be replaced")
    return items


def check_sets(sets: list[tuple[int, ...]], resolved: ResolvedTarget) -> None:
    """Raise `ValueError` for sets of positions with one that may not be replaced."""
    allowed = admissible(resolved).tolist()
    for index, positions in enumerate(sets):
        for place in positions:
            if not 0 <= place < len(allowed) or not allowed[place]:
                free = [place for place, free in enumerate(allowed) if free]
                raise ValueError(f"set {index} names position {place}, which may not be replaced; free are {free}")


def _spans(prompt: Prompt, text: str) -> list[tuple[str, tuple[int, int]]]:
    if not prompt.spans:
        raise PromptError(f"{prompt_label(prompt)!r} has no spans; give `spans`, or use by='token' or 'word'")
    # a scored continuation is appended, so the prompt's own characters keep their places
    if prompt.text is None or not text.startswith(prompt.text):
        raise PromptError(f"the spans of {prompt_label(prompt)!r} count in its text, which a chat template changed")
    return sorted(((name, (span[0], span[1])) for name, span in prompt.spans.items()), key=lambda each: each[1])


def _characters(text: str, offsets: list[list[int]]) -> list[tuple[int, int]]:
    """[start, end) of each token without white space at its ends; (-1, -1) for tokens without a place in the text."""
    found = []
    for start, end in offsets:
        if start < 0:
            found.append((-1, -1))
            continue
        piece = text[start:end]
        left = len(piece) - len(piece.lstrip())
        right = len(piece) - len(piece.rstrip())
        # a token of white space alone belongs where it stands
        found.append((start + left, end - right) if piece.strip() else (start, end))
    return found


def position_tensor(item: Item) -> Tensor:
    """The item's positions as an index."""
    return torch.tensor(item.positions, dtype=torch.int64)

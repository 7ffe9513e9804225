"""Scores of tokens named elsewhere, put on this model's own tokens.

Tried in this order, and nothing is guessed beyond it:

1. the names are the tokenizer's own entries, or equal our token texts up to the usual markers (`Ġ`, `▁`, `##`, `</w>`);
2. the same without the special tokens of either side: ours get nan where the other side has none;
3. the names, one after the other, spell the text (case and accents folded, white space skipped): each becomes the span
   of characters that it stands for, and its score is spread over our tokens there;
4. every name occurs exactly once in the text, in whatever distance.

Else `TokenisationError`, which shows both tokenisations.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attndiag.errors import ShapeError
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt

Array = NDArray[np.float64]
Span = tuple[int, int]
# special tokens of common tokenizers, beside those of the model's own
_SPECIAL = frozenset({"<s>", "</s>", "<bos>", "<eos>", "<pad>", "<unk>", "[CLS]", "[SEP]", "[PAD]", "<|endoftext|>"})
_MARKERS = ("Ġ", "▁", "Ċ")


class TokenisationError(ShapeError):
    """Scores name other tokens than the model reads, and the characters do not tell where they belong."""


@dataclass(frozen=True, eq=False)
class OwnTokens:
    """Tokens of one prompt as this model reads them.

    Parameters
    ----------
    label : of the prompt.
    texts : text of each token; empty for those that stand for none.
    entries : the tokenizer's own entries.
    special : [position].
    offsets : [position, 2] characters of `text`, -1 where a token has none.
    text : what was tokenised.
    special_names : entries of the tokenizer that are special.
    """

    label: str
    texts: tuple[str, ...]
    entries: tuple[str, ...]
    special: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    text: str
    special_names: frozenset[str]

    def __len__(self) -> int:
        return len(self.texts)


def own_tokens(lm: LoadedModel, prompt: Prompt, label: str) -> OwnTokens:
    """The tokens of one prompt; those of the source in an encoder-decoder."""
    encoded = lm.encode(prompt)
    ids = encoded.input_ids[0].tolist()
    names = getattr(lm.tokenizer, "convert_ids_to_tokens", None)
    entries = [str(name) for name in names(ids)] if names is not None else list(encoded.tokens[0])
    return OwnTokens(
        label=label,
        texts=tuple(encoded.tokens[0]),
        entries=tuple(entries),
        special=encoded.special[0].cpu().numpy(),
        offsets=encoded.offsets[0].cpu().numpy(),
        text=encoded.texts[0],
        special_names=frozenset(getattr(lm.tokenizer, "all_special_tokens", ())) | _SPECIAL,
    )


def on_own_tokens(names: Sequence[str], scores: Array, own: OwnTokens) -> Array:
    """Scores of named tokens on our own, [position]; nan where there is none.

    Parameters
    ----------
    names : texts of the tokens that the scores are about.
    scores : [name]; nan stays undefined.

    Raises
    ------
    TokenisationError : see the module's text.
    """
    if len(names) != len(scores):
        raise TokenisationError(f"{own.label!r}: {len(scores)} scores for {len(names)} named tokens {list(names)}")
    everyone = range(len(own))
    if _equal(names, own, everyone):
        return scores.copy()
    mine = [place for place in everyone if not own.special[place]]
    theirs = [place for place, name in enumerate(names) if name not in own.special_names]
    if theirs and _equal([names[place] for place in theirs], own, mine):
        values = np.full(len(own), np.nan)
        values[mine] = scores[theirs]
        return values
    places = _spans([names[place] for place in theirs], own.text)
    values = None if places is None else _spread(places, scores[theirs], own)
    if values is None:
        raise TokenisationError(
            f"the scores for prompt {own.label!r} are about {len(names)} tokens {list(names)}, which neither equal nor "
            f"spell its {len(own)} tokens {list(own.texts)}; make them with this model's tokenizer, or give character "
            "spans (start, end, score)"
        )
    return values


def plain(token: str) -> str:
    """A token without the marks that tokenizers put where a word begins or goes on, white space at its ends removed."""
    text = token.removesuffix("</w>")
    if len(text) > 2 and text.startswith("##"):
        text = text[2:]
    for mark in _MARKERS:
        text = text.replace(mark, " ")
    return text.strip()


def _equal(names: Sequence[str], own: OwnTokens, places: Sequence[int]) -> bool:
    if len(names) != len(places):
        return False
    if all(name == own.entries[place] for name, place in zip(names, places, strict=True)):
        return True
    return all(
        name == own.entries[place] or plain(name) == plain(own.texts[place])
        for name, place in zip(names, places, strict=True)
    )


def _spans(names: Sequence[str], text: str) -> list[Span | None] | None:
    """Characters that each name stands for, None for white space; None where the names neither spell the text nor are
    unique in it.
    """
    letters, places = _folded(text)
    wanted = ["".join(_folded(plain(name))[0]) for name in names]
    whole = "".join(letters)
    if not any(wanted):
        return None
    if "".join(wanted) == whole:
        ends = np.cumsum([len(name) for name in wanted])
        starts = [int(end) - len(name) for end, name in zip(ends, wanted, strict=True)]
    elif all(not name or whole.count(name) == 1 for name in wanted):
        starts = [whole.index(name) if name else 0 for name in wanted]
    else:
        return None
    return [
        (places[start], places[start + len(name) - 1] + 1) if name else None
        for start, name in zip(starts, wanted, strict=True)
    ]


def _spread(places: Sequence[Span | None], scores: Array, own: OwnTokens) -> Array | None:
    """[position] each score spread evenly over the tokens that its characters overlap; None where one overlaps none.

    A token under an undefined score is undefined, and so is one under none.
    """
    start, end = own.offsets[:, 0], own.offsets[:, 1]
    values, seen = np.zeros(len(own)), np.zeros(len(own), dtype=bool)
    for span, score in zip(places, scores, strict=True):
        if span is None:
            continue
        inside = (start >= 0) & (start < span[1]) & (end > span[0])
        if not inside.any():
            return None
        values[inside] += score / inside.sum()
        seen |= inside
    return np.where(seen, values, np.nan)


def _folded(text: str) -> tuple[list[str], list[int]]:
    """Letters without case, accents and white space, and the character of `text` that each comes from."""
    letters: list[str] = []
    places: list[int] = []
    for place, character in enumerate(text):
        for letter in unicodedata.normalize("NFKD", character.casefold()):
            if not letter.isspace() and not unicodedata.combining(letter):
                letters.append(letter)
                places.append(place)
    return letters, places

"""How rare a token is, told without a corpus: by the order in which a subword vocabulary was learned.

BPE learns the most frequent pair first, WordPiece vocabularies are written by frequency, Unigram ones by log
probability. So a higher id stands for a rarer piece, whatever else was tokenised. Three kinds of pieces stand apart:

- Single characters of BPE and WordPiece. Learning starts from them, and their ids follow character codes or come after
  all merges (SentencePiece); they share the first place.
- Tokens that were added by hand (special ones, runs of white space) and the unknown token. Nothing was learned about
  them; they have no place.
- Byte pieces such as `<0x0A>`, which stand in for a character that the vocabulary lacks: no place.

Sources: Sennrich 2016 (BPE, arXiv 1508.07909), Kudo 2018 (Unigram, arXiv 1804.10959), Wu 2016 (WordPiece, arXiv
1609.08144).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import models

from attndiag.errors import NotApplicableError

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def learned_places(tokenizer: Any, token_ids: NDArray[np.integer]) -> NDArray[np.float64]:
    """Place of each token in the order in which its vocabulary was learned: later, rarer in the tokenizer's own corpus.

    place = id + 1; 0 for the single characters of BPE and WordPiece.

    It is an order and no frequency: distances between places say nothing. The corpus is the one that the tokenizer was
    trained on, in all its languages. A piece that longer ones absorbed (`th`, once ` the` is a token) keeps its early
    place, however rarely it is left over.

    Parameters
    ----------
    tokenizer : of transformers.
    token_ids : [item].

    Returns
    -------
    [item], 0 or more, no unit. A function of each id alone.

    Raises
    ------
    NotApplicableError : the vocabulary was not learned piece by piece (words, characters, bytes), its order cannot be
        read (tokenizers without a `tokenizers` model), or a token has no place in it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = getattr(backend, "model", None)
    if not isinstance(model, (models.BPE, models.Unigram, models.WordPiece)):
        kind = type(tokenizer if model is None else model).__name__
        raise NotApplicableError(f"{kind} has no learned order of tokens; BPE, Unigram and WordPiece vocabularies have")
    outside = {*getattr(tokenizer, "added_tokens_decoder", {}), getattr(tokenizer, "unk_token_id", None)}
    starts_from_characters = not isinstance(model, models.Unigram)
    places = np.empty(len(token_ids), dtype=np.float64)
    for item, index in enumerate(token_ids.tolist()):
        piece = backend.id_to_token(index)  # type: ignore[union-attr]
        if piece is None or index in outside or _BYTE.fullmatch(piece):
            raise NotApplicableError(
                f"{piece!r} (id {index}) has no place in the learned order: added, unknown or a byte that stands in"
            )
        places[item] = 0 if starts_from_characters and len(_bare(piece, model)) == 1 else index + 1
    return places


def _bare(piece: str, model: models.BPE | models.Unigram | models.WordPiece) -> str:
    """A piece without the marks of its place in the word (`##s`, `s</w>`)."""
    inside = piece.removeprefix(getattr(model, "continuing_subword_prefix", None) or "")
    return inside.removesuffix(getattr(model, "end_of_word_suffix", None) or "")

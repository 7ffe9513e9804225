"""The order in which a subword vocabulary was learned, read from its tokenizer: what has one, and what has not."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, CanineTokenizer, PreTrainedTokenizerFast

from attndiag.errors import NotApplicableError
from attndiag.models.vocabulary import learned_places

# `the` far more often than `quilt`, its letters all among those of others
CORPUS = ["the the the the the the the the cat sat and sat the the cat a quilt the quiet cat"] * 20


def trained(backend: Tokenizer, trainer: trainers.Trainer, *, split: object) -> PreTrainedTokenizerFast:
    backend.pre_tokenizer = split  # type: ignore[assignment]
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def bpe() -> PreTrainedTokenizerFast:
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>"], show_progress=False)
    return trained(Tokenizer(models.BPE(unk_token="<unk>")), trainer, split=pre_tokenizers.Whitespace())


def unigram() -> PreTrainedTokenizerFast:
    # as trainers write it: by log probability, characters among the rest
    pieces = [("<unk>", 0.0), ("▁", -1.5), ("▁the", -1.7), ("t", -3.0), ("▁quilt", -6.0), ("q", -9.0)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def word_piece() -> PreTrainedTokenizerFast:
    trainer = trainers.WordPieceTrainer(vocab_size=60, special_tokens=["<unk>"], show_progress=False)
    return trained(Tokenizer(models.WordPiece(unk_token="<unk>")), trainer, split=pre_tokenizers.Whitespace())


def places(tokenizer: object, *pieces: str) -> list[float]:
    ids = tokenizer.convert_tokens_to_ids(list(pieces))  # type: ignore[attr-defined]
    return learned_places(tokenizer, np.array(ids)).tolist()


@pytest.mark.parametrize(
    ("make", "often", "seldom"),
    [(bpe, "the", "quilt"), (word_piece, "the", "quilt"), (unigram, "▁the", "▁quilt")],
    ids=["BPE", "WordPiece", "Unigram"],
)
def test_a_rarer_piece_stands_later(make, often: str, seldom: str) -> None:
    tokenizer = make()
    first, last = places(tokenizer, often, seldom)
    assert 0 < first < last
    # a function of each id alone: neither order nor company of the tokens matters
    assert places(tokenizer, seldom, often, seldom) == [last, first, last]
    ids = tokenizer.convert_tokens_to_ids([often, seldom])
    assert [first, last] == [index + 1 for index in ids]


def test_single_characters_share_the_first_place_wherever_their_ids_stand() -> None:
    # as SentencePiece writes BPE: merges first, then the alphabet
    vocabulary = {"<unk>": 0, "th": 1, "the": 2, ",": 3, "t": 4, "h": 5, "e": 6}
    backend = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e")], unk_token="<unk>"))
    assert places(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"), ",", "the", "t", "th") == [
        0.0,
        3.0,
        0.0,
        2.0,
    ]
    assert places(word_piece(), "t", "##t", "##h") == [0.0, 0.0, 0.0]
    end_marked = Tokenizer(models.BPE({"a": 0, "a</w>": 1, "aa": 2}, [("a", "a")], end_of_word_suffix="</w>"))
    assert places(PreTrainedTokenizerFast(tokenizer_object=end_marked), "a</w>", "a", "aa") == [0.0, 0.0, 3.0]
    # Unigram sorts its characters with the rest
    assert places(unigram(), "t", "q") == [4.0, 6.0]


def test_what_was_not_learned_has_no_place() -> None:
    tokenizer = bpe()
    tokenizer.add_tokens([AddedToken("\n\n", special=False)])
    with pytest.raises(NotApplicableError, match=r"'\\n\\n' \(id \d+\) has no place in the learned order"):
        places(tokenizer, "the", "\n\n")
    with pytest.raises(NotApplicableError, match="'<unk>'"):
        places(tokenizer, "<unk>")
    with pytest.raises(NotApplicableError, match="None"):
        learned_places(tokenizer, np.array([10_000]))
    pieces = {"<unk>": 0, "<0x41>": 1, "b": 2, "c": 3, "bc": 4}
    backend = Tokenizer(models.BPE(pieces, [("b", "c")], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.ByteFallback()
    fallback = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert fallback("bcA").input_ids == [4, 1]
    with pytest.raises(NotApplicableError, match="'<0x41>'"):
        learned_places(fallback, np.array([4, 1]))


def test_vocabularies_without_a_learned_order_are_refused_with_the_reason() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    for tokenizer, name in (
        (PreTrainedTokenizerFast(tokenizer_object=words), "WordLevel"),
        (ByT5Tokenizer(), "ByT5Tokenizer"),
        (CanineTokenizer(), "CanineTokenizer"),
        (None, "NoneType"),
    ):
        with pytest.raises(NotApplicableError, match=rf"^{name} has no learned order of tokens"):
            learned_places(tokenizer, np.array([1]))

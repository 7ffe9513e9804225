"""Prompts to inputs: padding that changes nothing, offsets that rebuild the text, labels for what is no text."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast

import attndiag
from attndiag.errors import PromptError, UnsupportedModelError
from attndiag.models.encoding import Encoded
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt

SPECIAL = ["<s>", "</s>", "<pad>", "<unk>"]
WORDS = [*SPECIAL, "the", "cat", "sat", "on", "mat", "a", "dog", "ran", "hello", "user", "assistant", "system"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} {{ m['role'] }} {{ m['content'] | trim }} </s>{% endfor %}"
    "{% if add_generation_prompt %} assistant{% endif %}"
)
RAGGED = ["the cat sat on the mat", "a dog", "the dog ran on a mat hello"]


def word_tokenizer(*, adds_bos: bool = False, template: str | None = None) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    reader = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    reader.chat_template = template
    return reader


def byte_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    vocabulary = [*letters, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({piece: index for index, piece in enumerate(vocabulary)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def reader_of(tokenizer: PreTrainedTokenizerFast) -> LoadedModel:
    """Encoding needs no real model."""
    return attndiag.load(nn.Embedding(300, 4), tokenizer=tokenizer)


FAMILIES: dict[str, Callable[[], nn.Module]] = {}


def family(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    FAMILIES[build.__name__] = build
    return build


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


@family
def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, **IDS)
    )


@family
def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=64, **IDS)
    )


@family
def opt() -> nn.Module:
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64, **IDS)
    )


@family
def bloom() -> nn.Module:
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, **IDS)
    )


@family
def bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**SMALL, intermediate_size=64, max_position_embeddings=64, pad_token_id=2)
    )


@family
def roberta() -> nn.Module:
    """Derives its positions from the pad id: position ids that count from 0 would be wrong for it."""
    return transformers.RobertaForMaskedLM(
        transformers.RobertaConfig(**SMALL, intermediate_size=64, max_position_embeddings=64, **IDS)
    )


@family
def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=2,
            eos_token_id=1, pad_token_id=2,
        )
    )  # fmt: skip


def loaded(name: str) -> LoadedModel:
    torch.manual_seed(0)
    model = FAMILIES[name]().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(5)
    return attndiag.load(model, tokenizer=word_tokenizer())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_ragged_batches_equal_one_by_one(name: str, side: str) -> None:
    lm = loaded(name)
    encoded = lm.encode(RAGGED, padding_side=side)
    batch = lm.run(encoded.inputs).logits
    decoder = encoded.decoder is not None
    for row, text in enumerate(RAGGED):
        alone = lm.forward(text).logits[0]
        rows = batch[row] if decoder else batch[row][encoded.attention_mask[row].bool()]
        torch.testing.assert_close(rows, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "gives"), [("gpt2", True), ("llama", True), ("roberta", False), ("bloom", False)])
def test_position_ids_are_given_where_they_are_needed(name: str, gives: bool) -> None:
    encoded = loaded(name).encode(["the cat sat", "the"], padding_side="left")
    if gives:
        assert encoded.inputs["position_ids"].tolist() == [[0, 1, 2], [0, 0, 0]]
    else:
        assert "position_ids" not in encoded.inputs
    assert "position_ids" not in loaded(name).encode(["the cat sat", "the"], padding_side="right").inputs
    assert "position_ids" not in loaded(name).encode(["the cat", "a dog"], padding_side="left").inputs


class CountsFromTheLeft(nn.Module):
    """Adds the absolute place to each embedding, padding or not: left padding must be refused."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 8)

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        places = torch.arange(input_ids.shape[1])[None, :, None]
        return SimpleNamespace(logits=self.tokens(input_ids) + places)


def test_left_padding_that_changes_the_output_is_refused() -> None:
    lm = attndiag.load(CountsFromTheLeft(), tokenizer=word_tokenizer())
    assert lm.encode(["the cat", "a dog"], padding_side="left").input_ids.shape == (2, 2)
    with pytest.raises(UnsupportedModelError, match=r"left padding changes what CountsFromTheLeft computes.*'right'"):
        lm.encode(["the cat", "the"], padding_side="left")


class TakesNoMask(nn.Module):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids


def test_a_model_without_mask_runs_equal_lengths_only() -> None:
    lm = attndiag.load(TakesNoMask(), tokenizer=word_tokenizer())
    assert lm.forward(["the cat", "a dog"]).tolist() == [[4, 5], [9, 10]]
    with pytest.raises(UnsupportedModelError, match="TakesNoMask takes no mask; run prompts of one length"):
        lm.forward(["the cat", "the"])


def test_last_and_lengths_point_at_real_tokens() -> None:
    lm = reader_of(word_tokenizer())
    right = lm.encode(RAGGED)
    assert right.lengths.tolist() == [6, 2, 7]
    assert right.last.tolist() == [5, 1, 6]
    assert right.special[1].tolist() == [False, False, True, True, True, True, True]
    assert right.ragged
    assert not lm.encode(RAGGED[:1]).ragged
    single = lm.encode(RAGGED[0], padding_side="left")
    assert single.last.tolist() == [5]


# --- text, tokens and characters

TEXTS = [
    "the cat <script>alert('x')</script> & more",
    "é 🤗 the 日本語  two spaces",
    "שלום the עולם",
    " leading and trailing ",
    "tab\tnewline\nnull-ish \x01",
]


def rebuilt(encoded: Encoded, row: int) -> str:
    return "".join(encoded.tokens[row][i] for i in range(int(encoded.lengths[row])) if encoded.offsets[row, i, 0] >= 0)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_and_offsets_rebuild_the_text(text: str) -> None:
    encoded = reader_of(byte_tokenizer()).encode(text)
    length = int(encoded.lengths[0])
    assert len(encoded.tokens[0]) == length == encoded.input_ids.shape[1]
    assert encoded.texts == (text,)
    assert rebuilt(encoded, 0) == text
    covered = {place for start, end in encoded.offsets[0].tolist() for place in range(start, end)}
    assert {place for place in range(len(text)) if not text[place].isspace()} <= covered
    assert not encoded.special.any()


def test_added_special_tokens_are_labelled_and_stand_nowhere() -> None:
    encoded = reader_of(word_tokenizer(adds_bos=True)).encode("the cat zebra")
    assert encoded.input_ids.tolist() == [[0, 4, 5, 3]]
    assert encoded.tokens[0] == ("<s>", "the", " cat", " zebra")
    assert encoded.offsets.tolist() == [[[-1, -1], [0, 3], [4, 7], [8, 13]]]
    # an unknown word is text all the same
    assert encoded.special.tolist() == [[True, False, False, False]]


def test_bos_written_in_the_text_is_not_doubled() -> None:
    lm = reader_of(word_tokenizer(adds_bos=True))
    assert lm.info.adds_bos
    assert lm.encode("<s> the cat").input_ids.tolist() == [[0, 4, 5]]
    assert lm.encode("the cat").input_ids.tolist() == [[0, 4, 5]]


def test_a_special_token_written_in_the_text_is_still_special() -> None:
    encoded = reader_of(word_tokenizer()).encode("the </s> cat <unk>")
    assert encoded.special.tolist() == [[False, True, False, True]]


# --- chat


def test_messages_go_through_the_template_once_and_its_tokens_are_labelled() -> None:
    lm = reader_of(word_tokenizer(adds_bos=True, template=TEMPLATE))
    assert lm.info.chat_template == TEMPLATE
    chat = Prompt(messages=[{"role": "system", "content": "hello"}, {"role": "user", "content": "  the cat "}])
    encoded = lm.encode(chat)
    assert encoded.texts == ("<s> system hello </s> user the cat </s> assistant",)
    assert encoded.tokens[0] == ("<s>", " system", " hello", " </s>", " user", " the", " cat", " </s>", " assistant")
    assert encoded.input_ids[0].tolist().count(0) == 1
    assert encoded.template.tolist() == [[True, True, False, True, True, False, False, True, True]]
    assert torch.equal(encoded.special, encoded.template)


def test_an_answered_chat_opens_no_new_turn() -> None:
    lm = reader_of(word_tokenizer(template=TEMPLATE))
    chat = Prompt(messages=[{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the cat"}])
    assert lm.encode(chat).texts == ("<s> user hello </s> assistant the cat </s>",)


def test_messages_without_a_template_or_against_it_are_refused() -> None:
    chat = Prompt(id="c1", messages=[{"role": "user", "content": "hello"}])
    with pytest.raises(
        PromptError, match="prompt 'c1' has messages, but this tokenizer has no chat template; give text"
    ):
        reader_of(word_tokenizer()).encode(chat)
    strict = reader_of(word_tokenizer(template="{{ raise_exception('users only') }}"))
    with pytest.raises(PromptError, match="the chat template refused the messages of prompt 'c1': users only"):
        strict.encode(chat)


# --- encoder-decoders and limits


def test_the_decoder_starts_with_its_start_token() -> None:
    lm = loaded("t5")
    encoded = lm.encode([Prompt("the cat", decoder_text="a dog ran"), Prompt("the", decoder_text="a")])
    assert encoded.inputs["decoder_input_ids"].tolist() == [[2, 9, 10, 11], [2, 9, 2, 2]]
    assert encoded.inputs["decoder_attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert encoded.decoder is not None
    assert encoded.decoder.special.tolist() == [[True, False, False, False], [True, False, True, True]]
    assert encoded.decoder.tokens[0] == ("<pad>", "a", " dog", " ran")
    assert lm.forward(Prompt("the cat")).logits.shape == (1, 1, 64)


def test_prompts_that_do_not_fit_are_refused_by_name() -> None:
    lm = loaded("gpt2")
    with pytest.raises(PromptError, match=r"prompt 'long' has 65 tokens but the model has 64 positions; shorten it"):
        lm.encode(Prompt("the " * 65, id="long"))
    with pytest.raises(PromptError, match=r"prompt '   ' has no tokens after tokenisation"):
        lm.encode("   ")
    with pytest.raises(PromptError, match="no prompts were given"):
        lm.encode([])

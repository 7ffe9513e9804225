"""Models with a word tokenizer for explanations: two random ones, and one that is linear in its embeddings."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM, PreTrainedTokenizerFast

import attndiag
from attndiag.models.load import LoadedModel

SPECIAL = {"bos_token": "<bos>", "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}


def words(count: int = 64) -> PreTrainedTokenizerFast:
    """`count` ids: four special tokens, then w4, w5, ..."""
    names = [*SPECIAL.values(), *(f"w{index}" for index in range(len(SPECIAL), count))]
    backend = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


class LinearLM(nn.Module):
    """Logits at position i are the sum of what tokens 0..i say, each with a weight of its own place: linear in them."""

    def __init__(self, vocab: int = 64, width: int = 8, positions: int = 16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embedding = nn.Embedding(vocab, width, dtype=torch.float64)
        self.head = nn.Linear(width, vocab, dtype=torch.float64)
        self.place = nn.Parameter(torch.randn(positions, generator=generator, dtype=torch.float64))
        with torch.no_grad():
            self.embedding.weight.normal_(generator=generator)
            self.head.weight.normal_(generator=generator)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        hidden = self.embedding(input_ids) * self.place[: input_ids.shape[1], None]
        if attention_mask is not None:
            hidden = hidden * attention_mask[..., None]
        return SimpleNamespace(logits=self.head(hidden.cumsum(1)))


@pytest.fixture
def word_lm() -> Callable[[nn.Module], LoadedModel]:
    """Loads a model with the word tokenizer."""
    return lambda model: attndiag.load(model, tokenizer=words())


@pytest.fixture(params=["llama", "gpt2"])
def lm(request: pytest.FixtureRequest, tiny_llama: LlamaForCausalLM, tiny_gpt2: GPT2LMHeadModel) -> LoadedModel:
    """Both small random models, in float64."""
    model = tiny_llama if request.param == "llama" else tiny_gpt2
    return attndiag.load(model.double(), tokenizer=words())


@pytest.fixture
def llama_lm(tiny_llama: LlamaForCausalLM) -> LoadedModel:
    """The small random Llama in float32."""
    return attndiag.load(tiny_llama, tokenizer=words())


@pytest.fixture
def linear_lm() -> LoadedModel:
    """m is linear in the embeddings, so every path and every subset says the same."""
    return attndiag.load(LinearLM(), tokenizer=words())

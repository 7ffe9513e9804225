"""What every test shares: no hub, one torch thread, two small random models and the trained default model."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("MPLBACKEND", "agg")

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import GPT2LMHeadModel, LlamaForCausalLM

    from attndiag.models.load import LoadedModel


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def default_lm() -> LoadedModel:
    """The pinned default model, converted on first use. For tests marked `real_model`; leave it as you found it."""
    import attndiag

    return attndiag.load("default", device="cpu")


@pytest.fixture
def tiny_gpt2() -> GPT2LMHeadModel:
    """Random GPT-2: 2 layers, 4 heads of 8, V = 64, learned positions, biases that are not zero."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    return _spread(GPT2LMHeadModel(config))


@pytest.fixture
def tiny_llama() -> LlamaForCausalLM:
    """Random Llama: 2 layers, 4 query heads on 2 key/value heads of 8, RoPE, V = 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return _spread(LlamaForCausalLM(config))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved random Llama with a byte-level tokenizer of its own: any text goes in, nothing sensible comes out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator(["When Mary and John went to the store, John gave a drink to Mary."] * 3, trainer)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=words.get_vocab_size(),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )
    folder = tmp_path_factory.mktemp("tiny") / "model"
    _spread(model).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|end|>", pad_token="<|end|>").save_pretrained(folder)
    return folder


def _spread(model: torch.nn.Module) -> torch.nn.Module:
    """Enlarge the fresh weights (else attention is uniform) and fill the biases (else they hide mistakes)."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.1, generator=generator)
            elif weight.ndim == 2:
                weight.mul_(6)
    return model.eval()

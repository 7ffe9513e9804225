"""Shared parts of the hand-built models: the record, the residual layout, the norm layers, the wiring of heads.

What stands in the way of a transformer with chosen weights is its norm layer. Both kinds are made the identity by
pinned residual columns that outweigh everything else:

- LayerNorm (GPT-2, BART): a pair of columns holds +P and -P, P = 1000. The mean stays near 0 and the variance near
  2 P^2 / d whatever the signal columns hold, so `weight = P sqrt(2 / d)` undoes the division, and
  `bias = (sum of the signal) / d` undoes the subtraction of the mean, on every column alike.
- RMSNorm (Llama, Mistral): one column holds P, `weight = P / sqrt(d)`.

Where the sum and the sum of squares of the signal are known, as they are for one-hot blocks, they enter the gain, and
the norm is the identity to rounding; an unexpected signal s changes the scale by |s|^2 / (4 P^2) (pair) or
|s|^2 / (2 P^2) (single pin) and shifts all columns of a LayerNorm by (missing sum) / d.

Residual columns come in named blocks: `token` and `position` are one-hot, `constant` is 1, `pin` holds the pins, and
the heads write to blocks of their own. Feed-forward weights are 0 unless a model says otherwise. Attention picks
blocks: a query block times beta sqrt(d_head) against a key block of ones and zeros gives scores of beta or 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from attndiag.errors import ShapeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PIN = 1000.0
BETA = 60.0
"""Score of a full match; half of it is the score of a default key, so that losers get less than 1e-13."""


@dataclass(frozen=True, eq=False)
class KnownModel:
    """A model whose right answers are known before anything is measured.

    Parameters
    ----------
    name : unique name, parameters included where they matter.
    model : a stock transformers model in eval mode, eager attention; call `set_attn_implementation` for another.
    vocab : token text to token id.
    prompt_ids : [batch, position], an example input.
    expected : the right answers; heads are keyed `(layer, head)`, edges `(layer, head, query_pos, key_pos)`.
    notes : what the model shows and how it does it.
    inputs : further keyword arguments that the example input needs (`attention_mask`, `decoder_input_ids`, ...).
    """

    name: str
    model: PreTrainedModel
    vocab: Mapping[str, int]
    prompt_ids: Tensor
    expected: Mapping[str, Any]
    notes: str
    inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "vocab", MappingProxyType(dict(self.vocab)))
        object.__setattr__(self, "expected", MappingProxyType(dict(self.expected)))
        object.__setattr__(self, "inputs", MappingProxyType(dict(self.inputs)))

    def batch(self) -> dict[str, Tensor]:
        """Keyword arguments for a forward pass over the example input."""
        return {"input_ids": self.prompt_ids, **self.inputs}

    def text(self, row: int = 0) -> str:
        """One row of the example input as text that `tokenizer()` reads back to the same ids."""
        names = {token_id: name for name, token_id in self.vocab.items()}
        return " ".join(names[int(i)] for i in self.prompt_ids[row])

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A tokenizer that splits on white space and adds nothing; it knows the words of `vocab` and no others.

        A word outside `vocab` raises when it is encoded: there is no unknown token to stand in for it.
        """
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = Tokenizer(models.WordLevel(vocab=dict(self.vocab), unk_token="<unknown>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        special = {
            name: text
            for name, text in (("bos_token", "<bos>"), ("eos_token", "<eos>"), ("pad_token", "<pad>"))
            if text in self.vocab
        }
        return PreTrainedTokenizerFast(tokenizer_object=words, **special)


class Layout:
    """Named column blocks of a residual stream, in the order given, `width` padded to what the heads need.

    `Layout(heads=2, least=10, token=8, constant=1)["token"]` is `slice(0, 8)`.
    """

    def __init__(self, *, heads: int = 1, least: int = 1, **sizes: int) -> None:
        self.blocks: dict[str, slice] = {}
        start = 0
        for name, size in sizes.items():
            self.blocks[name] = slice(start, start + size)
            start += size
        width = max(start, least)
        self.heads = heads
        self.width = width + -width % heads
        self.d_head = self.width // heads

    def __getitem__(self, name: str) -> slice:
        return self.blocks[name]

    def column(self, name: str, index: int = 0) -> int:
        """Column number of one entry of a block."""
        block = self.blocks[name]
        if not 0 <= index < block.stop - block.start:
            raise ShapeError(f"block {name!r} has {block.stop - block.start} columns; index {index} is outside")
        return block.start + index


def layer_norm_gain(width: int, signal_sum: float, signal_square: float) -> tuple[float, float]:
    """Weight and bias that make LayerNorm the identity for a signal of that sum and sum of squares, beside pins +-P."""
    variance = (2 * PIN**2 + signal_square) / width - (signal_sum / width) ** 2
    return variance**0.5, signal_sum / width


def rms_norm_gain(width: int, signal_square: float) -> float:
    """Weight that makes RMSNorm the identity for a signal of that sum of squares, beside one pin P."""
    return ((PIN**2 + signal_square) / width) ** 0.5


def set_layer_norm(norm: torch.nn.Module, signal_sum: float, signal_square: float) -> None:
    """Make a LayerNorm the identity for the named signal (see the module docstring)."""
    weight, bias = layer_norm_gain(norm.weight.shape[0], signal_sum, signal_square)
    norm.weight.data.fill_(weight)
    norm.bias.data.fill_(bias)


def zero_parameters(model: torch.nn.Module) -> None:
    """Set every parameter to 0: a hand-built model starts from nothing."""
    for parameter in model.parameters():
        parameter.data.zero_()


def pick(
    block: slice, shape: tuple[int, int], *, to: int = 0, gain: float = 1.0, skip: Sequence[int] = (), shift: int = 0
) -> Tensor:
    """A float64 matrix [d_model, d_head] that copies a block into head dimensions `to`, `to + 1`, ..., times `gain`.

    Entries of the block listed in `skip` are left out; with `shift` = 1, entry p lands where entry p - 1 would, and
    entry 0 is dropped. Transposed, it writes head dimensions into a block.
    """
    matrix = torch.zeros(shape, dtype=torch.float64)
    for index in range(block.stop - block.start):
        if index not in skip and index >= shift:
            matrix[block.start + index, to + index - shift] = gain
    return matrix


def stack_columns(shape: tuple[int, int], entries: Mapping[tuple[int, int], float]) -> Tensor:
    """A float64 matrix of that shape with the named (row, column) entries and zeros elsewhere."""
    matrix = torch.zeros(shape, dtype=torch.float64)
    for (row, column), value in entries.items():
        matrix[row, column] = value
    return matrix


def blank_gpt2(
    layout: Layout,
    *,
    vocab_size: int,
    positions: int,
    layers: int,
    norms: Sequence[tuple[float, float]],
    inner: int = 1,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
) -> GPT2LMHeadModel:
    """A GPT-2 that does nothing: its residual holds token, position (where the layout has one), constant and pins.

    `norms` gives (signal sum, signal sum of squares) at the input of each block, then at the final norm; the norm
    before the feed-forward part gets the numbers of what comes next.
    """
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=positions,
        n_embd=layout.width,
        n_layer=layers,
        n_head=layout.heads,
        n_inner=inner,
        activation_function="relu",
        layer_norm_epsilon=1e-12,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=None,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    model = GPT2LMHeadModel(config).to(dtype).eval()
    zero_parameters(model)
    body = model.transformer
    body.wte.weight.data[:, layout["token"]] = torch.eye(vocab_size, dtype=dtype)
    body.wpe.weight.data[:, layout.column("constant")] = 1
    body.wpe.weight.data[:, layout.column("pin", 0)] = PIN
    body.wpe.weight.data[:, layout.column("pin", 1)] = -PIN
    if "position" in layout.blocks:
        body.wpe.weight.data[:, layout["position"]] = torch.eye(positions, dtype=dtype)
    for block, before, after in zip(body.h, norms[:-1], norms[1:], strict=True):
        set_layer_norm(block.ln_1, *before)
        set_layer_norm(block.ln_2, *after)
    set_layer_norm(body.ln_f, *norms[-1])
    return model


def wire_gpt2(
    model: GPT2LMHeadModel,
    layer: int,
    head: int,
    *,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    o: Tensor | None = None,
) -> None:
    """Set one head of a GPT-2: q, k, v are [d_model, d_head], o is [d_head, d_model]; None leaves zeros."""
    attention = model.transformer.h[layer].attn
    size, width = attention.head_dim, attention.embed_dim
    for part, matrix in enumerate((q, k, v)):
        if matrix is not None:
            start = part * width + head * size
            attention.c_attn.weight.data[:, start : start + size] = matrix.to(attention.c_attn.weight.dtype)
    if o is not None:
        attention.c_proj.weight.data[head * size : (head + 1) * size] = o.to(attention.c_proj.weight.dtype)


def blank_llama(
    layout: Layout,
    *,
    vocab_size: int,
    positions: int,
    layers: int,
    kv_heads: int,
    d_head: int,
    rope_theta: float,
    norms: Sequence[float],
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """A Llama (with a `window`, a Mistral) that does nothing: its residual holds token, constant and pin.

    `norms` gives the sum of squares of the signal at the input of each block, then at the final norm. The embedding
    and the unembedding are not tied: the embedding holds the pin, which would drown the logits.
    """
    shared: dict[str, Any] = {
        "vocab_size": vocab_size,
        "max_position_embeddings": positions,
        "hidden_size": layout.width,
        "intermediate_size": 1,
        "num_hidden_layers": layers,
        "num_attention_heads": layout.heads,
        "num_key_value_heads": kv_heads,
        "head_dim": d_head,
        "rms_norm_eps": 1e-12,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    if window is None:
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**shared))
    else:
        model = MistralForCausalLM(MistralConfig(sliding_window=window, **shared))
    model = model.to(dtype).eval()
    zero_parameters(model)
    embedding = model.model.embed_tokens.weight.data
    embedding[:, layout["token"]] = torch.eye(vocab_size, dtype=dtype)
    embedding[:, layout.column("constant")] = 1
    embedding[:, layout.column("pin")] = PIN
    for block, before, after in zip(model.model.layers, norms[:-1], norms[1:], strict=True):
        block.input_layernorm.weight.data.fill_(rms_norm_gain(layout.width, before))
        block.post_attention_layernorm.weight.data.fill_(rms_norm_gain(layout.width, after))
    model.model.norm.weight.data.fill_(rms_norm_gain(layout.width, norms[-1]))
    return model


def wire_llama(
    model: PreTrainedModel,
    layer: int,
    head: int,
    *,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    o: Tensor | None = None,
) -> None:
    """Set one query head of a Llama or Mistral; `k` and `v` go to the key/value head that it shares."""
    attention = model.model.layers[layer].self_attn
    size, shared = attention.head_dim, head // attention.num_key_value_groups
    for part, index, matrix in (("q_proj", head, q), ("k_proj", shared, k), ("v_proj", shared, v)):
        if matrix is not None:
            weight = getattr(attention, part).weight
            weight.data[index * size : (index + 1) * size] = matrix.T.to(weight.dtype)
    if o is not None:
        weight = attention.o_proj.weight
        weight.data[:, head * size : (head + 1) * size] = o.T.to(weight.dtype)

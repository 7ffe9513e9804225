"""A transformer encoder-decoder (BART form) trained on dates whose right alignment is known.

The task is that of `attndiag.models.known.recurrent`: a date in one of three orders becomes year-month-day, token by
token, and every target token has exactly one source position that it must be read off. Here the reader is a stock
`BartForConditionalGeneration` of two layers a side, trained from a seed in a few CPU-seconds, with a tokenizer of its
own, so that it can be loaded, captured, edited and explained like any other model. As in real translators the source
ends with `</s>`, a place where attention can rest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attndiag.models.known.recurrent import DIGITS, MONTHS, VOCAB, Dates, dates

PAD, START, END = VOCAB, VOCAB + 1, VOCAB + 2
STEPS = 300
_WORDS = (
    *("<dmy>", "<mdy>", "<ymd>"),
    *(str(digit) for digit in range(DIGITS)),
    *(f"month{month + 1}" for month in range(MONTHS)),
    *(f"M{month + 1:02d}" for month in range(MONTHS)),
)
_SPECIAL = ("<pad>", "<s>", "</s>")


def translation_model(layers: int = 2, width: int = 64, heads: int = 4) -> nn.Module:
    """An untrained translator: BART form, learned positions, norms after the sums, no dropout."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=VOCAB + len(_SPECIAL),
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=2 * width,
        decoder_ffn_dim=2 * width,
        max_position_embeddings=16,
        init_std=0.1,  # at the usual .02 so small a post-norm model needs ten times the steps
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
        decoder_start_token_id=START,
        forced_eos_token_id=None,
    )
    return BartForConditionalGeneration(config)


def translation_tokenizer() -> Any:
    """The translator's tokenizer: one token a word, white space between them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate((*_WORDS, *_SPECIAL))}
    core = Tokenizer(WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def dated_sentences(rows: int, seed: int = 0) -> Dates:
    """Random dates, by seed, their sources ended by `</s>`: source [row, 9], target [row, 7], alignment [row, 7]."""
    data = dates(rows, seed=seed)
    return Dates(torch.cat([data.source, torch.full_like(data.source[:, :1], END)], 1), data.target, data.alignment)


def as_text(ids: Tensor) -> str:
    """Token ids [position] as the words that the tokenizer reads back."""
    return " ".join((*_WORDS, *_SPECIAL)[index] for index in ids.tolist())


def decoder_inputs(target: Tensor) -> Tensor:
    """[row, 7] targets -> what the decoder reads: the start token and all targets but the last."""
    return torch.cat([torch.full_like(target[:, :1], START), target[:, :-1]], 1)


def trained_bart(seed: int = 0, *, steps: int = STEPS, batch: int = 64, rate: float = 3e-3) -> nn.Module:
    """A translator that knows the task, trained from a seed; in eval mode.

    Parameters
    ----------
    seed : of the weights and of the rows.
    steps, batch, rate : AdamW, linear warm-up over 100 steps, then linear decay.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = translation_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, max((steps - step) / steps, 0.02))
    )
    model.train()
    for step in range(steps):
        rows = dated_sentences(batch, seed=100_000 * (seed + 1) + step)
        logits = model(input_ids=rows.source, decoder_input_ids=decoder_inputs(rows.target), use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows.target.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def accuracy(model: nn.Module, rows: int = 256, seed: int = 7) -> float:
    """Share of target tokens that a translator gets right on fresh dates, in [0, 1]."""
    data = dated_sentences(rows, seed=seed)
    with torch.no_grad():
        logits = model(input_ids=data.source, decoder_input_ids=decoder_inputs(data.target), use_cache=False).logits
    return float((logits.argmax(-1) == data.target).float().mean())


def same_class_replacements(source: Tensor, position: int, seed: int = 0) -> Tensor:
    """[row, 9] sources with one position changed to another token of its class (a digit for a digit, a month for a
    month, an order for an order), never the original; `</s>` stays what it is.
    """
    sizes = ((0, 3), (3, DIGITS), (3 + DIGITS, MONTHS))
    changed, generator = source.clone(), torch.Generator().manual_seed(seed)
    token = source[:, position]
    for first, size in sizes:
        here = (token >= first) & (token < first + size)
        step = torch.randint(1, size, (len(token),), generator=generator)
        changed[here, position] = (first + (token - first + step) % size)[here]
    return changed

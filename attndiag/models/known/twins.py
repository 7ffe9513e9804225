"""Two small language models trained alike, one of them with a mask that lets queries see the next token.

The silent fault: the leaky twin is trained and evaluated by the usual one forward of a whole row, in which every query
can read the token that it has to predict. Its loss falls below the entropy of the language, which no honest model can
do, and looks wonderful. Free running, where the next token does not exist yet, it has learned nothing.

- `MarkovLanguage`: tokens with a known entropy rate, so that "too good" has a number.
- `untrained_twin`, `train_twin`: the same initial weights, the same rows, the same optimiser; only the mask differs.
- `teacher_forced_loss`: one forward of whole rows, as in training.
- `free_running_loss`: the prefix alone is given and its last position is scored, as in generation.
- `generate`, `judge_text`: what the twin writes, and how much of it belongs to the language.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from attndiag.models.known.faulty import FaultyMaskLlamaAttention

VOCABULARY = 32
CONTEXT = 32
ROWS = 32
STEPS = 300
PROBABILITIES = (0.4, 0.3, 0.2, 0.1)


class MarkovLanguage:
    """A chain in which each token has four possible successors, of probabilities .4, .3, .2, .1.

    The entropy rate is H = -sum_s p_s ln p_s = 1.280 nats whatever the chain: no predictor of unseen text has a smaller
    expected loss, and one that knows the chain reaches it.
    """

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.successors = torch.rand(VOCABULARY, VOCABULARY, generator=generator).argsort(1)[:, : len(PROBABILITIES)]
        self.table = torch.zeros(VOCABULARY, VOCABULARY)
        self.table.scatter_(1, self.successors, torch.tensor(PROBABILITIES).expand(VOCABULARY, -1))

    @property
    def entropy(self) -> float:
        """Nats per token after the first."""
        return -sum(p * math.log(p) for p in PROBABILITIES)

    @property
    def guess_loss(self) -> float:
        """Loss of a uniform guess: ln V, nats."""
        return math.log(VOCABULARY)

    def rows(self, count: int, *, seed: int, length: int = CONTEXT) -> Tensor:
        """[row, position] token ids; the first token of a row is uniform."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCABULARY, (count, length), generator=generator)
        chosen = torch.multinomial(torch.tensor(PROBABILITIES), count * length, replacement=True, generator=generator)
        chosen = chosen.view(count, length)
        for position in range(1, length):
            tokens[:, position] = self.successors[tokens[:, position - 1], chosen[:, position]]
        return tokens


@dataclass(frozen=True)
class TextQuality:
    """How a text written by a twin compares with the language.

    valid_rate : share of steps that the language allows, in [0, 1]; by chance 4/32.
    repetition_rate : share of steps that repeat one of the two tokens before, in [0, 1].
    total_variation : distance between the written and the true distribution of successors, in [0, 1]; the mean over
        the tokens that were written, each weighted by how often. Finite samples never reach 0.
    """

    valid_rate: float
    repetition_rate: float
    total_variation: float


def untrained_twin(*, leaky: bool, seed: int = 0) -> LlamaForCausalLM:
    """Two layers, d_model 64, 4 heads of 16. `leaky` plants the mask j <= i + 1 in layer 0; weights are the same."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4 * CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        use_cache=False,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    if leaky:
        attention = model.model.layers[0].self_attn
        attention.__class__ = FaultyMaskLlamaAttention
        attention.mask_fault = _one_step_ahead
    return model


def train_twin(
    language: MarkovLanguage,
    *,
    leaky: bool,
    seed: int = 0,
    steps: int = STEPS,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[LlamaForCausalLM, list[float]]:
    """A trained twin, and its training loss (teacher forced) at every step.

    AdamW, lr 4e-3 after 20 steps of warm-up, betas (.9, .98), clip 1, 32 rows of 32 tokens a step, the same for both.
    Changes the state of torch's global generator.
    """
    model = untrained_twin(leaky=leaky, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    losses: list[float] = []
    for step in range(steps):
        loss = _row_losses(model, language.rows(ROWS, seed=1000 * (seed + 1) + step)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        losses.append(loss.item())
        if progress is not None and (step + 1) % 50 == 0:
            progress(f"training the {'leaky' if leaky else 'sound'} twin", step + 1, steps)
    return model.eval(), losses


@torch.no_grad()
def teacher_forced_loss(model: PreTrainedModel, rows: Tensor) -> float:
    """Mean loss in nats of each token after the first, from one forward of whole rows: what a training curve shows."""
    return _row_losses(model, rows).mean().item()


@torch.no_grad()
def free_running_loss(model: PreTrainedModel, rows: Tensor, *, positions: Sequence[int] | None = None) -> float:
    """Mean loss in nats of the next token when the model is given what stands before it and nothing else.

    Parameters
    ----------
    rows : [row, position] token ids.
    positions : which tokens to score, each from a forward of its own; by default every fourth from 4 on.

    For a model whose mask is sound this is the teacher-forced loss of the same tokens, to rounding.
    """
    chosen = range(4, rows.shape[1], 4) if positions is None else positions
    losses = []
    for position in chosen:
        logits = model(rows[:, :position]).logits[:, -1]
        losses.append(torch.nn.functional.cross_entropy(logits, rows[:, position]))
    return torch.stack(losses).mean().item()


@torch.no_grad()
def generate(model: PreTrainedModel, *, rows: int = 64, length: int = CONTEXT, seed: int = 0) -> Tensor:
    """[row, position] sampled from the model, one token a forward, after a uniform first token."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, 1), generator=generator)
    while tokens.shape[1] < length:
        chances = model(tokens).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return tokens


def judge_text(language: MarkovLanguage, rows: Tensor) -> TextQuality:
    """What share of a text [row, position] belongs to the language."""
    before, after = rows[:, :-1].flatten(), rows[:, 1:].flatten()
    valid = (language.table[before, after] > 0).double().mean().item()
    repeated = (rows[:, 2:] == rows[:, 1:-1]) | (rows[:, 2:] == rows[:, :-2])
    counts = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    counts.index_put_((before, after), torch.ones(len(before), dtype=torch.float64), accumulate=True)
    written = counts.sum(1, keepdim=True)
    distance = 0.5 * (counts / written.clamp_min(1) - language.table).abs().sum(1)
    weighted = (distance * written[:, 0]).sum() / written.sum()
    return TextQuality(valid, repeated.double().mean().item(), weighted.item())


def _row_losses(model: PreTrainedModel, rows: Tensor) -> Tensor:
    logits = model(rows).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")


def _one_step_ahead(allowed: Tensor) -> Tensor:
    """One key more for every query, j = i + 1: the off-by-one of `tril(diagonal=1)`."""
    n_query, n_key = allowed.shape[-2:]
    last = n_key - n_query + 1
    following = torch.ones(n_query, n_key, dtype=torch.bool, device=allowed.device).tril(last).triu(last)
    return allowed | following

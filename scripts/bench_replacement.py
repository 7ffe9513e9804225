"""Replacement at every position: shared prefixes against naive batches, equal logits, ratios within one run.

    python scripts/bench_replacement.py                 the sizes of the targets (n = 128 and 512), a GPT-2 form
    python scripts/bench_replacement.py --model default --lengths 128

Every position of a random prompt is replaced by one token. Naive: whole forwards in batches of the same size, logits at
the last position only. Shared: each batch starts at its first changed position on the keys and values of the unedited
run. Both sides keep one logit a row and carry their own unedited row. Process CPU time, best of the rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import attndiag
from attndiag import Prompt, Replacement, Target
from attndiag.explanations.replacement_effects import replacement_effects
from attndiag.models.load import LoadedModel
from attndiag.scores import Scores

VOCABULARY = 1000


def small_gpt2() -> LoadedModel:
    """Six layers, d_model 256, random weights, a word tokenizer."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=1024, n_embd=256, n_layer=6, n_head=4, bos_token_id=0, eos_token_id=0
    )
    words = {f"w{index}": index for index in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="w0", pad_token="w0", unk_token="w0")
    return attndiag.load(GPT2LMHeadModel(config).eval(), tokenizer=tokenizer)


def prompt_of(lm: LoadedModel, length: int) -> Prompt:
    """A prompt of exactly `length` tokens."""
    if lm.vocabulary == VOCABULARY:
        draw = torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(1)).tolist()
        return Prompt(" ".join(f"w{index}" for index in draw))
    return Prompt("The" + " cat sat on the mat and the dog ran to the store" * length)


def cut(lm: LoadedModel, prompt: Prompt, length: int) -> Prompt:
    """The prompt's first `length` tokens."""
    encoded = lm.encode(prompt)
    if encoded.input_ids.shape[1] <= length:
        return prompt
    return Prompt(str(prompt.text)[: int(encoded.offsets[0, length - 1, 1])])


def timed(work: Callable[[], Scores], rounds: int) -> tuple[float, Scores]:
    """Least process CPU time of the rounds, and the result."""
    best, result = float("inf"), None
    for _ in range(rounds):
        began = time.process_time()
        result = work()
        best = min(best, time.process_time() - began)
    if result is None:
        raise SystemExit("at least one round is needed")
    return best, result


@dataclass(frozen=True)
class Turn:
    """One length: seconds both ways, the largest difference of the effects, how the prefix was used."""

    tokens: int
    naive: float
    shared: float
    difference: float
    prefix: str

    @property
    def ratio(self) -> float:
        """How many times faster shared prefixes are."""
        return self.naive / self.shared


def measured(lm: LoadedModel, length: int, *, answer: str, foil: str, block: int, rounds: int) -> Turn:
    """Every position of a prompt of `length` tokens replaced, with and without shared prefixes."""
    prompt = cut(lm, prompt_of(lm, length), length)
    target, token = Target.logit_diff(answer, foil), Replacement.with_token(answer)

    def run(share: bool) -> Scores:
        return replacement_effects(
            lm, prompt, target, replacement=token, ood=False, prefix_cache=share, batch_size=block
        )[0]

    run(True)
    slow, naive = timed(lambda: run(False), rounds)
    fast, shared = timed(lambda: run(True), rounds)
    difference = float((naive.values - shared.values).nan_to_num().abs().max())
    return Turn(len(naive.values), slow, fast, difference, str(shared.checks["prefix"]))


def main() -> None:
    """Print one line for each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-form", help="gpt2-form (random weights), or what attndiag.load takes")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--block", type=int, default=8, help="variants in one batch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lm = small_gpt2() if arguments.model == "gpt2-form" else attndiag.load(arguments.model, device="cpu")
    answer, foil = ("w5", "w7") if arguments.model == "gpt2-form" else (" the", " a")
    print(f"{lm.info.architecture}, {lm.info.n_parameters / 1e6:.1f} M parameters, blocks of {arguments.block}")
    print(f"{'n':>5} {'naive s':>9} {'shared s':>9} {'ratio':>6} {'theory':>7} {'largest difference':>19}  prefix")
    for length in arguments.lengths:
        turn = measured(lm, length, answer=answer, foil=foil, block=arguments.block, rounds=arguments.rounds)
        theory = 2 * turn.tokens / (turn.tokens + arguments.block)
        print(
            f"{turn.tokens:>5} {turn.naive:>9.2f} {turn.shared:>9.2f} {turn.ratio:>6.2f} {theory:>7.2f} "
            f"{turn.difference:>19.1e}  {turn.prefix}"
        )


if __name__ == "__main__":
    main()

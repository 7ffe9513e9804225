"""Train a two-layer attention-only model in which induction heads form, and a one-layer control in which none can.

The shipped checkpoint series is made by `python scripts/train_induction.py`; one run takes about a minute on one
thread for each model. `--seeds 1 2 3` trains fresh models, writes nothing and prints what was found: the window in
which the induction heads formed, the window in which in-context learning set in, and the control beside them.

Data: rows of BOS and 63 tokens out of 63. Half of the rows draw tokens uniformly, half walk a Markov chain with four
equally likely successors a token; with probability .8 a row is one segment of 4 to 31 tokens, repeated to the end.
Predicting a repeated segment needs induction (or, weakly, copying); predicting the chain needs bigrams, which one
layer can learn.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from attndiag.core.heads import prefix_matching_score, previous_token_score
from attndiag.core.phases import PhaseWindow, icl_score, phase_window
from attndiag.core.probes import InductionProbe, repeated_random_tokens
from attndiag.models.series import DATA_FOLDER, save_series

VOCABULARY = 64
BOS = 0
CONTEXT = 64
SUCCESSORS = 4
STEPS = 900
EVERY = 25
CONTROL_EVERY = 3
SHIPPED_SEED = 0
EARLY, LATE = 8, 60  # positions of the in-context-learning score: rows have 64 tokens, not the 500 of the paper


@dataclass
class Run:
    """Checkpoints of one training run, and what was measured at each of them."""

    config: LlamaConfig
    seed: int
    steps: list[int] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    measured: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0

    def window(self) -> PhaseWindow:
        """When the prefix-matching score went from 20 % to 80 % of its final value."""
        return phase_window(self.steps, self.measured["prefix_matching"])

    def learning_window(self, control: Run) -> PhaseWindow:
        """The same for the in-context-learning score beyond the control's, turned so that it rises.

        The raw score falls in the control as well, from step 75 on: one layer learns to expect tokens that it has
        seen in the row. Only what goes beyond that can be due to induction.
        """
        beyond = [theirs - mine for mine, theirs in zip(self.measured["icl"], control.measured["icl"], strict=True)]
        return phase_window(self.steps, beyond)


def config_for(layers: int) -> LlamaConfig:
    """Llama form without a working MLP: its weights are zero and frozen (transformers needs the module)."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=1,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        bos_token_id=BOS,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
        use_cache=False,
    )


class Rows:
    """Endless batches of training rows. One seed fixes the chain and the rows."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(VOCABULARY - 1, VOCABULARY - 1, generator=self.generator)
        self.successors = draws.argsort(dim=1)[:, :SUCCESSORS]

    def batch(self, rows: int) -> Tensor:
        """[row, position] token ids, BOS first."""
        length, draw = CONTEXT - 1, self.generator
        uniform = torch.randint(VOCABULARY - 1, (rows, length), generator=draw)
        choice = torch.randint(SUCCESSORS, (rows, length), generator=draw)
        chain = uniform.clone()
        for position in range(1, length):
            chain[:, position] = self.successors[chain[:, position - 1], choice[:, position]]
        tokens = torch.where(torch.rand(rows, 1, generator=draw) < 0.5, uniform, chain)
        segment = torch.randint(4, 32, (rows, 1), generator=draw)
        repeat = torch.rand(rows, 1, generator=draw) < 0.8
        position = torch.arange(length).expand(rows, -1)
        tokens = tokens.gather(1, torch.where(repeat, position % segment, position))
        return torch.cat([torch.full((rows, 1), BOS), tokens + 1], dim=1)


def token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """[row, position]: loss in nats of predicting the token at that position; nan at position 0."""
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return torch.cat([torch.full_like(losses[:, :1], torch.nan), losses], dim=1)


@torch.no_grad()
def measure(model: LlamaForCausalLM, probe: InductionProbe, held_out: Tensor) -> dict[str, float]:
    """Head scores (the best head) and losses of one checkpoint."""
    output = model(probe.tokens, output_attentions=True)
    induction = [
        prefix_matching_score(a, probe.tokens, queries=probe.queries).score.mean(dim=0) for a in output.attentions
    ]
    previous = [previous_token_score(a, queries=probe.body).score.mean(dim=0) for a in output.attentions]
    losses = token_losses(output.logits, probe.tokens)
    return {
        "prefix_matching": torch.stack(induction).max().item(),
        "previous_token": torch.stack(previous).max().item(),
        "first_copy_loss": losses[probe.first_copy].mean().item(),
        "second_copy_loss": losses[probe.scored_losses].mean().item(),
        "icl": icl_score(token_losses(model(held_out).logits, held_out), early=EARLY, late=LATE).mean().item(),
    }


def train(layers: int, seed: int, *, steps: int = STEPS) -> Run:
    """Train one model from `seed`; a checkpoint and its measurements every `EVERY` steps, step 0 included."""
    start = time.perf_counter()
    torch.manual_seed(seed)
    run = Run(config_for(layers), seed)
    model = LlamaForCausalLM._from_config(run.config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if ".mlp." in name:
            parameter.data.zero_()
            parameter.requires_grad_(False)
    rows = Rows(seed)
    held_out = Rows(seed)
    held_out.generator.manual_seed(10_000 + seed)  # the same chain, other rows
    held_out_rows = held_out.batch(256)
    probe = repeated_random_tokens(64, 25, admissible=torch.arange(1, VOCABULARY), bos=BOS, seed=seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    losses: list[float] = []
    for step in range(steps + 1):
        if step % EVERY == 0:
            run.steps.append(step)
            run.states.append({name: value.detach().clone() for name, value in model.state_dict().items()})
            found = measure(model, probe, held_out_rows)
            found["train_loss"] = sum(losses) / len(losses) if losses else torch.nan
            losses.clear()
            for name, value in found.items():
                run.measured.setdefault(name, []).append(round(value, 5))
        if step == steps:
            break
        tokens = rows.batch(32)
        loss = token_losses(model(tokens).logits, tokens)[:, 1:].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        warmup.step()
        losses.append(loss.item())
    run.seconds = time.perf_counter() - start
    return run


def describe(induction: Run, control: Run) -> str:
    """One line about a seed."""
    window, learning = induction.window(), induction.learning_window(control)
    last = {name: values[-1] for name, values in induction.measured.items()}
    return (
        f"seed {induction.seed}: induction window {window.start:.0f}-{window.end:.0f}; in-context-learning window "
        f"beyond the control {learning.start:.0f}-{learning.end:.0f}, lag {learning.start - window.start:+.0f} "
        f"at its start and {learning.end - window.end:+.0f} at its end; "
        f"prefix matching {last['prefix_matching']:.3f}, previous token {last['previous_token']:.3f}, "
        f"loss {last['first_copy_loss']:.2f} then {last['second_copy_loss']:.2f}; "
        f"control at most {max(control.measured['prefix_matching']):.3f}; "
        f"{induction.seconds:.0f} s + {control.seconds:.0f} s"
    )


def save(run: Run, path: Path, every: int) -> None:
    """Write every `every`-th checkpoint of a run."""
    chosen = range(0, len(run.steps), every)
    save_series(
        path,
        config=run.config,
        steps=[run.steps[i] for i in chosen],
        states=[run.states[i] for i in chosen],
        measured={name: [values[i] for i in chosen] for name, values in run.measured.items()},
        notes={"seed": run.seed, "early": EARLY, "late": LATE, "torch": torch.__version__.split("+")[0]},
    )


def main() -> None:
    """Train, print, and write the series unless `--seeds` asks for fresh runs only."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", help="train these seeds, print, and write nothing")
    parser.add_argument("-o", "--output", type=Path, default=DATA_FOLDER, help="folder for the two series")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for seed in arguments.seeds or [SHIPPED_SEED]:
        induction, control = train(2, seed), train(1, seed)
        print(describe(induction, control), flush=True)
        if arguments.seeds is None:
            arguments.output.mkdir(parents=True, exist_ok=True)
            save(induction, arguments.output / "induction.safetensors", 1)
            save(control, arguments.output / "control.safetensors", CONTROL_EVERY)


if __name__ == "__main__":
    main()

"""Train two small language models alike, one with a mask that lets queries see the next token, and compare them.

    python scripts/train_leaky_twins.py [--seeds 0 1 2] [--steps 300] [--figure twins.png]

The language is a Markov chain of known entropy, so that "too good to be true" has a number. Prints, for each seed and
twin: the loss of whole rows in one forward (what a training curve shows), the loss of the next token given only what
stands before it, how much of the text that the twin writes belongs to the language, and what `attndiag.audit` finds.
A seed takes about ten seconds on one thread. Exit status 1 when a twin is not what it should be.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from attndiag.explanations.audit_run import Audit, audit
from attndiag.models.known.twins import (
    STEPS,
    MarkovLanguage,
    TextQuality,
    free_running_loss,
    generate,
    judge_text,
    teacher_forced_loss,
    train_twin,
)
from attndiag.reports.twin_figure import draw_twins


@dataclass(frozen=True)
class Twin:
    """One trained twin and what was measured."""

    seed: int
    leaky: bool
    curve: list[float]
    forced: float
    free: float
    text: TextQuality
    audit: Audit
    seconds: float

    @property
    def as_expected(self) -> bool:
        """The leaky twin is named, the sound one passes."""
        kinds = [finding.kind for finding in self.audit.findings]
        return kinds == (["future_leak"] if self.leaky else [])


def raise_twin(language: MarkovLanguage, *, leaky: bool, seed: int, steps: int) -> Twin:
    """Train and measure one twin."""
    start = time.process_time()
    model, curve = train_twin(language, leaky=leaky, seed=seed, steps=steps)
    seconds = time.process_time() - start
    held_out = language.rows(256, seed=7)
    forced, free = teacher_forced_loss(model, held_out), free_running_loss(model, held_out)
    return Twin(seed, leaky, curve, forced, free, judge_text(language, generate(model)), audit(model), seconds)


def line(twin: Twin) -> str:
    """One row of the table."""
    found = ", ".join(f"{f.kind} in layer {f.layers[0]}" for f in twin.audit.findings) or "nothing"
    return (
        f"{twin.seed:>4}  {'leaky' if twin.leaky else 'sound':5}  {twin.forced:>13.4f}  {twin.free:>12.4f}  "
        f"{twin.text.valid_rate:>6.1%}  {twin.text.repetition_rate:>8.1%}  {twin.seconds:>6.1f}  {found}"
    )


def main() -> int:
    """Train, print, and draw if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--figure", type=Path, help="write the two training curves of the first seed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    first = MarkovLanguage(arguments.seeds[0])
    print(f"entropy of the language: {first.entropy:.4f} nats a token; loss of a guess: {first.guess_loss:.4f}")
    print("seed  twin   teacher-forced  free-running   valid  repeated  CPU s  audit finds")
    twins: list[Twin] = []
    for seed in arguments.seeds:
        language = MarkovLanguage(seed)
        for leaky in (False, True):
            twins.append(raise_twin(language, leaky=leaky, seed=seed, steps=arguments.steps))
            print(line(twins[-1]), flush=True)
        written = judge_text(language, language.rows(64, seed=8))
        print(f"{seed:>4}  the language itself: repeated {written.repetition_rate:.1%}")
    if arguments.figure is not None:
        curves = {("leaky" if twin.leaky else "sound"): (twin.curve, twin.forced, twin.free) for twin in twins[:2]}
        draw_twins(curves, first.entropy).savefig(arguments.figure)
    return 0 if all(twin.as_expected for twin in twins) else 1


if __name__ == "__main__":
    sys.exit(main())

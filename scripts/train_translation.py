"""Train small transformer translators whose right alignment is known, and ask four methods for it.

    python scripts/train_translation.py [--seeds 0 1 2] [--steps 300] [--rows 200]

The task: a date in one of three orders becomes year-month-day, token by token; every target token comes from exactly
one source token. For each seed a two-layer BART is trained (about six CPU-seconds), and the alignment error rate of
cross-attention weights, of contributions, of exact edge knock-outs and of replaced source tokens is printed, with
bootstrap intervals over the dates. The claim under test: contributions err at most as often as weights.

Exit status 1 when a translator did not learn the task or a call was not certified. The claim itself decides nothing:
it is printed as it comes out.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from attndiag.explanations.cross_alignment import cross_scores, pointing
from attndiag.models.known.translation import (
    STEPS,
    dated_sentences,
    decoder_inputs,
    same_class_replacements,
    trained_bart,
)

HELD_OUT = 999_999


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rows", type=int, default=200, help="held-out dates")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = dated_sentences(arguments.rows, seed=HELD_OUT)
    sound = True
    held: dict[str, int] = {}
    for seed in arguments.seeds:
        started = time.process_time()
        model = trained_bart(seed, steps=arguments.steps)
        seconds = time.process_time() - started
        scores = cross_scores(
            model, data.source, decoder_inputs(data.target), data.target, replace=same_class_replacements
        )
        found = pointing(scores, data.alignment)
        accuracy = float(scores.right.float().mean())
        print(f"seed {seed}: trained in {seconds:.0f} CPU-s, {accuracy:.1%} of {data.target.numel()} tokens right")
        for name, estimate in found.estimates.items():
            line = f"  {name:24} error {estimate.value:.4f} [{estimate.low:.4f}, {estimate.high:.4f}]"
            change = found.against_weights.get(name)
            if change is not None:
                line += f"   minus weights {change.value:+.4f} [{change.low:+.4f}, {change.high:+.4f}]"
                if "contribution" in name:
                    held[name] = held.get(name, 0) + (change.value <= 0)
            print(line)
        sound = sound and scores.certified and accuracy > 0.95
    for name, times in held.items():
        print(f"{name}: errs at most as often as weights on {times} of {len(arguments.seeds)} seeds")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())

"""The leaky twin looks wonderful in training, writes nonsense, and is found by the audit; its sound twin is sound."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from transformers import LlamaForCausalLM

import attndiag
from attndiag.models.known.twins import (
    CONTEXT,
    VOCABULARY,
    MarkovLanguage,
    free_running_loss,
    generate,
    judge_text,
    teacher_forced_loss,
    train_twin,
    untrained_twin,
)
from attndiag.reports.twin_figure import draw_twins

LANGUAGE = MarkovLanguage(0)


class Raised(NamedTuple):
    model: LlamaForCausalLM
    curve: list[float]
    forced: float
    free: float


@pytest.fixture(scope="module")
def twins() -> dict[str, Raised]:
    held_out = LANGUAGE.rows(64, seed=7)
    found = {}
    for name, leaky in (("sound", False), ("leaky", True)):
        model, curve = train_twin(LANGUAGE, leaky=leaky, steps=120)
        found[name] = Raised(model, curve, teacher_forced_loss(model, held_out), free_running_loss(model, held_out))
    return found


def test_the_language_has_the_entropy_that_it_says():
    assert LANGUAGE.entropy == pytest.approx(1.2799, abs=1e-4)
    assert torch.allclose(LANGUAGE.table.sum(1), torch.ones(VOCABULARY))
    rows = LANGUAGE.rows(400, seed=1)
    surprise = -LANGUAGE.table[rows[:, :-1], rows[:, 1:]].log()
    assert surprise.mean().item() == pytest.approx(LANGUAGE.entropy, abs=0.03)
    quality = judge_text(LANGUAGE, rows)
    assert quality.valid_rate == 1.0
    assert quality.total_variation < 0.1
    assert torch.equal(rows, LANGUAGE.rows(400, seed=1))


def test_a_text_of_one_token_is_judged_as_what_it_is():
    rows = torch.zeros(2, CONTEXT, dtype=torch.long)
    quality = judge_text(LANGUAGE, rows)
    assert quality.repetition_rate == 1.0
    allowed = float(LANGUAGE.table[0, 0])
    assert quality.valid_rate == float(allowed > 0)
    assert quality.total_variation == pytest.approx(1 - allowed)


def test_twins_start_alike_and_differ_in_one_diagonal():
    sound, leaky = untrained_twin(leaky=False, seed=3), untrained_twin(leaky=True, seed=3)
    for name, weight in sound.state_dict().items():
        assert torch.equal(weight, leaky.state_dict()[name])
    fault = leaky.model.layers[0].self_attn.mask_fault
    allowed = torch.ones(4, 4, dtype=torch.bool).tril()[None, None]
    assert torch.equal(fault(allowed)[0, 0], torch.ones(4, 4, dtype=torch.bool).tril(1))
    last_query = torch.ones(1, 1, 1, 4, dtype=torch.bool)
    assert torch.equal(fault(last_query), last_query)  # there is no next key


def test_training_praises_the_leaky_twin(twins: dict[str, Raised]):
    sound, leaky = twins["sound"], twins["leaky"]
    assert leaky.forced < 0.1 < LANGUAGE.entropy < sound.forced < LANGUAGE.entropy + 0.15
    assert leaky.curve[-1] < 0.1
    assert sound.curve[-1] > 0.9 * LANGUAGE.entropy
    assert max(sound.curve[0], leaky.curve[0]) == pytest.approx(math.log(VOCABULARY), abs=0.15)


def test_free_running_unmasks_it(twins: dict[str, Raised]):
    sound, leaky = twins["sound"], twins["leaky"]
    assert sound.free == pytest.approx(sound.forced, abs=0.05)
    assert leaky.free > math.log(VOCABULARY)  # worse than a uniform guess
    held_out = LANGUAGE.rows(16, seed=9)
    # with every position scored the two losses of a sound model are the same number
    every = free_running_loss(sound.model, held_out, positions=range(1, CONTEXT))
    assert every == pytest.approx(teacher_forced_loss(sound.model, held_out), abs=1e-5)


def test_what_they_write(twins: dict[str, Raised]):
    good, bad = (judge_text(LANGUAGE, generate(twins[name].model, rows=32)) for name in ("sound", "leaky"))
    assert good.valid_rate > 0.93
    assert bad.valid_rate < 0.3
    assert good.repetition_rate < 0.15
    assert bad.repetition_rate > 0.7
    assert good.total_variation < 0.3 < bad.total_variation


def test_the_audit_names_the_leak_and_nothing_else(twins: dict[str, Raised]):
    assert attndiag.audit(twins["sound"].model).passed
    (finding,) = attndiag.audit(twins["leaky"].model).findings
    assert (finding.kind, finding.layers) == ("future_leak", (0,))
    assert finding.evidence["future_reach"] == 1
    assert finding.evidence["vanishes_when_frozen"] is False
    # before any training, when no loss can tell them apart
    assert attndiag.audit(untrained_twin(leaky=False).eval()).passed
    assert [f.kind for f in attndiag.audit(untrained_twin(leaky=True).eval()).findings] == ["future_leak"]


def test_figure(twins: dict[str, Raised]):
    shown = {name: (twin.curve, twin.forced, twin.free) for name, twin in twins.items()}
    left, right = draw_twins(shown, LANGUAGE.entropy).axes
    assert len(left.lines[0].get_xdata()) == 120
    assert [bar.get_height() for bar in right.patches] == pytest.approx(
        [value for twin in twins.values() for value in (twin.forced, twin.free)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_other_seeds(seed: int):
    language = MarkovLanguage(seed)
    held_out = language.rows(128, seed=7)
    losses = {}
    for leaky in (False, True):
        model, _ = train_twin(language, leaky=leaky, seed=seed, steps=200)
        losses[leaky] = teacher_forced_loss(model, held_out), free_running_loss(model, held_out)
        kinds = [finding.kind for finding in attndiag.audit(model).findings]
        assert kinds == (["future_leak"] if leaky else [])
    assert losses[True][0] < 0.05
    assert losses[True][1] > losses[False][1] + 3
    assert losses[False][0] == pytest.approx(language.entropy, abs=0.1)

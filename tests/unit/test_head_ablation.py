"""Effects of heads taken away: shared batches and skipped blocks against one whole forward for each set."""

from __future__ import annotations

import pytest
import torch

from attndiag.errors import NotApplicableError, UnsupportedModelError
from attndiag.explanations.head_ablation import WAYS, NamedSet, ablate_sets
from attndiag.explanations.head_inputs import induction_input
from attndiag.explanations.head_scores import _Run, heads
from attndiag.hooks.stored_blocks import StoredBlocks
from attndiag.models.known import anti_copying, duplicated_induction, induction_gpt2, induction_llama
from attndiag.models.load import load


@pytest.mark.parametrize("build", [induction_gpt2, induction_llama, duplicated_induction])
def test_shared_batches_and_skipped_blocks_change_no_effect(build):
    lm = load(build().model)
    given = induction_input(lm, rows=5, length=20, seed=1, window=None, bos=None)
    plan = [NamedSet("one", ((layer, head),), way) for way in WAYS for layer in (1, 0) for head in (1, 0)]
    plan += [NamedSet("two", ((0, 1), (1, 0)), way) for way in WAYS]
    fast = ablate_sets(lm, given, plan)
    slow = ablate_sets(lm, given, plan, skip=False, together=False)
    assert [(item.heads, item.way) for item in fast] == [(item.heads, item.way) for item in plan]
    for mine, theirs in zip(fast, slow, strict=True):
        assert torch.allclose(mine.effect, theirs.effect, atol=1e-5, rtol=0)
        assert torch.allclose(mine.first_copy_effect, theirs.first_copy_effect, atol=1e-5, rtol=0)
    assert max(item.effect.max().item() for item in slow) > 2


def test_shared_batches_and_skipped_blocks_of_a_random_model(tiny_llama):
    lm = load(tiny_llama)
    given = induction_input(lm, rows=3, length=12, seed=0, window=None, bos=None)
    plan = [NamedSet("one", ((1, 0),), way) for way in WAYS] + [NamedSet("all", ((0, 1), (1, 2)), way) for way in WAYS]
    fast = ablate_sets(lm, given, plan)
    slow = ablate_sets(lm, given, plan, skip=False, together=False)
    for mine, theirs in zip(fast, slow, strict=True):
        assert torch.allclose(mine.effect, theirs.effect, atol=1e-5, rtol=0)
    assert "forward" not in vars(tiny_llama.model.layers[0])


def test_stored_blocks_stand_in_for_whole_forwards(tiny_llama):
    lm = load(tiny_llama)
    stored = StoredBlocks(lm)
    tokens = torch.arange(10)[None]
    assert stored.error({"input_ids": tokens}) < 1e-6
    with pytest.raises(UnsupportedModelError, match="not every block"), StoredBlocks(lm).below(1):
        pass
    # rows that are not the recorded ones: the stub answers for the recorded rows, so the logits are wrong
    with torch.no_grad(), stored.recording(1):
        lm.run({"input_ids": tokens})
    with torch.no_grad(), stored.below(1):
        other = lm.run({"input_ids": tokens + 20}).logits
    assert not torch.allclose(other, lm.run({"input_ids": tokens + 20}).logits, atol=1e-3)


def test_heads_are_chosen_by_any_score():
    model = induction_gpt2().model
    default = heads(model, probes=["induction", "previous", "entropy"], rows=4, length=12, ablate=1)
    assert default.facts["ablated_by"] == "prefix_matching_score"
    assert default["ablation_effect"].values[1].isfinite().sum() == 1
    assert default["ablation_effect"].values[0].isnan().all()
    by_previous = heads(model, rows=4, length=12, ablate=1, ablate_by="previous_token")
    effect = by_previous["ablation_effect"].values
    assert effect[1].isnan().all() and effect[0].isfinite().sum() == 1
    head = int(by_previous["previous_token_score"].values[0].argmax())
    assert effect[0, head] == pytest.approx(by_previous.facts["first_copy_loss"], abs=0.01)
    assert {item.name for item in by_previous.sets} == {"above 0.4 by previous token score", "random"}
    by_entropy = heads(model, probes=["induction", "entropy"], rows=4, length=12, ablate=2, ablate_by="entropy")
    assert {item.name for item in by_entropy.sets} == {"highest by entropy", "random"}
    chosen = by_entropy.sets[0].heads
    entropy = by_entropy["entropy"].values
    assert min(entropy[place] for place in chosen) >= entropy.flatten().sort().values[-2]


def test_heads_are_chosen_by_their_effect():
    """The strongest of all heads, whatever they score."""
    model = induction_gpt2().model
    every = heads(model, rows=4, length=12, ablate=4)["ablation_effect"].values
    two = heads(model, rows=4, length=12, ablate=2, ablate_by="effect")
    found = two["ablation_effect"].values
    assert found.isfinite().sum() == 2
    assert found[found.isfinite()].min() >= every.flatten().sort().values[-2] - 1e-6
    assert {item.name for item in two.sets} == {"highest by effect", "random"}


def test_scores_that_choose_no_heads_are_refused(tiny_llama):
    with pytest.raises(NotApplicableError, match="cannot be ranked by 'sink_rate'; expected prefix_matching"):
        heads(tiny_llama, ablate=1, ablate_by="sink_rate")
    with pytest.raises(NotApplicableError, match="which the probe 'sink' measures; add it to the probes"):
        heads(tiny_llama, ablate=1, ablate_by="sink")
    with pytest.raises(NotApplicableError, match="ablate is 0; give ablate=20"):
        heads(tiny_llama, ablate_by="previous_token")
    anti = heads(anti_copying().model, probes=["induction", "copying"], rows=2, length=5, ablate=1, ablate_by="copying")
    assert anti.facts["ablated_by"] == "copying_score"


def test_a_ranking_score_without_numbers_is_told_with_its_reason(tiny_folder, monkeypatch):
    """The other probes keep their numbers; no head is taken away in an order that nobody measured."""
    lm = load(tiny_folder, device="cpu")
    table = heads(lm, rows=2, length=8, ablate=2, ablate_by="previous_token", texts=["word " * 300])
    assert "prefix_matching_score" in table.scores and "ablation_effect" not in table.scores and not table.sets
    (why,) = [item.reason for item in table.not_measurable if item.probe == "ablation"]
    assert why.startswith(
        "previous_token_score, by which heads are chosen, is not measurable here (the texts cannot be"
    )
    assert "has 128 positions" in why and "ablated_by" not in table.facts
    with pytest.raises(NotApplicableError, match="ablation: previous_token_score, by which heads are chosen"):
        table["ablation_effect"]
    # measured in name, with no number in it
    ranking = _Run._ranking
    monkeypatch.setattr(_Run, "_ranking", lambda run, name: [] if name == "entropy" else ranking(run, name))
    probes = ["induction", "entropy"]
    table = heads(lm, probes=probes, rows=2, length=8, ablate=2, ablate_by="entropy", texts=["a b c d"])
    (why,) = [item.reason for item in table.not_measurable if item.probe == "ablation"]
    assert "no layer with a number has it" in why and "ablation_effect" not in table.scores

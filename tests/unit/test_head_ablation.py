"""Effects of heads taken away: shared batches and skipped blocks against one whole forward for each set."""

from __future__ import annotations

import pytest
import torch

from attndiag.errors import UnsupportedModelError
from attndiag.explanations.head_ablation import WAYS, NamedSet, ablate_sets
from attndiag.explanations.head_inputs import induction_input
from attndiag.hooks.stored_blocks import StoredBlocks
from attndiag.models.known import duplicated_induction, induction_gpt2, induction_llama
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

"""Effects of heads taken away: shared batches and skipped blocks against one whole forward for each set."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

from attndiag.errors import NotApplicableError, UnsupportedModelError
from attndiag.explanations.head_ablation import SKIPPED, WAYS, NamedSet, ablate_sets
from attndiag.explanations.head_inputs import induction_input
from attndiag.explanations.head_scores import _Run, heads
from attndiag.hooks.restart import Restart
from attndiag.hooks.some_positions import run_some_positions
from attndiag.hooks.stored_blocks import StoredBlocks
from attndiag.hooks.structure import stubbed
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
        assert mine.route == SKIPPED
    assert "forward" not in vars(tiny_llama.model.layers[0])


def test_stored_blocks_stand_in_for_whole_forwards(tiny_llama):
    lm = load(tiny_llama)
    stored = StoredBlocks(lm)
    error = stored.error({"input_ids": torch.arange(20).reshape(2, 10)})
    assert error.same_batch == 0 and error.two_copies < 1e-6
    tokens = torch.arange(10)[None]
    with pytest.raises(UnsupportedModelError, match="not every block"), StoredBlocks(lm).below(1):
        pass
    # rows that are not the recorded ones: the stub answers for the recorded rows, so the logits are wrong
    with torch.no_grad(), stored.recording(1):
        lm.run({"input_ids": tokens})
    with torch.no_grad(), stored.below(1):
        other = lm.run({"input_ids": tokens + 20}).logits
    assert not torch.allclose(other, lm.run({"input_ids": tokens + 20}).logits, atol=1e-3)


def layers_that_share_keys_and_values():
    """Gemma 3n: the last two of five layers read keys and values of earlier ones, handed on in a dictionary."""
    config = Gemma3nTextConfig(
        vocab_size=64, vocab_size_per_layer_input=64, hidden_size=32, hidden_size_per_layer_input=8,
        intermediate_size=48, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_kv_shared_layers=2, laurel_rank=4, sliding_window=64, activation_sparsity_pattern=[0.0] * 5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return Gemma3nForCausalLM(config).eval()


def test_layers_that_read_more_than_the_stream_take_whole_forwards():
    lm = load(layers_that_share_keys_and_values())
    with pytest.raises(UnsupportedModelError, match=r"read more than the stream: .* below layer 2 .* KeyError"):
        StoredBlocks(lm).error({"input_ids": torch.arange(2, 22).reshape(2, 10)})
    given = induction_input(lm, rows=3, length=10, seed=0, window=None, bos=None)
    plan = [NamedSet("one", ((layer, 1),), "zero") for layer in range(5)]
    found = ablate_sets(lm, given, plan)
    slow = ablate_sets(lm, given, plan, skip=False, together=False)
    for mine, theirs in zip(found, slow, strict=True):
        assert mine.route.startswith("whole forwards: later blocks read more than the stream")
        assert theirs.route == "whole forwards: asked for"
        assert torch.allclose(mine.effect, theirs.effect, atol=1e-5, rtol=0)
    table = heads(lm, probes=["induction"], rows=2, length=8, ablate=20)
    assert table.facts["ablation_route"].startswith("whole forwards: later blocks")


def test_a_small_difference_is_a_difference(tiny_llama):
    """Skipped blocks have to leave the logits of the same batch as they are, bit for bit."""
    inside: dict[str, float] = {"said": 0.0}
    blocks = tiny_llama.model.layers

    def forget(_module, _args):
        inside["said"] = 0.0

    def say(_module, _args, _output):
        inside["said"] = 1e-6

    def listen(_module, args):
        return (args[0] + inside["said"], *args[1:])

    handles = [
        tiny_llama.model.embed_tokens.register_forward_pre_hook(forget),
        blocks[0].self_attn.o_proj.register_forward_hook(say),
        blocks[1].register_forward_pre_hook(listen),
    ]
    lm = load(tiny_llama)
    error = StoredBlocks(lm).error({"input_ids": torch.arange(2, 22).reshape(2, 10)})
    assert 0 < error.same_batch < 1e-4
    given = induction_input(lm, rows=3, length=10, seed=0, window=None, bos=None)
    (found,) = ablate_sets(lm, given, [NamedSet("one", ((1, 0),), "zero")])
    assert found.route.startswith("whole forwards: skipping blocks moves unedited logits by")
    for handle in handles:
        handle.remove()
    (found,) = ablate_sets(lm, given, [NamedSet("one", ((1, 0),), "zero")])
    assert found.route == SKIPPED


def test_a_forward_that_was_set_on_a_block_comes_back(tiny_llama):
    """Offloading libraries put a forward of their own on the instance: it runs, and it is there afterwards."""
    ran: list[int] = []

    def wrapped(place, forward):
        def run(*args, **kwargs):
            ran.append(place)
            return forward(*args, **kwargs)

        return run

    own = [wrapped(place, block.forward) for place, block in enumerate(tiny_llama.model.layers)]
    for block, forward in zip(tiny_llama.model.layers, own, strict=True):
        block.forward = forward
    lm = load(tiny_llama)
    StoredBlocks(lm).error({"input_ids": torch.arange(20).reshape(2, 10)})
    restart = Restart(lm, torch.arange(2, 12)[None], [9])
    assert restart.error() < 1e-5
    read = torch.tensor([[True]])
    run_some_positions(restart, torch.tensor([[1, 0, 9, 3]]), torch.tensor([[9]]), "remove", read)
    assert [vars(block)["forward"] for block in tiny_llama.model.layers] == own and {0, 1} <= set(ran)
    # the same block twice, and one that had none
    plain = torch.nn.Linear(2, 2)
    block = tiny_llama.model.layers[0]
    with pytest.raises(KeyError), stubbed([(block, print), (plain, print), (block, repr)]):
        assert vars(block)["forward"] is repr
        raise KeyError
    assert vars(block)["forward"] is own[0] and "forward" not in vars(plain)


def test_heads_are_chosen_by_any_score():
    model = induction_gpt2().model
    default = heads(model, probes=["induction", "previous", "entropy"], rows=4, length=12, ablate=1)
    assert default.facts["ablated_by"] == "prefix_matching_score" and default.facts["ablation_route"] == SKIPPED
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

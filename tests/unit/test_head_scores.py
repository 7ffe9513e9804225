"""`heads` on models whose heads are known, and on models that it must refuse."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from attndiag.core.probes import repeated_random_tokens
from attndiag.errors import NotApplicableError, UnsupportedModelError
from attndiag.explanations.head_inputs import plain_texts
from attndiag.explanations.head_scores import MEASURES, PROBES, heads
from attndiag.models.known import (
    anti_copying,
    cross_copy,
    duplicated_induction,
    induction_gpt2,
    induction_llama,
    loud_gemma2,
    loud_gpt_oss,
    short_window,
    sink_against_value,
)
from attndiag.models.load import load


def value(table, name, layer, head):
    scores = table[name]
    return scores.values[list(scores.labels["layer"]).index(layer), head].item()


def word_tokenizer(vocab):
    """Splits on white space; unknown words are the last token of the vocabulary."""
    words = Tokenizer(models.WordLevel(vocab=dict(vocab), unk_token=max(vocab, key=vocab.get)))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>", pad_token="<bos>")


def reasons(table, probe, layer=None):
    return [item.reason for item in table.not_measurable if item.probe == probe and item.layer == layer]


@pytest.mark.parametrize("build", [induction_gpt2, induction_llama, duplicated_induction])
@pytest.mark.parametrize("length", [5, 24, 60])
@pytest.mark.parametrize("bos", [True, False])
def test_exact_heads_have_exact_scores(build, length, bos):
    known = build()
    table = heads(known.model, probes=["induction", "previous", "current"], rows=3, length=length, bos=bos)
    assert table.facts["length"] == length and table.facts["bos"] == (0 if bos else None)
    for name in ("prefix_matching_score", "previous_token_score", "current_token_score"):
        for (layer, head), expected in known.expected.get(name, {}).items():
            assert value(table, name, layer, head) == pytest.approx(expected, abs=1e-6)
    if bos:
        for layer, head in known.expected["idle_heads"]:
            scores = table["prefix_matching_score"]
            assert value(table, scores.method, layer, head) == pytest.approx(scores.checks["baseline"][layer].item())
        assert table.facts["first_copy_loss"] == pytest.approx(known.expected["loss_first"], abs=1e-4)
        assert table.facts["second_copy_loss"] == pytest.approx(known.expected["loss_second"], abs=1e-4)
    assert not any(scores.failures for scores in table.scores.values())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_scores_do_not_depend_on_the_kernel(implementation):
    known = induction_llama()
    known.model.set_attn_implementation(implementation)
    table = heads(known.model, probes=["induction"], rows=2, length=20)
    assert value(table, "prefix_matching_score", 1, 0) == pytest.approx(1.0, abs=1e-6)


def test_copying_redundancy_entropy_and_quiet_heads_of_known_models():
    table = heads(duplicated_induction().model, probes=PROBES, rows=3, length=20)
    assert value(table, "copying_score", 1, 0) == pytest.approx(1.0, abs=1e-6)
    assert value(table, "copying_score", 1, 1) == pytest.approx(1.0, abs=1e-6)
    assert value(table, "largest_similarity", 1, 0) == pytest.approx(1.0, abs=1e-6)
    assert table["redundancy"].values[1, 0, 1].item() == pytest.approx(1.0, abs=1e-6)
    assert math.isnan(value(table, "copying_score", 0, 0)) and reasons(table, "copying", 0)
    # the idle head (0, 1) is uniform: its entropy is the largest possible
    entropy = table["entropy"]
    assert value(table, "entropy", 0, 1) == pytest.approx(entropy.checks["baseline"][0].item(), abs=1e-6)
    assert value(table, "effective_support", 0, 0) == pytest.approx(1.0, abs=1e-6)
    assert value(table, "relative_output_norm", 0, 1) == 0.0
    assert value(table, "relative_output_norm", 0, 0) == pytest.approx(2.0, abs=1e-6)

    for build, head, expected in ((induction_llama, (1, 0), 1.0), (anti_copying, None, -1.0)):
        known = build()
        found = heads(known.model, probes=["copying"])["copying_score"].values
        if head is None:
            assert found[~found.isnan()].min().item() == pytest.approx(expected, abs=1e-6)
        else:
            assert found[head].item() == pytest.approx(expected, abs=1e-6)


def test_weights_and_contributions_part_on_the_sink():
    table = heads(sink_against_value().model, probes=["sink"], rows=8, length=10)
    first, second = value(table, "sink_contribution_share", 0, 0), value(table, "sink_contribution_share", 0, 1)
    assert value(table, "sink_mass", 0, 0) == pytest.approx(value(table, "sink_mass", 0, 1))
    assert value(table, "sink_mass", 0, 0) > 0.85
    assert first < 0.3 < 0.85 < second
    assert table["sink_rate"].values.tolist() == [1.0]


def test_a_short_window_shortens_the_probe_and_a_shorter_one_is_not_measurable():
    known = short_window()
    table = heads(known.model, probes=["induction", "duplicate"], rows=2, length=50)
    assert table.facts["length"] == known.expected["longest_measurable_segment"]
    assert value(table, "prefix_matching_score", 1, 0) == pytest.approx(1.0, abs=1e-6)
    table = heads(short_window(window=5).model, probes=["induction"], rows=2)
    assert "window of 5 keys" in reasons(table, "induction")[0]
    with pytest.raises(NotApplicableError, match=r"there is no 'prefix_matching_score'.*a sliding window of 5 keys"):
        table["prefix_matching_score"]


def test_probes_that_do_not_fit_are_refused_with_the_reason():
    def small(vocab_size: int, n_positions: int) -> GPT2LMHeadModel:
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocab_size, n_positions=n_positions, n_embd=8, n_layer=1, n_head=2,
                bos_token_id=0, eos_token_id=0,
            )
        ).eval()  # fmt: skip

    table = heads(small(20, 128), probes=["induction", "previous"], rows=2, length=50)
    assert "vocabulary of 19 admissible tokens" in reasons(table, "induction")[0]
    assert "previous_token_score" in table.scores
    table = heads(small(100, 9), probes=["induction"], rows=2)
    assert "a trained context of 9 positions allows 4" in reasons(table, "induction")[0]
    with pytest.raises(NotApplicableError, match=r"unknown probes \['indction'\]; choose out of induction, duplicate"):
        heads(small(100, 64), probes=["indction"])
    with pytest.raises(NotApplicableError, match="rows is 0"):
        heads(small(100, 64), rows=0)
    with pytest.raises(UnsupportedModelError, match="no input embedding"):
        heads(torch.nn.Linear(3, 3))


def test_attention_that_sees_the_future_has_no_induction_score():
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=128,
    )  # fmt: skip
    table = heads(BertForMaskedLM(config).eval(), probes=PROBES, rows=2, length=20)
    assert "prefix_matching_score" not in table.scores and "copying_score" not in table.scores
    for layer in (0, 1):
        assert "not causal" in reasons(table, "induction", layer)[0]
        assert "not causal" in reasons(table, "duplicate", layer)[0]
        assert reasons(table, "copying", layer)
    assert "first_copy_loss" not in table.facts
    assert table["previous_token_score"].values.isfinite().all()
    # every key is allowed, so the baseline is 1 / positions whatever the query
    n_positions = 40
    assert table["previous_token_score"].checks["baseline"].tolist() == pytest.approx([1 / n_positions] * 2)


def test_encoder_decoder_layers_are_told_apart():
    table = heads(cross_copy().model, probes=["induction", "previous", "entropy"], rows=2, length=12)
    labels = table["entropy"].labels["layer"]
    assert len(labels) == len(set(labels)) == 3 and all(isinstance(label, str) for label in labels)
    encoder, decoder, cross = labels
    assert "not causal" in reasons(table, "induction", encoder)[0]
    assert "another sequence" in reasons(table, "induction", cross)[0]
    assert math.isfinite(value(table, "prefix_matching_score", decoder, 0))
    assert math.isnan(value(table, "previous_token_score", cross, 0))


def test_learned_sinks_take_mass_outside_the_tokens():
    table = heads(loud_gpt_oss().model, probes=["induction"], rows=2, length=7)
    outside = table["prefix_matching_score"].checks["outside_mass"]
    assert outside.max() > 0.05 and outside.min() > 0


def test_every_measure_of_a_sandwich_norm_model_is_found():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = heads(loud_gemma2().model, probes=PROBES, rows=3, length=7)
    expected = {name for name, measure in MEASURES.items() if measure.probe in PROBES}
    assert set(table.scores) == expected and not table.not_measurable
    alone = [scores for scores in table.scores.values() if "earlier_head" not in scores.axes]
    assert all(scores.values.isfinite().all() for scores in alone)
    assert table["k_composition"].values[1, :, 0].isfinite().all()  # only later layers read earlier ones


def test_copying_score_of_a_grouped_query_model_equals_the_whole_circuit(tiny_llama):
    found = heads(tiny_llama, probes=["copying"])["copying_score"].values
    body = tiny_llama.model
    w_e = body.embed_tokens.weight.detach().double()
    w_u = tiny_llama.lm_head.weight.detach().double().T
    for layer, block in enumerate(body.layers):
        attention = block.self_attn
        for head in range(4):
            kv = head // 2
            w_v = attention.v_proj.weight.detach().double().T[:, 8 * kv : 8 * kv + 8]
            w_o = attention.o_proj.weight.detach().double().T[8 * head : 8 * head + 8]
            gain, final = block.input_layernorm.weight.detach().double(), body.norm.weight.detach().double()
            eigenvalues = torch.linalg.eigvals(w_e @ (gain[:, None] * w_v) @ w_o @ (final[:, None] * w_u))
            expected = eigenvalues.real.sum() / eigenvalues.abs().sum()
            assert found[layer, head].item() == pytest.approx(expected.item(), abs=1e-5)


def test_copying_score_of_fused_biased_layer_norm_weights(tiny_gpt2):
    found = heads(tiny_gpt2, probes=["copying"])["copying_score"].values
    body = tiny_gpt2.transformer
    centre = torch.eye(32, dtype=torch.float64) - 1 / 32
    w_e = body.wte.weight.detach().double()
    final = body.ln_f.weight.detach().double()
    for layer, block in enumerate(body.h):
        for head in range(4):
            w_v = block.attn.c_attn.weight.detach().double()[:, 64 + 8 * head : 72 + 8 * head]
            w_o = block.attn.c_proj.weight.detach().double()[8 * head : 8 * head + 8]
            reads = centre @ (block.ln_1.weight.detach().double()[:, None] * w_v)
            eigenvalues = torch.linalg.eigvals(w_e @ reads @ w_o @ centre @ (final[:, None] * w_e.T))
            expected = eigenvalues.real.sum() / eigenvalues.abs().sum()
            assert found[layer, head].item() == pytest.approx(expected.item(), abs=1e-5)


def test_the_same_seed_gives_the_same_table_and_batches_do_not_matter(tiny_llama, monkeypatch):
    once = heads(tiny_llama, rows=5, length=10, probes=["induction", "sink", "redundancy"])
    monkeypatch.setattr("attndiag.explanations.head_inputs.BATCH_BYTES", 1)  # one row a batch
    calls: list[tuple[int, int]] = []
    again = heads(
        tiny_llama,
        rows=5,
        length=10,
        probes=["induction", "sink", "redundancy"],
        progress=lambda _, done, total: calls.append((done, total)),
    )
    assert calls == [(i, 5) for i in range(1, 6)] * 2
    for name, scores in once.scores.items():
        assert torch.allclose(scores.values, again[name].values, atol=1e-6, rtol=0), name
        assert scores.checks["rows"] == again[name].checks["rows"] == 5
    other = heads(tiny_llama, rows=5, length=10, seed=1, probes=["induction"])
    assert not torch.equal(other["prefix_matching_score"].values, once["prefix_matching_score"].values)


def test_the_interval_over_rows_covers_the_mean_of_many_rows(tiny_llama):
    few = heads(tiny_llama, rows=16, length=20)["prefix_matching_score"]
    many = heads(tiny_llama, rows=256, length=20, seed=9)["prefix_matching_score"]
    inside = (few.checks["low"] <= many.values) & (many.values <= few.checks["high"])
    assert inside.double().mean() > 0.7
    assert (few.checks["high"] - few.checks["low"]).min() > 0
    single = heads(tiny_llama, rows=1, length=20)["prefix_matching_score"]
    assert single.checks["low"].isnan().all() and single.values.isfinite().all()


def test_tables_are_tidy(tiny_llama):
    table = heads(tiny_llama, rows=2, length=10, probes=["induction", "entropy"])
    frame = table.to_frame()
    assert list(frame["layer"]) == [0] * 4 + [1] * 4 and list(frame["head"]) == [0, 1, 2, 3] * 2
    assert frame["prefix_matching_score"].tolist() == table["prefix_matching_score"].values.flatten().tolist()
    assert {"prefix_matching_score_low", "prefix_matching_score_baseline", "entropy_baseline"} <= set(frame.columns)
    tidy = table.tidy()
    assert list(tidy.columns) == ["layer", "head", "measure", "value", "low", "high", "unit"]
    assert len(tidy) == 8 * 3 and set(tidy["unit"]) == {"mass", "nats", "keys"}
    top = table.top("entropy", 3)
    assert len(top) == 3 and top["entropy"].is_monotonic_decreasing
    with pytest.raises(NotApplicableError, match="there is no 'loudness'; measured are"):
        table.top("loudness")


def test_text_probes_use_the_tokenizer_and_leave_special_tokens_out():
    known = induction_gpt2()
    lm = load(known.model, tokenizer=word_tokenizer(known.vocab))
    texts = ["t5 t9 t2 t7 t1", "t3 t4 t8 t6 t2 t11 t12"]
    table = heads(lm, probes=["previous", "sink"], texts=texts)
    assert value(table, "previous_token_score", 0, 0) == pytest.approx(1.0, abs=1e-6)
    assert table["previous_token_score"].provenance["input"] == "2 given texts"
    assert table["previous_token_score"].checks["rows"] == 2
    table = heads(lm, probes=["previous"], texts=["t5 t9"])
    assert "at least three tokens" in reasons(table, "previous")[0]
    with pytest.raises(NotApplicableError):
        heads(load(known.model), probes=["previous"], texts=texts)["previous_token_score"]


def test_plain_texts_are_there():
    texts = plain_texts()
    assert len(texts) == 16 and all(120 < len(text) < 260 for text in texts)


def test_a_model_is_left_as_it_was(tiny_llama):
    tiny_llama.train()
    before = {name: weight.clone() for name, weight in tiny_llama.state_dict().items()}
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in tiny_llama.modules())
    heads(tiny_llama, rows=2, length=10, probes=PROBES)
    assert tiny_llama.training and all(module.training for module in tiny_llama.modules())
    assert all(torch.equal(weight, before[name]) for name, weight in tiny_llama.state_dict().items())
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in tiny_llama.modules())


@pytest.mark.parametrize("build", [induction_gpt2, induction_llama])
def test_effects_of_exact_heads_are_exact(build):
    known = build()
    table = heads(known.model, ablate=4, rows=4, length=24)
    for (layer, head), expected in known.expected["ablation_effect"].items():
        assert value(table, "ablation_effect", layer, head) == pytest.approx(expected, abs=1e-4)
    for layer, head in known.expected["idle_heads"]:
        assert value(table, "ablation_effect", layer, head) == 0.0
        assert value(table, "mean_ablation_effect", layer, head) == 0.0
    # the induction head writes to the logits; the previous-token head only moves what the induction head attends to
    assert value(table, "ablation_effect_patterns_kept", 1, 0) == pytest.approx(value(table, "ablation_effect", 1, 0))
    assert value(table, "ablation_effect_patterns_kept", 0, 0) == pytest.approx(0.0, abs=1e-4)
    controls = table["ablation_effect"].checks["first_copy_effect"]
    assert controls.abs().max() < 5e-3
    named = {item.name for item in table.sets}
    assert named == {"above 0.4", "random"}
    together = next(item for item in table.sets if item.name == "above 0.4" and item.way == "zero")
    assert together.heads == ((1, 0),)
    assert len({item.heads for item in table.sets if item.name == "random"}) == 3  # all that there are


def test_redundant_heads_hide_each_other():
    known = duplicated_induction()
    table = heads(known.model, ablate=2, rows=4, length=24)
    for head in (0, 1):
        assert value(table, "ablation_effect", 1, head) == pytest.approx(0.0, abs=1e-5)
    assert table["ablation_effect"].values[0].isnan().all()  # not among the two that were asked for
    ((heads_together, expected),) = known.expected["joint_ablation_effect"].items()
    together = next(item for item in table.sets if item.name == "above 0.4" and item.way == "zero")
    assert together.heads == heads_together
    assert together.effect == pytest.approx(expected, abs=1e-4)
    assert together.low <= together.effect <= together.high
    assert together.first_copy_effect == pytest.approx(0.0, abs=1e-5)
    frame = table.sets_frame()
    assert list(frame["name"]) == ["above 0.4"] * 3 + ["random"]


def test_ablations_follow_the_edit_and_restore_the_model(tiny_llama):
    """The same number by hand: W_O of the head set to zero."""
    table = heads(tiny_llama, ablate=8, rows=6, ablation_rows=6, length=12, threshold=2.0)
    given = repeated_random_tokens(6, 12, admissible=torch.arange(1, 64), bos=0, seed=0)

    def second_copy_loss() -> float:
        with torch.no_grad():
            logits = tiny_llama(given.tokens).logits
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), given.tokens[:, 1:], reduction="none"
        )
        return losses[given.scored_losses[:, 1:]].mean().item()

    clean = second_copy_loss()
    assert clean == pytest.approx(table.facts["second_copy_loss"], abs=1e-4)
    for layer in (0, 1):
        weight = tiny_llama.model.layers[layer].self_attn.o_proj.weight.data
        for head in range(4):
            kept = weight.clone()
            weight[:, 8 * head : 8 * head + 8] = 0
            expected = second_copy_loss() - clean
            weight.copy_(kept)
            assert value(table, "ablation_effect", layer, head) == pytest.approx(expected, abs=1e-4)
    assert second_copy_loss() == clean
    assert table.sets == ()  # no head is above 2


def test_effects_need_a_language_model_and_the_induction_probe(tiny_llama):
    with pytest.raises(NotApplicableError, match='add "induction" to probes, or ablate=0'):
        heads(tiny_llama, probes=["previous"], ablate=3)
    table = heads(tiny_llama.model, rows=2, length=8, ablate=2)
    assert "no causal language model" in reasons(table, "ablation")[0]
    assert "ablation_effect" not in table.scores and table.sets == ()

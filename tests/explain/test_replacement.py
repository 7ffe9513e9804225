"""Counterfactual replacement: against slow forwards, exact zeros, draws, granularity, prefixes, refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from attndiag import Prompt, Target
from attndiag.errors import NotApplicableError, PromptError, TargetError
from attndiag.explanations.replacement import Replacement
from attndiag.explanations.replacement_effects import replacement_effects, set_effects
from attndiag.explanations.samplers import allowed_tokens, look_up, uniform_numbers
from attndiag.models.load import LoadedModel
from attndiag.scores import Scores

TEXT = "<bos> w5 w9 w30 w7 w9 w12"
PROMPT = Prompt(TEXT, pair="<bos> w5 w9 w31 w7 w9 w13", spans={"two": (9, 15)})
TARGET = Target.logit_diff("w10", "w20")
ALL = [
    Replacement.pair(),
    Replacement.sampled(3),
    Replacement.frequency_band(3),
    Replacement.uniform(3),
    Replacement.neighbour(2),
    Replacement.attention_mask_out(),
    Replacement.delete(),
    Replacement.with_token("w40"),
    Replacement.zero_embedding(),
    Replacement.mean_embedding(),
]
BY_NAME = [pytest.param(each, id=each.name) for each in ALL]


def plain_m(lm: LoadedModel, ids: Tensor, **inputs: Any) -> tuple[float, Tensor]:
    """m and the logits of one forward of the bare model."""
    with torch.no_grad():
        logits = lm.model(input_ids=ids[None], use_cache=False, **inputs).logits[0]
    return float(logits[-1, 10] - logits[-1, 20]), logits


def rise(clean: Tensor, edited: Tensor, ids: Tensor, changed: Tensor, place: int) -> float:
    """Mean rise of the loss of the tokens after `place`."""
    later = range(place + 1, len(ids))
    if not later:
        return float("nan")
    before = -clean.log_softmax(-1)[list(range(place, len(ids) - 1)), ids[place + 1 :]]
    after = -edited.log_softmax(-1)[list(range(place, len(ids) - 1)), changed[place + 1 :]]
    return float((after - before).mean())


def test_effects_of_a_named_token_equal_one_forward_each(lm: LoadedModel) -> None:
    ids = lm.encode(TEXT).input_ids[0]
    clean, logits = plain_m(lm, ids)
    found = replacement_effects(lm, TEXT, TARGET, replacement=Replacement.with_token("w40"))[0]
    assert torch.isnan(found.values[0])
    assert found.checks["reasons"] == {0: "special token or scored continuation"}
    for place in range(1, len(ids)):
        changed = ids.clone()
        changed[place] = 40
        m, edited = plain_m(lm, changed)
        assert float(found.values[place]) == pytest.approx(clean - m, rel=1e-5, abs=1e-6)
        assert float(found.checks["ood"][place]) == pytest.approx(
            rise(logits, edited, ids, changed, place), rel=1e-4, abs=1e-6, nan_ok=True
        )
        flipped = int(edited[-1].argmax()) != int(logits[-1].argmax())
        assert float(found.checks["flip_share"][place]) == float(flipped)
    assert found.checks["m"] == pytest.approx(clean, rel=1e-6)
    assert found.checks["prefix"].startswith("shared (checked: ") or "not needed" in found.checks["prefix"]


def test_deleting_masking_and_blanking_equal_one_forward_each(lm: LoadedModel) -> None:
    ids = lm.encode(TEXT).input_ids[0]
    clean, logits = plain_m(lm, ids)
    gone = replacement_effects(lm, TEXT, TARGET, replacement="delete", batch_size=3)[0]
    hidden = replacement_effects(lm, TEXT, TARGET, replacement="attention_mask_out", batch_size=3)[0]
    blank = replacement_effects(lm, TEXT, TARGET, replacement="zero_embedding", batch_size=3)[0]
    mean = replacement_effects(lm, TEXT, TARGET, replacement="mean_embedding", batch_size=3)[0]
    table = lm.model.get_input_embeddings().weight.detach()
    for place in range(1, len(ids)):
        rest = torch.cat([ids[:place], ids[place + 1 :]])
        m, edited = plain_m(lm, rest)
        assert float(gone.values[place]) == pytest.approx(clean - m, rel=1e-5, abs=1e-6)
        if place < len(ids) - 1:
            after = -edited.log_softmax(-1)[torch.arange(place - 1, len(rest) - 1), rest[place:]]
            before = -logits.log_softmax(-1)[torch.arange(place, len(ids) - 1), ids[place + 1 :]]
            assert float(gone.checks["ood"][place]) == pytest.approx(float((after - before).mean()), rel=1e-4, abs=1e-6)
        mask = torch.ones(1, len(ids), dtype=torch.int64)
        mask[0, place] = 0
        m, _ = plain_m(lm, ids, attention_mask=mask, position_ids=torch.arange(len(ids))[None])
        assert float(hidden.values[place]) == pytest.approx(clean - m, rel=1e-5, abs=1e-6)
        for found, vector in ((blank, torch.zeros_like(table[0])), (mean, table.mean(0))):
            embeddings = table[ids].clone()
            embeddings[place] = vector
            with torch.no_grad():
                edited = lm.model(inputs_embeds=embeddings[None], use_cache=False).logits[0, -1]
            expected = clean - float(edited[10] - edited[20])
            assert float(found.values[place]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_sampled_draws_follow_the_models_own_distribution(lm: LoadedModel) -> None:
    """Each draw is where its uniform number falls in p(. | before) without the original and the special tokens."""
    ids = lm.encode(TEXT).input_ids[0]
    clean, logits = plain_m(lm, ids)
    found = replacement_effects(lm, TEXT, TARGET, replacement=Replacement.sampled(4, seed=3))[0]
    numbers = uniform_numbers(ids, 3, 4)
    for place in (1, 3, 6):
        weights = logits[place - 1].double().softmax(-1)
        weights[:4] = 0
        weights[ids[place]] = 0
        edges = (weights / weights.sum()).cumsum(0)
        for draw in range(4):
            token = int((edges < numbers[place, draw]).sum())
            changed = ids.clone()
            changed[place] = token
            effect = float(found.checks["draw_effects"][place, draw])
            assert effect == pytest.approx(clean - plain_m(lm, changed)[0], rel=1e-5, abs=1e-6)
    draws = found.checks["draw_effects"][1:]
    torch.testing.assert_close(found.values[1:], draws.mean(1))
    torch.testing.assert_close(found.checks["se"][1:], draws.std(1) / 2)


@pytest.mark.parametrize("replacement", BY_NAME)
def test_batch_and_prefix_change_nothing(lm: LoadedModel, replacement: Replacement) -> None:
    with_prefix = replacement_effects(lm, PROMPT, TARGET, replacement=replacement, batch_size=2)[0]
    whole = replacement_effects(lm, PROMPT, TARGET, replacement=replacement, batch_size=32, prefix_cache=False)[0]
    lean = replacement_effects(lm, PROMPT, TARGET, replacement=replacement, ood=False)[0]
    if replacement.name != "pair":
        assert with_prefix.checks["prefix"].startswith("shared (checked")
    assert whole.checks["prefix"] == "not asked for"
    scale = float(whole.values.nan_to_num().abs().max())
    for other in (with_prefix, lean):
        torch.testing.assert_close(other.values, whole.values, rtol=1e-5, atol=1e-5 * scale, equal_nan=True)
        assert torch.equal(other.checks["flip_share"].nan_to_num(), whole.checks["flip_share"].nan_to_num())
    torch.testing.assert_close(with_prefix.checks["ood"], whole.checks["ood"], rtol=1e-4, atol=1e-5, equal_nan=True)
    assert bool(lean.checks["ood"].isnan().all())


@pytest.mark.parametrize("replacement", BY_NAME)
def test_swapping_answer_and_foil_negates_exactly(llama_lm: LoadedModel, replacement: Replacement) -> None:
    one = replacement_effects(llama_lm, PROMPT, TARGET, replacement=replacement)[0]
    two = replacement_effects(llama_lm, PROMPT, TARGET.swapped(), replacement=replacement)[0]
    assert torch.equal(one.values.nan_to_num(), -two.values.nan_to_num())
    assert float(one.values.nan_to_num().abs().max()) > 0


def test_many_prompts_equal_single_ones(llama_lm: LoadedModel) -> None:
    texts = [TEXT, "<bos> w8 w8 w21", "<bos> w40 w5 w6 w7 w11 w13 w60 w33"]
    done: list[tuple[int, int]] = []
    together = replacement_effects(
        llama_lm, texts, TARGET, replacement="uniform:draws=3", progress=lambda *counts: done.append(counts)
    )
    assert done == [(1, 3), (2, 3), (3, 3)]
    for text, found in zip(texts, together, strict=True):
        alone = replacement_effects(llama_lm, text, TARGET, replacement="uniform:draws=3")[0]
        assert torch.equal(found.values.nan_to_num(), alone.values.nan_to_num())


@pytest.mark.parametrize("batch_size", [1, 3, 32])
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_identity_is_exactly_zero(llama_lm: LoadedModel, mode: str, batch_size: int) -> None:
    """The token is replaced by itself wherever the text holds it already; in train mode with dropout too."""
    llama_lm.model.config.attention_dropout = 0.5
    llama_lm.model.train(mode == "train")
    text = "<bos> w9 w5 w9 w9 w7"
    found = replacement_effects(
        llama_lm, text, TARGET, replacement=Replacement.with_token("w9"), batch_size=batch_size
    )[0]
    assert found.values[[1, 3, 4]].tolist() == [0.0, 0.0, 0.0]
    assert found.checks["flip_share"][[1, 3, 4]].tolist() == [0.0, 0.0, 0.0]
    assert found.checks["ood"][[1, 3, 4]].tolist() == [0.0, 0.0, 0.0]
    assert found.checks["rows_run"] == 2
    assert bool((found.values[[2, 5]] != 0).all())
    everything = replacement_effects(llama_lm, "<bos> w9 w9", TARGET, replacement=Replacement.with_token("w9"))[0]
    assert everything.values[1:].tolist() == [0.0, 0.0]
    assert everything.checks["m"] == pytest.approx(plain_m(llama_lm.model.eval() and llama_lm,
        llama_lm.encode("<bos> w9 w9").input_ids[0])[0], rel=1e-5)  # fmt: skip


def test_equal_draws_are_scored_once(llama_lm: LoadedModel) -> None:
    with torch.no_grad():  # a model that always foretells the same word
        llama_lm.model.lm_head.weight.zero_()
        llama_lm.model.lm_head.weight[50] = 1e3 * torch.randn(32)
    found = replacement_effects(llama_lm, TEXT, Target.logit_diff("w50", "w20"), replacement="uniform:draws=200")[0]
    assert found.checks["rows_run"] <= 6 * 59
    distinct = found.checks["distinct"]
    assert int(distinct.sum()) == found.checks["rows_run"]
    assert int(distinct.max()) <= 59  # words of the vocabulary without the original
    few = replacement_effects(llama_lm, "<bos> w8 w9", TARGET, replacement="token: w8")[0]
    assert few.checks["distinct"].tolist() == [0, 1, 1]


def test_words_and_spans_are_replaced_whole(lm: LoadedModel) -> None:
    ids = lm.encode(TEXT).input_ids[0]
    clean, _ = plain_m(lm, ids)
    span = replacement_effects(lm, PROMPT, TARGET, replacement=Replacement.with_token("w40"), by="span")[0]
    changed = ids.clone()
    changed[2:4] = 40
    assert span.checks["positions"] == [(2, 3)]
    assert span.axes == ("span",)
    assert float(span.values[0]) == pytest.approx(clean - plain_m(lm, changed)[0], rel=1e-5, abs=1e-6)
    word = replacement_effects(lm, PROMPT, TARGET, replacement=Replacement.with_token("w40"), by="word")[0]
    token = replacement_effects(lm, PROMPT, TARGET, replacement=Replacement.with_token("w40"))[0]
    assert word.labels["word"] == TEXT.split()[1:]
    torch.testing.assert_close(word.values, token.values[1:])
    with pytest.raises(PromptError, match="has no spans"):
        replacement_effects(lm, TEXT, TARGET, by="span")


def test_a_sampled_span_is_drawn_token_after_token(lm: LoadedModel) -> None:
    ids = lm.encode(TEXT).input_ids[0]
    clean, logits = plain_m(lm, ids)
    found = replacement_effects(lm, PROMPT, TARGET, replacement=Replacement.sampled(3), by="span")[0]
    numbers = uniform_numbers(ids, 0, 3)

    def pick(scores: Tensor, place: int, draw: int) -> int:
        weights = scores.double().softmax(-1)
        weights[:4] = 0
        weights[ids[place]] = 0
        return int(((weights / weights.sum()).cumsum(0) < numbers[place, draw]).sum())

    for draw in range(3):
        changed = ids.clone()
        changed[2] = pick(logits[1], 2, draw)
        changed[3] = pick(plain_m(lm, changed)[1][2], 3, draw)
        effect = float(found.checks["draw_effects"][0, draw])
        assert effect == pytest.approx(clean - plain_m(lm, changed)[0], rel=1e-5, abs=1e-6)


def test_sets_share_their_draws_and_the_empty_one_changes_nothing(lm: LoadedModel) -> None:
    sets = [[], [2], [2, 5], [1, 2, 3, 4, 5, 6]]
    found = set_effects(lm, TEXT, TARGET, sets=sets, replacement=Replacement.sampled(3))
    token = replacement_effects(lm, TEXT, TARGET, replacement=Replacement.sampled(3))[0]
    assert float(found.values[0]) == 0.0
    assert float(found.values[1]) == pytest.approx(float(token.values[2]), rel=1e-5, abs=1e-6)
    assert found.axes == ("set",)
    alone = set_effects(lm, TEXT, TARGET, sets=sets[2:3], replacement=Replacement.sampled(3))
    assert float(alone.values[0]) == pytest.approx(float(found.values[2]), rel=1e-5, abs=1e-6)
    with pytest.raises(ValueError, match="set 0 names position 0, which may not be replaced; free are"):
        set_effects(lm, TEXT, TARGET, sets=[[0]])


def test_effects_add_up_where_m_is_linear(linear_lm: LoadedModel) -> None:
    """Every token has its own effect, whatever the others are; a set has the sum of its tokens' effects."""
    for replacement in (Replacement.with_token("w40"), Replacement.zero_embedding(), Replacement.uniform(4)):
        single = replacement_effects(linear_lm, TEXT, TARGET, replacement=replacement)[0]
        both = set_effects(linear_lm, TEXT, TARGET, sets=[[1, 4], [2, 3, 6]], replacement=replacement)
        assert float(both.values[0]) == pytest.approx(float(single.values[[1, 4]].sum()))
        assert float(both.values[1]) == pytest.approx(float(single.values[[2, 3, 6]].sum()))
        assert "no key/value cache" in single.checks["prefix"]


def test_a_wrong_prefix_is_found_out_and_not_used(llama_lm: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose early tokens feel later ones: the check sees that a shared prefix does not give the same m."""
    expected = replacement_effects(llama_lm, TEXT, TARGET, replacement="token:w40", prefix_cache=False)[0]
    inner = llama_lm.model.model.forward

    def peeking(input_ids: Tensor, **kwargs: Any) -> Any:
        out = inner(input_ids=input_ids, **kwargs)
        out.last_hidden_state = out.last_hidden_state + 0.01 * out.last_hidden_state.shape[1]
        return out

    monkeypatch.setattr(llama_lm.model.model, "forward", peeking)
    found = replacement_effects(llama_lm, TEXT, TARGET, replacement="token:w40", batch_size=2)[0]
    assert found.checks["prefix"].startswith("whole forwards: a shared prefix does not give the same m")
    plain = replacement_effects(llama_lm, TEXT, TARGET, replacement="token:w40", prefix_cache=False)[0]
    torch.testing.assert_close(found.values, plain.values, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert not torch.allclose(found.values[1:], expected.values[1:], atol=0, rtol=1e-7)


def test_a_sliding_window_shares_prefixes_too(word_lm: Callable[[nn.Module], LoadedModel]) -> None:
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=3, max_position_embeddings=64, pad_token_id=1,
    )  # fmt: skip
    mistral = word_lm(MistralForCausalLM(config).eval())
    text = f"{TEXT} w5 w6 w7 w8"
    found = replacement_effects(mistral, text, TARGET, replacement="token:w40", batch_size=2)[0]
    whole = replacement_effects(mistral, text, TARGET, replacement="token:w40", prefix_cache=False)[0]
    torch.testing.assert_close(found.values, whole.values, rtol=1e-4, atol=1e-6, equal_nan=True)


# ------------------------------------------------------------------------------------------------- encoders
def bert(word_lm: Callable[[nn.Module], LoadedModel], kind: Any, **more: Any) -> LoadedModel:
    config = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=1,
        **more,
    )  # fmt: skip
    return word_lm(kind(config).eval())


def test_encoders_take_every_replacement_but_their_own_draws(word_lm: Callable[[nn.Module], LoadedModel]) -> None:
    classifier = bert(word_lm, BertForSequenceClassification, num_labels=3)
    masked = bert(word_lm, BertForMaskedLM)
    target = Target.class_logit(1, 2)
    for replacement in [each for each in ALL if each.name != "sampled"] + [Replacement.masked_lm(masked, 3)]:
        found = replacement_effects(classifier, PROMPT, target, replacement=replacement)[0]
        assert found.values.nan_to_num().abs().max() > 0
        assert bool(found.checks["ood"].isnan().all())
    with pytest.raises(NotApplicableError, match=r"does not foretell .* masked_lm"):
        replacement_effects(classifier, PROMPT, target)
    with pytest.raises(NotApplicableError, match="is no masked language model"):
        replacement_effects(classifier, PROMPT, target, replacement="masked_lm")


def test_a_masked_model_draws_for_itself_and_never_at_its_mask(word_lm: Callable[[nn.Module], LoadedModel]) -> None:
    masked = bert(word_lm, BertForMaskedLM)
    target = Target.masked_token_logit("w10", "w20")
    found = replacement_effects(masked, "w5 w6 <mask> w7", target, replacement="masked_lm:draws=4")[0]
    assert torch.isnan(found.values).tolist() == [False, False, True, False]
    gone = replacement_effects(masked, "w5 w6 <mask> w7", target, replacement="delete")[0]
    ids = masked.encode("w5 w6 <mask> w7").input_ids
    with torch.no_grad():
        clean, rest = masked.model(ids).logits[0, 2], masked.model(ids[:, 1:]).logits[0, 1]
    expected = float(clean[10] - clean[20] - rest[10] + rest[20])
    assert float(gone.values[0]) == pytest.approx(expected, abs=1e-5)


def test_roberta_keeps_its_own_positions_under_a_mask(word_lm: Callable[[nn.Module], LoadedModel]) -> None:
    config = RobertaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=1,
        max_position_embeddings=40,
    )  # fmt: skip
    roberta = word_lm(RobertaForMaskedLM(config).eval())
    target = Target.masked_token_logit("w10", "w20")
    found = replacement_effects(roberta, "w5 w6 <mask> w7", target, replacement="attention_mask_out")[0]
    ids = roberta.encode("w5 w6 <mask> w7").input_ids
    with torch.no_grad():
        clean = roberta.model(ids).logits[0, 2]
        hidden = roberta.model(ids, attention_mask=torch.tensor([[1, 0, 1, 1]])).logits[0, 2]
    expected = float(clean[10] - clean[20] - hidden[10] + hidden[20])
    assert float(found.values[1]) == pytest.approx(expected, abs=1e-5)


def test_the_encoder_of_an_encoder_decoder_is_replaced(word_lm: Callable[[nn.Module], LoadedModel]) -> None:
    config = T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=1, pad_token_id=1
    )
    t5 = word_lm(T5ForConditionalGeneration(config).eval())
    prompt = Prompt("w5 w6 w7", decoder_text="w9 w10")
    for replacement in ("token:w40", "delete", "attention_mask_out", "zero_embedding"):
        found = replacement_effects(t5, prompt, Target.logit("w12"), replacement=replacement)[0]
        assert found.provenance["side"] == "encoder"
        assert len(found.values) == 3
        assert bool((found.values != 0).all())


# ---------------------------------------------------------------------------------------------------- draws
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(1, 30), zeros=st.integers(0, 20))
def test_draws_never_land_on_a_choice_without_weight(seed: int, size: int, zeros: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(size + zeros, generator=generator, dtype=torch.float64) + 1e-3
    weights[torch.randperm(size + zeros, generator=generator)[:zeros]] = 0
    numbers = torch.cat([torch.rand(50, generator=generator, dtype=torch.float64), torch.tensor([0.0, 1 - 2**-53])])
    found = look_up(weights, numbers)
    assert bool((weights[found] > 0).all())
    if zeros == 0:
        again = look_up(weights, numbers)
        assert torch.equal(found, again)


def test_draws_have_the_right_frequencies() -> None:
    numbers = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = look_up(torch.tensor([0.2, 0.0, 0.5, 0.3]), numbers)
    shares = torch.bincount(found, minlength=4) / len(numbers)
    torch.testing.assert_close(shares, torch.tensor([0.2, 0.0, 0.5, 0.3]), atol=0.02, rtol=0)


def test_only_words_are_drawn_and_never_the_original(llama_lm: LoadedModel) -> None:
    """The embedding has rows that the tokenizer does not know, and special tokens, and none of them is drawn."""
    llama_lm.model.resize_token_embeddings(80)
    assert llama_lm.vocabulary == 80
    assert allowed_tokens(llama_lm).nonzero()[:, 0].tolist() == list(range(4, 64))
    from attndiag.explanations.replacement_items import items_of
    from attndiag.explanations.resolve import resolve_target
    from attndiag.explanations.samplers import draw_variants

    resolved = resolve_target(llama_lm, TEXT, TARGET)
    ids = resolved.encoded.input_ids[0]
    items = items_of(Prompt(TEXT), resolved, "token")
    for replacement in (Replacement.uniform(300), Replacement.sampled(300), Replacement.frequency_band(300)):
        drawn = draw_variants(llama_lm, Prompt(TEXT), resolved, items, replacement)
        for owner, row in zip(drawn.owner.tolist(), drawn.variants.ids, strict=True):
            place = items[owner].positions[0]
            assert 4 <= int(row[place]) < 64
            assert int(row[place]) != int(ids[place])
            assert int((row != ids).sum()) == 1
        if replacement.name == "frequency_band":
            ranks = drawn.variants.ids[drawn.owner == 3][:, 3] + 1
            assert bool(((ranks >= 31 / 2) & (ranks <= 31 * 2)).all())


def test_counts_decide_the_frequency_band(llama_lm: LoadedModel) -> None:
    counts = [0.0] * 64
    counts[30], counts[50], counts[51] = 100.0, 90.0, 80.0
    rare = Replacement.frequency_band(50, counts=counts, width=0.6)
    found = replacement_effects(llama_lm, "<bos> w50", TARGET, replacement=rare)[0]
    # w50 is second: within a factor of 1.5 lies rank 3 alone, which is w51
    one = replacement_effects(llama_lm, "<bos> w50", TARGET, replacement="token:w51")[0]
    assert float(found.values[1]) == pytest.approx(float(one.values[1]), rel=1e-6)
    assert found.checks["rows_run"] == 1
    with pytest.raises(ValueError, match="expected one number for each of 64 ids"):
        replacement_effects(llama_lm, TEXT, TARGET, replacement=Replacement.frequency_band(2, counts=[1.0]))


def test_neighbours_are_near_and_other_words(llama_lm: LoadedModel) -> None:
    table = llama_lm.model.get_input_embeddings().weight.detach()
    near = torch.nn.functional.cosine_similarity(table, table[30][None])
    near[[0, 1, 2, 3, 30]] = -2
    best = int(near.argmax())
    found = replacement_effects(llama_lm, PROMPT, TARGET, replacement=Replacement.neighbour(), by="span")[0]
    assert found.checks["se"].tolist() == [0.0]
    single = replacement_effects(llama_lm, TEXT, TARGET, replacement=Replacement.neighbour())[0]
    named = replacement_effects(llama_lm, TEXT, TARGET, replacement=Replacement.with_token(best))[0]
    assert float(single.values[3]) == pytest.approx(float(named.values[3]), rel=1e-6)


def test_seeds_and_prompts_decide_the_draws(llama_lm: LoadedModel) -> None:
    def run(seed: int) -> Scores:
        return replacement_effects(llama_lm, TEXT, TARGET, replacement=Replacement.uniform(3, seed))[0]

    torch.manual_seed(1)
    first = run(0)
    torch.manual_seed(2)
    assert torch.equal(first.values.nan_to_num(), run(0).values.nan_to_num())
    assert not torch.equal(first.values.nan_to_num(), run(1).values.nan_to_num())
    assert first.params["replacement"] == "uniform(draws=3, seed=0)"


# ------------------------------------------------------------------------------------------------- refusals
def test_what_cannot_be_replaced_says_why(llama_lm: LoadedModel) -> None:
    with pytest.raises(PromptError, match="has no token that may be replaced"):
        replacement_effects(llama_lm, "<bos> <unk>", TARGET)
    with pytest.raises(PromptError, match="has no counterfactual"):
        replacement_effects(llama_lm, TEXT, TARGET, replacement="pair")
    longer = dataclasses.replace(PROMPT, pair=f"{TEXT} w5")
    with pytest.raises(PromptError, match="has 8 tokens and the prompt 7"):
        replacement_effects(llama_lm, longer, TARGET, replacement="pair")
    for wrong in ("w5 w6", "unheard", 64, -1):
        with pytest.raises(TargetError, match=r"is not one token|outside the vocabulary"):
            replacement_effects(llama_lm, TEXT, TARGET, replacement=Replacement.with_token(wrong))
    same = replacement_effects(llama_lm, PROMPT, TARGET, replacement="pair")[0]
    assert torch.isnan(same.values).tolist() == [True, True, True, False, True, True, False]
    assert same.checks["reasons"][1] == "the counterfactual has the same token here"
    without_bos = replacement_effects(llama_lm, "w5 w6 w7", TARGET)[0]
    assert not bool(without_bos.values.isnan().any())  # the tokenizer has a BOS to start from
    llama_lm.tokenizer.bos_token = None
    without_bos = replacement_effects(llama_lm, "w5 w6 w7", TARGET)[0]
    assert torch.isnan(without_bos.values).tolist() == [True, False, False]
    assert "no BOS to start from" in without_bos.checks["reasons"][0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Replacement("noise"), r"unknown replacement 'noise'; expected pair, sampled"),
        (lambda: Replacement.sampled(0), r"draws is 0 for sampled"),
        (lambda: Replacement("delete", draws=2), r"draws is 2 for delete \(it has only one\)"),
        (lambda: Replacement("token"), r"needs one"),
        (lambda: Replacement("uniform", token="w5"), r"token is 'w5' for uniform"),
        (lambda: Replacement.parse("uniform:size=3"), r"unknown parameter 'size'"),
    ],
)
def test_bad_replacements_are_refused(make: Callable[[], Replacement], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_replacements_are_read_from_text() -> None:
    assert Replacement.parse("sampled") == Replacement.sampled()
    assert Replacement.parse("uniform:draws=4,seed=7") == Replacement.uniform(4, 7)
    assert Replacement.parse("token: the") == Replacement.with_token(" the")
    assert Replacement.parse("token:12") == Replacement.with_token(12)
    assert Replacement.parse("frequency_band:width=2").width == 2.0
    assert Replacement.parse("neighbour:variants=true").variants
    labels = [each.label for each in ALL]
    assert len(set(labels)) == len(labels)

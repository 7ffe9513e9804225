"""The relation probe on heads that are known: an induction head is for a relation, a previous-token head is not."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from attndiag.errors import NotApplicableError
from attndiag.explanations.relation_probe import probe_relation, relations_in
from attndiag.models.known import induction_gpt2, short_window
from attndiag.models.load import LoadedModel, load
from attndiag.prompts import Prompt
from attndiag.runs.prompt_files import shipped_prompts

VOCABULARY = 64


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(
        models.WordLevel(vocab={"<bos>": 0, **{f"t{i}": i for i in range(1, VOCABULARY)}}, unk_token="t63")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>", pad_token="<bos>")


def repeated(first: int, length: int, upto: int) -> Prompt:
    """`<bos> s` and s again up to its item `upto`, which the target follows; spans: the last token, its first
    occurrence, the token after that, and the token before the last."""
    s = [f"t{first + i}" for i in range(length)]
    words = ["<bos>", *s, *s[: upto + 1]]
    starts = [sum(len(word) + 1 for word in words[:index]) for index in range(len(words))]
    place = {"again": len(words) - 1, "first": 1 + upto, "follower": 2 + upto, "before": len(words) - 2}
    spans = {name: (starts[i], starts[i] + len(words[i])) for name, i in place.items()}
    return Prompt(" ".join(words), id=f"{first}-{length}", target=s[upto + 1], foil=s[0], spans=spans)


PROMPTS = [
    repeated(1 + 9 * i, length, upto) for i, (length, upto) in enumerate([(5, 2), (6, 1), (8, 4), (7, 3), (9, 2)])
]


@pytest.fixture(scope="module")
def lm() -> LoadedModel:
    return load(induction_gpt2().model, tokenizer=tokenizer())


def test_an_induction_head_is_for_the_follower_and_its_edge_is_worth_the_answer(lm):
    known = induction_gpt2().expected["prefix_matching_score"]
    (layer, head) = next(place for place, score in known.items() if score == pytest.approx(1.0))
    steps: list[tuple[str, int, int]] = []
    table = probe_relation(lm, PROMPTS, "again", "follower", knock_out=2, progress=lambda *step: steps.append(step))
    assert table["relation_mass"].values[layer, head] == pytest.approx(1.0, abs=1e-6)
    assert table["relation_share"].values[layer, head] == pytest.approx(1.0, abs=1e-6)
    assert table["relation_mass_best_offset"].values[layer, head] < 0.5
    assert table["relation_mass_shuffled"].values[layer, head] < 1e-6
    assert table["relation_p_any"].values[layer, head] < 0.01
    effect = table["relation_effect"]
    assert effect.unit == "logits" and effect.values[layer, head] > 5
    assert abs(table["relation_effect_shuffled"].values[layer, head]) < 1e-3
    assert int(effect.values.isfinite().sum()) == 2
    assert table.facts["effect_together"] == pytest.approx(effect.values[layer, head].item(), rel=0.05)
    assert table.facts["pairs"] == 5 and table.facts["distances"] == [4, 5, 6, 7, 8]
    assert steps[4] == ("relation again -> follower", 5, 5) and steps[-1][1:] == (5, 5)
    # the model's idle heads have W_O = 0
    assert {item.probe for item in table.not_measurable} == {"relation_share"}
    assert all("write nothing" in item.reason for item in table.not_measurable)
    # baseline: a row that is uniform over what it may see
    lengths = [len(prompt.text.split()) for prompt in PROMPTS]
    expected = sum(1 / n for n in lengths) / 5
    assert table["relation_mass"].checks["baseline"][layer].item() == pytest.approx(expected)


def test_a_previous_token_head_is_no_more_than_an_offset(lm):
    known = induction_gpt2().expected["previous_token_score"]
    (layer, head) = next(place for place, score in known.items() if score == pytest.approx(1.0))
    table = probe_relation(lm, PROMPTS, None, "before", knock_out=0)
    assert table["relation_mass"].values[layer, head] == pytest.approx(1.0, abs=1e-6)
    assert table["relation_mass_best_offset"].values[layer, head] == pytest.approx(1.0, abs=1e-6)
    assert table["relation_offset"].values[layer, head] == 1
    assert "relation_effect" not in table.scores
    assert table["relation_p_any"].values.isnan().all()
    assert "cannot be told from a fixed offset" in table.not_measurable[0].reason


def test_pairs_that_cannot_be_measured_are_named(lm):
    first = Prompt("<bos> t1 t2 t3 t1", id="at-the-sink", spans={"again": (15, 17), "follower": (0, 5)})
    later = Prompt("<bos> t1 t2 t3 t1", id="later", spans={"again": (6, 8), "follower": (15, 17)})
    itself = Prompt("<bos> t1 t2 t3", id="itself", spans={"again": (6, 8), "follower": (6, 8)})
    table = probe_relation(lm, [*PROMPTS, first, later, itself], "again", "follower", knock_out=0)
    assert table.facts["pairs"] == 5
    assert table.facts["left_out"] == {
        "at-the-sink": "the related tokens are a sink (position 0 or a special token)",
        "later": "the related tokens are hidden from the query",
        "itself": "the query is one of the related tokens",
    }
    with pytest.raises(NotApplicableError, match=r"has 1 usable pairs in 2 prompts, and needs at least two \(later"):
        probe_relation(lm, [PROMPTS[0], later], "again", "follower")
    with pytest.raises(NotApplicableError, match="no prompt has the spans verb and follower; the prompts have again"):
        probe_relation(lm, PROMPTS, "verb", "follower")


def test_a_window_that_hides_the_related_token_is_no_low_score():
    lm = load(short_window(window=8).model, tokenizer=tokenizer())
    far = [repeated(1, 11, 2), repeated(20, 12, 3)]
    with pytest.raises(NotApplicableError, match=r"has 0 usable pairs in 2 prompts.*hidden from the query"):
        probe_relation(lm, far, "again", "first")
    near = [repeated(1, 5, 2), repeated(20, 6, 3)]
    assert probe_relation(lm, [*near, *far], "again", "first", knock_out=0).facts["pairs"] == 2
    # one layer that sees everything beside one with a window: the second has no number, and says why
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, use_sliding_window=True, sliding_window=8,
        layer_types=["full_attention", "sliding_attention"],
    )  # fmt: skip
    mixed = load(Qwen2ForCausalLM(config).eval(), tokenizer=tokenizer())
    table = probe_relation(mixed, far, "again", "first", knock_out=0)
    assert table["relation_mass"].values[0].isfinite().all()
    assert table["relation_mass"].values[1].isnan().all()
    assert any("its window hides the related tokens in 2 of 2" in item.reason for item in table.not_measurable)


def test_targets_in_different_units_leave_effects_out_and_say_so(lm):
    other = Prompt(PROMPTS[0].text, id="no-foil", target=PROMPTS[0].target, spans=PROMPTS[0].spans)
    table = probe_relation(lm, [*PROMPTS[1:], other], "again", "follower", knock_out=1)
    assert "relation_effect" not in table.scores
    assert any("targets are in logits and nats" in item.reason for item in table.not_measurable)


def test_the_model_is_left_as_it_was(lm):
    tokens = torch.arange(12)[None]
    before = lm.model(tokens).logits
    probe_relation(lm, PROMPTS[:2], "again", "follower", knock_out=1)
    assert torch.equal(lm.model(tokens).logits, before)


def test_relations_of_the_shipped_prompts():
    found = relations_in(shipped_prompts())
    assert ("subject_again", "subject") in found and ("verb", "antecedent") in found
    assert ("subject", "subject_again") not in found

"""Edge and head verdicts on running models: the sink model, ragged prompt sets, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import attndiag
from attndiag.comparison.edges import edge_verdicts
from attndiag.errors import NotApplicableError
from attndiag.models.known import KnownModel, randomised_sink, sink_against_value
from attndiag.models.load import LoadedModel

TARGET = attndiag.Target.logit_diff("ANS", "FOIL")


def loaded(built: KnownModel) -> tuple[LoadedModel, attndiag.Prompt]:
    words = {index: word for word, index in built.vocab.items()}
    text = " ".join(words[int(index)] for index in built.prompt_ids[0])
    return attndiag.load(built.model, tokenizer=built.tokenizer()), attndiag.Prompt(text, id="p")


def test_weights_mislead_on_head_0_of_the_sink_model_and_contributions_nowhere() -> None:
    lm, prompt = loaded(sink_against_value())
    found = edge_verdicts(lm, prompt, target=TARGET)
    assert found.head_rows("weight").verdict.tolist() == ["disagree", "agree"]
    assert found.head_rows("head_contribution").verdict.tolist() == ["agree", "agree"]
    assert found.heads("weight").misleads.tolist() == [1.0, 0.0]
    edges = found.edges("weight").set_index(["head", "key"])
    assert edges.loc[(0, 0), "verdict"] == "disagree"
    assert edges.loc[(0, 0), "token"].strip() == "<bos>"
    assert edges.loc[(0, 1), "effect"] == pytest.approx(1.0, abs=1e-4)
    (case,) = found.cases["weight"].weights_without_effect.tolist()
    assert (found.rows[case[0]], case[1]) == (("p", "p", 0, 0), 0)
    assert not found.blocked


def test_edges_carry_the_planted_verdicts() -> None:
    for seed in (3, 11):
        built = randomised_sink(seed)
        lm, prompt = loaded(built)
        edges = edge_verdicts(lm, prompt, ["weight"], target=TARGET).edges("weight").set_index(["head", "key"])
        for (_, head, _, key), planted in built.expected["verdict"].items():
            assert edges.loc[(head, key), "verdict"] == planted


def test_prompts_of_different_length_stand_side_by_side(lm: LoadedModel) -> None:
    prompts = [
        attndiag.Prompt("<bos> w5 w9 w13 w30", id="a", cluster="x"),
        attndiag.Prompt("<bos> w7 w9 w13 w30 w8 w21", id="b", cluster="y"),
    ]
    both = edge_verdicts(lm, prompts, ["weight", "value_norm"], layers=[1])
    assert [row[0] for row in both.rows] == ["a"] * 4 + ["b"] * 4
    assert (both.judged["weight"].verdict[:4, 5:] == "").all()
    assert (both.judged["weight"].verdict[4:] != "").all()
    alone = edge_verdicts(lm, prompts[0], ["weight"], layers=[1])
    np.testing.assert_array_equal(alone.judged["weight"].verdict, both.judged["weight"].verdict[:4, :5])
    assert set(both.edges("weight").layer) == {1}
    assert len(both.heads("weight")) == 4


def test_what_cannot_be_measured_says_so(lm: LoadedModel) -> None:
    with pytest.raises(ValueError, match="expected some of weight, value_norm, head_contribution"):
        edge_verdicts(lm, "<bos> w5 w9", ["contribution"])
    with pytest.raises(ValueError, match="mode is 'zero'"):
        edge_verdicts(lm, "<bos> w5 w9", mode="zero")  # type: ignore[arg-type]
    whole = attndiag.Target.continuation_logprob(" w5 w9 w13")
    with pytest.raises(NotApplicableError, match="read at 3 positions"):
        edge_verdicts(lm, "<bos> w5 w9", target=whole)

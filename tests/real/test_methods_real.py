"""Direct attribution, value zeroing and induction heads on the default model, against numbers found in other ways."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import attndiag
from attndiag.catalog import explain
from attndiag.comparison.axis import token_axis
from attndiag.comparison.methods import PromptMethods
from attndiag.models.load import LoadedModel
from attndiag.models.vocabulary import learned_places

pytestmark = pytest.mark.real_model

PROMPT = attndiag.Prompt("When Mary and John went to the store, John gave a drink to", id="ioi")
TARGET = attndiag.Target.logit_diff(" Mary", " John")


def test_the_strongest_edge_writes_what_its_removal_costs(default_lm: LoadedModel) -> None:
    """L23H3, last query <- second John: exact effect 2.89, first order 2.79, nearly all of it on the direct path."""
    found = explain(default_lm, PROMPT, TARGET, method="target_attribution")
    assert found.verified
    at_last = found.values[:, :, -1]
    layer, head, key = np.unravel_index(int(at_last.nan_to_num().argmax()), at_last.shape)
    assert (layer, head, key) == (23, 3, 9)
    assert float(at_last.nan_to_num().max()) == pytest.approx(2.87, abs=0.05)


def test_a_value_that_is_zero_for_one_head_is_its_key_removed(default_lm: LoadedModel) -> None:
    one = explain(default_lm, PROMPT, TARGET, method="value_zeroing_effect", layers=[23], heads=[3])
    keys = attndiag.edge_effects(default_lm, PROMPT, TARGET, layers=[23], grain="key")
    torch.testing.assert_close(one.values, keys.values[0, 3].double(), atol=2e-4, rtol=0)
    shares = explain(default_lm, PROMPT, method="value_zeroing", layers=[23])
    rows = shares.values[0, 0]
    assert bool((rows.sum(1) - 1).abs().max() < 1e-9)
    assert float(rows.triu(1).abs().max()) == 0


def test_the_induction_heads_are_those_of_the_long_probe(default_lm: LoadedModel) -> None:
    text = " the cat sat on a red mat near the blue door. the cat sat on a red"
    axis = token_axis(default_lm, attndiag.Prompt(text, id="again"), attndiag.Target.logprob(" mat"))
    found = explain(default_lm, axis.prompt, axis.resolved.targets[0], method="induction")
    heads = [head[:2] for head in found.checks["heads"]]
    assert heads[0] == (18, 6)
    assert {(17, 3), (17, 4), (17, 5), (18, 7)} <= set(heads)
    # they look at what followed last time
    ranked = np.where(axis.admissible & (np.arange(len(axis)) > 0), found.values.numpy(), -1)
    assert axis.tokens[int(ranked.argmax())] == " mat"
    run = PromptMethods(default_lm, axis)
    np.testing.assert_allclose(run.scores("induction@L18H6").values, run.scores("weight@L18H6").values, atol=1e-5)


def test_rare_tokens_first_is_a_control_with_numbers(default_lm: LoadedModel) -> None:
    metrics = ["aopc_comprehensiveness", "aopc_sufficiency", "effect_tau"]
    given = {"target": TARGET, "replacements": ["mean_embedding"], "metrics": metrics, "edges": None, "heads": False}
    axis = token_axis(default_lm, PROMPT, TARGET)
    places = learned_places(default_lm.tokenizer, axis.token_ids)
    found = attndiag.run(default_lm, [PROMPT], ["weight"], own={"places": [places]}, **given).comparison.faithfulness
    table = found.pivot(index="metric", columns="method", values="value")
    assert len(table) == len(metrics) and np.isfinite(table["token_frequency"]).all()
    # the same order given as a method
    assert table["token_frequency"].tolist() == table["places"].tolist() != table["recency"].tolist()
    assert found[found.method == "token_frequency"].control.all()


def test_names_are_learned_late_and_function_words_early(default_lm: LoadedModel) -> None:
    axis = token_axis(default_lm, PROMPT, TARGET)
    placed = dict(zip(axis.tokens, learned_places(default_lm.tokenizer, axis.token_ids), strict=True))
    late = min(placed[word] for word in (" Mary", " John", " store", " drink"))
    assert placed[","] == 0 and max(placed[word] for word in (" and", " to", " the", " a")) < late

"""Head scores of the default model, against the numbers that are known for it."""

from __future__ import annotations

import pytest

from attndiag.explanations.head_composition import strongest_pairs
from attndiag.explanations.head_scores import heads

pytestmark = pytest.mark.real_model


def test_induction_heads_of_the_default_model(default_lm):
    table = heads(default_lm, rows=64)
    assert table.facts["length"] == 50 and table.facts["rows"] == 64 and table.facts["bos"] is not None
    scores = table["prefix_matching_score"]
    for (layer, head), expected in {(18, 6): 0.90, (17, 3): 0.77, (17, 4): 0.74, (17, 5): 0.65, (18, 7): 0.60}.items():
        assert scores.values[layer, head].item() == pytest.approx(expected, abs=0.08)
    top = table.top("prefix_matching_score", 3)
    assert [(int(a), int(b)) for a, b in zip(top["layer"], top["head"], strict=True)] == [(18, 6), (17, 3), (17, 4)]
    assert scores.checks["baseline"].max() < 0.02
    assert table.facts["first_copy_loss"] == pytest.approx(14.1, abs=0.5)
    assert table.facts["second_copy_loss"] == pytest.approx(3.2, abs=0.5)
    assert not scores.failures
    assert table["previous_token_score"].values.max() > 0.6


def test_sinks_and_copying_of_the_default_model(default_lm):
    table = heads(default_lm, probes=["sink", "copying"])
    mass, share = table["sink_mass"].values, table["sink_contribution_share"].values
    assert 0.35 < mass.mean() < 0.6 and 0.2 < share.mean() < 0.4
    assert (share < mass).double().mean() > 0.8  # the sink's values are small nearly everywhere
    assert table["sink_norm_ratio"].values.median() < 0.5
    copying = table["copying_score"].values
    assert copying.isfinite().all() and copying.abs().max() <= 1 + 1e-9


def test_induction_heads_of_the_default_model_read_one_head_with_their_keys(default_lm):
    table = heads(default_lm, probes=["composition"])
    assert not table.not_measurable
    keys = table["k_composition"].values
    for head in (3, 4):
        best, second = keys[17, head].flatten().nan_to_num(nan=-1.0).topk(2).values.tolist()
        assert keys[17, head, 16, 0].item() == best > 0.1
        assert best > 3 * second > 0
    pairs = strongest_pairs(table, None)
    pairs = pairs[(pairs["kind"] == "k") & (pairs["layer"] == 17) & pairs["head"].isin((3, 4))]
    first = pairs.groupby("head").first()
    assert first["earlier_layer"].tolist() == [16, 16] and first["earlier_head"].tolist() == [0, 0]
    assert (first["score"] > 3 * first["next"]).all()

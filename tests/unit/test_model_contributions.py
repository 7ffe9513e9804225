"""All layers in one forward equal the layers one by one."""

from __future__ import annotations

import pytest
import torch

import attndiag
from attndiag import model_contributions
from attndiag.errors import NotApplicableError, UnsupportedModelError
from attndiag.models import known


@pytest.fixture
def lm():
    model = known.induction_gpt2()
    return attndiag.load(model.model, tokenizer=model.tokenizer()), model.text(0)


@pytest.mark.parametrize("kind", ["contribution", "head_contribution", "contribution_residual", "alti"])
@pytest.mark.filterwarnings("ignore:.*undefined.*")
def test_equals_each_layer_alone(lm, kind):
    loaded, text = lm
    seen = []
    whole = model_contributions(loaded, text, kind, progress=lambda done, total: seen.append((done, total)))
    assert whole.axes[0] == "layer"
    assert whole.labels["layer"] == [0, 1]
    assert seen == [(1, None), (2, None)]
    with torch.no_grad(), attndiag.capture(loaded) as captured:
        loaded.forward(text)
    for layer, call in enumerate(captured.calls):
        alone = attndiag.contributions(call, kind)
        torch.testing.assert_close(whole.values[layer], alone.values, equal_nan=True)
    assert whole.verified
    assert "completeness_error" in whole.checks


def test_tokens_label_the_positions_and_layers_can_be_chosen(lm):
    loaded, text = lm
    scores = model_contributions(loaded, text, layers=[1])
    assert scores.values.shape[0] == 1
    assert len(scores.labels["key_pos"]) == scores.values.shape[-1]
    frame = scores.to_frame()
    assert {"layer_label", "key_pos_label"} <= set(frame.columns)


def test_a_kind_about_a_target_is_referred_to_the_method_that_has_one(lm):
    with pytest.raises(NotApplicableError, match=r"use attndiag\.explain\(lm, .*method='target_attribution'\)"):
        model_contributions(lm, "w5 w9", "target_attribution")


def test_encoder_decoders_do_not_stack():
    cross = known.cross_copy()
    loaded = attndiag.load(cross.model, tokenizer=cross.tokenizer())
    with pytest.raises(UnsupportedModelError, match=r"do not stack|attndiag\.contributions"):
        model_contributions(loaded, attndiag.Prompt(cross.text(0), decoder_text=cross.text(0)))


@pytest.mark.real_model
def test_the_strongest_edges_write_more_than_the_sink_on_the_default_model(default_lm):
    """Token 0 has more of the weight than of what is written, in the layers and on the whole."""
    text = "When Mary and John went to the store, John gave a drink to"
    written = model_contributions(default_lm, text, certificate="full").require_verified().values[:, 0, 1:]
    weight = model_contributions(default_lm, text, "weight").values[:, 0, :, 1:].mean(1)
    shares = [(x / x.sum(-1, keepdim=True))[..., 0] for x in (weight, written)]
    assert float(shares[0].mean()) == pytest.approx(0.548, abs=0.003)
    assert float(shares[1].mean()) == pytest.approx(0.29, abs=0.005)
    assert float(shares[0][20].mean()) == pytest.approx(0.86, abs=0.01)
    assert float(shares[1][20].mean()) == pytest.approx(0.36, abs=0.01)

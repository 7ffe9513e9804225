"""Alignment by cross-attention: the error rate by hand, and a trained translator whose right alignment is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import attndiag
from attndiag.errors import ShapeError
from attndiag.explanations.cross_alignment import CrossScores, cross_scores, pointing
from attndiag.models.known.translation import (
    END,
    accuracy,
    as_text,
    dated_sentences,
    decoder_inputs,
    same_class_replacements,
    trained_bart,
    translation_model,
    translation_tokenizer,
)
from attndiag.stats.alignment import alignment_error_rate, strongest_links


def test_alignment_error_rate_by_hand():
    found = np.array([[1, 0, 0], [0, 1, 0]], dtype=bool)
    sure = np.array([[1, 0, 0], [0, 0, 1]], dtype=bool)
    assert float(alignment_error_rate(found, sure)) == pytest.approx(0.5)
    assert float(alignment_error_rate(found, found)) == 0.0
    assert float(alignment_error_rate(found, ~found & sure)) == pytest.approx(1.0)
    possible = sure | np.array([[0, 0, 0], [0, 1, 0]], dtype=bool)
    assert float(alignment_error_rate(found, sure, possible)) == pytest.approx(1 - (1 + 2) / (2 + 2))
    more = np.array([[1, 1, 0], [0, 0, 1]], dtype=bool)  # both sure links and one too many
    assert float(alignment_error_rate(more, sure)) == pytest.approx(1 - 4 / 5)
    nothing = np.zeros((2, 3), dtype=bool)
    assert np.isnan(alignment_error_rate(nothing, nothing))
    assert float(alignment_error_rate(nothing, sure)) == 1.0
    batch = alignment_error_rate(np.stack([found, sure]), np.stack([sure, sure]))
    np.testing.assert_allclose(batch, [0.5, 0.0])
    with pytest.raises(ShapeError, match=r"found \(2, 3\), sure \(3, 2\)"):
        alignment_error_rate(found, sure.T)


def test_strongest_links():
    links = strongest_links(np.array([[0.1, 0.9, 0.0], [0.2, 0.2, 0.1], [-3.0, -1.0, -2.0], [np.nan, 1.0, 0.0]]))
    assert links.tolist() == [[False, True, False], [True, False, False], [False, True, False], [False, False, False]]


def test_dates_are_read_back_by_the_tokenizer():
    data = dated_sentences(6, seed=3)
    assert data.source.shape == (6, 9)
    assert bool((data.source[:, -1] == END).all())
    tokenizer = translation_tokenizer()
    for row in range(6):
        assert tokenizer(as_text(data.source[row]))["input_ids"] == data.source[row].tolist()
        months = data.target[row] - (data.target[row] >= 25) * 12  # a month's target token is its source token plus 12
        assert torch.equal(data.source[row][data.alignment[row]], months)


@pytest.mark.parametrize("position", range(9))
def test_replacements_stay_in_their_class(position):
    data = dated_sentences(40, seed=1)
    changed = same_class_replacements(data.source, position, seed=5)
    others = [index for index in range(9) if index != position]
    assert torch.equal(changed[:, others], data.source[:, others])
    if position == 8:
        assert torch.equal(changed, data.source)  # special tokens are never replaced
        return
    assert bool((changed[:, position] != data.source[:, position]).all())
    bounds = torch.tensor([3, 13, 25])
    assert torch.equal(
        torch.bucketize(changed[:, position].contiguous(), bounds, right=True),
        torch.bucketize(data.source[:, position].contiguous(), bounds, right=True),
    )


def test_scores_of_an_untrained_translator_are_what_the_parts_say():
    torch.manual_seed(0)
    model = translation_model().eval()
    data = dated_sentences(3, seed=2)
    decoder = decoder_inputs(data.target)
    scores = cross_scores(model, data.source, decoder, data.target, replace=same_class_replacements, draws=1)
    assert scores.certified
    with torch.no_grad():
        logits = model(input_ids=data.source, decoder_input_ids=decoder).logits.log_softmax(-1)
        clean = logits.gather(-1, data.target[..., None])[..., 0]
        torch.testing.assert_close(scores.clean, clean)
        changed = same_class_replacements(data.source, 4, 0)
        moved = model(input_ids=changed, decoder_input_ids=decoder).logits.log_softmax(-1)
        lost = clean - moved.gather(-1, data.target[..., None])[..., 0]
    torch.testing.assert_close(scores.by_method["replacement_effect"][..., 4], lost, atol=1e-5, rtol=1e-4)
    assert float(scores.by_method["replacement_effect"][..., 8].abs().max()) == 0.0
    assert scores.by_method["weight heads"].shape == (3, 8, 7, 9)
    both = scores.by_method["weight layer 0"] + scores.by_method["weight layer 1"]
    torch.testing.assert_close(scores.by_method["weight"], both)

    # one edge of one head, by the public function and by whole forwards, is what the edit of that head gives
    lm = attndiag.load(model, tokenizer=translation_tokenizer())
    words = as_text(data.target[0]).split()
    prompt = attndiag.Prompt(as_text(data.source[0]), decoder_text=" ".join(words[:-1]))
    target = attndiag.Target.logprob(words[-1])
    effects = attndiag.edge_effects(lm, prompt, target, stream="cross", queries=[-1])
    assert effects.provenance["route"] == "forwards"
    assert effects.values.shape == (2, 4, 7, 9)
    with attndiag.edit(model, attndiag.Knockout(layer=1, head=2, query=6, key=3, stream="cross")), torch.no_grad():
        edited = model(input_ids=data.source[:1], decoder_input_ids=decoder[:1]).logits.log_softmax(-1)
    expected = float(clean[0, 6] - edited[0, 6, data.target[0, 6]])
    assert float(effects.values[1, 2, 6, 3]) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ShapeError, match="do not fit"):
        cross_scores(model, data.source, decoder[:, :3], data.target)


@pytest.mark.gpu
def test_scores_stay_on_the_device_of_the_model():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    model = translation_model().eval().cuda()
    data = dated_sentences(2, seed=2)
    source, target = data.source.cuda(), data.target.cuda()
    decoder = decoder_inputs(data.target).cuda()
    scores = cross_scores(model, source, decoder, target, replace=same_class_replacements, draws=1)
    assert {values.device.type for values in scores.by_method.values()} == {"cuda"}
    there = cross_scores(model.cpu(), data.source, decoder.cpu(), data.target)
    for name in ("edge_effect", "weight", "contribution"):
        torch.testing.assert_close(scores.by_method[name].cpu(), there.by_method[name], atol=1e-4, rtol=1e-3)


def test_pointing_pairs_each_method_with_its_weights():
    right = torch.tensor([[0, 1], [1, 0]])
    good = torch.nn.functional.one_hot(right, 3).double()
    bad = good.roll(1, -1)
    scores = CrossScores(
        {"weight": bad, "contribution": good, "weight heads": torch.stack([good, bad], 1),
         "head_contribution heads": torch.stack([good, good], 1)},
        clean=torch.zeros(2, 2), right=torch.ones(2, 2, dtype=torch.bool), certified=True,
    )  # fmt: skip
    found = pointing(scores, right, draws=50)
    assert {name: estimate.value for name, estimate in found.estimates.items()} == {
        "weight": 1.0, "contribution": 0.0, "weight heads": 0.5, "head_contribution heads": 0.0,
    }  # fmt: skip
    assert {name: each.value for name, each in found.against_weights.items()} == {
        "contribution": -1.0, "head_contribution heads": -0.5,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_trained_translator_and_four_answers():
    """Seed 0. Summed over layers weights and contributions are both right; head by head contributions do worse."""
    model = trained_bart(0)
    assert accuracy(model) > 0.99
    data = dated_sentences(100, seed=999_999)
    scores = cross_scores(
        model, data.source, decoder_inputs(data.target), data.target, replace=same_class_replacements, draws=2
    )
    assert scores.certified
    found = pointing(scores, data.alignment)
    error = {name: estimate.value for name, estimate in found.estimates.items()}
    for name in ("weight", "contribution", "edge_effect"):
        assert error[name] < 0.02
    assert error["replacement_effect"] < 0.1
    assert found.against_weights["contribution"].value <= 0.001
    # the claim "contributions point better than weights" does not hold head by head
    assert 0.1 < error["weight heads"] < 0.3
    assert found.against_weights["head_contribution heads"].low > 0
    # whoever is right, taking away the edge that really carries the token costs the answer
    aligned = scores.by_method["edge_effect"].gather(-1, data.alignment[..., None])[..., 0]
    assert float(aligned.median()) > 2.0

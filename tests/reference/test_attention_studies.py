"""The replication of Jain & Wallace (2019), in small: directions, not values. Its parts against plain replicas."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from replicate_attention_studies import MODELS, captured, js_divergence, main, measure, run, taus, texts, train


@pytest.mark.parametrize("kind", MODELS)
def test_each_number_of_a_text_is_what_it_says(kind: str) -> None:
    """One text at a time, without batches: attention from the captured call, gradient by difference, words deleted."""
    model = train(kind, texts("sparse", 64, 0), 0, epochs=1).double()
    data = texts("sparse", 3, 1, shortest=5, longest=7)
    found = measure(model, data)
    first = 1 if kind == "transformer" else 0
    for row in range(3):
        ids = data.ids[row][data.ids[row] != 0][None]
        n = ids.shape[1]
        assert np.isnan(found["attention"][row, n:]).all()
        with torch.no_grad():
            weights, _, logits = captured(model, ids)
            y = logits.sigmoid()
            np.testing.assert_allclose(found["attention"][row, :n], weights[0].mean(0)[first:], atol=1e-6)
            for place in range(n):
                left = torch.cat([ids[:, :place], ids[:, place + 1 :]], 1)
                effect = float((model(left).sigmoid() - y).abs())
                assert found["leave one out"][row, place] == pytest.approx(effect, abs=1e-6)
                step = 1e-5
                moved = model.embed(ids).clone()
                moved[0, place] *= 1 + step
                model.attention.given = weights[:, :, None]
                slope = float((model(ids, moved).sigmoid() - y).abs()) / step
                model.attention.given = None
                assert found["gradient"][row, place] == pytest.approx(slope, rel=1e-2, abs=1e-5)
    own = taus(found, (data.ids != 0).numpy())
    n = int((data.ids[0] != 0).sum())
    plain = kendalltau(found["attention"][0, :n], found["leave one out"][0, :n]).statistic
    assert own["attention, leave one out"][0] == pytest.approx(plain)


def test_the_divergence_is_that_of_definition() -> None:
    one, two = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0]]])
    assert float(js_divergence(one, two)) == pytest.approx(np.log(2))
    assert float(js_divergence(one, one)) == 0.0


@pytest.mark.slow
def test_gradients_agree_with_effects_more_than_attention_does() -> None:
    """The paper's finding on its own kind of model, and that other attention leaves the output where it was."""
    given = argparse.Namespace(texts=3000, epochs=4, instances=60, permutations=20, steps=60)
    found = [run("bilstm", "graded", seed, given=given) for seed in range(2)]

    def mean(name: str) -> float:
        return float(np.mean([np.nanmean(one["tau"][name]) for one in found]))

    assert min(one["accuracy"] for one in found) > 0.75
    assert mean("gradient, leave one out") > mean("attention, leave one out") + 0.1
    assert mean("gradient, leave one out") > mean("attention, gradient") + 0.1
    for one in found:
        assert np.mean(one["freedom"]["adversary"]) > 0.2
        assert np.median(one["freedom"]["permuted"]) < 0.2


@pytest.mark.slow
def test_the_script_prints_its_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = "x --seeds 2 --texts 128 --epochs 1 --instances 10 --permutations 4 --steps 4 --scales 1"
    monkeypatch.setattr(sys, "argv", arguments.split())
    main()
    printed = capsys.readouterr().out
    assert printed.count("\n| accuracy |") == 2
    assert "| graded | 0.3 |" in printed
    assert "| sparse | 0.3, untrained |" in printed
    assert "Pairs of an evidence word and a filler" in printed

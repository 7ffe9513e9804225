"""Explanations of the trained default model, against independent code and known numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import attndiag
from attndiag import Prompt, Replacement, Target
from attndiag.catalog import explain
from attndiag.models.load import LoadedModel
from attndiag.runs.prompt_files import SHIPPED, read_prompts

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def ioi() -> Prompt:
    return read_prompts(SHIPPED)[0]


def test_integrated_gradients_equal_an_independent_implementation(default_lm: LoadedModel, ioi: Prompt) -> None:
    steps = 8
    ids, other = (default_lm.encode(text).input_ids[0] for text in (ioi, Prompt(str(ioi.pair))))
    table = default_lm.model.get_input_embeddings().weight.detach()
    answer, foil = (default_lm.tokenizer(text)["input_ids"][0] for text in (ioi.target, ioi.foil))
    end, start = table[ids], table[other]
    total = torch.zeros_like(end)
    for node, weight in zip(*np.polynomial.legendre.leggauss(steps), strict=True):
        point = (start + float(node + 1) / 2 * (end - start)).requires_grad_()
        logits = default_lm.model(inputs_embeds=point[None], use_cache=False).logits[0, -1]
        total += float(weight) / 2 * torch.autograd.grad(logits[answer] - logits[foil], point)[0]
    expected = ((end - start) * total).sum(-1)
    found = explain(default_lm, ioi, method="integrated_gradients", baseline="pair", steps=steps, max_steps=steps)
    changed = (ids != other).nonzero()[:, 0]
    assert len(changed) == 1
    torch.testing.assert_close(found.values[changed], expected[changed], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_batches_equal_single_prompts(default_lm: LoadedModel, side: Any) -> None:
    prompts = [prompt for prompt in read_prompts(SHIPPED) if prompt.cluster in ("ioi", "facts")][4:8]
    assert len({default_lm.encode(prompt).input_ids.shape[1] for prompt in prompts}) > 1
    for method in ("input_x_gradient", "saliency"):
        together = explain(default_lm, prompts, method=method, padding_side=side)
        for prompt, found in zip(prompts, together, strict=True):
            alone = explain(default_lm, prompt, method=method).values
            torch.testing.assert_close(found.values, alone, rtol=1e-4, atol=1e-5 * float(alone.abs().max()))


def test_the_strongest_edge_is_the_known_one(default_lm: LoadedModel, ioi: Prompt) -> None:
    """L23H3, last query, second "John": exact effect 2.91, first order 2.79."""
    found = explain(default_lm, ioi, method="pattern_attribution")
    assert found.verified, found.failures
    layer, head, query, key = np.unravel_index(int(found.values.abs().argmax()), found.values.shape)
    assert (layer, head, query, key) == (23, 3, 13, 9)
    assert float(found.values[23, 3, 13, 9]) == pytest.approx(2.79, abs=0.05)


def test_replacement_finds_the_names(default_lm: LoadedModel, ioi: Prompt) -> None:
    sampled = explain(default_lm, ioi, method="replacement", replacement=Replacement.sampled(4), batch_size=8)
    assert sampled.checks["prefix"].startswith("shared (checked: ")
    assert sampled.labels["position"][int(sampled.values.argmax())] == " Mary"
    assert float(sampled.checks["flip_share"][1]) == 1.0
    pair = explain(default_lm, ioi, method="replacement", replacement="pair")
    assert float(pair.values[9]) == pytest.approx(11.6, abs=0.2)
    assert int(pair.values.isnan().sum()) == 13
    whole = explain(
        default_lm, ioi, method="replacement", replacement=Replacement.sampled(4), prefix_cache=False, batch_size=32
    )
    torch.testing.assert_close(sampled.values, whole.values, rtol=1e-4, atol=1e-4)


def test_a_sentence_encoder_has_token_scores(ioi: Prompt) -> None:
    minilm = attndiag.load("minilm", device="cpu")
    target = Target.cosine("A drink was given to Mary.")
    for method, params in (("integrated_gradients", {"baseline": "token=[MASK]"}), ("replacement", {})):
        if method == "replacement":
            params = {"replacement": Replacement.with_token("[MASK]")}
        found = explain(minilm, Prompt("John gave Mary a drink."), target, method=method, **params)
        assert found.unit == "cosine"
        assert found.verified, found.failures
        strongest = int(found.values.nan_to_num(-1).argmax())
        assert found.labels["position"][strongest].strip().lower() in ("mary", "gave", "drink")


@pytest.mark.slow
def test_the_completeness_gap_closes_on_the_shipped_prompts(default_lm: LoadedModel) -> None:
    """One prompt of each cluster with its counterfactual as baseline; `scripts/completeness_gaps.py` has the others."""
    first = {prompt.cluster: prompt for prompt in reversed(read_prompts(SHIPPED)) if prompt.pair is not None}
    gaps = {
        cluster: explain(
            default_lm, prompt, method="integrated_gradients", baseline="pair", steps=8, max_steps=32, batch_size=16
        ).checks["completeness_gap"]
        for cluster, prompt in first.items()
    }
    closed = sum(gap <= 0.05 for gap in gaps.values()) / len(gaps)
    assert closed >= 0.8, f"{closed:.0%} of {len(gaps)} prompts closed: {gaps}"

"""Gradient attributions: independent implementations, exactness on linear models, symmetry, batches, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from attndiag import Prompt, Target
from attndiag.errors import AttnDiagError, NotApplicableError, PromptError, TargetError, UnsupportedModelError
from attndiag.explanations.gradients import input_x_gradient, integrated_gradients, saliency
from attndiag.explanations.sampled_gradients import deeplift, gradient_shap
from attndiag.explanations.surrogates import kernel_shap, lime, occlusion
from attndiag.models.load import LoadedModel
from attndiag.scores import Scores

TEXT = "<bos> w5 w9 w30 w7 w9 w12"
RAGGED = [TEXT, "<bos> w8 w8 w21", "<bos> w40 w5 w6 w7 w11 w13 w60 w33"]
TARGET = Target.logit_diff("w10", "w20")
SHORT: dict[str, dict[str, Any]] = {
    "saliency": {},
    "input_x_gradient": {},
    "integrated_gradients": {"steps": 8, "max_steps": 8},
    "gradient_shap": {"samples": 8},
    "occlusion": {},
    "lime": {"samples": 40},
    "kernel_shap": {"samples": 60},
}
METHODS: dict[str, Callable[..., list[Scores]]] = {
    "saliency": saliency,
    "input_x_gradient": input_x_gradient,
    "integrated_gradients": integrated_gradients,
    "gradient_shap": gradient_shap,
    "occlusion": occlusion,
    "lime": lime,
    "kernel_shap": kernel_shap,
}


def measure(model: nn.Module, embeddings: Tensor) -> Tensor:
    """m from embeddings by the model's own `inputs_embeds`, for the target of these tests."""
    logits = model(inputs_embeds=embeddings[None], use_cache=False).logits[0, -1]
    return logits[10] - logits[20]


def slow_integrated_gradients(model: nn.Module, ids: Tensor, baseline: Tensor, steps: int) -> Tensor:
    """(e - b) times the mean gradient on the path, one point after the other, in float64."""
    table = model.get_input_embeddings().weight.detach()
    end = table[ids]
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    total = torch.zeros_like(end)
    for node, weight in zip(nodes, weights, strict=True):
        point = (baseline + (node + 1) / 2 * (end - baseline)).requires_grad_()
        (gradient,) = torch.autograd.grad(measure(model, point), point)
        total += weight / 2 * gradient
    return (end - baseline) * total


def test_saliency_and_input_x_gradient_are_plain_gradients(lm: LoadedModel) -> None:
    ids = lm.encode(TEXT).input_ids[0]
    point = lm.model.get_input_embeddings().weight.detach()[ids].requires_grad_()
    (gradient,) = torch.autograd.grad(measure(lm.model, point), point)
    found = saliency(lm, TEXT, TARGET)[0]
    torch.testing.assert_close(found.values, gradient.norm(dim=-1), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.checks["sum"], gradient.sum(-1), rtol=1e-9, atol=1e-12)
    assert (found.sign, found.unit, found.axes) == ("non-negative", "logits per embedding unit", ("position",))
    product = input_x_gradient(lm, TEXT, TARGET)[0]
    torch.testing.assert_close(product.values, (point * gradient).sum(-1).detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(product.checks["norm"], (point * gradient).norm(dim=-1).detach(), rtol=1e-9, atol=1e-12)
    assert product.labels["position"] == ["<bos>", *[f" {word}" for word in TEXT.split()[1:]]]


@pytest.mark.parametrize("baseline", ["zero", "mean_embedding", "pad", "token=w33"])
def test_integrated_gradients_equal_an_independent_implementation(lm: LoadedModel, baseline: str) -> None:
    ids = lm.encode(TEXT).input_ids[0]
    table = lm.model.get_input_embeddings().weight.detach()
    start = {"zero": 0 * table[0], "mean_embedding": table.mean(0), "pad": table[1], "token=w33": table[33]}
    if baseline == "pad":
        start["pad"] = table[lm.tokenizer.pad_token_id]
    path = start[baseline].expand(len(ids), -1).clone()
    path[0] = table[ids[0]]
    expected = slow_integrated_gradients(lm.model, ids, path, 24).sum(-1)
    found = integrated_gradients(lm, TEXT, TARGET, baseline=baseline, steps=24, max_steps=24)[0]
    assert torch.isnan(found.values[0])
    torch.testing.assert_close(found.values[1:], expected[1:], rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_every_signed_method_is_exact_where_m_is_linear(linear_lm: LoadedModel) -> None:
    model = linear_lm.model
    ids = linear_lm.encode(TEXT).input_ids[0]
    direction = model.head.weight[10] - model.head.weight[20]
    table = model.embedding.weight
    says = (model.place[: len(ids)] * (table[ids] @ direction)).detach()
    from_mean = (model.place[: len(ids)] * ((table[ids] - table.mean(0)) @ direction)).detach()
    torch.testing.assert_close(input_x_gradient(linear_lm, TEXT, TARGET)[0].values, says)
    for method, params in [
        (integrated_gradients, {}),
        (occlusion, {}),
        (kernel_shap, {"samples": 64}),
        (gradient_shap, {"baseline": "mean_embedding", "samples": 8}),
        (lime, {"samples": 200, "ridge": 1e-9}),
    ]:
        found = method(linear_lm, TEXT, TARGET, **params)[0]
        torch.testing.assert_close(found.values[1:].double(), from_mean[1:], rtol=2e-5, atol=2e-5)
        assert found.verified, found.failures
    assert lime(linear_lm, TEXT, TARGET, ridge=1e-9)[0].checks["r_squared"] > 1 - 1e-9


def test_kernel_shap_finds_shapley_values(lm: LoadedModel) -> None:
    """Against the average over all orders of four tokens, with enough draws to see every subset."""
    import itertools

    text = "<bos> w5 w9 w30 w7"
    ids = lm.encode(text).input_ids[0]
    table = lm.model.get_input_embeddings().weight.detach()
    mean = table.mean(0)

    def with_only(present: frozenset[int]) -> float:
        rows = [table[token] if place == 0 or place in present else mean for place, token in enumerate(ids)]
        return float(measure(lm.model, torch.stack(rows)).detach())

    expected = torch.zeros(5)
    for order in itertools.permutations(range(1, 5)):
        for turn, place in enumerate(order):
            before = frozenset(order[:turn])
            expected[place] += (with_only(before | {place}) - with_only(before)) / 24
    found = kernel_shap(lm, text, TARGET, samples=4000)[0]
    torch.testing.assert_close(found.values[1:].float(), expected[1:], rtol=0.1, atol=0.1 * float(expected.abs().max()))
    assert found.checks["completeness_gap"] < 1e-5


@pytest.mark.parametrize("name", METHODS)
def test_swapping_answer_and_foil_negates_exactly(llama_lm: LoadedModel, name: str) -> None:
    params = SHORT[name] | ({"aggregate": "sum"} if name == "saliency" else {})
    one = METHODS[name](llama_lm, TEXT, TARGET, **params)[0]
    two = METHODS[name](llama_lm, TEXT, TARGET.swapped(), **params)[0]
    assert one.sign == "signed"
    assert torch.equal(one.values.nan_to_num(), -two.values.nan_to_num())
    assert float(one.values.nan_to_num().abs().max()) > 0


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", METHODS)
def test_ragged_batches_equal_single_prompts(llama_lm: LoadedModel, name: str, side: Any) -> None:
    together = METHODS[name](llama_lm, RAGGED, TARGET, padding_side=side, batch_size=8, **SHORT[name])
    for text, found in zip(RAGGED, together, strict=True):
        # the draws of gradient_shap come in groups as large as a batch
        size = 8 if name == "gradient_shap" else 2
        alone = METHODS[name](llama_lm, text, TARGET, batch_size=size, **SHORT[name])[0]
        assert found.labels == alone.labels
        scale = float(alone.values.nan_to_num().abs().max())
        torch.testing.assert_close(found.values, alone.values, rtol=1e-5, atol=1e-5 * scale, equal_nan=True)


def test_a_closed_gap_stops_the_doubling_and_an_open_one_is_marked(lm: LoadedModel) -> None:
    few = integrated_gradients(lm, TEXT, TARGET, steps=1, max_steps=1, baseline="token=w40")[0]
    many = integrated_gradients(lm, TEXT, TARGET, steps=1, max_steps=512, baseline="token=w40")[0]
    assert few.checks["completeness_gap"] > 0.05
    assert not few.verified
    assert "of it, above 5%" in few.failures[0]
    assert many.checks["completeness_gap"] <= 0.05
    assert many.verified
    assert many.checks["steps"] == max(many.checks["gaps"]) < 512
    assert few.checks["gaps"] == {1: few.checks["completeness_gap"]}
    total = float(many.values.nansum())
    assert total == pytest.approx(many.checks["m"] - many.checks["m_baseline"], rel=0.05)


def test_a_path_through_a_singular_point_never_closes_unless_its_token_is_kept(llama_lm: LoadedModel) -> None:
    """The first token's embedding is the zero vector: RMSNorm turns it into a step, which no quadrature finds."""
    assert llama_lm.model.get_input_embeddings().weight[0].norm() == 0
    moved = integrated_gradients(llama_lm, TEXT, TARGET, baseline="token=w33", keep="none", max_steps=256)[0]
    assert set(moved.checks["gaps"]) == {32, 64, 128, 256}
    assert min(moved.checks["gaps"].values()) == moved.checks["completeness_gap"] > 0.05
    assert moved.checks["steps"] == min(moved.checks["gaps"], key=moved.checks["gaps"].get)
    kept = integrated_gradients(llama_lm, TEXT, TARGET, baseline="token=w33", max_steps=256)[0]
    assert kept.checks["gaps"].keys() == {32}
    assert kept.verified


def test_a_pair_is_a_baseline(lm: LoadedModel) -> None:
    prompt = Prompt(TEXT, pair=TEXT.replace("w30", "w31"))
    found = integrated_gradients(lm, prompt, TARGET, baseline="pair")[0]
    assert torch.equal(found.values.nan_to_num().nonzero()[:, 0], torch.tensor([3]))
    with pytest.raises(PromptError, match=r"has 8 tokens and the prompt 7: .*a pair must have the same length"):
        integrated_gradients(lm, Prompt(TEXT, pair=f"{TEXT} w5"), TARGET, baseline="pair")
    with pytest.raises(PromptError, match="has no counterfactual"):
        integrated_gradients(lm, TEXT, TARGET, baseline="pair")


def test_a_baseline_that_changes_nothing_is_refused_by_name(llama_lm: LoadedModel) -> None:
    lm = llama_lm
    with pytest.raises(AttnDiagError, match="baseline 'token=w5' equals the input"):
        integrated_gradients(lm, "<bos> w5 w5", TARGET, baseline="token=w5")
    for wrong in ("noise", "token=", "token=w5 w6", "token=unheard"):
        with pytest.raises(ValueError, match=r"expected one of zero|is not one token"):
            integrated_gradients(lm, TEXT, TARGET, baseline=wrong)
    with pytest.raises(ValueError, match="position 7, but prompt 0 has 7 tokens"):
        integrated_gradients(lm, TEXT, TARGET, keep=[7])
    with pytest.raises(ValueError, match="1 <= steps <= max_steps"):
        integrated_gradients(lm, TEXT, TARGET, steps=600)
    with torch.no_grad():  # a head that says the same whatever it reads
        lm.model.lm_head.weight.zero_()
    with pytest.raises(AttnDiagError, match="baseline 'mean_embedding': there is no difference"):
        integrated_gradients(lm, TEXT, TARGET)


def test_quantised_models_have_no_gradients_but_have_occlusion(linear_lm: LoadedModel) -> None:
    model = linear_lm.model
    inner = model.forward

    def detached(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        out.logits = out.logits.detach()
        return out

    model.forward = detached
    lm = LoadedModel(model, linear_lm.tokenizer, linear_lm.info)
    # a model without named inputs takes no mask
    model.forward.__signature__ = __import__("inspect").signature(inner)
    with pytest.raises(UnsupportedModelError, match=r"no gradient reaches .*occlusion"):
        saliency(lm, TEXT, TARGET)
    assert occlusion(lm, TEXT, TARGET)[0].values[1:].abs().max() > 0


def opt_lm(word_lm: Callable[[nn.Module], LoadedModel], activation: str) -> LoadedModel:
    config = OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, dropout=0.0,
        max_position_embeddings=64, word_embed_proj_dim=32, activation_function=activation, pad_token_id=1,
    )  # fmt: skip
    return word_lm(OPTForCausalLM(config).double().eval())


def test_deeplift_runs_where_its_rule_fires_and_raises_elsewhere(
    word_lm: Callable[[nn.Module], LoadedModel], llama_lm: LoadedModel
) -> None:
    relu = opt_lm(word_lm, "relu")
    hooks = {name: len(module._forward_hooks) + len(module._backward_hooks) for name, module in
             relu.model.named_modules()}  # fmt: skip
    found = deeplift(relu, TEXT, TARGET)[0]
    assert found.checks["rules_fired"] == 2
    plain = _gradient_times_difference(relu, TEXT)
    assert float((found.values[1:] - plain[1:]).abs().max()) > 1e-6
    after = {name: len(module._forward_hooks) + len(module._backward_hooks) for name, module in
             relu.model.named_modules()}  # fmt: skip
    assert hooks == after
    together = deeplift(relu, RAGGED, TARGET)
    assert torch.equal(together[0].values.nan_to_num(), found.values.nan_to_num())
    assert [len(each.values) for each in together] == [7, 4, 9]
    swapped = deeplift(relu, TEXT, TARGET.swapped())[0]
    assert torch.equal(swapped.values.nan_to_num(), -found.values.nan_to_num())
    for silent in (llama_lm, opt_lm(word_lm, "silu")):
        with pytest.raises(NotApplicableError, match=r"no DeepLift rule fires in .*input_x_gradient"):
            deeplift(silent, TEXT, TARGET)


def _gradient_times_difference(lm: LoadedModel, text: str) -> Tensor:
    ids = lm.encode(text).input_ids[0]
    table = lm.model.get_input_embeddings().weight.detach()
    point = table[ids].requires_grad_()
    (gradient,) = torch.autograd.grad(measure(lm.model, point), point)
    return ((table[ids] - table.mean(0)) * gradient).sum(-1)


def test_classifiers_and_encoder_decoders_have_token_scores_too(word_lm: Callable[[nn.Module], LoadedModel]) -> None:
    small = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = word_lm(
        BertForSequenceClassification(BertConfig(**small, intermediate_size=32, num_labels=3, pad_token_id=1)).eval()
    )
    for name in ("saliency", "integrated_gradients", "occlusion", "kernel_shap"):
        found = METHODS[name](bert, RAGGED, Target.class_logit(1, 2), **SHORT[name])
        assert [len(each.values) for each in found] == [7, 4, 9]
    config = T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=1, pad_token_id=1
    )
    t5 = word_lm(T5ForConditionalGeneration(config).eval())
    found = integrated_gradients(t5, [Prompt("w5 w6 w7", decoder_text="w9 w10")], Target.logit("w12"))[0]
    assert found.provenance["side"] == "encoder"
    assert found.checks["completeness_gap"] < 0.05


def test_a_continuation_is_scored_but_not_explained(lm: LoadedModel) -> None:
    found = integrated_gradients(lm, TEXT, Target.continuation_logprob(" w15 w16"))[0]
    assert len(found.values) == 9
    assert torch.equal(torch.isnan(found.values), torch.tensor([True] + [False] * 6 + [True] * 2))
    assert found.checks["admissible"].tolist() == [False, *[True] * 6, False, False]
    assert found.checks["completeness_gap"] < 0.05


def test_seeds_decide_the_draws_and_nothing_else_does(llama_lm: LoadedModel) -> None:
    for name in ("gradient_shap", "lime", "kernel_shap"):
        torch.manual_seed(3)
        before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
        first = METHODS[name](llama_lm, TEXT, TARGET, **SHORT[name], seed=5)[0]
        assert torch.equal(torch.random.get_rng_state(), before[0])
        assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
        torch.manual_seed(4)
        again = METHODS[name](llama_lm, TEXT, TARGET, **SHORT[name], seed=5)[0]
        other = METHODS[name](llama_lm, TEXT, TARGET, **SHORT[name], seed=6)[0]
        assert torch.equal(first.values.nan_to_num(), again.values.nan_to_num())
        assert not torch.equal(first.values.nan_to_num(), other.values.nan_to_num())


def test_gradient_shap_gives_its_standard_error(lm: LoadedModel) -> None:
    few = gradient_shap(lm, TEXT, TARGET, baseline=["token=w33", "pad"], samples=32, batch_size=4)[0]
    many = gradient_shap(lm, TEXT, TARGET, baseline=["token=w33", "pad"], samples=512, batch_size=4)[0]
    assert few.checks["samples"] == 32
    assert float(many.checks["se"][1:].mean()) < 0.5 * float(few.checks["se"][1:].mean())
    apart = (few.values - many.values)[1:].abs()
    assert bool((apart <= 5 * (few.checks["se"] + many.checks["se"])[1:] + 1e-9).all())


def test_train_mode_is_left_and_changes_nothing(llama_lm: LoadedModel) -> None:
    expected = input_x_gradient(llama_lm, TEXT, TARGET)[0].values
    llama_lm.model.train()
    assert torch.equal(input_x_gradient(llama_lm, TEXT, TARGET)[0].values, expected)
    assert all(module.training for module in llama_lm.model.modules())


def test_bad_targets_and_surrogates_are_refused(llama_lm: LoadedModel) -> None:
    with pytest.raises(TargetError, match="outside the vocabulary"):
        saliency(llama_lm, TEXT, Target.logit("unheard"))
    with pytest.raises(NotApplicableError, match="two tokens that may vary, 1 are left"):
        lime(llama_lm, "<bos> w5", TARGET)
    with pytest.raises(ValueError, match="samples is 5 for 6 tokens"):
        kernel_shap(llama_lm, TEXT, TARGET, samples=5)
    with pytest.raises(ValueError, match="window is 8, the shortest prompt has 7 tokens"):
        occlusion(llama_lm, TEXT, TARGET, window=8)
    with pytest.raises(ValueError, match="aggregate is 'mean'"):
        saliency(llama_lm, TEXT, TARGET, aggregate="mean")

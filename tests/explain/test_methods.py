"""Methods on the token axis against slow replicas: direct attribution, value zeroing, induction, layers and heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM

import attndiag
from attndiag.catalog import UnknownParameterError, explain
from attndiag.comparison.axis import token_axis
from attndiag.comparison.methods import PLACED, PromptMethods
from attndiag.comparison.side_by_side import Comparison
from attndiag.errors import AttnDiagError, NotApplicableError, UnsupportedModelError
from attndiag.explanations import induction_attention
from attndiag.explanations.induction_attention import prefix_matching
from attndiag.models.known import duplicated_induction, induction_gpt2, loud_gemma2, sink_against_value
from attndiag.models.known.build import KnownModel
from attndiag.models.load import LoadedModel

# not BOS, whose embedding is 0 in these models: nothing could be zeroed there
TEXT = "w40 w5 w9 w13 w30 w7 w21"
TARGET = attndiag.Target.logit_diff("w10", "w20")


def compare(*given: object, **more: object) -> Comparison:
    """Methods side by side on tokens alone, by a run in memory."""
    return attndiag.run(*given, edges=None, heads=False, **more).comparison  # type: ignore[arg-type]


def llama_parts(model: LlamaForCausalLM, ids: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """What each layer's heads see and give, from the weights alone: A [head, query, key], f [head, key, d_model]."""
    kept: dict[int, Tensor] = {}
    last: list[Tensor] = []
    handles = [
        layer.input_layernorm.register_forward_hook(lambda _m, _a, out, i=i: kept.update({i: out[0]}))
        for i, layer in enumerate(model.model.layers)
    ]
    handles.append(model.model.norm.register_forward_pre_hook(lambda _m, args: last.append(args[0][0])))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    for handle in handles:
        handle.remove()
    patterns, written = [], []
    for i, layer in enumerate(model.model.layers):
        patterns.append(weights[i][0])
        v = (kept[i] @ layer.self_attn.v_proj.weight.T).reshape(len(kept[i]), 2, 8)
        w_o = layer.self_attn.o_proj.weight.reshape(-1, 4, 8)
        written.append(torch.stack([v[:, head // 2] @ w_o[:, head].T for head in range(4)]))
    return patterns, written, last[0]


def test_direct_attribution_is_what_the_weights_say(tiny_llama: LlamaForCausalLM, word_lm: Any) -> None:
    model = tiny_llama.double()
    lm = word_lm(model)
    # the direction is a gradient, which must not depend on where the call stands
    with torch.no_grad():
        found = explain(lm, TEXT, TARGET, method="target_attribution")
    ids = lm.encode(TEXT).input_ids
    model.requires_grad_(False)
    patterns, written, hidden = llama_parts(model, ids)
    unembedding = model.lm_head.weight
    root = (hidden[-1].square().mean() + model.config.rms_norm_eps).sqrt()
    u = model.model.norm.weight * (unembedding[10] - unembedding[20]) / root
    for layer in range(2):
        for head in range(4):
            for key in range(ids.shape[1]):
                expected = float(patterns[layer][head, -1, key] * (written[layer][head, key] @ u))
                assert float(found.values[layer, head, -1, key]) == pytest.approx(
                    expected, abs=1e-7
                )  # its norms are float32 inside
    assert bool(found.values[:, :, :-1].isnan().all())
    assert found.verified
    assert found.checks["completeness_error"] < 1e-12
    assert found.params == {"queries": [6], "norm": "model.norm"}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_direct_attribution_and_the_rest_of_the_stream_add_up_to_the_target(
    family: str, tiny_llama: LlamaForCausalLM, tiny_gpt2: GPT2LMHeadModel, word_lm: Any
) -> None:
    """m is <h, u> + bias, h the stream at the end, and what each layer's heads write is what its branch adds to h.

    The branch is taken from the running model, after its own norm in Gemma 2, which a fold without sandwich norms would
    miss.
    """
    model = {"llama": tiny_llama, "gpt2": tiny_gpt2}.get(family) or loud_gemma2().model
    # Gemma 2 computes softmax and norms in float32, so that float64 certificates fail
    lm = word_lm(model.eval() if family == "gemma2" else model.double().eval())
    exact = {"gpt2": 1e-9, "llama": 1e-6, "gemma2": 1e-4}[family]
    target = attndiag.Target.logit("w10")
    softcap = getattr(model.config, "final_logit_softcapping", None)
    with torch.no_grad():
        model.config.final_logit_softcapping = None
        found = explain(lm, TEXT, target, method="target_attribution")
        m = float(attndiag.score(lm, TEXT, target).values[0])
        model.config.final_logit_softcapping = softcap
    assert found.verified
    assert found.checks["completeness_error"] < 1e-5
    blocks = model.transformer.h if family == "gpt2" else model.model.layers
    final = model.transformer.ln_f if family == "gpt2" else model.model.norm
    streams: list[Tensor] = []
    handles = [block.register_forward_pre_hook(lambda _m, args: streams.append(args[0][0, -1])) for block in blocks]
    handles.append(final.register_forward_pre_hook(lambda _m, args: streams.append(args[0][0, -1])))
    middles: list[Tensor] = []
    for block in blocks:
        # the branch after its own norm, where it has one
        part = (
            block.post_attention_layernorm
            if family == "gemma2"
            else block.attn
            if family == "gpt2"
            else block.self_attn
        )
        handles.append(
            part.register_forward_hook(
                lambda _m, _a, out: middles.append((out if isinstance(out, Tensor) else out[0])[0, -1])
            )
        )
    with torch.no_grad():
        lm.run(lm.encode(TEXT).inputs)
    for handle in handles:
        handle.remove()
    hidden, h = streams[-1].requires_grad_(), streams[-1].detach()
    head = model.lm_head.weight[10].detach()
    gain = final.weight.detach() + (1.0 if family == "gemma2" else 0.0)
    if family == "gpt2":
        u = gain * head
        u = (u - u.mean()) / (h.var(correction=0) + final.eps).sqrt()
    else:
        u = gain * head / (h.square().mean() + getattr(final, "variance_epsilon", getattr(final, "eps", 0.0))).sqrt()
    bias = 0.0 if family != "gpt2" else float(final.bias.detach() @ head)
    assert float(hidden.detach() @ u) + bias == pytest.approx(m, rel=exact)
    for layer, added in enumerate(middles):
        parts = float(found.values[layer, :, -1].sum())
        b_o = model.transformer.h[layer].attn.c_proj.bias.detach() if family == "gpt2" else torch.zeros_like(u)
        assert parts + float(b_o @ u) == pytest.approx(float(added @ u), rel=exact, abs=exact)


def test_the_last_block_of_a_hybrid_may_have_no_attention(word_lm: Any) -> None:
    """LFM2 (conv, attention, attention, conv): the norm that counts is behind the last block, not inside it.

    Truth from the running model: what each attention branch adds to the stream at the read position, along the real
    final norm's L^T (W_U[a] - W_U[b]).
    """
    from transformers import Lfm2Config, Lfm2ForCausalLM

    kinds = ["conv", "full_attention", "full_attention", "conv"]
    config = Lfm2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, layer_types=kinds, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = Lfm2ForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6) if weight.ndim == 2 else weight.add_(torch.randn_like(weight) * 0.3)
    lm = word_lm(model)
    found = explain(lm, TEXT, TARGET, method="target_attribution")
    final = model.model.embedding_norm
    added: list[Tensor] = []
    ends: list[Tensor] = []
    handles = [
        model.model.layers[layer].self_attn.register_forward_hook(lambda _m, _a, out: added.append(out[0][0, -1]))
        for layer in (1, 2)
    ]
    handles.append(final.register_forward_pre_hook(lambda _m, args: ends.append(args[0][0, -1])))
    with torch.no_grad():
        lm.run(lm.encode(TEXT).inputs)
    for handle in handles:
        handle.remove()
    unembedding = model.lm_head.weight.detach()
    root = (ends[-1].square().mean() + final.variance_epsilon).sqrt()
    u = final.weight.detach() * (unembedding[10] - unembedding[20]) / root
    assert found.verified and found.params["norm"] == "model.embedding_norm"
    assert found.labels["layer"] == [1, 2]
    for row, branch in enumerate(added):
        assert abs(float(branch @ u)) > 0.01
        assert float(found.values[row, :, -1].sum()) == pytest.approx(float(branch @ u), rel=1e-4, abs=1e-5)


def test_a_final_norm_that_fits_only_roughly_is_not_verified(tiny_llama: LlamaForCausalLM, word_lm: Any) -> None:
    lm = word_lm(tiny_llama)
    with torch.no_grad():
        exact = explain(lm, TEXT, TARGET, method="target_attribution")
        plain = tiny_llama.model.norm.forward
        tiny_llama.model.norm.forward = lambda hidden: plain(hidden) * (1 + 1.5e-5)
        rough = explain(lm, TEXT, TARGET, method="target_attribution")
    assert exact.verified and exact.checks["norm_error"] < 1e-6
    assert rough.checks["norm_error"] == pytest.approx(1.5e-5, rel=0.05)
    assert rough.failures == ("the linearised norm misses the layer's output by 1.5e-05, above 1.0e-05",)


def test_blocks_of_several_lists_have_no_last_one(tiny_llama: LlamaForCausalLM, word_lm: Any) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_llama
            self.first, self.second = nn.ModuleList([layers[0]]), nn.ModuleList([layers[1]])
            self.config = tiny_llama.config

        def get_input_embeddings(self) -> nn.Module:
            return self.inner.get_input_embeddings()

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
            hidden = self.inner.model.embed_tokens(input_ids)
            places = torch.arange(input_ids.shape[1])[None]
            rotary = self.inner.model.rotary_emb(hidden, places)
            for block in (self.first[0], self.second[0]):
                hidden = block(hidden, position_embeddings=rotary)
            return SimpleNamespace(logits=self.inner.lm_head(self.inner.model.norm(hidden)))

    layers = list(tiny_llama.model.layers)
    tiny_llama.model.layers = nn.ModuleList()
    with pytest.raises(UnsupportedModelError, match="sit in first, second; target_attribution needs them in one list"):
        explain(word_lm(Halves()), TEXT, TARGET, method="target_attribution")


def test_the_direct_path_of_the_sink_model_is_its_edge_effect() -> None:
    """One layer and nothing behind it: what a key writes along the target is what removing its edge costs."""
    lm, prompt, target = known(sink_against_value())
    direct = explain(lm, prompt, target, method="target_attribution").values[0, :, -1]
    effect = explain(lm, prompt, target, method="edge_effect", queries=[-1]).values[0, :, -1]
    torch.testing.assert_close(direct[:, :2], effect[:, :2], atol=2e-3, rtol=2e-3)


def known(
    built: KnownModel, target: attndiag.Target | None = None
) -> tuple[LoadedModel, attndiag.Prompt, attndiag.Target]:
    words = {index: word for word, index in built.vocab.items()}
    text = " ".join(words[int(index)] for index in built.prompt_ids[0])
    lm = attndiag.load(built.model, tokenizer=built.tokenizer())
    return lm, attndiag.Prompt(text, id="p"), target or attndiag.Target.logit_diff("ANS", "FOIL")


def test_a_post_norm_model_has_no_direct_path(word_lm: Any) -> None:
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    config = OpenAIGPTConfig(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    lm = word_lm(OpenAIGPTLMHeadModel(config).eval())
    with pytest.raises(NotApplicableError, match=r"layers \[0, 1\] normalise the stream after each sum"):
        explain(lm, TEXT, TARGET, method="target_attribution")
    with pytest.raises(NotApplicableError, match=r"layers \[7\] have no attention weights; there are \[0, 1\]"):
        explain(lm, TEXT, TARGET, method="value_zeroing", layers=[7])


class WithoutValue:
    """A key whose value is zero, in the plainest way: the output of v_proj is overwritten."""

    def __init__(self, model: LlamaForCausalLM, key: int, layers: range | list[int]) -> None:
        def blank(_module: Any, _args: Any, output: Tensor) -> Tensor:
            output = output.clone()
            output[:, key] = 0
            return output

        self.handles = [model.model.layers[i].self_attn.v_proj.register_forward_hook(blank) for i in layers]

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def test_value_zeroing_is_what_happens_when_a_value_is_overwritten(tiny_llama: LlamaForCausalLM, word_lm: Any) -> None:
    model = tiny_llama.double()
    lm = word_lm(model)
    ids = lm.encode(TEXT).input_ids
    n = ids.shape[1]
    found = explain(lm, TEXT, method="value_zeroing", batch_tokens=3 * n)
    whole = explain(lm, TEXT, method="value_zeroing")
    torch.testing.assert_close(found.values, whole.values, atol=1e-10, rtol=1e-8)
    for layer in range(2):
        outputs: list[Tensor] = []
        handle = model.model.layers[layer].register_forward_hook(
            lambda _m, _a, out, kept=outputs: kept.append((out if isinstance(out, Tensor) else out[0])[0])
        )
        with torch.no_grad():
            model(ids)
            raw = torch.zeros(n, n, dtype=torch.float64)
            for key in range(n):
                with WithoutValue(model, key, [layer]):
                    model(ids)
                for query in range(n):
                    one, other = outputs[0][query], outputs[-1][query]
                    raw[query, key] = 1 - (one @ other) / (one.norm() * other.norm())
                    change = float((one - other).norm() / one.norm())
                    assert float(found.checks["relative_change"][layer, 0, query, key]) == pytest.approx(
                        change, abs=1e-9
                    )
        handle.remove()
        torch.testing.assert_close(found.checks["raw"][layer, 0], raw, atol=1e-12, rtol=1e-6)
        torch.testing.assert_close(found.values[layer, 0], raw / raw.sum(1, keepdim=True), atol=1e-9, rtol=1e-6)
    # the future does nothing, exactly
    assert float(found.checks["raw"].triu(1).abs().max()) == 0.0


def test_value_effects_are_what_happens_when_values_are_overwritten(tiny_llama: LlamaForCausalLM, word_lm: Any) -> None:
    model = tiny_llama.double()
    lm = word_lm(model)
    ids = lm.encode(TEXT).input_ids

    def m() -> float:
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
        return float(logits[10] - logits[20])

    for layers, given in ((range(2), None), ([1], [1])):
        found = explain(lm, TEXT, TARGET, method="value_zeroing_effect", layers=given)
        for key in range(ids.shape[1]):
            clean = m()
            with WithoutValue(model, key, layers):
                assert float(found.values[key]) == pytest.approx(clean - m(), abs=1e-10)
    one_head = explain(lm, TEXT, TARGET, method="value_zeroing_effect", layers=[1], heads=[2])
    edges = explain(lm, TEXT, TARGET, method="edge_effect", layers=[1], mode="remove", grain="key")
    # a value that is zero for one head is its key removed for every query
    torch.testing.assert_close(one_head.values, edges.values[0, 2].double(), atol=1e-7, rtol=0)
    mean = explain(lm, TEXT, TARGET, method="mean_value_effect", layers=[1])
    # on a prompt whose values are all equal there would be nothing to replace
    assert (
        float((mean.values - explain(lm, TEXT, TARGET, method="value_zeroing_effect", layers=[1]).values).abs().max())
        > 0
    )


def test_the_mean_value_is_the_mean_over_the_prompt(tiny_llama: LlamaForCausalLM, word_lm: Any) -> None:
    model = tiny_llama.double()
    lm = word_lm(model)
    ids = lm.encode(TEXT).input_ids

    def mean_at(key: int) -> Any:
        def replace(_module: Any, _args: Any, output: Tensor) -> Tensor:
            output = output.clone()
            output[:, key] = output.mean(1)
            return output

        return model.model.layers[0].self_attn.v_proj.register_forward_hook(replace)

    found = explain(lm, TEXT, TARGET, method="mean_value_effect", layers=[0])
    with torch.no_grad():
        clean = model(ids).logits[0, -1]
        for key in range(ids.shape[1]):
            handle = mean_at(key)
            logits = model(ids).logits[0, -1]
            handle.remove()
            expected = float((clean[10] - clean[20]) - (logits[10] - logits[20]))
            assert float(found.values[key]) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("build", [induction_gpt2, duplicated_induction])
def test_induction_looks_where_the_copied_token_stands(build: Any) -> None:
    """On `[BOS] s s`, from the second copy's end, the induction head reads the token after the first occurrence."""
    built = build()
    lm = attndiag.load(built.model, tokenizer=built.tokenizer())
    words = {index: word for word, index in built.vocab.items()}
    ids = [int(index) for index in built.prompt_ids[0][:-5]]
    prompt = attndiag.Prompt(" ".join(words[index] for index in ids), id="p")
    follower = ids.index(ids[-1]) + 1
    target = attndiag.Target.logit(words[ids[follower]])
    found = explain(lm, prompt, target, method="induction")
    heads = [head[:2] for head in found.checks["heads"]]
    assert set(heads) == ({(1, 0)} if build is induction_gpt2 else {(1, 0), (1, 1)})
    assert found.values.argmax() == follower
    assert float(found.values[follower]) == pytest.approx(1.0, abs=1e-5)
    with attndiag.capture(lm) as captured:
        lm.forward(prompt)
    replica = torch.stack([captured.calls[1].pattern[0, head, -1] for _, head in heads]).double().mean(0)
    torch.testing.assert_close(found.values, replica)
    # what the head writes from there along the answer is the whole answer
    run = PromptMethods(lm, token_axis(lm, prompt, target))
    assert int(np.nanargmax(run.scores("target_attribution").values)) == follower
    assert int(np.nanargmax(run.scores("edge_effect@L1H0").values)) == follower or build is duplicated_induction
    assert run.scores("induction@L1H0").values.argmax() == follower
    with pytest.raises(NotApplicableError, match=r"induction@L0: no head .* of 0\.4 or more \(the highest is L0H"):
        run.scores("induction@L0")
    with pytest.raises(NotApplicableError, match="none was measured there"):
        run.scores("induction@L7")
    with pytest.raises(NotApplicableError, match="names its heads itself"):
        run.scores("induction@L1", heads=[(1, 0)])


def test_a_model_without_induction_heads_says_so(llama_lm: LoadedModel) -> None:
    with pytest.raises(
        NotApplicableError, match=r"no head with a prefix-matching score of 0\.4 or more \(the highest is L"
    ):
        explain(llama_lm, TEXT, TARGET, method="induction")
    with pytest.raises(NotApplicableError, match=r"no attention weights of \[\(1, 9\), \(9, 9\)\]"):
        explain(llama_lm, TEXT, TARGET, method="induction", heads=[(1, 2), (1, 9), (9, 9)])


def test_the_probe_is_run_again_when_the_model_has_changed(llama_lm: LoadedModel) -> None:
    first = prefix_matching(llama_lm)
    assert prefix_matching(llama_lm) is first
    attention = llama_lm.model.model.layers[0].self_attn
    with torch.no_grad():
        attention.q_proj.weight.mul_(-1)
    second = prefix_matching(llama_lm)
    assert second != first
    # behind autograd's back: neither place nor version of the parameter changes
    attention.q_proj.weight.data.mul_(-1)
    assert prefix_matching(llama_lm) == first
    # an adapter that is switched on changes no weight at all
    handle = attention.k_proj.register_forward_hook(lambda _m, _a, output: 3 * output)
    switched = prefix_matching(llama_lm)
    assert switched not in (first, second)
    handle.remove()
    assert prefix_matching(llama_lm) == first


def test_named_heads_need_no_probe(llama_lm: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(_lm: LoadedModel) -> None:
        raise AssertionError("the probe ran")

    monkeypatch.setattr(induction_attention, "prefix_matching", probe)
    found = explain(llama_lm, TEXT, TARGET, method="induction", heads=[(1, 2), (0, 1)])
    assert found.checks["heads"] == [(1, 2, None), (0, 1, None)]
    with torch.no_grad(), attndiag.capture(llama_lm) as captured:
        llama_lm.run(llama_lm.encode(TEXT).inputs)
    expected = (captured.calls[1].pattern[0, 2, -1] + captured.calls[0].pattern[0, 1, -1]).double() / 2
    torch.testing.assert_close(found.values, expected)
    with pytest.raises(NotApplicableError, match="heads is empty"):
        explain(llama_lm, TEXT, TARGET, method="induction", heads=[])


@pytest.mark.parametrize("name", PLACED)
def test_one_layer_and_one_head_of_everything_that_has_them(name: str, llama_lm: LoadedModel) -> None:
    """Units of the target add up over layers and heads where nothing is edited together; shares are means."""
    run = PromptMethods(llama_lm, token_axis(llama_lm, attndiag.Prompt(TEXT), TARGET))
    given = {"threshold": 0.0} if name == "induction" else {"norm": "next"} if name == "contribution_norm" else {}
    whole = run.scores(name, **given).values
    layers = [run.scores(f"{name}@L{layer}", **given).values for layer in range(2)]
    assert all(one.shape == whole.shape == (7,) for one in layers)
    assert not np.array_equal(layers[0], layers[1])
    summed = ("contribution", "contribution_residual", "contribution_norm", "alti", "projection")
    if name in summed:
        with pytest.raises(NotApplicableError, match="no heads, all are summed"):
            run.scores(f"{name}@L1H2", **given)
        heads = []
    else:
        heads = [run.scores(f"{name}@L1H{head}", **given).values for head in range(4)]
        with pytest.raises(AttnDiagError, match=r"heads 0 to 3|none was measured|head 9"):
            run.scores(f"{name}@L1H9", **given)
    with pytest.raises(AttnDiagError, match=r"\[0, 1\]|none was measured|layers 0 to 1"):
        run.scores(f"{name}@L9", **given)
    if name in ("pattern_attribution", "edge_effect", "target_attribution"):
        np.testing.assert_allclose(sum(layers), whole, atol=1e-5)
        np.testing.assert_allclose(sum(heads), layers[1], atol=1e-5)
    elif name in ("weight", "value_norm", "head_contribution"):
        np.testing.assert_allclose(np.mean(layers, axis=0), whole, atol=1e-7)
        np.testing.assert_allclose(np.mean(heads, axis=0), layers[1], atol=1e-7)
    elif name in summed:
        np.testing.assert_allclose(np.mean(layers, axis=0), whole, atol=1e-7)


def test_parameters_reach_the_method_or_are_refused(llama_lm: LoadedModel) -> None:
    run = PromptMethods(llama_lm, token_axis(llama_lm, attndiag.Prompt(TEXT), TARGET))
    with pytest.raises(NotApplicableError, match="norm="):
        run.scores("contribution_norm")
    assert np.isfinite(run.scores("contribution_norm", norm="next").values).all()
    with pytest.raises(UnknownParameterError, match="no parameter 'nrom'"):
        run.scores("weight", nrom=1)
    with pytest.raises(UnknownParameterError, match="rollout has no parameter 'x'"):
        run.scores("rollout", x=1)


def test_value_zeroing_rolled_out_over_layers(llama_lm: LoadedModel) -> None:
    run = PromptMethods(llama_lm, token_axis(llama_lm, attndiag.Prompt(TEXT), TARGET))
    first, second = explain(llama_lm, TEXT, method="value_zeroing").values[:, 0]
    np.testing.assert_allclose(run.scores("value_zeroing_rollout").values, (second @ first)[-1], atol=1e-9)


NEW = ["target_attribution", "value_zeroing", "value_zeroing_effect", "mean_value_effect", "value_zeroing_rollout"]


@pytest.mark.parametrize("text", ["😀👩‍👩‍👧 ok", "שלום עולם", "\u202eabc\u202c", "a", "e\u0301\u0301", "\t \n"])
def test_strange_prompts_get_numbers_or_reasons(text: str, tiny_folder: Any) -> None:
    lm = attndiag.load(str(tiny_folder))
    found = compare(
        lm, attndiag.Prompt(text, id="odd"), [*NEW, "induction", "value_zeroing@L1H2"], replacements=[], metrics=[]
    )
    n = len(lm.encode(text).tokens[0])
    measured = set(found.scores.method)
    assert set(NEW) <= measured
    for name in measured:
        mine = found.scores[found.scores.method == name]
        assert len(mine) == n
        assert np.isfinite(mine.score).all()
    # no induction heads in a random model: a reason, not zeros
    assert found.problems.method.tolist() == ["induction"]
    assert "prefix-matching score" in found.problems.reason[0]


def test_a_target_behind_a_continuation_is_no_target_of_a_row() -> None:
    known = sink_against_value()
    lm = attndiag.load(known.model, tokenizer=known.tokenizer())
    axis = token_axis(lm, attndiag.Prompt("<bos> MARK a b"), attndiag.Target.continuation_logprob(" c Q"))
    methods = PromptMethods(lm, axis)
    for name in ("weight", "contribution", "rollout"):
        with pytest.raises(NotApplicableError, match="read behind a continuation"):
            methods.scores(name)

"""`contributions` on captured calls: known answers, an independent replica from hooks alone, and clear refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    DynamicCache,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)

import attndiag
from attndiag.errors import NotApplicableError
from attndiag.models import known


def capture_one(model, ids: Tensor, layer: int = 0):
    with torch.no_grad(), attndiag.capture(model, layers=[layer]) as captured:
        model(ids)
    return captured.calls[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["reference", "fused", "auto"])
def test_sink_model_weights_mislead_on_head_0_and_not_on_head_1(dtype, backend):
    sink = known.sink_against_value(dtype=dtype)
    call = capture_one(sink.model, sink.prompt_ids)
    weight_of = attndiag.contributions(call, "weight").require_verified().values[0, :, -1]
    written = attndiag.contributions(call, "head_contribution", backend=backend)
    written_of = written.require_verified().values[0, :, -1]
    for kind, values in (("weight", weight_of), ("head_contribution", written_of)):
        for (_, head, _, key), expected in sink.expected[kind].items():
            assert float(values[head, key]) == pytest.approx(expected, abs=4e-6)
    # said once in plain numbers: nine tenths of the weight write almost nothing on head 0
    assert [round(float(written_of[0, key]), 3) for key in (0, 1)] == [0.009, 1.0]
    assert [round(float(written_of[1, key]), 3) for key in (0, 1)] == [0.9, 0.1]


def parts_from_hooks(model, ids: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """T [query, key, d] of a Llama layer in float64, from module hooks and eager weights alone."""
    attention = model.model.layers[layer].self_attn
    seen: dict[str, Tensor] = {}
    handles = [
        attention.v_proj.register_forward_hook(lambda _m, _a, out: seen.update(v=out)),
        model.model.layers[layer].register_forward_pre_hook(lambda _m, args: seen.update(x=args[0])),
        attention.o_proj.register_forward_hook(lambda _m, _a, out: seen.update(o=out)),
    ]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        pattern = model(ids, output_attentions=True).attentions[layer][0].double()
    model.set_attn_implementation("sdpa")
    for handle in handles:
        handle.remove()
    heads, n = pattern.shape[0], pattern.shape[1]
    v = seen["v"][0].double().reshape(n, -1, 8)
    w = attention.o_proj.weight.detach().double()
    parts = torch.zeros(n, n, w.shape[0], dtype=torch.float64)
    for head in range(heads):
        f = v[:, head // (heads // v.shape[1])] @ w[:, head * 8 : head * 8 + 8].T
        parts += pattern[head][:, :, None] * f[None]
    return parts, seen["x"][0].double(), seen["o"][0].double()


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_every_kind_equals_a_replica_from_hooks(tiny_llama, backend):
    ids = torch.randint(2, 64, (1, 12))
    parts, x, out = parts_from_hooks(tiny_llama, ids, 1)
    call = capture_one(tiny_llama, ids, 1)
    torch.testing.assert_close(parts.sum(1), out, atol=1e-5, rtol=1e-5)

    def check(kind: str, expected: Tensor, **options) -> None:
        scores = attndiag.contributions(call, kind, backend, **options).require_verified()
        seen.add(scores.provenance["backend"])
        torch.testing.assert_close(scores.values[0].double(), expected, atol=2e-5, rtol=2e-5)

    seen: set[str] = set()
    own = torch.eye(12, dtype=torch.float64)[..., None] * x[None]
    check("contribution", parts.norm(dim=-1))
    check("contribution_residual", (parts + own).norm(dim=-1))
    check("projection", (parts * out[:, None]).sum(-1) / out.norm(dim=-1, keepdim=True))
    mixed = (parts * (1 - torch.eye(12, dtype=torch.float64))[..., None]).sum(1).norm(dim=-1)
    kept = (parts.diagonal().T + x).norm(dim=-1)
    check("mixing_ratio", mixed / (mixed + kept))
    u = torch.randn(32, dtype=torch.float64)
    attribution = attndiag.contributions(call, "target_attribution", backend, direction=u, query=7)
    assert attribution.sign == "signed"
    torch.testing.assert_close(attribution.values[0].sum(0).double(), parts[7] @ u, atol=2e-5, rtol=2e-5)
    y = parts.sum(1) + x
    raw = (y.abs().sum(-1)[:, None] - (y[:, None] - parts - own).abs().sum(-1)).clamp_min(0)
    check("alti", raw / raw.sum(-1, keepdim=True))
    # the norm that reads the stream after attention, linearised at its real input
    norm = tiny_llama.model.layers[1].post_attention_layernorm
    scale = (y.square().mean(-1) + norm.variance_epsilon).sqrt()
    after = (parts + own) * norm.weight.detach().double() / scale[:, None, None]
    check("contribution_norm", after.norm(dim=-1), norm="next")
    assert seen == ({"reference"} if backend == "reference" else {"reference", "fused"})


def test_post_norm_parts_sum_to_what_the_layer_norm_returned():
    torch.manual_seed(0)
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    model = BertModel(config).eval()
    for name, weight in model.named_parameters():
        weight.data.mul_(6) if weight.ndim == 2 else weight.data.add_(torch.randn_like(weight) * 0.2 * ("bias" in name))
    seen = {}
    norm = model.encoder.layer[1].attention.output.LayerNorm
    handle = norm.register_forward_hook(lambda _m, args, out: seen.update(h=args[0], y=out))
    ids = torch.randint(2, 64, (1, 9))
    call = capture_one(model, ids, 1)
    handle.remove()
    scores = attndiag.contributions(call, "contribution_norm").require_verified()
    # replica: LayerNorm of the full sum, minus LayerNorm without one part, is linear once its scale is frozen
    h = seen["h"][0].double()
    scale = (h.var(-1, correction=0) + norm.eps).sqrt()
    gain = norm.weight.detach().double()
    pattern, v, w = call.pattern[0].double(), call.v[0].double(), call.w_o.double()
    parts = (
        torch.einsum("hij,hjc,hcd->ijd", pattern, v, w)
        + torch.eye(9)[..., None] * call.site.resid_pre[0].double()[None]
    )
    linear = (parts - parts.mean(-1, keepdim=True)) * gain / scale[:, None, None]
    torch.testing.assert_close(scores.values[0].double(), linear.norm(dim=-1), atol=2e-5, rtol=2e-5)
    bias = (call.b_o.double() - call.b_o.double().mean()) * gain / scale[:, None] + norm.bias.detach().double()
    torch.testing.assert_close((linear.sum(1) + bias).float(), seen["y"][0], atol=1e-5, rtol=1e-5)


def test_pre_norm_has_no_norm_of_its_own(tiny_llama):
    call = capture_one(tiny_llama, torch.arange(2, 12)[None])
    with pytest.raises(NotApplicableError, match='norm="next"'):
        attndiag.contributions(call, "contribution_norm")


@pytest.mark.parametrize(
    ("family", "extra"),
    [("granite", {"residual_multiplier": 0.25}), ("gemma2", {"head_dim": 8}), ("olmo2", {}), ("gpt_neox", {})],
)
def test_residual_parts_sum_to_the_stream(family, extra):
    """Multipliers, sandwich norms and parallel blocks: the parts and the bias add up to what is in the stream."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, bos_token_id=0, eos_token_id=0, pad_token_id=0, **extra,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        weight.data.mul_(6) if weight.ndim == 2 else weight.data.add_(torch.randn_like(weight) * 0.1)
    call = capture_one(model, torch.randint(2, 64, (1, 9)), 1)
    site = call.site
    assert site.multiplier == pytest.approx(extra.get("residual_multiplier", 1.0), abs=1e-6)
    from attndiag.core.contributions import part_blocks
    from attndiag.explanations.contribution_backends import folded_output

    folded = folded_output(call, call.w_o.double(), call.b_o.double(), norm=None)
    total = torch.zeros(9, 32, dtype=torch.float64)
    for rows, parts in part_blocks(
        call.pattern.double(), call.v.double(), folded.w_o, residual=folded.residual, row_scale=folded.row_scale
    ):
        total[rows] = parts[0].sum(1)
    total = (total + folded.bias).reshape(9, 32)
    if site.resid_mid is not None:
        torch.testing.assert_close(total.float(), site.resid_mid[0], atol=2e-5, rtol=2e-5)
    else:
        branch = call.attn_out if site.branch_norm is None else site.branch_norm.output
        torch.testing.assert_close(total.float(), (site.resid_pre + branch)[0], atol=2e-5, rtol=2e-5)
    assert attndiag.contributions(call, "contribution_residual").verified


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize(
    ("family", "extra"), [("granite", {"residual_multiplier": 0.22}), ("gemma2", {"head_dim": 8}), ("olmo2", {})]
)
def test_target_attribution_adds_up_to_what_the_branch_adds(family, extra, backend):
    """The branch factor and the sandwich norm stand between W_O and the stream that u lives in."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=0, pad_token_id=0, **extra,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        weight.data.mul_(6) if weight.ndim == 2 else weight.data.add_(torch.randn_like(weight) * 0.3)
    block, seen = model.model.layers[1], {}
    branch = block.self_attn if family == "granite" else block.post_attention_layernorm
    handle = branch.register_forward_hook(lambda _m, _a, out: seen.update(added=out if family != "granite" else out[0]))
    call = capture_one(model, torch.randint(2, 64, (2, 9)), 1)
    handle.remove()
    u = torch.randn(32)
    scores = attndiag.contributions(call, "target_attribution", backend, direction=u, query=7).require_verified()
    truth = extra.get("residual_multiplier", 1.0) * seen["added"][:, 7] @ u
    assert float(truth.abs().min()) > 0.03
    torch.testing.assert_close(scores.values.sum((1, 2)), truth, rtol=1e-4, atol=1e-4)
    # without the fold it is another number
    plain = call.attn_out[:, 7] @ u
    assert not torch.allclose(plain, truth, rtol=0.1, atol=0.01)
    assert scores.params == {}


@pytest.mark.parametrize(("kind", "more"), [("target_attribution", {"query": 3}), ("contribution_residual", {})])
@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_a_norm_that_fits_only_roughly_is_not_verified(kind, more, backend):
    """Near enough to tell its form (2e-5), too far for numbers that count as verified (1e-5)."""
    gemma = known.loud_gemma2()
    norm = gemma.model.model.layers[0].post_attention_layernorm
    given = more | ({"direction": torch.randn(norm.weight.shape[0])} if more else {})

    def scores():
        return attndiag.contributions(capture_one(gemma.model, gemma.prompt_ids), kind, backend, **given)

    exact = scores()
    assert exact.verified and exact.checks["norm_error"] < 1e-6
    plain = norm.forward
    norm.forward = lambda hidden: plain(hidden) * (1 + 1.5e-5)
    rough = scores()
    assert rough.checks["norm_error"] == pytest.approx(1.5e-5, rel=0.05)
    assert [text for text in rough.failures if "the linearised norm misses the layer's output by 1.5e-05" in text]
    # no norm, no error of one
    kind, given = "contribution", {}
    assert "norm_error" not in scores().checks


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_target_attribution_of_a_post_norm_block_says_where_its_direction_stands(backend):
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )  # fmt: skip
    call = capture_one(BertModel(config).eval(), torch.randint(2, 64, (1, 9)))
    u = torch.randn(32)
    scores = attndiag.contributions(call, "target_attribution", backend, direction=u, query=3).require_verified()
    assert scores.params == {"direction": "before the norm"}
    added = (call.attn_out[0, 3] - call.b_o) @ u
    torch.testing.assert_close(scores.values.sum(), added, rtol=1e-4, atol=1e-5)


def test_cross_attention_has_contributions_and_no_diagonal():
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "bart", vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
    )  # fmt: skip
    model = AutoModel.from_config(config).eval()
    with torch.no_grad(), attndiag.capture(model) as captured:
        model(input_ids=torch.randint(2, 64, (1, 9)), decoder_input_ids=torch.randint(2, 64, (1, 5)))
    cross = next(c for c in captured.calls if c.kind == "cross")
    assert attndiag.contributions(cross).require_verified().values.shape == (1, 5, 9)
    with pytest.raises(NotApplicableError, match="no key is the query itself"):
        attndiag.contributions(cross, "contribution_residual")


def test_behind_a_cache_the_diagonal_moves(tiny_llama):
    ids = torch.randint(2, 64, (1, 12))
    whole = attndiag.contributions(capture_one(tiny_llama, ids, 1), "contribution_residual").values
    with torch.no_grad():
        past = tiny_llama(ids[:, :8]).past_key_values
        with attndiag.capture(tiny_llama, layers=[1]) as captured:
            tiny_llama(ids[:, 8:], past_key_values=past)
    tail = attndiag.contributions(captured.calls[0], "contribution_residual").require_verified().values
    torch.testing.assert_close(tail, whole[:, 8:], atol=1e-5, rtol=1e-4)


def test_fused_refuses_what_it_cannot_do_and_auto_falls_back_without_changing_a_number(tiny_llama):
    call = capture_one(tiny_llama, torch.arange(2, 12)[None])
    with pytest.raises(NotApplicableError, match=r"not alti.*reference"):
        attndiag.contributions(call, "alti", backend="fused")
    wrong = replace(call, scale=call.scale * 1.1)
    with pytest.raises(NotApplicableError, match="formula misses"):
        attndiag.contributions(wrong, backend="fused")
    bloom = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("bloom", vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    ).eval()
    traced = capture_one(bloom, torch.arange(2, 12)[None])
    with pytest.raises(NotApplicableError, match="q and k were not seen"):
        attndiag.contributions(traced, backend="fused")
    auto, reference = attndiag.contributions(traced), attndiag.contributions(traced, backend="reference")
    assert auto.provenance["backend"] == "reference"
    assert torch.equal(auto.values, reference.values)


RESIDUAL_KINDS = ("contribution_residual", "mixing_ratio", "alti", "alti_l2")


@pytest.mark.parametrize("parts", [[9], [5, 4], [5, 1, 3]])
def test_a_static_cache_tells_its_diagonal(tiny_llama, parts):
    ids = torch.randint(2, 64, (2, 9))
    whole = capture_one(tiny_llama, ids, 1)
    cache = StaticCache(config=tiny_llama.config, max_cache_len=14)
    with torch.no_grad(), attndiag.capture(tiny_llama, layers=[1]) as captured:
        for part in ids.split(parts, dim=1):
            tiny_llama(part, past_key_values=cache)
    assert [call.past for call in captured.calls] == [sum(parts[:index]) for index in range(len(parts))]
    for kind in ("contribution", *RESIDUAL_KINDS):
        expected = attndiag.contributions(whole, kind).values
        steps = [attndiag.contributions(call, kind) for call in captured.calls]
        assert all(step.verified for step in steps)
        if kind == "mixing_ratio":
            torch.testing.assert_close(torch.cat([s.values for s in steps], 1), expected, atol=1e-5, rtol=1e-4)
            continue
        joined = torch.cat([step.values for step in steps], -2)
        torch.testing.assert_close(joined[..., :9], expected, atol=1e-5, rtol=1e-4)
        assert float(joined[..., 9:].abs().max()) == 0.0


def test_a_sliding_cache_counts_from_what_is_left():
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=5, bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    ids = torch.randint(2, 64, (1, 12))
    expected = attndiag.contributions(capture_one(model, ids, 1), "contribution_residual").values
    for cache in (DynamicCache(config=config), StaticCache(config=config, max_cache_len=16)):
        seen: list[tuple[int | None, Tensor]] = []

        def look(call, seen=seen) -> None:  # at once: a static cache goes on to overwrite these very tensors
            scores = attndiag.contributions(call, "contribution_residual").require_verified()
            seen.append((call.past, scores.values[0, 0, call.diagonal_offset]))

        with torch.no_grad(), attndiag.capture(model, layers=[1], on_call=look):
            for part in ids.split([9, 1, 1, 1], dim=1):
                model(part, past_key_values=cache)
        assert [past for past, _ in seen] == [0, 9, 10, 11]
        for query, own in seen[1:]:
            torch.testing.assert_close(own, expected[0, query, query], atol=1e-5, rtol=1e-4)


def test_room_behind_the_newest_key_is_no_diagonal_to_guess(tiny_llama):
    cache = StaticCache(config=tiny_llama.config, max_cache_len=9)
    with torch.no_grad(), attndiag.capture(tiny_llama, layers=[1]) as captured:
        tiny_llama(torch.randint(2, 64, (1, 6)), past_key_values=cache)
    call = replace(captured.calls[0], past=None)
    for kind in RESIDUAL_KINDS:
        with pytest.raises(NotApplicableError, match="dynamic cache"):
            attndiag.contributions(call, kind)
    with pytest.raises(NotApplicableError, match="room behind its newest key"):
        attndiag.contributions(captured.calls[0], "contribution_residual", backend="fused")


def test_wrong_names_are_refused_with_the_right_ones(tiny_llama):
    call = capture_one(tiny_llama, torch.arange(2, 12)[None])
    with pytest.raises(NotApplicableError, match="expected one of weight"):
        attndiag.contributions(call, "importance")
    with pytest.raises(NotApplicableError, match="expected one of auto"):
        attndiag.contributions(call, "weight", backend="cuda")
    with pytest.raises(NotApplicableError, match="expected one of own"):
        attndiag.contributions(call, "contribution_norm", norm="nxt")
    with pytest.raises(NotApplicableError, match="expected full or sampled"):
        attndiag.contributions(call, "weight", certificate="ful")
    with pytest.raises(NotApplicableError, match="direction"):
        attndiag.contributions(call, "target_attribution")


def test_scores_carry_what_is_needed_to_read_them(tiny_llama):
    scores = attndiag.contributions(capture_one(tiny_llama, torch.arange(2, 12)[None]))
    frame = scores.to_frame()
    assert len(frame) == 100
    assert set(frame.columns) == {"batch", "query_pos", "key_pos", "value", "method", "unit"}
    assert frame.unit.unique().tolist() == ["residual norm"]
    assert 0 <= scores.checks["completeness_error"] < 1e-6
    assert 0 < scores.checks["smallest_cancellation"] <= 1
    assert scores.provenance["kernel"] == "sdpa"

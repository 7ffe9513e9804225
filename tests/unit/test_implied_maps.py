"""Maps implied by mixers without a softmax reproduce the mixers, and are refused where there is none."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from attndiag import implied_maps
from attndiag.core.scoring import linear_attention_outputs, linear_attention_weights
from attndiag.models.known import sound_llama

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.randint(2, 60, (2, 10), generator=torch.Generator().manual_seed(0))


def built(family: str, **settings) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(6)
    return model


def minimax() -> nn.Module:
    return built(
        "minimax", **SIZES, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1,
        block_size=4, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip


def qwen3_next() -> nn.Module:
    return built(
        "qwen3_next", **SIZES, num_key_value_heads=2, head_dim=8, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip


def mamba2() -> nn.Module:
    return built(
        "mamba2", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, n_groups=2,
        chunk_size=4, expand=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("build", "columns", "count"),
    [(minimax, "token", 1), (qwen3_next, "post_convolution", 1), (mamba2, "post_convolution", 2)],
)
def test_maps_reproduce_the_core_and_the_output(build, columns, count):
    model = build()
    maps, refused = implied_maps(model, inputs={"input_ids": IDS})
    assert not refused
    assert len(maps) == count
    for name, found in maps.items():
        assert found.columns == columns
        assert found.core_error < 1e-5
        assert found.output_error < 1e-5
        assert found.unfrozen_error > 1e-2  # without freezing the parts do not add up
        head_map = found.head_map
        future = torch.ones(10, 10).triu(1).bool()
        assert float(head_map[..., future].abs().max()) == pytest.approx(0.0, abs=1e-6)
        assert tuple(found.row_sums.shape) == (2, head_map.shape[1], 10)
        assert 0 <= found.negative_share <= 1
        facts = found.facts()
        assert facts["columns"] == columns
        assert facts["row_sum_smallest"] <= facts["row_sum_largest"]
        assert abs(facts["row_sum_largest"] - 1) > 1e-3  # not a softmax
        module = model.get_submodule(name)
        seen = {}
        handle = module.register_forward_hook(lambda _m, _a, out, seen=seen: seen.setdefault("out", out))
        with torch.no_grad():
            model(IDS)
        handle.remove()
        output = seen["out"][0] if isinstance(seen["out"], tuple) else seen["out"]
        parts = found.map * found.values[:, None] * found.factor[:, :, None]
        projected = parts.flatten(3) @ found.output_weight.T
        scale = float(output.abs().max())
        torch.testing.assert_close(projected.sum(2), output, atol=1e-5 * scale, rtol=1e-4)
        torch.testing.assert_close(found.contributions(), projected.norm(dim=-1))


def test_linear_attention_map_is_the_formula():
    """MiniMax's decayed q.k, written down from the paper's recurrence, against the probed map."""
    model = minimax()
    found = implied_maps(model, inputs={"input_ids": IDS})[0]["model.layers.0.self_attn"]
    assert found.map.shape[-1] == 1
    seen = {}
    module = model.model.layers[0].self_attn
    handle = module.act_fn.register_forward_hook(lambda _m, _a, out: seen.setdefault("qkv", out))
    with torch.no_grad():
        model(IDS)
    handle.remove()
    q, k, _ = seen["qkv"].unflatten(-1, (4, 24)).split(8, -1)
    ratio = torch.exp(-module.slope_rate).flatten()
    for head in range(4):
        for i in range(10):
            for j in range(i + 1):
                expected = float(q[0, i, head] @ k[0, j, head] * ratio[head] ** (i - j))
                assert float(found.head_map[0, head, i, j]) == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_reference_linear_attention_is_reproduced_value_by_value():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    weights = linear_attention_weights(q, k, mask=mask)
    for j in range(6):
        one = torch.zeros_like(v)
        one[:, :, j] = 1.0
        column = linear_attention_outputs(q, k, one, causal=True)[..., 0]
        torch.testing.assert_close(column.transpose(1, 2), weights[..., j])


def test_models_without_such_layers_and_named_refusals():
    assert implied_maps(sound_llama().model) == ({}, {})
    model = built("rwkv", vocab_size=64, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    maps, refused = implied_maps(model, inputs={"input_ids": IDS})
    assert not maps
    assert all("no scan with values" in reason for reason in refused.values())
    assert refused


def test_a_scan_that_is_not_linear_is_refused_with_its_error(monkeypatch):
    from transformers.models.mamba2 import modeling_mamba2

    model = mamba2()
    real = modeling_mamba2.mamba2_chunk_scan

    @functools.wraps(real)
    def bent(x, *args, **kwargs):
        return real(torch.tanh(3 * x), *args, **kwargs)

    monkeypatch.setattr(modeling_mamba2, "mamba2_chunk_scan", bent)
    maps, refused = implied_maps(model, inputs={"input_ids": IDS})
    assert not maps
    assert all("is not linear in its values" in reason for reason in refused.values())
    assert modeling_mamba2.mamba2_chunk_scan is bent  # what was there before is there again

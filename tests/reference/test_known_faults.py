"""Planted faults reach exactly as far as recorded, controls nowhere; loud models punish every forgotten part.

The audits here are plain: replace a token and look, or change one key and value on stock routing and look.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

from attndiag.errors import UnsupportedModelError
from attndiag.models.known import KNOWN_MODELS, KnownModel, future_leak, sound_llama

DTYPES = [torch.float32, torch.float64]
AUDITED = [name for name, build in KNOWN_MODELS.items() if build.__module__.endswith("faulty") and "scale" not in name]
LOUD = [name for name in KNOWN_MODELS if name.startswith("loud_")]


@contextlib.contextmanager
def attention_calls(
    replace: Callable[[int, tuple[Tensor, Tensor, Tensor]], tuple[Tensor, Tensor, Tensor]] | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """Every call of an attention function on stock routing; `replace` may change q, k, v of the n-th call."""
    calls: list[dict[str, Any]] = []
    stock = AttentionInterface.get_interface

    def spied(self: AttentionInterface, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = stock(self, implementation, default)

        def call(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
            if replace is not None:
                q, k, v = replace(len(calls), (q, k, v))
            out = function(module, q, k, v, mask, **kwargs)
            calls.append({"module": module, "q": q, "k": k, "v": v, "mask": mask, "z": out[0], "pattern": out[1]})
            calls[-1].update(kwargs)
            return out

        return call

    AttentionInterface.get_interface = spied
    try:
        yield calls
    finally:
        AttentionInterface.get_interface = stock


def real(built: KnownModel) -> Tensor:
    """Positions that are not padding, [batch, position]."""
    return built.inputs.get("attention_mask", torch.ones_like(built.prompt_ids)).bool()


@torch.no_grad()
def reach(built: KnownModel, row: int, position: int) -> Tensor:
    """Which outputs [batch, position] move when one token is replaced."""
    clean = built.model(**built.batch()).logits
    ids = built.prompt_ids.clone()
    ids[row, position] = 2 + (ids[row, position] + 5) % 30
    moved = built.model(**{**built.batch(), "input_ids": ids}).logits
    return (moved - clean).abs().amax(-1) > 1e-5


@torch.no_grad()
def reach_in_attention(built: KnownModel, position: int) -> Tensor:
    """Which layer-0 head outputs of row 0 move when k and v change at one position alone, [position]."""
    with attention_calls() as calls:
        built.model(**built.batch())
    clean = calls[0]

    def nudge(index: int, qkv: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (part.clone() for part in qkv)
        if index == 0:
            k[:, :, position] += 1
            v[:, :, position] += 1
        return q, k, v

    with attention_calls(nudge) as nudged:
        built.model(**built.batch())
    return (nudged[0]["z"] - clean["z"]).abs().amax((-1, -2))[0] > 1e-5


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", AUDITED)
def test_planted_faults_reach_exactly_as_far_as_recorded(name: str, implementation: str) -> None:
    built = KNOWN_MODELS[name]()
    built.model.set_attn_implementation(implementation)
    expected = built.expected
    assert (expected["fault"] is None) == name.startswith("sound")
    n = built.prompt_ids.shape[1]
    position = n - 4
    moved = reach(built, 0, position)
    earlier = moved[0, :position].nonzero().flatten().tolist()
    if expected["future_reach"] is None:
        assert earlier == list(range(position))
    else:
        assert earlier == list(range(position - expected["future_reach"], position))
    assert bool(moved[1:].any()) == expected["batch_leak"]
    if built.inputs:
        seen = [bool((reach(built, row, 0) & real(built))[row].any()) for row in (1, 2)]
        assert seen == [expected["padding_leak"]] * 2
    direct = reach_in_attention(built, position)
    assert bool(direct[position]) == expected["diagonal_visible"]
    if expected["vanishes_when_frozen"] is not None and not built.inputs and expected["window"] is None:
        assert bool(direct[:position].any()) != expected["vanishes_when_frozen"]
    if expected["window"] is not None:
        first = reach_in_attention(built, 0).nonzero().flatten().tolist()
        assert first == list(range(expected["window"]))


def test_padding_does_not_leak_from_the_sound_control() -> None:
    built = sound_llama(padded=True)
    padded = ~real(built)
    assert int(padded.sum()) == 6
    assert not bool((reach(built, 2, 1) & real(built)).any())
    leaking = KNOWN_MODELS["padding_leak"]()
    assert torch.equal(real(leaking), real(built))


def test_two_leaking_layers_reach_two_positions() -> None:
    built = future_leak(layers=(0, 1))
    assert built.expected["future_reach"] == 2
    assert reach(built, 0, 6)[0, :6].nonzero().flatten().tolist() == [4, 5]


def test_inverted_mask_rows() -> None:
    built = KNOWN_MODELS["inverted_mask"]()
    with torch.no_grad():
        patterns = built.model(built.prompt_ids, output_attentions=True).attentions
    faulty, sound = patterns[0][0, 0], patterns[1][0, 0]
    assert float(faulty[:-1].tril().abs().max()) == 0
    torch.testing.assert_close(faulty[-1], torch.full_like(faulty[-1], 1 / faulty.shape[-1]))
    assert float(sound.triu(1).abs().max()) == 0


def test_faults_survive_generation_with_a_cache() -> None:
    built = KNOWN_MODELS["hidden_diagonal"]()
    for implementation in ("eager", "sdpa"):
        built.model.set_attn_implementation(implementation)
        with torch.no_grad():
            whole = built.model(built.prompt_ids).logits[:, -1]
            cache = built.model(built.prompt_ids[:, :-1], use_cache=True).cache
            step = built.model(built.prompt_ids[:, -1:], cache=cache).logits[:, -1]
        torch.testing.assert_close(step, whole, atol=1e-5, rtol=1e-5)


def test_a_mask_that_is_no_tensor_is_refused() -> None:
    attention = future_leak().model.model.layers[0].self_attn
    with pytest.raises(UnsupportedModelError, match="4-axis tensor mask, got str"):
        attention(torch.zeros(1, 3, 32), attention_mask="causal")


@pytest.mark.parametrize("name", ["missing_scale", "double_scale", "sound_llama"])
def test_planted_scales(name: str) -> None:
    built = KNOWN_MODELS[name]()
    with attention_calls() as calls, torch.no_grad():
        built.model(**built.batch())
    for call in calls:
        size = call["q"].shape[-1]
        assert call["scaling"] * size**0.5 == pytest.approx(built.expected["scale_ratio"])
        scores = call["q"] @ call["k"].repeat_interleave(2, dim=1).transpose(-1, -2) / size**0.5
        assert 0.8 < float(scores.std()) < 2.5


def recompute(call: dict[str, Any], without: str | None = None) -> Tensor:
    """The pattern from q, k and the extras of a call, in float64, with one part forgotten."""
    q, k = call["q"].double(), call["k"].double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    n_query, n_key = q.shape[-2], k.shape[-2]
    scale = call["scaling"]
    if without == "scale":
        scale = 1.0
    elif without == "no_scale":
        scale = q.shape[-1] ** -0.5
    scores = q @ k.transpose(-1, -2) * scale
    if call.get("softcap") is not None and without != "soft_cap":
        scores = call["softcap"] * torch.tanh(scores / call["softcap"])
    if call.get("position_bias") is not None and without != "position_bias":
        scores = scores + call["position_bias"]
    if without == "window":
        scores = scores.masked_fill(torch.ones(n_query, n_key, dtype=torch.bool).triu(1), -math.inf)
    elif call["mask"] is not None:
        scores = scores.masked_fill(call["mask"] < 0, -math.inf)
    if call.get("s_aux") is not None and without != "sinks":
        sinks = call["s_aux"].double()[None, :, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    return scores.softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOUD)
def test_loud_models_punish_every_forgotten_part(name: str, dtype: torch.dtype) -> None:
    built = KNOWN_MODELS[name](dtype=dtype)
    assert built.prompt_ids.shape[1] > built.expected.get("window", 0)
    with attention_calls() as calls:
        built.model(**built.batch())
    for call in calls:
        torch.testing.assert_close(recompute(call), call["pattern"].double(), atol=2e-5, rtol=0)
    peaks = []
    for call in calls:
        raw = call["q"] @ call["k"].repeat_interleave(call["q"].shape[1] // call["k"].shape[1], 1).transpose(-1, -2)
        peaks.append(float(raw.abs().max()) * call["scaling"])
    assert min(peaks) > built.expected["least_peak_score"]
    for part in built.expected["parts"]:
        changes = [
            0.5 * (recompute(call, part) - recompute(call)).abs().sum(-1)
            for call in calls
            if (part != "window" or call.get("sliding_window") is not None)
            and (part != "position_bias" or bool(call["position_bias"].any()))
        ]
        assert changes
        assert all(float(change.max()) > built.expected["least_row_change"] for change in changes), part

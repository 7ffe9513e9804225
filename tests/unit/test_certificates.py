"""A certificate must be able to fail: every term of the formula, wrong or left out, is caught on loud models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import attndiag
from attndiag.errors import UnverifiedCaptureError
from attndiag.hooks.record import AttentionCall
from attndiag.models import known
from attndiag.models.known import KnownModel


def calls_of(loud: KnownModel) -> list[AttentionCall]:
    given = {"input_ids": loud.prompt_ids}
    if loud.model.config.is_encoder_decoder:
        given["decoder_input_ids"] = loud.prompt_ids
    with torch.no_grad(), attndiag.capture(loud.model) as captured:
        loud.model(**given)
    for call in captured.calls:
        call.certificate.check()
    return captured.calls


def largest_score(call: AttentionCall) -> float:
    scores = call.scale * call.q @ call.k.repeat_interleave(call.n_heads // call.n_kv_heads, 1).transpose(-1, -2)
    return float(scores.abs().max())


def causal(call: AttentionCall) -> Tensor:
    return torch.ones(call.n_queries, call.n_keys, dtype=torch.bool).tril()[None, None]


MUTATIONS = {
    "scale": (known.loud_llama, lambda call: replace(call, scale=call.scale * 1.02)),
    "future": (known.loud_llama, lambda call: replace(call, mask=None, is_causal=False)),
    "kv heads in the wrong order": (known.loud_llama, lambda call: replace(call, k=call.k.flip(1))),
    "soft-cap": (known.loud_gemma2, lambda call: replace(call, softcap=None)),
    "soft-cap of another size": (known.loud_gemma2, lambda call: replace(call, softcap=call.softcap * 1.1)),
    "window": (known.loud_gemma2, lambda call: replace(call, mask=causal(call))),
    "sinks": (known.loud_gpt_oss, lambda call: replace(call, sinks=None)),
    "sinks of another head": (known.loud_gpt_oss, lambda call: replace(call, sinks=call.sinks.flip(0))),
    "position bias": (known.loud_t5, lambda call: replace(call, position_bias=None)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_term_is_caught(name):
    build, mutate = MUTATIONS[name]
    calls = calls_of(build())
    touched = []
    for call in calls:
        if name.startswith("window") and (call.window is None or call.n_keys <= call.window):
            continue
        if name.startswith("position") and (call.position_bias is None or float(call.position_bias.abs().max()) == 0):
            continue
        assert largest_score(call) > 10 or name.startswith("position")
        touched.append(mutate(call))
    assert touched
    for call in touched:
        assert not call.certificate.formula_passed, f"{name} on {call.module_name} went unnoticed"
        assert not call.sampled_certificate.passed
        with pytest.raises(UnverifiedCaptureError, match=r"recorded formula|A v - z"):
            call.certificate.check()


def test_a_wrong_output_projection_is_caught(tiny_gpt2):
    with torch.no_grad(), attndiag.capture(tiny_gpt2) as captured:
        tiny_gpt2(torch.arange(2, 20)[None])
    call = captured.calls[0]
    assert call.certificate.passed
    other = replace(call.output, module=captured.calls[1].output.module)
    wrong = replace(call, output=other)
    assert wrong.certificate.output_error > 0.1
    assert wrong.certificate.value_error < 1e-6
    assert not attndiag.contributions(wrong).verified


def test_a_missing_output_bias_is_caught(tiny_gpt2):
    with torch.no_grad(), attndiag.capture(tiny_gpt2) as captured:
        tiny_gpt2(torch.arange(2, 20)[None])
    call = captured.calls[0]
    without = nn.Linear(32, 32, bias=False)
    without.weight.data = call.output.module.weight.detach().T.contiguous()
    wrong = replace(call, output=replace(call.output, module=without))
    assert "module output" in wrong.certificate.failures[0]


def test_nan_never_passes(tiny_llama):
    with torch.no_grad(), attndiag.capture(tiny_llama) as captured:
        tiny_llama(torch.arange(2, 20)[None])
    call = captured.calls[0]
    broken = replace(call, q=call.q.clone().fill_(torch.nan))
    assert not broken.certificate.passed
    assert not broken.sampled_certificate.passed


def test_sampled_rows_are_eight_and_keep_both_ends(tiny_llama):
    ids = torch.randint(2, 64, (1, 60))
    with torch.no_grad(), attndiag.capture(tiny_llama) as captured:
        tiny_llama(ids)
    call = captured.calls[0]
    assert call.sampled_certificate.rows == 8
    assert call.certificate.rows == 60
    # a fault in the last row alone is seen by the sample
    z = call.z.clone()
    z[:, -1] += 0.1
    assert not replace(call, z=z).sampled_certificate.passed


def test_certify_while_capturing_raises_on_the_spot(tiny_llama):
    def spoil(_module, _args, output):
        return output * 1.01  # the projection does not return W_O z any more

    handle = tiny_llama.model.layers[1].self_attn.o_proj.register_forward_hook(spoil)
    try:
        with (
            pytest.raises(UnverifiedCaptureError, match=r"layers\.1\.self_attn"),
            torch.no_grad(),
            attndiag.capture(tiny_llama, certify=True),
        ):
            tiny_llama(torch.arange(2, 20)[None])
    finally:
        handle.remove()

"""Random stock models whose scores are large and whose every extra in the attention formula matters.

A recomputed pattern that forgets the scale, the soft-cap, the window, the position bias or the sinks is often close
to the real one on a freshly initialised model, because all its patterns are near uniform. Here the weights are drawn
so that scores before the soft-cap spread by about `SPREAD` and pass 10 in size, and the example input is longer than
the window: forgetting any one of the parts named in `expected["parts"]` moves some row by more than .1 in total
variation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from attndiag.models.known.build import KnownModel

SPREAD = 5.0
LENGTH = 24
WINDOW = 8
SOFT_CAP = 6.0
VOCAB = 64
_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 1,
    "attn_implementation": "eager",
}


def loud_llama(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> KnownModel:
    """Llama: grouped queries, RoPE, scale 1 / sqrt(d_head)."""
    model = LlamaForCausalLM(LlamaConfig(**_DECODER))
    return _record(loud_llama, _draw(model, seed, SPREAD, dtype), ("scale",), seed)


def loud_gemma2(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> KnownModel:
    """Gemma 2: a soft-cap of 6 on scores, layer 0 with a window of 8 keys, a scale that is not 1 / sqrt(d_head)."""
    config = Gemma2Config(
        **_DECODER,
        attn_logit_softcapping=SOFT_CAP,
        query_pre_attn_scalar=64,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    )
    # the scale is 1 / 8 where heads of 16 would have 1 / 4: draw twice as loud
    model = _draw(Gemma2ForCausalLM(config), seed, 2 * SPREAD, dtype)
    return _record(loud_gemma2, model, ("scale", "soft_cap", "window"), seed, soft_cap=SOFT_CAP, window=WINDOW)


def loud_gpt_oss(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> KnownModel:
    """gpt-oss: a learned sink per head takes part of every row, a window of 8 keys in layer 0, biases."""
    config = GptOssConfig(
        **_DECODER,
        num_local_experts=2,
        num_experts_per_tok=1,
        experts_implementation="eager",
        attention_bias=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = _draw(GptOssForCausalLM(config), seed, SPREAD, dtype)
    for layer in model.model.layers:
        # near the largest score of a row, so that a sink takes some of the row and not all of it
        layer.self_attn.sinks.data = torch.linspace(4.0, 10.0, 4, dtype=dtype)
    return _record(loud_gpt_oss, model, ("scale", "window", "sinks"), seed, window=WINDOW)


def loud_t5(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> KnownModel:
    """T5: no scale at all, a relative position bias in encoder and decoder self-attention, and cross-attention."""
    config = T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=16,
        d_ff=32,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        attn_implementation="eager",
    )
    model = _draw(T5ForConditionalGeneration(config), seed, SPREAD / 4, dtype)
    return _record(loud_t5, model, ("no_scale", "position_bias"), seed)


def _draw(model: PreTrainedModel, seed: int, spread: float, dtype: torch.dtype) -> PreTrainedModel:
    """Normal weights that keep the residual near unit size; q and k make q.k / sqrt(16) spread by `spread`."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "relative_attention_bias" in name:
            parameter.data = 4.0 * noise
        elif "embed" in name or "shared" in name:
            parameter.data = noise
        elif parameter.ndim >= 2:
            loud = spread**0.5 if name.split(".")[-2] in {"q_proj", "k_proj", "q", "k"} else 1.0
            parameter.data = loud * noise / parameter.shape[-1] ** 0.5
        elif name.endswith("bias"):
            parameter.data = 0.3 * noise
    return model.to(dtype).eval()


def _record(
    build: Callable[..., KnownModel], model: PreTrainedModel, parts: tuple[str, ...], seed: int, **found: Any
) -> KnownModel:
    generator = torch.Generator().manual_seed(1000 + seed)
    ids = torch.randint(2, VOCAB, (2, LENGTH), generator=generator)
    inputs = {}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(2, VOCAB, (2, LENGTH - 6), generator=generator)
        inputs["decoder_input_ids"][:, 0] = 0
    else:
        ids[:, 0] = 0
    vocab = {"<bos>": 0, **{f"t{index}": index for index in range(1, VOCAB)}}
    expected: dict[str, Any] = {"parts": parts, "least_peak_score": 10.0, "least_row_change": 0.1, **found}
    notes = " ".join((build.__doc__ or "").split())
    return KnownModel(build.__name__, model, vocab, ids, expected, notes, inputs)

"""Models whose right answers are known before anything is measured: for tests, demonstrations and calibration.

Every builder returns a `KnownModel`: a stock transformers model with weights set by hand (or drawn by seed), an example
input, and `expected`, the answers. Nothing is trained and nothing is downloaded.

- `induction`: induction heads in GPT-2, Llama (RoPE, grouped queries) and Mistral (window) form, duplicated ones too.
- `sinks`: sinks against values, dead and duplicated heads, randomised sink models for the calibration of verdicts.
- `circuits`: an anti-copying head, two hops through the residual stream, a cross-attention copy.
- `faulty`: one planted fault each, for audits, and sound controls.
- `loud`: random models in which every part of the attention formula shows.

How weights can be chosen at all in spite of the norm layers is told in `attndiag.models.known.build`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from attndiag.models.known.build import KnownModel
from attndiag.models.known.circuits import anti_copying, cross_copy, two_hops
from attndiag.models.known.faulty import (
    batch_leak,
    double_scale,
    future_leak,
    hidden_diagonal,
    inverted_mask,
    missing_scale,
    padding_leak,
    sound_llama,
    sound_window,
    upstream_mix,
    wide_window,
)
from attndiag.models.known.induction import (
    duplicated_induction,
    induction_gpt2,
    induction_llama,
    repeated_tokens,
    short_window,
)
from attndiag.models.known.loud import loud_gemma2, loud_gpt_oss, loud_llama, loud_t5
from attndiag.models.known.sinks import (
    HeadPlan,
    dead_heads,
    duplicated_heads,
    one_layer_gpt2,
    randomised_sink,
    sink_against_value,
)

KNOWN_MODELS: MappingProxyType[str, Callable[..., KnownModel]] = MappingProxyType(
    {
        build.__name__: build
        for build in (
            induction_gpt2,
            induction_llama,
            duplicated_induction,
            short_window,
            sink_against_value,
            dead_heads,
            duplicated_heads,
            anti_copying,
            two_hops,
            cross_copy,
            sound_llama,
            sound_window,
            future_leak,
            hidden_diagonal,
            padding_leak,
            batch_leak,
            inverted_mask,
            upstream_mix,
            wide_window,
            missing_scale,
            double_scale,
            loud_llama,
            loud_gemma2,
            loud_gpt_oss,
            loud_t5,
        )
    }
)
"""Every builder that needs no argument, by name; all take `dtype`. `randomised_sink(seed)` stands apart."""

__all__ = [
    "KNOWN_MODELS",
    "HeadPlan",
    "KnownModel",
    "anti_copying",
    "batch_leak",
    "cross_copy",
    "dead_heads",
    "double_scale",
    "duplicated_heads",
    "duplicated_induction",
    "future_leak",
    "hidden_diagonal",
    "induction_gpt2",
    "induction_llama",
    "inverted_mask",
    "loud_gemma2",
    "loud_gpt_oss",
    "loud_llama",
    "loud_t5",
    "missing_scale",
    "one_layer_gpt2",
    "padding_leak",
    "randomised_sink",
    "repeated_tokens",
    "short_window",
    "sink_against_value",
    "sound_llama",
    "sound_window",
    "two_hops",
    "upstream_mix",
    "wide_window",
]

"""Induction heads that are perfect by construction, in three stock forms.

Layer 0 holds a previous-token head: it copies the token at i - 1 into the block `previous`. Layer 1 holds the
induction head: its query is the current token, its key is `previous`, so it finds the position after an earlier
occurrence and copies the token there to the logits with gain G. Where nothing matches, a key that says "I am BOS",
worth half a match, takes all of the weight, and the head's value is 0 there. The unembedding reads the `token` block,
so the current token keeps logit 1: every loss below follows from these two numbers.

Loss on a token that cannot be predicted: ln(V - 1 + e); on one that is: ln(1 + (V - 2 + e) exp(-G)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attndiag.errors import ShapeError
from attndiag.models.known.build import (
    BETA,
    KnownModel,
    Layout,
    blank_gpt2,
    blank_llama,
    pick,
    stack_columns,
    wire_gpt2,
    wire_llama,
)

GAIN = 20.0
FAST_PAIRS = 8
SLOW_FREQUENCY = 1e-4


def repeated_tokens(vocab_size: int, length: int, *, rows: int = 4, seed: int = 0) -> Tensor:
    """Rows of `[BOS] s s`: BOS is id 0, s is `length` other tokens without replacement. Shape [rows, 1 + 2 length]."""
    if not 1 <= length < vocab_size:
        raise ShapeError(
            f"a segment of {length} tokens without replacement needs a vocabulary of at least {length + 1}, "
            f"got {vocab_size}; use a shorter segment"
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = [1 + torch.randperm(vocab_size - 1, generator=generator)[:length] for _ in range(rows)]
    segment = torch.stack(drawn)
    return torch.cat([torch.zeros(rows, 1, dtype=torch.long), segment, segment], dim=1)


def induction_gpt2(
    vocab_size: int = 64,
    positions: int = 128,
    *,
    length: int = 24,
    duplicate: bool = False,
    gain: float = GAIN,
    dtype: torch.dtype = torch.float32,
) -> KnownModel:
    """Induction in GPT-2 form: 2 layers, 2 heads, tied embeddings; heads (0, 0) and (1, 0) work, the others idle.

    With `duplicate`, head (1, 1) is a second copy of (1, 0): ablating one of the two changes nothing because the
    softmax is saturated, ablating both costs everything.

    Ablating the previous-token head costs a trifle less than ablating the induction head: the sum of the signal falls
    by 1, LayerNorm then shifts every column by 1 / d, and the BOS value, 0 by construction, writes G / d to the logit
    of every token but BOS.
    """
    _check_length(length, positions)
    layout = Layout(
        heads=2,
        least=2 * max(positions, vocab_size + 1),
        token=vocab_size,
        position=positions,
        previous=vocab_size,
        constant=1,
        pin=2,
    )
    shape = (layout.width, layout.d_head)
    model = blank_gpt2(
        layout,
        vocab_size=vocab_size,
        positions=positions,
        layers=2,
        norms=[(3, 3), (4, 4), (4, 4)],
        tied=True,
        dtype=dtype,
    )
    scale = BETA * layout.d_head**0.5
    wire_gpt2(
        model,
        0,
        0,
        q=pick(layout["position"], shape, gain=scale, shift=1),
        k=pick(layout["position"], shape),
        v=pick(layout["token"], shape),
        o=pick(layout["previous"], shape).T,
    )
    default = (layout.column("constant"), vocab_size)
    for head in range(1 + duplicate):
        wire_gpt2(
            model,
            1,
            head,
            q=pick(layout["token"], shape, gain=scale) + stack_columns(shape, {default: scale / 2}),
            k=pick(layout["previous"], shape) + stack_columns(shape, {(layout.column("token", 0), vocab_size): 1.0}),
            v=pick(layout["token"], shape, skip=[0]),
            o=pick(layout["token"], shape, gain=gain).T,
        )
    expected = _expected(vocab_size, gain, heads=1 + duplicate)
    shifted = math.log(math.e + vocab_size - 2 + math.exp(-(1 + duplicate) * gain / layout.width))
    expected["ablation_effect"] = {**expected["ablation_effect"], (0, 0): shifted - expected["loss_second"]}
    return KnownModel(
        name=f"{'duplicated_' if duplicate else ''}induction_gpt2_v{vocab_size}",
        model=model,
        vocab=_vocab(vocab_size),
        prompt_ids=repeated_tokens(vocab_size, length),
        expected=expected,
        notes="Previous-token head (0, 0) feeds the induction head (1, 0)"
        + ("; (1, 1) is its exact copy, so each hides the other." if duplicate else "; (0, 1) and (1, 1) are idle."),
    )


def duplicated_induction(
    vocab_size: int = 64, positions: int = 128, *, length: int = 24, dtype: torch.dtype = torch.float32
) -> KnownModel:
    """`induction_gpt2` with two equal induction heads: redundancy 1, single ablation 0, both together ln(V - 1 + e)."""
    return induction_gpt2(vocab_size, positions, length=length, duplicate=True, dtype=dtype)


def induction_llama(
    vocab_size: int = 64,
    positions: int = 128,
    *,
    length: int = 24,
    window: int | None = None,
    gain: float = GAIN,
    dtype: torch.dtype = torch.float32,
) -> KnownModel:
    """Induction in Llama form: RoPE, RMSNorm, 2 query heads on 1 key/value head; with a `window`, in Mistral form.

    RoPE turns pair p of the head dimensions by position * f_p, f_p geometric from 1 down. The first 8 pairs hold a
    constant key; a constant query turned back by one step scores sum_p cos(f_p (i - 1 - j)), largest at j = i - 1, and
    one that is not turned back at j = i. So head (0, 0) attends to the previous and (0, 1) to the current token with
    the same keys and values. The slow pairs (f <= 1e-4) hold token identities, which RoPE leaves almost unturned.
    """
    _check_length(length, positions)
    slow_pairs = (vocab_size + 2) // 2
    half = FAST_PAIRS + slow_pairs
    layout = Layout(heads=2, token=vocab_size, previous=vocab_size, current=vocab_size, constant=1, pin=1)
    shape = (layout.width, 2 * half)
    model = blank_llama(
        layout,
        vocab_size=vocab_size,
        positions=positions,
        layers=2,
        kv_heads=1,
        d_head=2 * half,
        rope_theta=SLOW_FREQUENCY ** (-half / FAST_PAIRS),
        norms=[2, 4, 4],
        window=window,
        dtype=dtype,
    )
    scale = BETA * (2 * half) ** 0.5
    constant = layout.column("constant")
    frequencies = [SLOW_FREQUENCY ** (pair / FAST_PAIRS) for pair in range(FAST_PAIRS)]
    key = stack_columns(shape, {(constant, pair): 1.0 for pair in range(FAST_PAIRS)})
    for head, back, block in ((0, 1.0, "previous"), (1, 0.0, "current")):
        turned = {(constant, pair): scale * math.cos(f * back) for pair, f in enumerate(frequencies)}
        turned |= {(constant, half + pair): -scale * math.sin(f * back) for pair, f in enumerate(frequencies)}
        wire_llama(
            model,
            0,
            head,
            q=stack_columns(shape, turned),
            k=key,
            v=pick(layout["token"], shape),
            o=pick(layout[block], shape).T,
        )
    slow = [*range(FAST_PAIRS, half), *range(half + FAST_PAIRS, 2 * half)]
    default = slow[vocab_size]
    match_q = torch.zeros(shape, dtype=torch.float64)
    match_k = torch.zeros(shape, dtype=torch.float64)
    for token in range(vocab_size):
        match_q[layout.column("token", token), slow[token]] = scale
        match_k[layout.column("previous", token), slow[token]] = 1
    match_q[constant, default] = scale / 2
    match_k[layout.column("token", 0), default] = 1
    wire_llama(
        model,
        1,
        0,
        q=match_q,
        k=match_k,
        v=pick(layout["token"], shape, skip=[0]),
        o=pick(layout["token"], shape, gain=gain).T,
    )
    model.lm_head.weight.data[:, layout["token"]] = torch.eye(vocab_size, dtype=dtype)
    expected = _expected(vocab_size, gain, heads=1)
    expected["current_token_score"] = {(0, 1): 1.0}
    expected["idle_heads"] = ((1, 1),)
    # (0, 1) attends, and writes to a block that nothing reads: no idle head, but no effect either
    expected["ablation_effect"] = {(0, 0): expected["loss_first"] - expected["loss_second"], (0, 1): 0.0}
    expected["ablation_effect"] |= {(1, 0): expected["ablation_effect"][(0, 0)], (1, 1): 0.0}
    expected["kv_head_of"] = {(layer, head): 0 for layer in (0, 1) for head in (0, 1)}
    return KnownModel(
        name=f"induction_llama_v{vocab_size}" if window is None else f"induction_mistral_v{vocab_size}_w{window}",
        model=model,
        vocab=_vocab(vocab_size),
        prompt_ids=repeated_tokens(vocab_size, length),
        expected=expected,
        notes="Previous-token head (0, 0) and current-token head (0, 1) share one key/value head; (1, 0) is the "
        "induction head, (1, 1) reads the same keys with a zero query and writes nothing.",
    )


def short_window(
    vocab_size: int = 64, positions: int = 128, *, window: int = 16, dtype: torch.dtype = torch.float32
) -> KnownModel:
    """The Llama form as a Mistral whose sliding window is shorter than the distance that induction has to bridge.

    A query sees keys at distances 0 to `window` - 1; in `[BOS] s s` the wanted key lies L - 1 back. With L at most
    `window` - 1 everything works; the example input has L = `window` + 8, where no induction is possible: a probe
    must shorten s or say that it cannot measure, and not report a head without induction.
    """
    built = induction_llama(vocab_size, positions, length=window + 8, window=window, dtype=dtype)
    expected: dict[str, Any] = dict(built.expected)
    # these hold for probes that fit; on the example input the head cannot reach the follower
    expected["longest_measurable_segment"] = window - 1
    expected["prefix_matching_score_beyond_window"] = 0.0
    expected["window"] = window
    return KnownModel(
        name=built.name,
        model=built.model,
        vocab=built.vocab,
        prompt_ids=built.prompt_ids,
        expected=expected,
        notes=built.notes + f" Keys more than {window - 1} positions back are invisible: expected values hold for "
        f"segments of at most {window - 1} tokens, and the example input is longer.",
    )


def _expected(vocab_size: int, gain: float, *, heads: int) -> dict[str, Any]:
    """Right answers that the forms share; `heads` counts the equal induction heads."""
    unpredicted = math.log(vocab_size - 1 + math.e)
    single, full = (
        math.log1p((vocab_size - 2 + math.e) * math.exp(-count * gain)) if count else unpredicted
        for count in (heads - 1, heads)
    )
    induction = [(1, head) for head in range(heads)]
    ablation: Mapping[tuple[int, int], float] = {
        (0, 0): unpredicted - full,
        (0, 1): 0.0,
        (1, 1): 0.0,
        **dict.fromkeys(induction, single - full),
    }
    return {
        "previous_token_score": {(0, 0): 1.0},
        "prefix_matching_score": dict.fromkeys(induction, 1.0),
        "first_copy_bos_mass": dict.fromkeys(induction, 1.0),
        "copying_score": dict.fromkeys(induction, 1.0),
        "loss_first": unpredicted,
        "loss_second": full,
        "ablation_effect": ablation,
        "joint_ablation_effect": {tuple(induction): unpredicted - full},
        "redundancy": {tuple(induction): 1.0} if heads > 1 else {},
        "idle_heads": ((0, 1),) if heads > 1 else ((0, 1), (1, 1)),
        "induction_heads": tuple(induction),
    }


def _vocab(vocab_size: int) -> dict[str, int]:
    return {"<bos>": 0, **{f"t{index}": index for index in range(1, vocab_size)}}


def _check_length(length: int, positions: int) -> None:
    if 1 + 2 * length > positions:
        raise ShapeError(
            f"[BOS] s s with a segment of {length} tokens takes {1 + 2 * length} positions, the model has {positions}; "
            f"use a segment of at most {(positions - 1) // 2}"
        )

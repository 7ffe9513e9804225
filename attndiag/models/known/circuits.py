"""Small circuits by hand: a head that pushes its token down, two hops through the residual stream, a cross copy.

GPT-2 form with one-hot positions: a head "looks back k" when its query picks entry i of the position block and its
key is stored k places later, so that position i matches i - k. The first k positions match nothing and spread evenly.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import BartConfig, BartForConditionalGeneration

from attndiag.errors import ShapeError
from attndiag.models.known.build import (
    BETA,
    PIN,
    KnownModel,
    Layout,
    blank_gpt2,
    pick,
    set_layer_norm,
    wire_gpt2,
    zero_parameters,
)


def anti_copying(*, vocab_size: int = 16, positions: int = 32, dtype: torch.dtype = torch.float32) -> KnownModel:
    """Head 0 looks back one and lowers that token's logit by 5, head 1 looks back two and raises it by 5.

    The OV eigenvalues are all -5 and all +5: copying scores -1 and +1 (Elhage 2021). The model predicts the token two
    back; the token just before it is the least likely one.
    """
    layout = Layout(
        heads=2, least=2 * max(positions, vocab_size), token=vocab_size, position=positions, constant=1, pin=2
    )
    model = blank_gpt2(
        layout, vocab_size=vocab_size, positions=positions, layers=1, norms=[(3, 3), (3, 53)], tied=True, dtype=dtype
    )
    shape = (layout.width, layout.d_head)
    for head, (back, gain) in enumerate(((1, -5.0), (2, 5.0))):
        wire_gpt2(
            model,
            0,
            head,
            q=pick(layout["position"], shape, gain=BETA * layout.d_head**0.5, shift=back),
            k=pick(layout["position"], shape),
            v=pick(layout["token"], shape),
            o=pick(layout["token"], shape, gain=gain).T,
        )
    ids = _shuffled(vocab_size, 12)
    return KnownModel(
        name="anti_copying",
        model=model,
        vocab=_vocab(vocab_size),
        prompt_ids=ids,
        expected={
            "copying_score": {(0, 0): -1.0, (0, 1): 1.0},
            "ov_eigenvalue": {(0, 0): -5.0, (0, 1): 5.0},
            "looks_back": {(0, 0): 1, (0, 1): 2},
            "previous_token_score": {(0, 0): 1.0},
            # at the last position, logit(two back) - logit(one back)
            "logit_diff": 10.0,
            "head_effect": {(0, 0): 5.0, (0, 1): 5.0},
        },
        notes=" ".join((anti_copying.__doc__ or "").split()),
    )


def two_hops(*, vocab_size: int = 16, positions: int = 32, dtype: torch.dtype = torch.float32) -> KnownModel:
    """Two stacked previous-token heads, one per layer; the second reads what the first wrote, two tokens back.

    The unembedding reads only the block `two_back`. Rollout with (A + I) / 2 per layer (Abnar 2020) is exact:
    1/4, 1/2, 1/4 on i - 2, i - 1, i. But the output depends on the token at i - 2 alone.
    """
    layout = Layout(
        least=max(positions, vocab_size),
        token=vocab_size,
        position=positions,
        one_back=vocab_size,
        two_back=vocab_size,
        constant=1,
        pin=2,
    )
    model = blank_gpt2(
        layout, vocab_size=vocab_size, positions=positions, layers=2, norms=[(3, 3), (4, 4), (5, 5)], dtype=dtype
    )
    shape = (layout.width, layout.d_head)
    for layer, (source, target) in enumerate((("token", "one_back"), ("one_back", "two_back"))):
        wire_gpt2(
            model,
            layer,
            0,
            q=pick(layout["position"], shape, gain=BETA * layout.d_head**0.5, shift=1),
            k=pick(layout["position"], shape),
            v=pick(layout[source], shape),
            o=pick(layout[target], shape).T,
        )
    model.lm_head.weight.data[:, layout["two_back"]] = 10 * torch.eye(vocab_size, dtype=dtype)
    ids = _shuffled(vocab_size, 10)
    n = ids.shape[1]
    step = torch.zeros(n, n, dtype=torch.float64)
    step[0, 0] = 1
    for query in range(1, n):
        step[query, query] = step[query, query - 1] = 0.5
    reach = torch.zeros(n, n, dtype=torch.float64)
    for query in range(n):
        reach[query, max(query - 2, 0)] = 1
    return KnownModel(
        name="two_hops",
        model=model,
        vocab=_vocab(vocab_size),
        prompt_ids=ids,
        expected={
            "previous_token_score": {(0, 0): 1.0, (1, 0): 1.0},
            "rollout": step @ step,
            "attention_product": reach,
            "logit_of_two_back": 10.0,
        },
        notes=" ".join((two_hops.__doc__ or "").split()),
    )


def cross_copy(
    *, vocab_size: int = 24, positions: int = 32, length: int = 8, dtype: torch.dtype = torch.float32
) -> KnownModel:
    """A BART that copies its source: decoder position i attends to source position i and predicts its token.

    Post-norm, learned positions, 1 encoder and 1 decoder layer of 2 heads, tied embeddings. Cross-attention head 0
    matches positions (mass 1) and writes the source token with gain 20; cross head 1 and every self-attention head are
    idle: zero scores, hence uniform, and nothing written. The decoder gets the source shifted right.

    T5 is left out: its cross-attention has no position bias, so nothing could tell it which source position to copy.
    """
    gain = 20.0
    layout = Layout(
        heads=2, least=2 * max(positions, vocab_size), token=vocab_size, position=positions, constant=1, pin=2
    )
    if length + 1 > positions:
        raise ShapeError(
            f"a source of {length} tokens and <eos> needs {length + 1} positions, the model has {positions}"
        )
    config = BartConfig(
        vocab_size=vocab_size,
        max_position_embeddings=positions,
        d_model=layout.width,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=1,
        decoder_ffn_dim=1,
        dropout=0.0,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
        attn_implementation="eager",
    )
    model = BartForConditionalGeneration(config).to(dtype).eval()
    zero_parameters(model)
    body = model.model
    body.shared.weight.data[:, layout["token"]] = torch.eye(vocab_size, dtype=dtype)
    for stack in (body.encoder, body.decoder):
        # BART keeps two unused rows before position 0
        table = stack.embed_positions.weight.data[stack.embed_positions.offset :]
        table[:, layout["position"]] = torch.eye(positions, dtype=dtype)
        table[:, layout.column("constant")] = 1
        table[:, layout.column("pin", 0)] = PIN
        table[:, layout.column("pin", 1)] = -PIN
        set_layer_norm(stack.layernorm_embedding, 3, 3)
        for name, norm in stack.layers[0].named_modules():
            if name.endswith("layer_norm"):
                # after the copy head has written, the block `token` holds 1 + gain or two entries; both sum to this
                written = stack is body.decoder and name != "self_attn_layer_norm"
                set_layer_norm(norm, 3 + gain * written, 3 + gain**2 * written)
    cross = body.decoder.layers[0].encoder_attn
    shape = (layout.width, layout.d_head)
    size = layout.d_head
    cross.q_proj.weight.data[:size] = pick(layout["position"], shape, gain=BETA * size**0.5).T.to(dtype)
    cross.k_proj.weight.data[:size] = pick(layout["position"], shape).T.to(dtype)
    cross.v_proj.weight.data[:size] = pick(layout["token"], shape).T.to(dtype)
    cross.out_proj.weight.data[:, :size] = pick(layout["token"], shape, gain=gain).to(dtype)
    generator = torch.Generator().manual_seed(0)
    drawn = [3 + torch.randperm(vocab_size - 3, generator=generator)[:length] for _ in range(2)]
    source = torch.cat([torch.stack(drawn), torch.full((2, 1), 2)], dim=1)
    decoder_ids = torch.cat([torch.zeros(2, 1, dtype=torch.long), source[:, :-1]], dim=1)
    return KnownModel(
        name="cross_copy",
        model=model,
        vocab={"<bos>": 0, "<pad>": 1, "<eos>": 2, **{f"t{index}": index for index in range(3, vocab_size)}},
        prompt_ids=source,
        expected={
            "cross_diagonal_mass": {(0, 0): 1.0},
            "cross_copying_gain": {(0, 0): gain},
            "cross_idle_heads": ((0, 1),),
            "output_ids": source,
            "logit_of_source_token": gain,
        },
        notes=" ".join((cross_copy.__doc__ or "").split()),
        inputs={"decoder_input_ids": decoder_ids},
    )


def _vocab(vocab_size: int) -> dict[str, int]:
    return {"<bos>": 0, **{f"t{index}": index for index in range(1, vocab_size)}}


def _shuffled(vocab_size: int, length: int) -> Tensor:
    """BOS and `length` other tokens in a fixed random order."""
    generator = torch.Generator().manual_seed(0)
    return torch.cat(
        [torch.zeros(1, dtype=torch.long), 1 + torch.randperm(vocab_size - 1, generator=generator)[:length]]
    )[None]

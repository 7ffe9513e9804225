"""Models with one planted fault each, and sound controls: what an audit has to find, and must not report.

All are small random Llamas (one a Mistral), drawn by seed, with weights large enough that every path shows. A fault
is a subclass of the stock attention or norm module put in the place of the stock one: the faulty mask or scale then
reaches the attention function through transformers' own routing, as it would in real code, under eager and sdpa alike.
Faults sit in layer 0 unless said otherwise, so their reach in positions is exact: later layers are sound.

`expected` has the same keys for every model:

- `fault`: its name, None for a control; `faulty_layers`.
- `future_reach`: how many positions ahead an output can see (None: any number).
- `diagonal_visible`: whether attention in the faulty layer reads its own position.
- `padding_leak`, `batch_leak`: whether padded positions, or other rows, reach real outputs.
- `vanishes_when_frozen`: whether the leak is gone once q, k and v of every position but the changed one are held
  fixed. Then the mask is sound and something before attention mixed the tokens. None where there is no leak.
- `scale_ratio`: the scale used over 1 / sqrt(d_head).
- `window`: keys visible to a query, itself included, in the faulty layer; None without a window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralAttention

from attndiag.errors import UnsupportedModelError
from attndiag.models.known.build import KnownModel

VOCAB = 32
LAYERS = 2
MaskFault = Callable[[Tensor], Tensor]
"""Takes the sound mask, bool [batch, 1, query_pos, key_pos] with True = allowed, and returns the faulty one."""


class FaultyMaskMixin:
    """Replaces the mask that the stock attention receives by `mask_fault` of it, in the form it came in."""

    mask_fault: MaskFault

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        given = kwargs.get("attention_mask")
        cache = kwargs.get("cache")
        n_query = hidden_states.shape[1]
        if given is None:
            # sdpa leaves a plain causal mask out and sets is_causal instead
            n_key = n_query + (cache.get_seq_length(self.layer_idx) if cache is not None else 0)
            positions = torch.arange(n_key, device=hidden_states.device)
            allowed = positions[None, :] <= positions[n_key - n_query :, None]
            allowed = allowed.expand(hidden_states.shape[0], 1, -1, -1)
        elif isinstance(given, Tensor) and given.ndim == 4:
            allowed = given if given.dtype == torch.bool else given >= 0
        else:
            raise UnsupportedModelError(
                f"a planted mask fault needs a 4-axis tensor mask, got {type(given).__name__}; "
                'use attn_implementation="eager" or "sdpa"'
            )
        faulty = self.mask_fault(allowed)
        if given is not None and given.dtype != torch.bool:
            # Llama takes the softmax in float32, where the lowest float64 is -inf and a fully masked row nan
            lowest = max(torch.finfo(given.dtype).min, torch.finfo(torch.float32).min)
            faulty = torch.where(faulty, torch.zeros((), dtype=given.dtype, device=given.device), lowest)
        return super().forward(hidden_states, **{**kwargs, "attention_mask": faulty})


class FaultyMaskLlamaAttention(FaultyMaskMixin, LlamaAttention):
    """Llama attention with a planted mask fault."""


class FaultyMaskMistralAttention(FaultyMaskMixin, MistralAttention):
    """Mistral attention with a planted mask fault."""


class BatchScaledRMSNorm(LlamaRMSNorm):
    """RMSNorm whose mean square runs over the rows of the batch too: one axis too many."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        mean_square = hidden_states.pow(2).mean(dim=(0, -1), keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(mean_square + self.variance_epsilon)


class LookaheadRMSNorm(LlamaRMSNorm):
    """RMSNorm that adds half of the next position's output: a centred convolution where a causal one was meant."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed = super().forward(hidden_states)
        following = torch.zeros_like(normed)
        following[:, :-1] = normed[:, 1:]
        return normed + 0.5 * following


def sound_llama(seed: int = 0, *, padded: bool = False, dtype: torch.dtype = torch.float32) -> KnownModel:
    """A control without a fault: an audit that reports anything here is wrong."""
    return _record(sound_llama, _random_llama(seed, dtype), padded=padded)


def future_leak(seed: int = 0, *, layers: Sequence[int] = (0,), dtype: torch.dtype = torch.float32) -> KnownModel:
    """Queries see one key too many, the next token: `j <= i + 1`. Each faulty layer adds one position of reach."""
    model = _random_llama(seed, dtype)
    _plant_mask(model, layers, lambda allowed: allowed | _offset(allowed, 1))
    return _record(future_leak, model, layers, future_reach=len(tuple(layers)), vanishes_when_frozen=False)


def hidden_diagonal(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> KnownModel:
    """Queries do not see themselves: `j < i`. Position 0 keeps itself, since a fully masked row is another fault."""

    def fault(allowed: Tensor) -> Tensor:
        hidden = _offset(allowed, 0)
        if allowed.shape[-2] == allowed.shape[-1]:
            hidden[..., 0, 0] = False
        return allowed & ~hidden

    model = _random_llama(seed, dtype)
    _plant_mask(model, (0,), fault)
    return _record(hidden_diagonal, model, (0,), diagonal_visible=False)


def padding_leak(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> KnownModel:
    """The padding part of the mask is lost: left-padded rows read their padding. The causal part holds."""

    def fault(allowed: Tensor) -> Tensor:
        n_query, n_key = allowed.shape[-2:]
        causal = torch.ones(n_query, n_key, dtype=torch.bool, device=allowed.device).tril(n_key - n_query)
        return causal.expand_as(allowed)

    model = _random_llama(seed, dtype)
    _plant_mask(model, range(LAYERS), fault)
    return _record(padding_leak, model, range(LAYERS), padded=True, padding_leak=True, vanishes_when_frozen=False)


def inverted_mask(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> KnownModel:
    """The boolean convention is turned round: queries see exactly what they must not see.

    In layer 0 query i reads the keys after i and not itself. The last query has no key left: eager attention then
    spreads it evenly over all keys, sdpa returns zeros.
    """
    model = _random_llama(seed, dtype)
    _plant_mask(model, (0,), torch.logical_not)
    return _record(inverted_mask, model, (0,), future_reach=None, diagonal_visible=False, vanishes_when_frozen=False)


def batch_leak(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> KnownModel:
    """The norm before attention averages over the batch: every row depends on the others at the same position."""
    model = _random_llama(seed, dtype)
    _swap_norm(model, 0, BatchScaledRMSNorm)
    return _record(batch_leak, model, (0,), batch_leak=True, vanishes_when_frozen=True)


def upstream_mix(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> KnownModel:
    """The mask is sound, but the norm before attention has already mixed the next token in.

    Outputs see one position ahead. With q, k and v held fixed the leak is gone, so the mask is not to blame.
    """
    model = _random_llama(seed, dtype)
    _swap_norm(model, 0, LookaheadRMSNorm)
    return _record(upstream_mix, model, (0,), future_reach=1, vanishes_when_frozen=True)


def missing_scale(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> KnownModel:
    """Scores are not divided by sqrt(d_head): their spread is sqrt(d_head) = 4 times too large."""
    model = _random_llama(seed, dtype)
    _set_scale(model, 1.0)
    return _record(missing_scale, model, range(LAYERS), scale_ratio=_head_size(model) ** 0.5)


def double_scale(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> KnownModel:
    """Scores are divided by sqrt(d_head) twice: their spread is sqrt(d_head) = 4 times too small."""
    model = _random_llama(seed, dtype)
    _set_scale(model, 1.0 / _head_size(model))
    return _record(double_scale, model, range(LAYERS), scale_ratio=_head_size(model) ** -0.5)


def sound_window(seed: int = 0, *, window: int = 4, dtype: torch.dtype = torch.float32) -> KnownModel:
    """A control: a Mistral whose queries see `window` keys, themselves included, as its config says."""
    return _record(sound_window, _random_llama(seed, dtype, window=window), window=window, configured_window=window)


def wide_window(seed: int = 0, *, window: int = 4, dtype: torch.dtype = torch.float32) -> KnownModel:
    """A Mistral whose layer 0 sees one key more than the window of its config: `i - j <= window`."""
    model = _random_llama(seed, dtype, window=window)
    _plant_mask(model, (0,), lambda allowed: allowed | _offset(allowed, -window))
    return _record(wide_window, model, (0,), window=window + 1, configured_window=window, vanishes_when_frozen=False)


def _random_llama(seed: int, dtype: torch.dtype, *, window: int | None = None) -> PreTrainedModel:
    """Two layers, d 32, 4 query heads on 2 key/value heads of 16. Scores have a spread near 1.5, no weight is 0."""
    shared: dict[str, Any] = {
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 1,
        "attn_implementation": "eager",
    }
    if window is None:
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**shared))
    else:
        model = MistralForCausalLM(MistralConfig(sliding_window=window, **shared))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            spread = 1.0 if "embed" in name else parameter.shape[1] ** -0.5
            spread *= 1.5**0.5 if "q_proj" in name or "k_proj" in name else 1.0
            parameter.data = spread * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype).eval()


def _head_size(model: PreTrainedModel) -> int:
    return model.model.layers[0].self_attn.head_dim


def _plant_mask(model: PreTrainedModel, layers: Sequence[int], fault: MaskFault) -> None:
    """Put a faulty attention module in the place of the stock one; weights and names stay."""
    for layer in layers:
        attention = model.model.layers[layer].self_attn
        faulty = FaultyMaskLlamaAttention if isinstance(attention, LlamaAttention) else FaultyMaskMistralAttention
        attention.__class__ = faulty
        attention.mask_fault = fault


def _swap_norm(model: PreTrainedModel, layer: int, norm: type[LlamaRMSNorm]) -> None:
    stock = model.model.layers[layer].input_layernorm
    swapped: nn.Module = norm(stock.weight.shape[0], eps=stock.variance_epsilon).to(stock.weight.dtype)
    model.model.layers[layer].input_layernorm = swapped


def _set_scale(model: PreTrainedModel, scale: float) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = scale


def _offset(allowed: Tensor, offset: int) -> Tensor:
    """True where key = query + offset, counted from the aligned ends, in the shape of a mask."""
    n_query, n_key = allowed.shape[-2:]
    queries = torch.arange(n_key - n_query, n_key, device=allowed.device)
    keys = torch.arange(n_key, device=allowed.device)
    return (keys[None, :] == queries[:, None] + offset).expand_as(allowed).clone()


def _record(
    build: Callable[..., KnownModel],
    model: PreTrainedModel,
    layers: Sequence[int] = (),
    *,
    padded: bool = False,
    **found: Any,
) -> KnownModel:
    """A record with the common keys of `expected`, those in `found` replacing the sound answers."""
    vocab = {"<bos>": 0, "<pad>": 1, **{f"t{index}": index for index in range(2, VOCAB)}}
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCAB, (3, 10), generator=generator)
    ids[:, 0] = 0
    inputs: dict[str, Tensor] = {}
    if padded:
        # left padding, 0, 2 and 4 places; transformers does not derive positions from the mask
        mask = torch.ones_like(ids)
        for row, places in enumerate((0, 2, 4)):
            mask[row, :places] = 0
            ids[row, :places] = 1
            ids[row, places] = 0
        inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    expected: dict[str, Any] = {
        "fault": build.__name__ if layers else None,
        "faulty_layers": tuple(layers),
        "future_reach": 0,
        "diagonal_visible": True,
        "padding_leak": False,
        "batch_leak": False,
        "vanishes_when_frozen": None,
        "scale_ratio": 1.0,
        "window": None,
        **found,
    }
    notes = " ".join((build.__doc__ or "").split())
    return KnownModel(build.__name__, model, vocab, ids, expected, notes, inputs)

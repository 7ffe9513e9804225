"""Inputs for any model, from the names in its forward signature.

Shapes of images and sounds are not written down anywhere in a uniform way, so several are proposed, likely ones first,
and the caller takes the first that the model accepts. Models that mix a picture or a sound into the text want exactly
as many placeholder tokens as their tower gives vectors: that number is measured by running the tower.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from families.shrink import VOCAB

TEXT_LENGTH = 12
DECODER_LENGTH = 7
_TEXT_IDS = (60, 180)  # ordinary tokens: above the usual special ids, below those that the shrinking moved
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Proposal:
    """A set of inputs to try, and what it stands for (``"text"``, ``"image+text"``, ...)."""

    kind: str
    inputs: Inputs


def find(config: PreTrainedConfig, *names: str, under: tuple[str, ...] = ()) -> Any:
    """First of the named fields that is set, in the configuration, then in its nested ones (``under`` first)."""
    nested = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    preferred = [vars(config)[name] for name in under if isinstance(vars(config).get(name), PreTrainedConfig)]
    for part in [*preferred, config]:
        for name in names:
            value = _read(part, name)
            if value is not None and not isinstance(value, PreTrainedConfig):
                return value
    for part in nested:
        value = find(part, *names)
        if value is not None:
            return value
    return None


def _read(config: PreTrainedConfig, name: str) -> Any:
    """A field by its own or its common name, or None; properties count too unless they raise."""
    name = type(config).attribute_map.get(name, name)
    if name in vars(config):
        return vars(config)[name]
    try:
        return getattr(config, name, None)
    except RuntimeError:  # a field that varies by layer and has no global value
        return None


def forward_parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(model.forward).parameters)


def text_ids(model: PreTrainedModel, length: int, batch: int, generator: torch.Generator) -> Tensor:
    """Ordinary tokens, [batch, position]; never a special one where the vocabulary leaves room for that."""
    try:
        text = model.config.get_text_config()
    except ValueError:  # several text towers
        text = model.config
    vocab = find(text, "vocab_size", "vocab_sizes", "src_vocab_size") or find(model.config, "vocab_size") or VOCAB
    vocab = vocab[0] if isinstance(vocab, list | tuple) else vocab
    low, high = _TEXT_IDS if vocab >= _TEXT_IDS[1] else (min(3, vocab - 1), vocab)
    return torch.randint(low, high, (batch, length), generator=generator)


VISION = ("vision_config", "image_config", "vit_config", "backbone_config", "encoder")
AUDIO = ("audio_config", "audio_encoder_config", "encoder_config", "speech_encoder", "encoder")


def _pair(value: Any, default: int) -> tuple[int, int]:
    if isinstance(value, list | tuple) and len(value) >= 2:
        return int(value[-2]), int(value[-1])
    if isinstance(value, list | tuple):
        value = value[0]
    if isinstance(value, dict):
        return int(value.get("height", default)), int(value.get("width", default))
    number = default if not isinstance(value, int) else value
    return number, number


def proposals(model: PreTrainedModel, generator: torch.Generator) -> Iterator[Proposal]:
    """Sets of inputs, the fullest first, each completed by what the forward insists on."""
    for proposal in _proposals(model, generator):
        yield Proposal(proposal.kind, proposal.inputs | _insisted_on(model, proposal.inputs, generator))


def _insisted_on(model: PreTrainedModel, inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Masks of ones and the like for parameters without a default that the proposal does not give."""
    leading = next(iter(inputs.values()))
    batch = leading.shape[0]
    extra: Inputs = {}
    for name, parameter in forward_parameters(model).items():
        if parameter.default is not inspect.Parameter.empty or name in inputs:
            continue
        if name in ("attention_mask", "input_features_mask", "padding_mask"):
            length = leading.shape[1]
            if name == "input_features_mask" and leading.dim() == 3:
                length = max(leading.shape[1:])
            extra[name] = torch.ones(batch, length, dtype=torch.long)
        elif name == "qformer_input_ids":
            extra[name] = text_ids(model, DECODER_LENGTH, batch, generator)
        elif name == "bool_masked_pos":
            extra[name] = torch.zeros(batch, TEXT_LENGTH, dtype=torch.bool)
    return extra


def _proposals(model: PreTrainedModel, generator: torch.Generator) -> Iterator[Proposal]:
    names = forward_parameters(model)
    text = _text_inputs(model, names, generator)
    towers: list[tuple[str, list[Inputs]]] = []
    if "pixel_values" in names or "pixel_values_videos" in names or "flattened_patches" in names:
        towers.append(("image", list(_image_inputs(model, names, generator))))
    if any(name in names for name in ("input_features", "input_values", "audio_values")):
        towers.append(("audio", list(_audio_inputs(model, names, generator))))
    for kind, options in towers:
        for option in options:
            if text:
                mixed = _mixed(model, kind, option, text, generator)
                if mixed is not None:
                    yield Proposal(f"{kind}+text", mixed)
                yield Proposal(f"{kind}+text", {**text, **option})
            yield Proposal(kind, option)
    if text:
        yield Proposal("text", text)
        for name in ("inputs_embeds", "encoder_hidden_states"):
            if name in names and "input_ids" not in names:
                yield Proposal(name, {name: _hidden(model, generator)})
    if "past_values" in names:
        yield from _series(model, names, generator)
    required = [
        name
        for name, parameter in names.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if required and required[0] in ("hidden_states", "inputs_embeds"):
        yield Proposal(required[0], {required[0]: _hidden(model, generator)})


def _hidden(model: PreTrainedModel, generator: torch.Generator) -> Tensor:
    width = find(model.config, "hidden_size", "d_model", "embed_dim", "n_embd") or 64
    return torch.randn(2, TEXT_LENGTH, width, generator=generator)


def _text_inputs(model: PreTrainedModel, names: dict[str, inspect.Parameter], generator: torch.Generator) -> Inputs:
    inputs: Inputs = {}
    if "input_ids" in names:
        inputs["input_ids"] = text_ids(model, TEXT_LENGTH, 2, generator)
    if "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = text_ids(model, DECODER_LENGTH, 2, generator)
    if "bbox" in names:
        inputs["bbox"] = _boxes(TEXT_LENGTH, generator)
    return inputs


def _boxes(length: int, generator: torch.Generator) -> Tensor:
    """Integer boxes (left, top, right, bottom) that are not empty, [2, length, 4]."""
    corner = torch.randint(0, 50, (2, length, 2), generator=generator)
    return torch.cat([corner, corner + torch.randint(1, 50, (2, length, 2), generator=generator)], dim=-1)


def _image_inputs(
    model: PreTrainedModel, names: dict[str, inspect.Parameter], generator: torch.Generator
) -> Iterator[Inputs]:
    config = model.config
    channels = find(config, "num_channels", "in_channels", "in_chans", under=VISION) or 3
    channels = channels if isinstance(channels, int) else 3
    size = _pair(find(config, "image_size", "img_size", "input_size", under=VISION), 64)
    patch, _ = _pair(find(config, "patch_size", under=VISION), 16)
    temporal, _ = _pair(find(config, "temporal_patch_size", under=VISION), 1)
    merge = find(config, "spatial_merge_size", "merge_size", under=VISION) or 1
    if "image_grid_thw" in names or "grid_thw" in names:
        side = 2 * (merge if isinstance(merge, int) else 2)
        grid = torch.tensor([[1, side, side]])
        flat = torch.randn(side * side, channels * temporal * patch * patch, generator=generator)
        yield {"pixel_values": flat, "image_grid_thw" if "image_grid_thw" in names else "grid_thw": grid}
    if "spatial_shapes" in names:
        flat = torch.randn(2, 16, channels * patch * patch, generator=generator)
        shapes = torch.tensor([[4, 4], [4, 4]])
        for name in ("pixel_attention_mask", "attention_mask"):
            if name in names:
                yield {"pixel_values": flat, "spatial_shapes": shapes, name: torch.ones(2, 16, dtype=torch.long)}
        yield {"pixel_values": flat, "spatial_shapes": shapes}
    picture = torch.randn(2, channels, *size, generator=generator)
    if "pixel_values" in names:
        yield {"pixel_values": picture}
        if "image_sizes" in names:
            yield {"pixel_values": picture[:1], "image_sizes": torch.tensor([list(size)])}
            tiles = torch.randn(1, 3, channels, *size, generator=generator)
            yield {"pixel_values": tiles, "image_sizes": torch.tensor([list(size)])}
        yield {"pixel_values": picture[:, None]}
        yield {"pixel_values": picture[:, None].repeat(1, 2, 1, 1, 1)}
        frames = find(config, "num_frames", "frames_per_clip", under=VISION) or 4
        yield {"pixel_values": torch.randn(2, frames, channels, *size, generator=generator)}
        patches = torch.randn(2, 16, channels * patch * patch, generator=generator)
        yield {"pixel_values": patches}
    if "pixel_values_videos" in names:
        frames = find(config, "num_frames", "frames_per_clip", under=VISION) or 4
        yield {"pixel_values_videos": torch.randn(1, frames, channels, *size, generator=generator)}


def _audio_inputs(
    model: PreTrainedModel, names: dict[str, inspect.Parameter], generator: torch.Generator
) -> Iterator[Inputs]:
    config = model.config
    mels = (
        find(config, "num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "input_dim", under=AUDIO) or 80
    )
    if "input_features" in names:
        positions = find(config, "max_source_positions", under=AUDIO)
        lengths = [2 * positions] if isinstance(positions, int) else []
        for length in [*lengths, 64, 100]:
            features = torch.randn(2, mels, length, generator=generator)
            yield {"input_features": features}
            yield {"input_features": features.transpose(1, 2).contiguous()}
    for name in ("input_values", "audio_values"):
        if name in names:
            yield {name: 0.5 * torch.randn(2, 4000, generator=generator)}
            yield {name: 0.5 * torch.randn(2, 1, 4000, generator=generator)}
            length = find(config, "max_length", "spec_size", under=AUDIO) or 100
            yield {name: torch.randn(2, length, mels, generator=generator)}


def _series(
    model: PreTrainedModel, names: dict[str, inspect.Parameter], generator: torch.Generator
) -> Iterator[Proposal]:
    config = model.config
    length = find(config, "context_length") or 32
    lags = find(config, "lags_sequence") or [0]
    channels = find(config, "num_input_channels", "input_size") or 1
    past = length + max(lags)
    if "past_time_features" in names:
        future = find(config, "prediction_length") or 4
        features = config.num_time_features
        yield Proposal(
            "series",
            {
                "past_values": torch.randn(2, past, generator=generator),
                "past_time_features": torch.randn(2, past, features, generator=generator),
                "past_observed_mask": torch.ones(2, past),
                "future_values": torch.randn(2, future, generator=generator),
                "future_time_features": torch.randn(2, future, features, generator=generator),
            },
        )
    yield Proposal("series", {"past_values": torch.randn(2, past, channels, generator=generator)})
    yield Proposal("series", {"past_values": torch.randn(2, past, generator=generator)})


_PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index", "image_patch_id", "im_patch_id", "img_token_id"),
    "audio": ("audio_token_id", "audio_token_index"),
}
_TOWER_METHODS = {"image": "get_image_features", "audio": "get_audio_features"}


def _mixed(
    model: PreTrainedModel, kind: str, option: Inputs, text: Inputs, generator: torch.Generator
) -> Inputs | None:
    """Text with as many placeholders as the tower gives vectors, or None where that cannot be found out."""
    token = find(model.config, *_PLACEHOLDERS[kind])
    method: Callable[..., Any] | None = getattr(model, _TOWER_METHODS[kind], None)
    method = method or getattr(getattr(model, "model", None), _TOWER_METHODS[kind], None)
    if not isinstance(token, int) or method is None:
        return None
    try:
        with torch.no_grad():
            features = method(**option)
    except Exception:  # any shape that the tower does not take; the caller's next proposal is another one
        return None
    rows = _feature_rows(features)
    batch = next(iter(option.values())).shape[0]
    if rows is None or not 0 < rows <= 4000:
        return None
    batch = batch if rows % batch == 0 and "image_grid_thw" not in option else 1
    start = find(model.config, "vision_start_token_id", "image_start_token_id", "boi_token_id")
    ordinary = text_ids(model, TEXT_LENGTH, batch, generator)
    holders = torch.full((batch, rows // batch), token)
    opening = torch.full((batch, 1), start) if isinstance(start, int) else ordinary[:, :1]
    ids = torch.cat([ordinary[:, :4], opening, holders, ordinary[:, 4:]], dim=1)
    mixed = {**text, **option, "input_ids": ids}
    if "decoder_input_ids" in mixed:
        mixed["decoder_input_ids"] = mixed["decoder_input_ids"][:batch]
    if "mm_token_type_ids" in forward_parameters(model):
        mixed["mm_token_type_ids"] = (ids == token).long()
    if "token_type_ids" in forward_parameters(model):
        mixed["token_type_ids"] = (ids == token).long()
    return mixed


def _feature_rows(features: Any) -> int | None:
    """Number of vectors in whatever a tower returned."""
    pooled = getattr(features, "pooler_output", None)
    features = pooled if pooled is not None else features
    features = getattr(features, "last_hidden_state", features)
    if isinstance(features, Tensor) and features.dim() >= 2:
        return features.numel() // features.shape[-1]
    if isinstance(features, list | tuple) and features:
        rows = [_feature_rows(part) for part in features]
        return None if any(row is None for row in rows) else sum(row for row in rows if row is not None)
    return None

"""Inputs for the families whose forward wants something that its signature does not tell.

Each function takes the model and a generator and gives the arguments of one forward.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


def text(length: int, batch: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(60, 180, (batch, length), generator=generator)


def chameleon(_model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    return {"input_ids": text(12, 1, generator)}


def lxmert(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    boxes = torch.rand(2, 6, 4, generator=generator)
    features = torch.randn(2, 6, model.config.visual_feat_dim, generator=generator)
    return {"input_ids": text(12, 2, generator), "visual_feats": features, "visual_pos": boxes}


def oneformer(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    tasks = torch.randint(1, 300, (1, model.config.task_seq_len), generator=generator)
    return {"pixel_values": torch.randn(1, 3, 128, 128, generator=generator), "task_inputs": tasks}


def omdet(_model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    classes, task = text(5, 3, generator), text(6, 1, generator)
    return {
        "pixel_values": torch.randn(1, 3, 128, 128, generator=generator),
        "classes_input_ids": classes,
        "classes_attention_mask": torch.ones_like(classes),
        "tasks_input_ids": task,
        "tasks_attention_mask": torch.ones_like(task),
        "classes_structure": torch.tensor([3]),
    }


def pix2struct(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    patches = torch.randn(2, 9, 2 + model.config.vision_config.patch_embed_hidden_size, generator=generator)
    patches[..., :2] = torch.tensor([[row, column] for row in range(1, 4) for column in range(1, 4)])
    return {"flattened_patches": patches, "decoder_input_ids": text(7, 2, generator)}


def pairs_of_images(_model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": torch.rand(1, 2, 3, 96, 96, generator=generator)}


def text_line(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    height = 96 if model.config.model_type.startswith("pp_ocrv5_mobile") else 48
    return {"pixel_values": torch.randn(1, 3, height, 320, generator=generator)}


def codebook_decoder(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    rows = 2 * model.config.decoder.num_codebooks
    return {
        "input_ids": text(12, 2, generator),
        "decoder_input_ids": torch.randint(3, 200, (rows, 7), generator=generator),
    }


def moshi(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    codes = torch.randint(3, 200, (2, 2, model.config.num_codebooks, 12), generator=generator)
    return {"input_ids": text(12, 2, generator), "moshi_audio_codes": codes[0], "user_audio_codes": codes[1]}


def kosmos2(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    size, holders = model.config.vision_config.image_size, model.config.latent_query_num
    ids = text(12 + holders, 1, generator)
    mask = torch.zeros_like(ids)
    mask[:, 3 : 3 + holders] = 1
    picture = torch.randn(1, 3, size, size, generator=generator)
    return {"pixel_values": picture, "input_ids": ids, "image_embeds_position_mask": mask}


def idefics(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    size = model.config.vision_config.image_size
    return {
        "input_ids": text(12, 2, generator),
        "attention_mask": torch.ones(2, 12, dtype=torch.long),
        "pixel_values": torch.randn(2, 1, 3, size, size, generator=generator),
        "image_attention_mask": torch.ones(2, 12, 1, dtype=torch.long),
    }


def depth_pro(_model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": torch.randn(1, 3, 256, 256, generator=generator)}


def tvp(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    frames, size = model.config.num_frames, model.config.max_img_size
    return {
        "input_ids": text(12, 1, generator),
        "attention_mask": torch.ones(1, 12, dtype=torch.long),
        "pixel_values": torch.randn(1, frames, 3, size, size, generator=generator),
    }


def muse_assistant(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    width = model.config.hidden_size
    return {
        "noise_embeds": torch.randn(1, 4, width, generator=generator),
        "context_hidden_states": torch.randn(1, 8, width * len(model.config.target_layer_ids), generator=generator),
    }


def without_cache(_model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    return {"input_ids": text(24, 1, generator), "use_cache": False}


def clap(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    audio = model.config.audio_config
    return {
        "input_ids": text(12, 2, generator),
        "input_features": torch.randn(2, 1, audio.spec_size, audio.num_mel_bins, generator=generator),
        "is_longer": torch.zeros(2, 1, dtype=torch.bool),
    }


def dia(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    codes = torch.randint(3, 200, (2, 7, model.config.decoder_config.num_channels), generator=generator)
    return {"input_ids": text(12, 2, generator), "decoder_input_ids": codes}


def stacked_frames(_model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    return {"input_features": torch.randn(2, 40, 320, generator=generator)}


def mllama(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    vision = model.config.vision_config
    tiles, size = vision.max_num_tiles, vision.image_size
    return {
        "input_ids": text(12, 1, generator),
        "pixel_values": torch.randn(1, 1, tiles, 3, size, size, generator=generator),
        "aspect_ratio_ids": torch.tensor([[1]]),
        "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, 12, 1, tiles, dtype=torch.long),
    }


def seggpt(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    height, width = model.config.image_size
    return {
        name: torch.randn(1, 3, height // 2, width, generator=generator)
        for name in ("pixel_values", "prompt_pixel_values", "prompt_masks")
    }


def codebook_tokens(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    columns = model.config.num_codebooks + 1
    return {"input_ids": torch.randint(3, 200, (2, 12, columns), generator=generator)}


def codec_pair(_model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    return {
        "input_values": 0.5 * torch.randn(1, 1, 6400, generator=generator),
        "input_features": torch.randn(1, 20, 160, generator=generator),
    }


def assistant(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    """A drafting model reads the caches of the model that it drafts for: one pair for each kind of layer."""
    config = model.config.get_text_config()
    shared = {}
    for kind, layer in zip(config.layer_types, range(config.num_hidden_layers), strict=True):
        part = config.per_layer_config[layer] if config.is_heterogeneous else config
        shape = (1, part.num_key_value_heads, 8, part.head_dim)
        shared[kind] = (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
    width = model.config.backbone_hidden_size
    return {
        "inputs_embeds": torch.randn(1, 1, 2 * width, generator=generator),
        "position_ids": torch.tensor([[7]]),
        "shared_kv_states": shared,
    }

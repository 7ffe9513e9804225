"""Families that the general rules do not reach, and what they need instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, ResNetConfig

from families import special_inputs
from families.shrink import WIDTH, shrunk_config


@dataclass(frozen=True)
class Special:
    """What to do differently for one family.

    Parameters
    ----------
    fields : dict
        Configuration fields to set after shrinking (``text_config__vocab_size`` reaches into a nested one).
    config : callable, optional
        Builds the configuration altogether, from the model class and the level.
    inputs : callable, optional
        Builds the inputs, from the model and a generator.
    classes : tuple of str
        The only classes to try, in this order.
    level : str, optional
        The only level to try.
    skip : str
        Why nothing is tried at all.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    config: Callable[[type[PreTrainedModel], str], PreTrainedConfig] | None = None
    inputs: Callable[[PreTrainedModel, torch.Generator], dict[str, Any]] | None = None
    classes: tuple[str, ...] = ()
    level: str | None = None
    skip: str = ""


def _compass_rope() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def _assistant_config(cls: type[PreTrainedModel], level: str) -> PreTrainedConfig:
    text = cls.config_class.sub_configs_defaults["text_config"]
    small = shrunk_config(
        text.get_config_class(text.model_type),
        level,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        num_kv_shared_layers=6,
        num_hidden_layers=6,
    )
    return cls.config_class(text_config=small, backbone_hidden_size=WIDTH)


_HIERA = {
    "vision_config__backbone_config__hidden_size": 16,
    "vision_config__backbone_config__embed_dim_per_stage": [16, 32, 64, 128],
    "vision_config__backbone_config__num_attention_heads_per_stage": [1, 2, 4, 8],
    "vision_config__backbone_config__blocks_per_stage": [1, 1, 2, 1],
    "vision_config__backbone_config__window_size_per_stage": [4, 4, 4, 4],
    "vision_config__backbone_config__global_attention_blocks": [3],
    "vision_config__backbone_config__image_size": [128, 128],
    "vision_config__backbone_config__window_positional_embedding_background_size": [4, 4],
    "vision_config__backbone_channel_list": [128, 64, 32, 16],
    "vision_config__backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
    "prompt_encoder_config__image_size": 128,
}
_SAM3 = {
    "vision_config__backbone_config__image_size": 112,
    "vision_config__backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
    "prompt_encoder_config__image_size": 112,
}

SPECIAL: dict[str, Special] = {
    "blip_2": Special(fields={"image_token_index": 319}),
    "deimv2": Special(classes=("Deimv2ForObjectDetection",)),
    "led": Special(fields={"attention_window": [4, 4]}),
    "mllama": Special(
        fields={
            "vision_config__intermediate_layers_indices": [0, 1],
            "vision_config__vision_output_dim": 192,  # one width for the output and one for each of these layers
            "text_config__cross_attention_layers": [1],
        },
        inputs=special_inputs.mllama,
    ),
    "patchtsmixer": Special(fields={"self_attn": True}),
    "blt": Special(inputs=special_inputs.without_cache),
    "clap": Special(inputs=special_inputs.clap),
    "deepseek_ocr2": Special(fields={"text_config__mlp_layer_types": ["dense", "sparse"]}),
    "dia": Special(inputs=special_inputs.dia),
    "granite_speech5": Special(inputs=special_inputs.stacked_frames),
    "hy_v4_vl": Special(
        fields={"text_config__rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    ),
    "instructblip": Special(fields={"image_token_index": 319}),
    "instructblipvideo": Special(fields={"video_token_index": 319}),
    "llama4": Special(
        fields={
            "vision_config__intermediate_size": 256,  # what the pixel shuffle makes of the width
            "vision_config__projector_input_dim": 64,
            "vision_config__projector_output_dim": 64,
        }
    ),
    "lw_detr": Special(fields={"projector_scale_factors": (1.0,)}),
    "molmo2": Special(fields={"adapter_config__vision_feature_layer": [1, 0]}),
    "moonshine_streaming": Special(fields={"num_key_value_heads": 4}),
    "sam": Special(
        fields={
            "vision_config__output_channels": 64,
            "prompt_encoder_config__image_embedding_size": 4,
            "vision_config__num_pos_feats": 32,
        }
    ),
    "sam_hq": Special(
        fields={
            "vision_config__output_channels": 64,
            "prompt_encoder_config__image_embedding_size": 4,
            "vision_config__num_pos_feats": 32,
            "mask_decoder_config__vit_dim": 64,
        }
    ),
    "step3p7": Special(fields={"text_config__sliding_window": 5}),
    "autoformer": Special(fields={"label_length": 2}),
    "depth_pro": Special(
        fields={
            "patch_size": 64,
            "image_model_config__image_size": 64,
            "patch_model_config__image_size": 64,
            "fov_model_config__image_size": 64,
            "intermediate_hook_ids": (1, 0),
        },
        inputs=special_inputs.depth_pro,
    ),
    "idefics": Special(inputs=special_inputs.idefics),
    "jamba": Special(fields={"attn_layer_period": 2, "attn_layer_offset": 1}),
    "kosmos2": Special(inputs=special_inputs.kosmos2),
    "moshi": Special(inputs=special_inputs.moshi),
    "musicgen": Special(inputs=special_inputs.codebook_decoder),
    "musicgen_melody": Special(inputs=special_inputs.codebook_decoder),
    "bamba": Special(fields={"attn_layer_indices": [1]}),
    "chameleon": Special(
        fields={
            "vocabulary_map": {"<image>": 319} | {f"IMGIMG{chr(65 + i)}Z": 200 + i for i in range(10)},
            "image_token_id": 319,
        },
        inputs=special_inputs.chameleon,
    ),
    "cohere_compass": Special(
        fields={
            "text_config__rope_parameters": {"full_attention": _compass_rope(), "sliding_attention": _compass_rope()},
            "text_config__layer_types": ["sliding_attention", "full_attention"],
            "vision_config__deepstack_visual_indexes": [0, 1],
        }
    ),
    "dbrx": Special(
        fields={"attn_config__rope_theta": 10000.0, "attn_config__kv_n_heads": 2, "attn_config__clip_qkv": 8.0}
    ),
    "diffusion_gemma": Special(
        fields={
            "text_config__num_experts": 4,
            "text_config__top_k_experts": 2,
            "text_config__moe_intermediate_size": 48,
            "canvas_length": 8,
        }
    ),
    "efficientloftr": Special(inputs=special_inputs.pairs_of_images, level="depth"),
    "ernie4_5_vl_moe": Special(
        fields={"text_config__rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}}
    ),
    "esm": Special(fields={"pad_token_id": 1, "mask_token_id": 32, "bos_token_id": 0}),
    "fun_asr_nano": Special(fields={"adaptor_config__intermediate_size": 16}),
    "gemma3n": Special(
        classes=("Gemma3nForCausalLM",), fields={"intermediate_size": 96, "num_kv_shared_layers": 0, "laurel_rank": 8}
    ),
    "gemma4_assistant": Special(config=_assistant_config, inputs=special_inputs.assistant),
    "gemma4_unified_assistant": Special(config=_assistant_config, inputs=special_inputs.assistant),
    "gemma3": Special(fields={"mm_tokens_per_image": 4}),
    "shieldgemma2": Special(fields={"mm_tokens_per_image": 4, "yes_token_index": 61, "no_token_index": 62}),
    "kyutai_speech_to_text": Special(
        fields={"codec_config__upsample_groups": 64}, inputs=special_inputs.codebook_tokens
    ),
    "tvp": Special(fields={"visual_prompt_size": 8, "max_img_size": 64}, inputs=special_inputs.tvp),
    "chmv2": Special(fields={"reassemble_factors": [4, 2, 1, 0.5], "post_process_channels": [16, 32, 48, 64]}),
    "cvt": Special(fields={"depth": (1, 2, 3)}),
    "esmfold2": Special(skip="its forward takes nine structural inputs (residues, atoms, bonds) and no text"),
    "jev": Special(skip="its forward takes marked options and question types; it borrows all of its attention"),
    "muse_glimmer_assistant": Special(inputs=special_inputs.muse_assistant),
    "nemotron_h_omni": Special(fields={"vision_config__video_temporal_patch_size": 2}),
    "rag": Special(skip="a composition of a question encoder and a generator of other families"),
    "recurrent_gemma": Special(fields={"num_hidden_layers": 3}),
    "sam2": Special(fields=_HIERA),
    "sam3_tracker": Special(fields=_SAM3),
    "glm5_next": Special(fields={"text_config__index_topk": 16}),
    "gpt_neo": Special(fields={"attention_types": [[["global", "local"], 1]]}),
    "granitemoehybrid": Special(fields={"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}),
    "lfm2_moe": Special(fields={"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}),
    "lightglue": Special(inputs=special_inputs.pairs_of_images),
    "longformer": Special(fields={"attention_window": [4, 4]}),
    "lxmert": Special(inputs=special_inputs.lxmert),
    "mamba2": Special(fields={"num_heads": 8, "head_dim": 16}),
    "neucodec": Special(inputs=special_inputs.codec_pair, level="depth"),
    "omdet_turbo": Special(
        fields={
            "backbone_config": ResNetConfig(
                embedding_size=16, hidden_sizes=[96, 192, 384, 768], depths=[1] * 4, out_indices=[2, 3, 4]
            ),
            "apply_layernorm_after_vision_backbone": False,
        },
        inputs=special_inputs.omdet,
    ),
    "oneformer": Special(inputs=special_inputs.oneformer),
    "pix2struct": Special(inputs=special_inputs.pix2struct),
    "pp_ocrv5_mobile_rec": Special(classes=("PPOCRV5MobileRecForTextRecognition",), inputs=special_inputs.text_line),
    "pp_ocrv5_server_rec": Special(classes=("PPOCRV5ServerRecForTextRecognition",), inputs=special_inputs.text_line),
    "pp_ocrv6_small_rec": Special(classes=("PPOCRV6SmallRecForTextRecognition",), inputs=special_inputs.text_line),
    "pp_ocrv6_tiny_rec": Special(classes=("PPOCRV6TinyRecForTextRecognition",), inputs=special_inputs.text_line),
    "qwen4_exp": Special(
        fields={
            "text_config__indexer_n_heads": 4,
            "text_config__indexer_kv_heads": 1,
            "text_config__indexer_head_dim": 16,
            "text_config__indexer_budget": 8,
            "text_config__indexer_compress_ratio": 4,
        }
    ),
    "reformer": Special(
        fields={
            "axial_pos_embds_dim": (16, 48),
            "axial_pos_shape": (4, 8),
            "attn_layers": ["local", "lsh"],
            "num_buckets": 4,
            "lsh_attn_chunk_length": 4,
            "local_attn_chunk_length": 4,
        }
    ),
    "seggpt": Special(inputs=special_inputs.seggpt),
    "superglue": Special(inputs=special_inputs.pairs_of_images),
    "xcodec2": Special(inputs=special_inputs.codec_pair, level="depth"),
    "xmod": Special(fields={"default_language": "en_XX"}),
    "zamba": Special(
        fields={
            "num_hidden_layers": 6,
            "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
        }
    ),
    "zamba2": Special(
        fields={
            "num_hidden_layers": 6,
            "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
        }
    ),
}

"""Makes the default configuration of any model family small, by the names of its fields.

The rules know no family. A field is rewritten when its name matches a rule and its default is larger than the rule's
value; nested configurations are rewritten the same way and passed on. All widths become the same number (so that a
projector between two towers keeps fitting), ids of special tokens move below the shrunk vocabulary, equal ids staying
equal. Fields that the class derives itself (its default is ``None``) are left for it to derive again.

Three levels, tried in this order because not every family survives the first:

``small``   widths, heads, depth, vocabulary, experts, images
``depth``   as ``small`` but widths and heads as in the default configuration
``counts``  only depth, vocabulary and experts
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig, ResNetConfig, TimmBackboneConfig

LEVELS = ("small", "depth", "counts")

WIDTH = 64
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
VOCAB = 320
WINDOW = 5  # smaller than every text input, so that a window really cuts
EXPERTS = 4
MAX_LAYERS = 8

Rule = tuple[re.Pattern[str], int]


def _rules(table: Mapping[str, int]) -> list[Rule]:
    return [(re.compile(rf"(?:^|.*_)(?:{names})$"), value) for names, value in table.items()]


# The first match wins. Values are upper bounds: a default that is already smaller stays.
_WIDTH_RULES = _rules(
    {
        r"mrope_hidden_size": WIDTH,
        r"qk_rope_head_dim|rope_head_dim|qk_rope_dim": 8,
        r"partial_rotary_dim|rotary_dim": 8,
        r"qk_nope_head_dim|v_head_dim|value_head_dim|key_head_dim|head_dim|d_kv|dim_head|d_head|attention_head_size|"
        r"query_key_head_dim|head_size|kv_channels|global_head_dim|mamba_head_dim|mamba_d_head|qk_head_dim|"
        r"attention_head_dim|dim_per_head|linear_value_head_dim|linear_key_head_dim|mamba_headdim": HEAD_DIM,
        r"q_lora_rank|kv_lora_rank|o_lora_rank|lora_rank": 32,
        r"mamba_n_heads|mamba_num_heads|n_mamba_heads": 8,
        r"num_key_value_heads|num_kv_heads|multi_query_group_num|n_kv_heads|kv_n_heads|num_global_key_value_heads|"
        r"key_value_heads": KV_HEADS,
        r"attention_heads|num_heads|n_heads?|num_attention_head|encoder_attention_heads|decoder_attention_heads|heads|"
        r"num_self_attention_heads|num_cross_attention_heads|index_n_heads|linear_num_value_heads": HEADS,
        r"linear_num_key_heads": 2,
        r"intermediate_size|ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|feedforward_dim|feed_forward_dim|"
        r"intermediate_dim|dim_feedforward|inter_dim|feedforward_size|d_inner|ffn_inner_dim|inner_dim|"
        r"feed_forward_hidden_size|feed_forward_size|mlp_hidden_size": 96,
        r"hidden_size|d_model|n_embd|embed_dim|hidden_dim|projection_dim|embedding_size|emb_dim|"
        r"embedding_dim|hidden_channels|projection_size|output_dim|qformer_hidden_size|width|proj_dim|"
        r"text_hidden_size|condition_dim|out_dim|embed_size|encoder_dim|decoder_dim|model_dim|"
        r"decoder_hidden_size|dim|hid_dim|hidden|vision_dim|bottleneck_size|bottleneck_dim|d_embed|"
        r"vision_output_dim|projector_size|pooler_output_size|latent_dim|lm_dim|d_text|"
        r"hidden_size_per_layer_input|fusion_hidden_size|feature_dim|token_dim|out_channels_dim|"
        r"mask_feature_size|feature_size|fpn_dim|proj_codevector_dim|codevector_dim|mlp_ratio_dim": WIDTH,
        r"index_topk": 4,
    }
)
_COUNT_RULES = _rules(
    {
        r"codebook_size": 256,  # several quantisers insist on a power of two
        r"vocab_size_per_layer_input|vocab_size|vocab|entity_vocab_size|n_words|num_words|num_embeddings|"
        r"vocab_size_words|visual_vocab_size|vision_vocab_size": VOCAB,
        r"num_experts_per_tok|moe_topk|moe_k|top_k_experts|num_experts_per_token|moe_top_k|experts_per_token|"
        r"num_selected_experts|router_topk": 2,
        r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts|routed_experts|"
        r"moe_num_primary_experts|n_experts": EXPERTS,
        r"n_group|topk_group|num_expert_group|topk_groups|n_expert_groups": 1,
        r"zero_expert_num": 2,
        r"n_shared_experts|num_shared_experts|moe_num_shared_experts": 1,
        r"num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|depth|num_decoder_layers|"
        r"num_encoder_layers|num_hidden_encoder_layers|num_blocks|layers|num_trunk_layers|num_self_attends_per_block|"
        r"num_transformer_layers|num_global_layers|num_layer|num_adapter_layers|num_encoder_blocks_|predictor_layers|"
        r"num_attention_layers|resampler_depth|transformer_layers|l_layers|r_layers|x_layers": 2,
        r"sliding_window|sliding_window_size|local_window|attention_window_size|window": WINDOW,
        r"attention_chunk_size": 8,
        r"num_mtp_layers|num_nextn_predict_layers|mtp_num_hidden_layers|mtp_num_layers": 0,
        r"first_k_dense_replace|num_dense_layers|moe_layer_start_index": 1,
        r"num_queries|num_object_queries|num_latents|num_query_tokens|latent_query_num|two_stage_num_proposals|"
        r"num_detection_tokens": 12,
        r"max_window_layers": 1,
    }
)
_IMAGE_RULES = _rules({r"image_size|img_size|pretrain_image_size|input_image_size|eval_size_": 64})

_TOKEN_ID = re.compile(r"(?:^|.*_)(?:token_id|token_index|index|token|token_idx|_id|token_ids|id)$")
_NOT_A_TOKEN = re.compile(
    r".*(?:layer|select|feature|stage|out_|eval_|head_in|ignore|num_|deepstack|global_attn|semantic_loss).*"
)
# Fields without a default that models cannot do without.
_NEEDED = {
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_key_value_heads": HEADS,
    "prediction_length": 4,
    "n_group": 1,
    "topk_group": 1,
}
_DEPTH_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Lists of one entry a stage keep their length (other fields count stages too) and get small entries.
_STAGE_LISTS = {
    "depths": 2,
    "num_heads": HEADS,
    "num_attention_heads": HEADS,
    "hidden_sizes": WIDTH,
    "embed_dims": WIDTH,
    "decoder_in_channels": WIDTH,
    "encoder_layers": 2,
}


def shrunk_config(config_class: type[PreTrainedConfig], level: str = "small", **overrides: Any) -> PreTrainedConfig:
    """A small configuration of the given class.

    Parameters
    ----------
    config_class : type
        A transformers configuration class whose fields all have defaults.
    level : {"small", "depth", "counts"}
        How much is shrunk; see the module docstring.
    **overrides
        Fields to set whatever the rules say. ``text_config__vocab_size=99`` reaches into a nested configuration.

    Returns
    -------
    PreTrainedConfig
        With dropout left alone (evaluation mode switches it off).
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {LEVELS}, got {level!r}")
    return _shrink(config_class(), _Shrinker(level), overrides)


class _Shrinker:
    """The rules of one level, and the ids that special tokens of this family moved to."""

    def __init__(self, level: str) -> None:
        self.level = level
        self.rules = list(_COUNT_RULES)
        if level in ("small", "depth"):
            self.rules += _IMAGE_RULES
        if level == "small":
            self.rules = _WIDTH_RULES + self.rules
        self.moved: dict[int, int] = {}
        self.head_dim = 128  # of the default configuration that is being shrunk

    def limit(self, name: str) -> int | None:
        return next((value for pattern, value in self.rules if pattern.match(name)), None)

    def token(self, value: int) -> int:
        """Ids below the shrunk vocabulary stay; others count down from its end, equal ones to equal ones."""
        if value < VOCAB:
            return value
        return self.moved.setdefault(value, VOCAB - 1 - len(self.moved))


def _shrink(config: PreTrainedConfig, shrinker: _Shrinker, overrides: Mapping[str, Any]) -> PreTrainedConfig:
    own = {name: value for name, value in overrides.items() if "__" not in name.strip("_")}
    kwargs: dict[str, Any] = {}
    head_dim = _head_dim(config)
    plain = _plain(config)
    for field in dataclasses.fields(config):
        name = field.name
        # Read past the attribute: some configurations raise for fields that vary by layer.
        if name in own or name not in vars(config):
            continue
        value = vars(config)[name]
        if isinstance(value, TimmBackboneConfig):
            kwargs[name] = _small_resnet(value)
        elif isinstance(value, PreTrainedConfig):
            prefix = f"{name}__"
            nested = {key.removeprefix(prefix): v for key, v in overrides.items() if key.startswith(prefix)}
            kwargs[name] = _shrink(value, shrinker, nested)
        elif value is None:
            if name in _NEEDED and not (name in ("head_dim", "num_key_value_heads") and shrinker.level != "small"):
                kwargs[name] = _NEEDED[name]
        elif _derived(field, value):
            continue
        else:
            shrinker.head_dim = head_dim
            new = _shrunk_value(name, value, shrinker)
            if new is not None and new != value:
                kwargs[name] = new
            elif vars(plain).get(name) != value:
                kwargs[name] = value  # what a composite configuration states for one of its parts
    _equal_heads(config, kwargs)
    _keep_backbone_outputs(config, kwargs)
    if shrinker.level == "small":
        _fit_windows(config, kwargs)
        _fit_rope_sections(config, kwargs)
    kwargs.update(own)
    _keep_every_layer_kind(config, kwargs, own)
    _cut_per_layer_lists(config, kwargs, own)
    init = getattr(config, "_attn_implementation", None)
    if init is not None:
        kwargs.setdefault("attn_implementation", init)
    return type(config)(**kwargs)


def _plain(config: PreTrainedConfig) -> PreTrainedConfig:
    """What the class gives without arguments, or the configuration itself where it insists on some."""
    try:
        return type(config)()
    except Exception:  # validators raise whatever they like
        return config


def _small_resnet(config: PreTrainedConfig) -> PreTrainedConfig:
    """Stands in for a backbone from a package that need not be installed; it has no attention either."""
    stages = list(getattr(config, "out_indices", None) or [4])
    return ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1],
        out_indices=[stage if stage >= 0 else 5 + stage for stage in stages],
    )


def _head_dim(config: PreTrainedConfig) -> int:
    values = vars(config)
    explicit = values.get("head_dim")
    if isinstance(explicit, int) and explicit:
        return explicit
    width, heads = values.get("hidden_size"), values.get("num_attention_heads")
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else 128


def _derived(field: dataclasses.Field[Any], value: Any) -> bool:
    """Whether the class computed this value itself, and will again from the shrunk ones."""
    if isinstance(value, dict) and _mentions(value, "mrope_section"):
        return False  # written out for the default head width, wherever it came from
    return field.default is None


def _mentions(tree: dict[str, Any], key: str) -> bool:
    return key in tree or any(_mentions(value, key) for value in tree.values() if isinstance(value, dict))


def _shrunk_value(name: str, value: Any, shrinker: _Shrinker) -> Any:
    if isinstance(value, bool):
        return None
    if _TOKEN_ID.match(name) and not _NOT_A_TOKEN.match(name):
        return _shrunk_tokens(value, shrinker)
    limit = shrinker.limit(name)
    if isinstance(value, int):
        return None if limit is None else min(value, limit)
    if isinstance(value, list | tuple) and value and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        if name in _STAGE_LISTS and (shrinker.level == "small" or name in ("depths", "encoder_layers")):
            return type(value)(_power_of_two(min(v, _STAGE_LISTS[name])) for v in value)
        if limit is not None and name not in _STAGE_LISTS:
            return type(value)(min(v, limit) for v in value)
    if name == "rope_parameters" and isinstance(value, dict) and shrinker.level == "small":
        return _shrunk_rope(value, shrinker.head_dim)
    return None


def _power_of_two(number: int) -> int:
    """The largest power of two that is not above the number: stage widths stay multiples of stage heads."""
    return 1 << (number.bit_length() - 1) if number > 0 else number


def _shrunk_tokens(value: Any, shrinker: _Shrinker) -> Any:
    if isinstance(value, int):
        return shrinker.token(value)
    if isinstance(value, list | tuple) and all(isinstance(v, int) for v in value):
        return type(value)(shrinker.token(v) for v in value)
    return None


def _shrunk_rope(rope: dict[str, Any], old_head_dim: int) -> dict[str, Any]:
    new = {}
    for key, value in rope.items():
        if isinstance(value, dict):
            new[key] = _shrunk_rope(value, old_head_dim)
        elif key == "mrope_section" and isinstance(value, list | tuple):
            new[key] = _scaled_sections(value, sum(value) * HEAD_DIM // old_head_dim)
        elif key in ("short_factor", "long_factor") and isinstance(value, list | tuple):
            new[key] = list(value[: HEAD_DIM // 2])
        else:
            new[key] = value
    return new


def _scaled_sections(sections: list[int] | tuple[int, ...], total: int) -> list[int]:
    scaled = [max(1, section * total // sum(sections)) for section in sections]
    scaled[-1] += total - sum(scaled)
    return scaled


def _equal_heads(config: PreTrainedConfig, kwargs: dict[str, Any]) -> None:
    """Numbers that are equal by design stay equal: some attentions are not written for anything else."""
    values = vars(config)
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if heads == kv_heads and "num_attention_heads" in kwargs and "num_key_value_heads" in kwargs:
        kwargs["num_key_value_heads"] = kwargs["num_attention_heads"]
    if values.get("head_dim") and values["head_dim"] == values.get("qk_rope_head_dim") and "head_dim" in kwargs:
        kwargs["head_dim"] = kwargs["qk_rope_head_dim"]  # latent attention: the rotated part is called the head


def _keep_backbone_outputs(config: PreTrainedConfig, kwargs: dict[str, Any]) -> None:
    """A backbone keeps giving as many feature maps as before; where stages are layers, from the last ones left."""
    stages = vars(config).get("_out_indices")
    if not stages:
        return
    depth = next((name for name in _DEPTH_FIELDS if name in kwargs and name in vars(config)), None)
    if depth is not None and "depths" not in vars(config):
        kwargs[depth] = max(kwargs[depth], len(stages))
        stages = list(range(kwargs[depth] - len(stages) + 1, kwargs[depth] + 1))
    kwargs["out_indices"] = list(stages)
    if "stage_out_channels" in vars(config):
        kwargs.pop("hidden_sizes", None)  # stated twice, and the other list is not one number a stage


def _fit_windows(config: PreTrainedConfig, kwargs: dict[str, Any]) -> None:
    """Shifted windows stay as small as the smallest feature map."""
    values = vars(config)
    if isinstance(values.get("window_size"), int) and "depths" in values and "image_size" in kwargs:
        kwargs["window_size"], kwargs["image_size"] = 4, 128


def _fit_rope_sections(config: PreTrainedConfig, kwargs: dict[str, Any]) -> None:
    """Modeling files fall back on sections for the default head width where the configuration states none."""
    rope = vars(config).get("rope_parameters")
    if "rope_parameters" in kwargs or not isinstance(rope, dict):
        return
    if "mrope_section" in (getattr(type(config), "ignore_keys_at_rope_validation", None) or ()):
        total = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
        kwargs["rope_parameters"] = {**rope, "mrope_section": _scaled_sections([2, 3, 3], total)}


def _keep_every_layer_kind(config: PreTrainedConfig, kwargs: dict[str, Any], own: Mapping[str, Any]) -> None:
    """One layer of each kind at least: a hybrid cut to two layers often has no attention layer left."""
    kinds = vars(config).get("layer_types")
    if not isinstance(kinds, list | tuple) or "layer_types" in own:
        return
    depth = next((name for name in _DEPTH_FIELDS if name in kwargs and name in vars(config)), None)
    if depth is None or len(set(kinds)) < 2:
        return
    needed = max(kinds.index(kind) for kind in set(kinds)) + 1
    if needed <= MAX_LAYERS:
        kwargs[depth] = max(kwargs[depth], needed)
        return
    kwargs["layer_types"] = list(dict.fromkeys(kinds))
    kwargs[depth] = len(kwargs["layer_types"])


def _cut_per_layer_lists(config: PreTrainedConfig, kwargs: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Lists that the class states itself, one entry a layer, end where the layers now end."""
    depth = next((name for name in _DEPTH_FIELDS if name in kwargs and name in vars(config)), None)
    if depth is None:
        return
    for field in dataclasses.fields(config):
        value = vars(config).get(field.name)
        stated = field.default is not None and field.name not in own and field.name not in _STAGE_LISTS
        if stated and isinstance(value, list | tuple) and len(value) == vars(config)[depth] > kwargs[depth]:
            kwargs.setdefault(field.name, type(value)(value[: kwargs[depth]]))

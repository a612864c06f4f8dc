"""Megatron-core form of Qwen2.5-VL, and the numbers of its structure in model.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_mm.configs.family_structure import Facts, FamilyStructure, ModelNumber, Numbers, NumbersAlone
from mindspeed_mm.configs.vlm_config import VLMModelConfig
from mindspeed_mm.models.megatron.family import MegatronFamily
from mindspeed_mm.utils.log import notice

_TEXT, _VISION, _PROJECTOR = "text_decoder", "image_encoder.vision_encoder", "image_encoder.vision_projector"
_NORM_EPSILON = 1e-6  # of tower and projector; transformers has it in the class, not in the configuration

_TOWER_NUMBERS = (
    ModelNumber(f"{_VISION}.num_layers", "vision", "depth"),
    ModelNumber(f"{_VISION}.hidden_size", "vision", "hidden_size"),
    ModelNumber(f"{_VISION}.ffn_hidden_size", "vision", "intermediate_size"),
    ModelNumber(f"{_VISION}.num_attention_heads", "vision", "num_heads"),
    ModelNumber(f"{_VISION}.in_channels", "vision", "in_channels"),
    ModelNumber(f"{_VISION}.patch_size", "vision", "patch_size"),
    ModelNumber(f"{_VISION}.spatial_merge_size", "vision", "spatial_merge_size"),
    ModelNumber(f"{_VISION}.temporal_patch_size", "vision", "temporal_patch_size"),
    ModelNumber(f"{_VISION}.tokens_per_second", "vision", "tokens_per_second"),
    ModelNumber(f"{_VISION}.window_attn_size", "vision", "window_size"),
    ModelNumber(f"{_VISION}.fullatt_block_indexes", "vision", "fullatt_block_indexes"),
)
_DEFAULTS = {
    f"{_TEXT}.max_position_embeddings": 128000,
    f"{_TEXT}.layernorm_epsilon": 1e-6,
    f"{_TEXT}.attention_dropout": 0.0,
    f"{_TEXT}.init_method_std": 0.02,
    f"{_TEXT}.rope_theta": 1e6,
    f"{_TEXT}.mrope_section": [16, 24, 24],
    f"{_VISION}.in_channels": 3,
    f"{_VISION}.patch_size": 14,
    f"{_VISION}.spatial_merge_size": 2,
    f"{_VISION}.temporal_patch_size": 2,
    f"{_VISION}.tokens_per_second": 2,
    f"{_VISION}.window_attn_size": 112,
    f"{_VISION}.fullatt_block_indexes": [7, 15, 23, 31],
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
}


def tower_facts(config: Any) -> Facts:
    """Return the keys of tower and projector whose values follow from the numbers of a Qwen2_5_VLConfig."""
    text, vision = config.get_text_config(), config.vision_config
    merged = vision.hidden_size * vision.spatial_merge_size**2
    return {
        f"{_VISION}.num_query_groups": (vision.num_heads, "the number of the tower's heads"),
        f"{_VISION}.kv_channels": (vision.hidden_size // vision.num_heads, "the size of the tower's heads"),
        f"{_VISION}.out_hidden_size": (text.hidden_size, "the language model's hidden size"),
        f"{_VISION}.layernorm_epsilon": (_NORM_EPSILON, "what the family has"),
        f"{_PROJECTOR}.num_layers": (1, "what the family has"),
        f"{_PROJECTOR}.input_size": (vision.hidden_size, "the tower's hidden size"),
        f"{_PROJECTOR}.ffn_hidden_size": (merged, "the tower's hidden size × spatial_merge_size²"),
        f"{_PROJECTOR}.hidden_size": (text.hidden_size, "the language model's hidden size"),
        f"{_PROJECTOR}.layernorm_epsilon": (_NORM_EPSILON, "what the family has"),
    }


def tower_misfits(file: str, config: Any) -> Iterator[str]:
    """Yield a message for each pair of the tower's numbers that don't fit each other."""
    vision = config.vision_config
    if vision.hidden_size % vision.num_heads:
        yield (
            f"{file}: '{_VISION}.hidden_size' is {vision.hidden_size}, which {vision.num_heads} attention heads don't "
            "divide"
        )


def build_config(described: VLMModelConfig, numbers: Numbers) -> Any:
    """Build the Qwen2_5_VLConfig of a model that model.json describes by numbers alone."""
    from transformers import Qwen2_5_VLConfig

    image_token, top = described.img_context_token_id, numbers["top"]
    if image_token is not None and image_token == top["video_token_id"]:
        notice(
            f"{described.file}: 'img_context_token_id' is {image_token}, the video token; {image_token - 1} is taken"
        )
        image_token -= 1
    return Qwen2_5_VLConfig(
        text_config={**numbers["text"], "rope_parameters": numbers["rope"]},
        vision_config={**numbers["vision"], "out_hidden_size": numbers["text"]["hidden_size"]},
        image_token_id=151655 if image_token is None else image_token,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        **top,
    )


MEGATRON = MegatronFamily(
    FamilyStructure(
        qkv_bias=True,
        tower_numbers=_TOWER_NUMBERS,
        tower_layers=lambda config: config.vision_config.depth,
        tower_facts=tower_facts,
        tower_misfits=tower_misfits,
        alone=NumbersAlone(_DEFAULTS, build_config),
    ),
    decoder="model.language_model.",
    towers="mindspeed_mm.models.transformers.qwen2_5_vl.towers:TOWERS",
)

"""Parts and tower of GLM-4.1V."""

from __future__ import annotations

from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.transformers.glm4v.batches import glm4v_tower_pass
from mindspeed_mm.models.transformers.qwen2_5_vl.batches import packed_positions
from mindspeed_mm.models.transformers.qwen2_5_vl.grids import device_inputs
from mindspeed_mm.models.transformers.qwen2_5_vl.traits import grid_tower

TRAITS = FamilyTraits(
    language_model="model.language_model",
    parts={
        "vision_encoder": ("model.visual",),
        "vision_projector": ("model.visual.downsample", "model.visual.merger"),
        "text_decoder": ("model.language_model", "lm_head"),
    },
    sub_configs={"vision_encoder": "vision_config", "text_decoder": "text_config"},
    towers=(grid_tower(device_inputs),),
    packed_positions=packed_positions,
    attention="causal",
    prepare_batch=glm4v_tower_pass,
    placeholders=("image", "image"),  # frames of videos have the token of images
)

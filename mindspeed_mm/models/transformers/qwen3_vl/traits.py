"""Parts and tower of Qwen3-VL, and the tower's smallest input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.transformers.qwen2_5_vl.batches import one_tower_pass, packed_positions
from mindspeed_mm.models.transformers.qwen2_5_vl.grids import interpolated_inputs
from mindspeed_mm.models.transformers.qwen2_5_vl.traits import GRID_SPLIT, grid_tower, run_one_patch
from mindspeed_mm.parallel.tensor_plan import TensorPlan


def run_one_deepstack_patch(model: Any, device: torch.device) -> torch.Tensor:
    """Run the vision tower on one merged patch of zeros → [1, hidden], with what it hands to the first decoder layers.

    The sum reaches every weight of the tower, those of the deepstack mergers too.
    """
    output = run_one_patch(interpolated_inputs, model, device)
    return output.pooler_output + sum(output.deepstack_features)


def _deepstack_layers(model: Any) -> int:
    """Number of decoder layers after which the model adds features of the vision tower to the tokens of media."""
    return len(model.config.vision_config.deepstack_visual_indexes)


#: names of layers as in Llama
DEEPSTACK = TensorPlan(uncut_layers=_deepstack_layers)

DEEPSTACK_TOWER = replace(
    grid_tower(interpolated_inputs),
    run_dummy=run_one_deepstack_patch,
    split=replace(GRID_SPLIT, outputs=("pooler_output", "deepstack_features")),
)
TRAITS = FamilyTraits(
    language_model="model.language_model",
    parts={
        "vision_encoder": ("model.visual",),
        "vision_projector": ("model.visual.merger", "model.visual.deepstack_merger_list"),
        "text_decoder": ("model.language_model", "lm_head"),
    },
    sub_configs={"vision_encoder": "vision_config", "text_decoder": "text_config"},
    towers=(DEEPSTACK_TOWER,),
    packed_positions=packed_positions,
    attention="causal",
    prepare_batch=one_tower_pass,
    placeholders=("image", "video"),
    tensor=DEEPSTACK,
)

"""Parts and towers of Gemma 4, and the towers' smallest inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.models.common.packed import plain_positions
from mindspeed_mm.models.transformers.gemma4.batches import gemma4_packed_masks
from mindspeed_mm.parallel.tensor_plan import TensorPlan

_FRAMES = 8  # become two tokens


def _run_one_token(model: Any, device: torch.device) -> torch.Tensor:
    """Run vision tower and projector on the patches of one token, of zeros → [1, hidden]."""
    vision = model.config.vision_config
    side = vision.pooling_kernel_size
    pixels = torch.zeros(1, side * side, 3 * vision.patch_size**2, device=device, dtype=model.dtype)
    places = torch.cartesian_prod(*[torch.arange(side, device=device)] * 2)[None]
    return torch.cat(list(model.model.get_image_features(pixels, places, return_dict=True).pooler_output))


def _run_smallest_sound(model: Any, device: torch.device) -> torch.Tensor:
    """Run audio tower and projector on 80 ms of zeros → [1, tokens, hidden]."""
    tower = model.model.audio_tower
    bins = (
        4 * tower.subsample_conv_projection.input_proj_linear.in_features // tower.config.subsampling_conv_channels[1]
    )
    features = torch.zeros(1, _FRAMES, bins, device=device, dtype=model.dtype)
    mask = torch.ones(1, _FRAMES, dtype=torch.bool, device=device)
    return model.model.get_audio_features(features, mask, return_dict=True).pooler_output


def _vision_tower(pixels: str) -> Tower:
    """One of the two passes of the vision tower: a rank with images only runs that for videos, too."""
    return Tower("model.vision_tower", ("image", "video"), (pixels,), _run_one_token, beside=("model.embed_vision",))


TRAITS = FamilyTraits(
    language_model="model.language_model",
    parts={
        "vision_encoder": ("model.vision_tower",),
        "vision_projector": ("model.embed_vision",),
        "audio_encoder": ("model.audio_tower", "model.embed_audio"),
        "text_decoder": ("model.language_model", "lm_head"),
    },
    sub_configs={
        "vision_encoder": "vision_config",
        "audio_encoder": "audio_config",
        "text_decoder": "text_config",
    },
    towers=(
        _vision_tower("pixel_values"),
        _vision_tower("pixel_values_videos"),
        Tower("model.audio_tower", ("audio",), ("input_features",), _run_smallest_sound, beside=("model.embed_audio",)),
    ),
    packed_positions=plain_positions,
    packed_masks=gemma4_packed_masks,
    # experts take rows from outside of the part of a layer that gathers them
    tensor=TensorPlan(whole=("proj",), uncut_layers=lambda model: model.config.text_config.num_hidden_layers),
)


def traits_for(config: Any) -> FamilyTraits:
    """Return the traits of a model with the towers that its configuration has."""
    absent = [kind for kind in ("vision", "audio") if getattr(config, f"{kind}_config") is None]
    paths = {f"model.{kind}_tower" for kind in absent}
    parts = {part: names for part, names in TRAITS.parts.items() if part.partition("_")[0] not in absent}
    towers = tuple(tower for tower in TRAITS.towers if tower.path not in paths)
    return dataclasses.replace(TRAITS, parts=parts, towers=towers)

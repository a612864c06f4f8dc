"""What a family folder tells about its models' Megatron-core form, in its file `megatron.py`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from mindspeed_mm.utils.errors import ConfigError


@dataclass(frozen=True)
class MegatronFamily:
    """How a transformers model is built of Megatron-core's modules; the defaults suit a text model.

    Attributes:
        decoder: prefix of the decoder's tensors in the transformers model.
        head: name of the output layer's tensor.
        image_encoder: (vision config, ParallelSizes, *, layers, has_patch_embedding, has_projector) → module with
            `forward(pixel_values, grid_thw)`, `set_input_tensor`, `made_of`, `vision_encoder`, `vision_projector`.
        smallest_image: (vision config) → (pixel_values, grid_thw) of one merged patch of zeros.
        positions: (transformers model on meta, batch) → position ids [3, batch, sequence], or None for the plain
            order.
    """

    decoder: str = "model."
    head: str = "lm_head.weight"
    image_encoder: Callable[..., nn.Module] | None = None
    smallest_image: Callable[[Any], tuple[Any, Any]] | None = None
    positions: Callable[[Any, dict[str, Any]], Any] | None = None


def find_megatron_family(model_type: str) -> MegatronFamily:
    """Return what the family folder of a HF `model_type` says.

    Raises:
        ConfigError: no folder, or one without a Megatron-core form.
    """
    package = "mindspeed_mm.models.transformers"
    places = importlib.import_module(package).__path__
    # by file: finding a module would import each family's package
    having = sorted({file.parent.name for place in places for file in Path(place).glob("*/megatron.py")})
    if model_type not in having:
        raise ConfigError(
            f"model_type '{model_type}' has no Megatron-core form here; those that have one: {', '.join(having)}; "
            "others train with --use-torch-fsdp2"
        )
    return importlib.import_module(f"{package}.{model_type}.megatron").FAMILY

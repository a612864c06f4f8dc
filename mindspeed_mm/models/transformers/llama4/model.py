"""Class, parts and tower of Llama 4, and the tower's smallest input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Llama4ForConditionalGeneration as HFLlama4
from transformers.models.llama4.modeling_llama4 import Llama4CausalLMOutputWithPast
from transformers.utils import ModelOutput

from mindspeed_mm.models.common.base_model import adapt_class
from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.models.common.packed import PACKING_KEY, restarting_positions
from mindspeed_mm.models.transformers.llava.traits import patches_per_picture
from mindspeed_mm.parallel.tensor_plan import TensorPlan
from mindspeed_mm.utils.errors import ConfigError


class Llama4ForConditionalGeneration(adapt_class(HFLlama4)):  # type: ignore[misc]
    """The transformers class, which can return its output.

    Its forward pass takes `image_outputs` from the output of its language model (transformers 5.24), which is of a
    class without them. A hook makes that output one of the model's own class, which has them.
    """

    __module__ = HFLlama4.__module__

    def __init__(self, config: Any) -> None:
        """
        Args:
            config: Llama4Config.
        """
        super().__init__(config)
        self.language_model.register_forward_hook(_with_image_outputs)

    def get_decoder(self) -> Any:
        """Return the module with the decoder layers; transformers' class returns the one around it."""
        return self.language_model.model


def _with_image_outputs(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return Llama4CausalLMOutputWithPast(**output) if isinstance(output, ModelOutput) else output


def _packed_positions(model: Any, batch: Mapping[str, Any], documents: torch.Tensor) -> torch.Tensor:
    """Return positions [batch, sequence] int64 that restart with each sample.

    Layers without positions scale their queries by a token's place in its row, not in its sample.

    Raises:
        ConfigError: the scale of a token would not be that of its place in its sample.
    """
    positions, text = restarting_positions(documents), model.config.text_config
    if text.attn_temperature_tuning:
        places = torch.arange(documents.shape[1]).expand_as(positions)
        steps = (((of + 1) / text.floor_scale).floor() for of in (places, positions))
        if bool(torch.ne(*steps)[documents > 0].any()):
            raise ConfigError(
                f"{type(model).__name__} can't train on packed rows of {documents.shape[1]} tokens: it scales "
                f"attention by a token's place in its row from {text.floor_scale} tokens on (floor_scale of "
                f"config.json); set --seq-length below {text.floor_scale}, or {PACKING_KEY}"
            )
    return positions


def _prepare_batch(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the micro-batch with pixels in float32: the processor makes bfloat16 ones whatever the model's dtype."""
    pixels = batch.get("pixel_values")
    return batch if pixels is None else {**batch, "pixel_values": pixels.float()}


def _run_one_tile(model: Any, device: torch.device) -> torch.Tensor:
    """Run tower and projector on one tile of zeros, the only size that they take → [tokens, hidden]."""
    vision = model.config.vision_config
    pixels = torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size, device=device, dtype=model.dtype)
    return model.multi_modal_projector(model.get_image_features(pixels, return_dict=True).last_hidden_state[0])


TRAITS = FamilyTraits(
    language_model="language_model.model",
    parts={
        "vision_encoder": ("vision_model",),
        "vision_projector": ("vision_model.vision_adapter", "multi_modal_projector"),
        "text_decoder": ("language_model",),
    },
    sub_configs={"vision_encoder": "vision_config", "text_decoder": "text_config"},
    towers=(
        Tower(
            "vision_model",
            ("image",),
            ("pixel_values",),
            _run_one_tile,
            beside=("multi_modal_projector",),
            patches_per_row=patches_per_picture,
        ),
    ),
    packed_positions=_packed_positions,
    prepare_batch=_prepare_batch,
    # experts return the tokens of all rows as one list
    tensor=TensorPlan(uncut_layers=lambda model: model.config.text_config.num_hidden_layers),
)

"""Gemma 3 with images: a SigLIP tower and a pooling projector; an image's tokens attend to all of the image."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import Gemma3ForConditionalGeneration as HFGemma3
from transformers.utils.generic import is_flash_attention_requested

from mindspeed_mm.models.common.base_model import adapt_class
from mindspeed_mm.models.transformers.gemma3.batches import packed_masks
from mindspeed_mm.models.transformers.llava.traits import TOWER
from mindspeed_mm.models.transformers.llava.traits import TRAITS as LLAVA
from mindspeed_mm.utils.errors import ConfigError

TRAITS = dataclasses.replace(
    LLAVA,
    towers=(dataclasses.replace(TOWER, has_one_size=True),),
    packed_masks=packed_masks,
    attention=None,  # images see themselves whole
)


class Gemma3ForConditionalGeneration(adapt_class(HFGemma3)):  # type: ignore[misc]
    """The transformers class, which here refuses attention implementations that can't mask images."""

    __module__ = HFGemma3.__module__

    def __init__(self, config: Any) -> None:
        """
        Args:
            config: Gemma3Config.

        Raises:
            ConfigError: flash attention is requested for the text model.
        """
        if is_flash_attention_requested(config.text_config):
            raise ConfigError(
                f"Gemma 3 with attention '{config.text_config._attn_implementation}' would train its pictures' tokens "
                "as if none saw the ones behind it, because flash attention takes no mask; set text_decoder."
                "attn_implementation: sdpa in model.json"
            )
        super().__init__(config)

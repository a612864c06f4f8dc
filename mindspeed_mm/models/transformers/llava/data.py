"""Data adapter of LLaVA: images are cut to squares of one size, so that all take the same number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_mm.configs.data_config import PreprocessParameters
from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media.media import Foreseen, Geometry
from mindspeed_mm.data.processors import Processor
from mindspeed_mm.utils.errors import ConfigError


class SquarePictureAdapter(DefaultAdapter):
    """A row of the media tensor is an image; all images have one size."""

    media_keys: Mapping[str, Sequence[str]] = {"image": ("pixel_values",)}

    def load_processor(self, path: str, options: PreprocessParameters) -> Processor:
        """Load the processor.

        Raises:
            ConfigError: the processor in `path` can't be loaded, or is not LlavaProcessor.
        """
        processor = super().load_processor(path, options)
        if hasattr(processor, "image_processor") and not hasattr(processor, "num_additional_image_tokens"):
            raise ConfigError(
                f"{path}: a LLaVA model with {type(processor).__name__} isn't adapted, only one with LlavaProcessor; "
                "of those with Pixtral's tower take one of model_type mistral3"
            )
        return processor

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Count the patches of the square; None if the processor doesn't cut images to squares."""
        part = processor.image_processor
        if not part.do_center_crop:
            return None
        patches = (part.crop_size["height"] // processor.patch_size) * (part.crop_size["width"] // processor.patch_size)
        tokens = patches + processor.num_additional_image_tokens
        tokens -= processor.vision_feature_select_strategy == "default"
        return Foreseen(processor.image_token * tokens, patches, patches**2, rows=1)


ADAPTER = SquarePictureAdapter()

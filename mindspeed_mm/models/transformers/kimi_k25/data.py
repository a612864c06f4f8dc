"""Data adapter of Kimi K2.5: images of any size, each with its grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_mm.configs.data_config import PreprocessParameters
from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media.media import MediaKind
from mindspeed_mm.data.processors import Processor


class KimiAdapter(DefaultAdapter):
    """Videos aren't read: the processor cuts one into clips, each with a grid of its own, of any number a video."""

    media_keys: Mapping[str, Sequence[str]] = {"image": ("pixel_values", "image_grid_thw")}

    def load_processor(self, path: str, options: PreprocessParameters) -> Processor:
        """Load transformers' own processor: the code in published directories doesn't say what it writes for images."""
        return super().load_processor(path, options.model_copy(update={"trust_remote_code": False}))

    def reads(self, processor: Processor) -> tuple[MediaKind, ...]:
        """Return images only."""
        return ("image",)


ADAPTER = KimiAdapter()

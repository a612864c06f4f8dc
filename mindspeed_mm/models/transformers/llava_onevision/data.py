"""LLaVA-OneVision's rows: each picture in tiles, however many there are; the tokens of a video's frames, and one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mindspeed_mm.data.media.media import Foreseen, Geometry
from mindspeed_mm.data.processors import Processor
from mindspeed_mm.models.transformers.llava_next.data import TiledPictureAdapter


class TilesAndClipsAdapter(TiledPictureAdapter):
    """A row of `pixel_values_videos` is a clip: those of one micro-batch have the same number of frames."""

    media_keys: Mapping[str, Sequence[str]] = {
        "image": ("pixel_values", "image_sizes"),
        "video": ("pixel_values_videos",),
    }

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Count a video's tokens by its frames, each pooled to half its sides."""
        if geometry.kind == "image":
            return super().foresee(processor, geometry)
        patches = processor.num_image_tokens
        tokens = geometry.frames * math.ceil(math.isqrt(patches) / 2) ** 2 + 1
        rows = geometry.frames * patches
        return Foreseen(processor.video_token * tokens, rows, rows * patches, rows=1)

    def patches_per_tile(self, processor: Processor, side: int) -> int:
        """As many as a tile has tokens."""
        return processor.num_image_tokens


ADAPTER = TilesAndClipsAdapter()

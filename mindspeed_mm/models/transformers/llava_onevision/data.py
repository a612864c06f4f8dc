"""Data adapter of LLaVA-OneVision: images in tiles; a video takes the tokens of its frames, and one more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mindspeed_mm.data.media.media import Foreseen, Geometry
from mindspeed_mm.data.processors import Processor
from mindspeed_mm.models.transformers.llava_next.data import TiledPictureAdapter


class TilesAndClipsAdapter(TiledPictureAdapter):
    """A row of `pixel_values_videos` is a clip; the clips of a micro-batch have the same number of frames."""

    media_keys: Mapping[str, Sequence[str]] = {
        "image": ("pixel_values", "image_sizes"),
        "video": ("pixel_values_videos",),
    }

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Count a video's tokens by its frames, each pooled to half its height and width."""
        if geometry.kind == "image":
            return super().foresee(processor, geometry)
        patches = processor.num_image_tokens
        tokens = geometry.frames * math.ceil(math.isqrt(patches) / 2) ** 2 + 1
        rows = geometry.frames * patches
        return Foreseen(processor.video_token * tokens, rows, rows * patches, rows=1)

    def patches_per_tile(self, processor: Processor, side: int) -> int:
        """Return the number of patches of a tile, which is its number of tokens."""
        return processor.num_image_tokens


ADAPTER = TilesAndClipsAdapter()

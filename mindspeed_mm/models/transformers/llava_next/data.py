"""Data adapter of LLaVA-NeXT: an image takes tokens for the whole image, and for its tiles without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media.media import Foreseen, Geometry
from mindspeed_mm.data.processors import Processor


class TiledPictureAdapter(DefaultAdapter):
    """A row of the media tensor is an image [tiles, channels, height, width], padded to the largest number of tiles."""

    media_keys: Mapping[str, Sequence[str]] = {"image": ("pixel_values", "image_sizes")}
    padded_keys: Sequence[str] = ("pixel_values",)

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Count features as the processor does, for the tower's input size."""
        from transformers.image_processing_utils import select_best_resolution

        part = processor.image_processor
        side = tile_side(part)
        tokens = processor._get_number_of_features(geometry.height, geometry.width, side, side)
        tokens -= processor.vision_feature_select_strategy == "default"
        height, width = select_best_resolution((geometry.height, geometry.width), part.image_grid_pinpoints)
        tiles = 1 + (height // side) * (width // side)
        patches = self.patches_per_tile(processor, side)
        return Foreseen(processor.image_token * tokens, tiles * patches, tiles * patches**2, rows=1)

    def patches_per_tile(self, processor: Processor, side: int) -> int:
        """Return the number of patches of a tile, which has the tower's input size."""
        return (side // processor.patch_size) ** 2


def tile_side(part: Any) -> int:
    """Return the side of a tile in pixels: the size that images are cropped to, or else resized to."""
    sizes = [part.crop_size] if part.crop_size else []
    for size in (*sizes, part.size):
        for name in ("height", "shortest_edge"):
            if size.get(name):
                return size[name]
    raise ValueError(f"{type(part).__name__} has neither a crop_size nor a size of one side")


ADAPTER = TiledPictureAdapter()

"""Data adapter of InternVL: images are cut into tiles, videos are numbered frames; one tensor holds both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media.media import Foreseen, Geometry
from mindspeed_mm.data.processors import Processor

_PATCHES_PER_TOKEN = 4


class TilesAndFramesAdapter(DefaultAdapter):
    """`pixel_values` holds the tiles of images and the frames of videos, in the order of their tokens."""

    media_keys: Mapping[str, Sequence[str]] = {"image": ("pixel_values",), "video": ("pixel_values",)}
    one_at_a_time: bool = True

    def media_counts(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Count tiles and frames together, as images: the tensor doesn't distinguish them."""
        return {**super().media_counts(batch), "video": 0}

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Write an image with the tokens of its tiles, and a video frame by frame."""
        start, end, length = processor.start_image_token, processor.end_image_token, processor.image_seq_length
        if geometry.kind == "image":
            counting = processor.image_processor.get_number_of_image_patches
            rows = counting(geometry.height, geometry.width, processor.images_kwargs)
            text = f"{start}{processor.image_token * (length * rows)}{end}"
        else:
            rows, tokens = geometry.frames, processor.image_token * length
            text = "\n".join(f"Frame{number}: {start}{tokens}{end}" for number in range(1, rows + 1))
        patches = length * _PATCHES_PER_TOKEN
        return Foreseen(text, rows * patches, rows * patches**2, rows)


ADAPTER = TilesAndFramesAdapter()

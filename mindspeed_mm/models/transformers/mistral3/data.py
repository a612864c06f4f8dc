"""Data adapter of Mistral 3: an image is written row by row, with a break token after each row but the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media.media import Foreseen, Geometry
from mindspeed_mm.data.processors import Processor


class RowsOfPatchesAdapter(DefaultAdapter):
    """A row of the media tensor is an image, padded to the largest one; `image_sizes` holds its own size."""

    media_keys: Mapping[str, Sequence[str]] = {"image": ("pixel_values", "image_sizes")}
    padded_keys: Sequence[str] = ("pixel_values",)

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Fit the image into the processor's largest size, and write it as the processor does."""
        from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size

        longest = processor.image_processor.size["longest_edge"]
        if longest is None:
            return None
        unit = processor.patch_size * processor.spatial_merge_size
        picture = np.broadcast_to(np.uint8(0), (geometry.height, geometry.width, 3))
        height, width = get_resize_output_image_size(picture, size=longest, patch_size=unit)
        text = processor.replace_image_token({"image_sizes": [(height, width)]}, 0)
        patches = (height // processor.patch_size) * (width // processor.patch_size)
        return Foreseen(text, patches, patches**2, rows=1)


ADAPTER = RowsOfPatchesAdapter()

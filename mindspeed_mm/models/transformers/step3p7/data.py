"""Data adapter of Step-3.7: a whole image in one size, and crops of it in another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media.media import Foreseen, Geometry
from mindspeed_mm.data.processors import Processor


class CropsAdapter(DefaultAdapter):
    """`num_local_patches` says how many rows of `pixel_values_local` are crops of each image."""

    media_keys: Mapping[str, Sequence[str]] = {"image": ("pixel_values", "pixel_values_local", "num_local_patches")}

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Write an image as the processor does, with the crops that it would cut from an image of this shape."""
        part = processor.image_processor
        size, crop = part.size.height, part.patch_size
        *_, window, columns, rows, _ = part._plan_patches(geometry.width, geometry.height, size, crop)
        if not window:
            columns, rows = 0, 0
        ends = [column == columns - 1 and row < rows - 1 for row in range(rows) for column in range(columns)]
        text = processor.replace_image_token({"num_local_patches": [len(ends)], "patch_newline_masks": [ends]}, 0)
        whole, of_crop = (size // part.vision_patch_size) ** 2, (crop // part.vision_patch_size) ** 2
        return Foreseen(text, whole + len(ends) * of_crop, whole**2 + len(ends) * of_crop**2, rows=1)


ADAPTER = CropsAdapter()

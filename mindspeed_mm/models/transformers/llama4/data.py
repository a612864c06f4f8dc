"""Data adapter of Llama 4: an image is cut into tiles, and the whole image follows them as one more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_mm.configs.data_config import PreprocessParameters
from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media.media import Foreseen, Geometry
from mindspeed_mm.data.processors import Processor


class TilesAdapter(DefaultAdapter):
    """A row of the media tensor is a tile, or a whole image in the size of a tile."""

    media_keys: Mapping[str, Sequence[str]] = {"image": ("pixel_values",)}

    def load_processor(self, path: str, options: PreprocessParameters) -> Processor:
        """Load the processor, to return the tiles of all images as one tensor, and to name the token that they take.

        Its `image_token` stands for a whole image in a text, and marks the last tile.
        """
        processor = super().load_processor(path, options)
        if hasattr(processor, "img_patch_token"):
            processor.images_kwargs = {**(getattr(processor, "images_kwargs", None) or {}), "return_tensors": "pt"}
            processor.image_token_ids = [processor.tokenizer.convert_tokens_to_ids(processor.img_patch_token)]
        return processor

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Write an image as the processor does, with the tiles that it would cut from an image of this shape."""
        import torch
        from transformers.models.llama4.image_processing_llama4 import find_supported_resolutions, get_best_fit

        part = processor.image_processor
        sizes = torch.tensor(find_supported_resolutions(max_num_chunks=part.max_patches, patch_size=part.size))
        fit = get_best_fit((geometry.height, geometry.width), sizes, resize_to_max_canvas=part.resize_to_max_canvas)
        grid = [int(side) // part.size.height for side in fit]
        patches = (part.size.height // processor.patch_size) ** 2
        rows = grid[0] * grid[1] + (grid[0] * grid[1] > 1)
        text = processor._prompt_split_image(grid, patches // processor.downsample_ratio)
        return Foreseen(text, rows * patches, rows * patches**2, rows)


ADAPTER = TilesAdapter()

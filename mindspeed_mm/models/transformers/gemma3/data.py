"""Data adapter of Gemma 3: an image, and each crop of pan-and-scan, takes a fixed number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_mm.configs.data_config import PreprocessParameters
from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media.media import Foreseen, Geometry
from mindspeed_mm.data.processors import Processor

_PATCHES_PER_TOKEN = 16
_CROP_RULES = ("pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate")


class PanAndScanAdapter(DefaultAdapter):
    """A row of the media tensor is an image or a crop of one; `token_type_ids` mark the image tokens."""

    media_keys: Mapping[str, Sequence[str]] = {"image": ("pixel_values",)}
    token_keys: Sequence[str] = ("token_type_ids",)

    def load_processor(self, path: str, options: PreprocessParameters) -> Processor:
        """Load the processor, with crops of images if `image_do_pan_and_scan` is set."""
        processor = super().load_processor(path, options)
        if options.image_do_pan_and_scan and hasattr(processor, "images_kwargs"):
            processor.images_kwargs = {**processor.images_kwargs, "do_pan_and_scan": True}
        return processor

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Write an image as the processor does, with the crops that it would cut from an image of this shape."""
        import torch

        options, crops = processor.images_kwargs, 0
        if options["do_pan_and_scan"]:
            picture = torch.zeros(1).expand(1, 3, geometry.height, geometry.width)
            rules = {name: options[name] for name in _CROP_RULES}
            crops = len(processor.image_processor.pan_and_scan_batched(picture, **rules))
        text = processor.replace_image_token({"num_crops": [crops]}, 0)
        rows, patches = 1 + crops, processor.image_seq_length * _PATCHES_PER_TOKEN
        return Foreseen(text, rows * patches, rows * patches**2, rows)


ADAPTER = PanAndScanAdapter()

"""Data adapter of DeepSeek-VL: an image is scaled into a square, and each patch takes one token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media.media import Foreseen, Geometry
from mindspeed_mm.data.processors import Processor


class FixedTokensAdapter(DefaultAdapter):
    """Every image takes the number of tokens that the processor's configuration states."""

    media_keys: Mapping[str, Sequence[str]] = {"image": ("pixel_values",)}

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Repeat the image token."""
        patches = processor.num_image_tokens
        return Foreseen(processor.image_token * patches, patches, patches**2, rows=1)


ADAPTER = FixedTokensAdapter()

"""DeepSeek-VL's rows: a picture is scaled into a square, a token a patch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media.media import Foreseen, Geometry
from mindspeed_mm.data.processors import Processor


class FixedTokensAdapter(DefaultAdapter):
    """Every picture takes the number of tokens that the processor's configuration states."""

    media_keys: Mapping[str, Sequence[str]] = {"image": ("pixel_values",)}

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Repeat the picture's token."""
        patches = processor.num_image_tokens
        return Foreseen(processor.image_token * patches, patches, patches**2, rows=1)


ADAPTER = FixedTokensAdapter()

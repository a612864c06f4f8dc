"""Data adapter of Kimi K2.5: images of any size, each with its grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media.media import MediaKind
from mindspeed_mm.data.processors import Processor


class KimiAdapter(DefaultAdapter):
    """Videos aren't read: the processor cuts one into clips, each with a grid of its own, of any number a video."""

    media_keys: Mapping[str, Sequence[str]] = {"image": ("pixel_values", "image_grid_thw")}

    def reads(self, processor: Processor) -> tuple[MediaKind, ...]:
        """Return images only."""
        return ("image",)


ADAPTER = KimiAdapter()

"""Qwen2.5-Omni's rows: the processor gets the frame rate of each clip."""

from __future__ import annotations

from typing import Any

from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media.media import DecodedVideo


class OmniAdapter(DefaultAdapter):
    """Processors that take the rate of frames as an argument, where Qwen2.5-VL's takes it from the clip."""

    padded_keys = ("input_features", "feature_attention_mask")

    def video_options(self, clip: DecodedVideo) -> dict[str, Any]:
        """The sampled rate: the seconds between two groups of frames follow from it."""
        return {"fps": clip.fps}


ADAPTER = OmniAdapter()

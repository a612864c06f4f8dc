"""Data adapter of Qwen2.5-Omni: the processor is given the frame rate of each clip."""

from __future__ import annotations

from typing import Any

from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media.media import DecodedVideo


class OmniAdapter(DefaultAdapter):
    """For processors that take the frame rate as an argument; Qwen2.5-VL's reads it from the clip's metadata."""

    padded_keys = ("input_features", "feature_attention_mask")

    def video_options(self, clip: DecodedVideo) -> dict[str, Any]:
        """Return the sampled frame rate, from which the processor computes the seconds between two groups of frames."""
        return {"fps": clip.fps}


ADAPTER = OmniAdapter()

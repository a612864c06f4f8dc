"""Data adapter of Gemma 4: images and frames in one budget of tokens each, sounds of up to 30 seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mindspeed_mm.data.adapter import TICKS, DefaultAdapter, in_ticks
from mindspeed_mm.data.media.media import Foreseen, Geometry
from mindspeed_mm.data.media.media_reader import MediaLimits
from mindspeed_mm.data.processors import Processor

_SECONDS = 30.0  # of 480 000 samples, which the feature extractor cuts a sound to


class Gemma4Adapter(DefaultAdapter):
    """A row of an image tensor is an image, or a frame of a video, filled up to the largest number of patches."""

    media_keys: Mapping[str, Sequence[str]] = {
        "image": ("pixel_values", "image_position_ids"),
        "video": ("pixel_values_videos", "video_position_ids", "num_frames_per_video"),
        "audio": ("input_features", "input_features_mask"),
    }
    padded_keys: Sequence[str] = ("input_features", "input_features_mask")

    def limits(self, processor: Processor) -> MediaLimits:
        """Set the longest sound, and the number of frames of a long video."""
        frames = processor.video_processor.num_frames
        return replace(super().limits(processor), max_audio_seconds=_SECONDS, video_max_frames=frames)

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Write a medium as the processor does."""
        if geometry.kind == "audio":
            rate = processor.feature_extractor.sampling_rate
            tokens = processor._compute_audio_num_tokens(range(geometry.samples), rate)
            text = f"{processor.boa_token}{processor.audio_token * tokens}{processor.eoa_token}"
            frames = -(-geometry.samples // processor.feature_extractor.hop_length)
            return Foreseen(text, frames, frames**2)
        if geometry.kind == "image":
            whole, tokens = _picture(processor.image_processor, geometry)
            text = f"{processor.boi_token}{processor.image_token * tokens}{processor.eoi_token}"
            return Foreseen(text, whole, whole**2, rows=1)
        whole, tokens = _picture(processor.video_processor, geometry)
        frame = f"{processor.boi_token}{processor.video_token * tokens}{processor.eoi_token}"
        seconds = [int(tick / TICKS) for tick in in_ticks(geometry.timestamps)]
        text = " ".join(f"{second // 60:02d}:{second % 60:02d} {frame}" for second in seconds)
        return Foreseen(text, geometry.frames * whole, geometry.frames * whole**2, rows=geometry.frames)


def _picture(part: Any, geometry: Geometry) -> tuple[int, int]:
    """Return the number of patches that an image is filled up to, and that of its tokens."""
    from transformers.models.gemma4.processing_gemma4 import get_aspect_ratio_preserving_size

    patch, side, whole = part.patch_size, part.pooling_kernel_size, part.max_soft_tokens * part.pooling_kernel_size**2
    height, width = get_aspect_ratio_preserving_size(geometry.height, geometry.width, patch, whole, side)
    return whole, (height // patch) * (width // patch) // side**2


ADAPTER = Gemma4Adapter()

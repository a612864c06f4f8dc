"""Qwen3-VL's rows: a video is written as its frames' times, each before the tokens of two frames."""

from __future__ import annotations

from typing import Any

from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media import Clip, Foreseen, Geometry


class TimedVideoAdapter(DefaultAdapter):
    """Times in the text are those of frames evenly spaced at the sampled rate, known before a clip is decoded."""

    def video_metadata(self, clip: Clip) -> dict[str, Any]:
        """Tell the processor of the sampled frames alone, so that it writes the times that were foreseen."""
        frames = len(clip.frames)
        return {"total_num_frames": frames, "fps": clip.fps, "frames_indices": list(range(frames))}

    def foresee(self, processor: Any, geometry: Geometry) -> Foreseen | None:
        """Write a video as the processor does, from the number of its frames and their rate."""
        if geometry.kind != "video":
            return super().foresee(processor, geometry)
        part = processor.video_processor
        patches = part.get_num_of_video_patches(geometry.frames, geometry.height, geometry.width, {})
        groups = -(-geometry.frames // part.temporal_patch_size)
        times = processor._calculate_timestamps(list(range(geometry.frames)), geometry.fps, part.temporal_patch_size)
        tokens = processor.video_token * (patches // groups // part.merge_size**2)
        texts = [
            f"<{second:.1f} seconds>{processor.vision_start_token}{tokens}{processor.vision_end_token}"
            for second in times
        ]
        return Foreseen("".join(texts), patches, patches**2 // groups)


ADAPTER = TimedVideoAdapter()

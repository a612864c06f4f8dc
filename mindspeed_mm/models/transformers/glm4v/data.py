"""Data adapter of GLM-4.1V: a video is written as images of two frames, each followed by its time in seconds."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_mm.data.adapter import TICKS, in_ticks
from mindspeed_mm.data.media.media import Foreseen, Geometry
from mindspeed_mm.data.media.media_reader import MediaLimits
from mindspeed_mm.data.processors import Processor
from mindspeed_mm.models.transformers.qwen3_vl.data import TimedVideoAdapter


class GlmAdapter(TimedVideoAdapter):
    """The times in the text are the frames' presentation times, which are known before a clip is decoded."""

    def limits(self, processor: Processor) -> MediaLimits:
        """Limit frames to those of the processor's longest video; longer videos are sampled at a lower rate."""
        part = processor.video_processor
        return replace(super().limits(processor), video_max_frames=int(part.max_duration * part.fps))

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Write a video as the processor does, from the times of its frames."""
        if geometry.kind != "video":
            return super().foresee(processor, geometry)
        part = processor.video_processor
        patches = part.get_num_of_video_patches(geometry.frames, geometry.height, geometry.width, {})
        groups = -(-geometry.frames // part.temporal_patch_size)
        tokens = patches // groups // part.merge_size**2
        seconds = [tick / TICKS for tick in in_ticks(geometry.timestamps)[::2]][:groups]
        text = "".join(processor.replace_frame_token_id(second, num_image_tokens=tokens) for second in seconds)
        return Foreseen(text, patches, patches**2 // groups)


ADAPTER = GlmAdapter()

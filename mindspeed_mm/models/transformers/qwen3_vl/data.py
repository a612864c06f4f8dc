"""Data adapter of Qwen3-VL: a video is written with a time before the tokens of every two frames."""

from __future__ import annotations

from mindspeed_mm.data.adapter import TICKS, DefaultAdapter, in_ticks
from mindspeed_mm.data.media.media import Foreseen, Geometry
from mindspeed_mm.data.processors import Processor


class TimedVideoAdapter(DefaultAdapter):
    """The times in the text are the frames' presentation times, which are known before a clip is decoded."""

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Write a video as the processor does, from the times of its frames."""
        if geometry.kind != "video":
            return super().foresee(processor, geometry)
        part = processor.video_processor
        patches = part.get_num_of_video_patches(geometry.frames, geometry.height, geometry.width, {})
        groups = -(-geometry.frames // part.temporal_patch_size)
        times = processor._calculate_timestamps(in_ticks(geometry.timestamps), TICKS, part.temporal_patch_size)
        tokens = processor.video_token * (patches // groups // part.merge_size**2)
        texts = [
            f"<{second:.1f} seconds>{processor.vision_start_token}{tokens}{processor.vision_end_token}"
            for second in times
        ]
        return Foreseen("".join(texts), patches, patches**2 // groups)


ADAPTER = TimedVideoAdapter()

"""Data adapter of ERNIE 4.5 VL: two frames of a video are merged into one grid of tokens."""

from __future__ import annotations

from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media.media import Foreseen, Geometry
from mindspeed_mm.data.processors import Processor


class MergedFramesAdapter(DefaultAdapter):
    """The tower sees each frame by itself, whose patches are merged with those of the next one behind it."""

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Count the tokens of a video from its patches."""
        if geometry.kind != "video":
            return super().foresee(processor, geometry)
        part = processor.video_processor
        patches = part.get_num_of_video_patches(geometry.frames, geometry.height, geometry.width, {})
        frames = geometry.frames + geometry.frames % part.temporal_patch_size
        tokens = patches // part.merge_size**2 // part.temporal_patch_size
        return Foreseen(processor.video_token * tokens, patches, patches**2 // frames)


ADAPTER = MergedFramesAdapter()

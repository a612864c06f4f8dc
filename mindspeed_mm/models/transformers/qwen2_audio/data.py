"""Data adapter of Qwen2-Audio: an audio clip of up to one window takes a token for each 40 ms."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media.media import Foreseen, Geometry
from mindspeed_mm.data.media.media_reader import MediaLimits
from mindspeed_mm.data.processors import Processor

# Older processors wrote a single token for an audio clip, and the model would mistake one token for that.
_LEAST_FRAMES = 7


class Qwen2AudioAdapter(DefaultAdapter):
    """Shorter audio clips are padded to at least two tokens; longer ones are cut to the window."""

    def limits(self, processor: Processor) -> MediaLimits:
        """Set the shortest audio clip to the fewest frames that take two tokens."""
        hop = processor.feature_extractor.hop_length
        return replace(super().limits(processor), min_audio_samples=_LEAST_FRAMES * hop)

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Count tokens as the processor does: the frames with audio, divided by the strides of two convolutions."""
        if geometry.kind != "audio":
            return super().foresee(processor, geometry)
        window = processor.feature_extractor.nb_max_frames
        frames = min(-(-geometry.samples // processor.feature_extractor.hop_length), window)
        tokens = ((frames - 1) // 2 + 1) // 2
        return Foreseen(processor.audio_token * tokens, window, window**2)


ADAPTER = Qwen2AudioAdapter()

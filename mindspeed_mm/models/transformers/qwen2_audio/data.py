"""Qwen2-Audio's rows: a sound of up to one window takes a token for each 40 ms."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media.media import Foreseen, Geometry
from mindspeed_mm.data.media.media_reader import MediaLimits
from mindspeed_mm.data.processors import Processor

# A single token is what stood for a sound before processors wrote them all, and the model would take it for that.
_LEAST_FRAMES = 7


class Qwen2AudioAdapter(DefaultAdapter):
    """Sounds of a tenth of a second at least; longer ones than the window are cut."""

    def limits(self, processor: Processor) -> MediaLimits:
        """Pad sounds to the fewest frames that take two tokens."""
        hop = processor.feature_extractor.hop_length
        return replace(super().limits(processor), min_audio_samples=_LEAST_FRAMES * hop)

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Count as the processor does: two convolutions' strides, of the frames that hold sound."""
        if geometry.kind != "audio":
            return super().foresee(processor, geometry)
        window = processor.feature_extractor.nb_max_frames
        frames = min(-(-geometry.samples // processor.feature_extractor.hop_length), window)
        tokens = ((frames - 1) // 2 + 1) // 2
        return Foreseen(processor.audio_token * tokens, window, window**2)


ADAPTER = Qwen2AudioAdapter()

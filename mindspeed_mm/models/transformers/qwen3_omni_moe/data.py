"""Qwen3-Omni's rows: sounds of any length, the shortest ones filled up to a window of the audio tower."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_mm.data.media.media_reader import MediaLimits
from mindspeed_mm.data.processors import Processor
from mindspeed_mm.models.transformers.qwen2_5_omni.data import OmniAdapter


class Qwen3OmniAdapter(OmniAdapter):
    """What a sound becomes must not depend on the sounds beside it, in a row or in a micro-batch.

    The processor counts the last, incomplete frame of a sound only if a longer one stands beside it. And the audio
    tower fills its first window up to the longest one of the micro-batch, behind which its convolutions see something
    else than behind the end of the sound. So sounds are padded with silence to whole frames, and at least a window.
    """

    def limits(self, processor: Processor) -> MediaLimits:
        """Sounds aren't cut: the processor doesn't either."""
        frame = processor.feature_extractor.hop_length
        return replace(
            super().limits(processor),
            max_audio_seconds=None,
            min_audio_samples=2 * processor.n_window * frame,
            audio_multiple=frame,
        )


ADAPTER = Qwen3OmniAdapter()

"""Data adapter of Qwen3-Omni: audio clips of any length, padded to at least a window of the audio tower."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_mm.data.media.media_reader import MediaLimits
from mindspeed_mm.data.processors import Processor
from mindspeed_mm.models.transformers.qwen2_5_omni.data import OmniAdapter


class Qwen3OmniAdapter(OmniAdapter):
    """The features of an audio clip must not depend on other clips in its row or micro-batch.

    The processor counts the last, incomplete frame of a clip only if a longer clip is in the same call. And the audio
    tower pads its first window to the longest clip of the micro-batch, so that its convolutions see other values after
    the end of a clip. Clips are therefore padded with silence to whole frames, and to at least a window.
    """

    def limits(self, processor: Processor) -> MediaLimits:
        """Set no longest audio clip, as the processor has none; pad to whole frames and at least a window."""
        frame = processor.feature_extractor.hop_length
        return replace(
            super().limits(processor),
            max_audio_seconds=None,
            min_audio_samples=2 * processor.n_window * frame,
            audio_multiple=frame,
        )


ADAPTER = Qwen3OmniAdapter()

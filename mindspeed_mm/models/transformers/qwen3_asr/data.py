"""Data adapter of Qwen3-ASR: an audio clip of any length, in chunks of a second."""

from __future__ import annotations

from dataclasses import replace

import torch

from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media.media import Foreseen, Geometry
from mindspeed_mm.data.media.media_reader import MediaLimits
from mindspeed_mm.data.processors import Processor


class Qwen3ASRAdapter(DefaultAdapter):
    """Audio clips of a micro-batch are padded with whole chunks, which the model masks out."""

    media_keys = {"audio": ("input_features", "input_features_mask")}
    padded_keys = ("input_features", "input_features_mask")

    def limits(self, processor: Processor) -> MediaLimits:
        """Set no longest audio clip, and pad with silence to the processor's shortest length."""
        least = processor.feature_extractor.min_length
        return replace(super().limits(processor), max_audio_seconds=None, min_audio_samples=least)

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Count tokens as the processor does for the whole frames of a single audio clip."""
        if geometry.kind != "audio":
            return super().foresee(processor, geometry)
        frames = geometry.samples // processor.feature_extractor.hop_length
        tokens = int(processor._get_audio_token_length(torch.tensor(frames), processor.audio_kwargs["n_window"]))
        return Foreseen(processor.audio_token * tokens, frames, frames**2)


ADAPTER = Qwen3ASRAdapter()

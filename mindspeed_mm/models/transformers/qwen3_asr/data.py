"""Qwen3-ASR's rows: one sound of any length, in chunks of a second."""

from __future__ import annotations

from dataclasses import replace

import torch

from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media.media import Foreseen, Geometry
from mindspeed_mm.data.media.media_reader import MediaLimits
from mindspeed_mm.data.processors import Processor


class Qwen3ASRAdapter(DefaultAdapter):
    """Sounds of a micro-batch are filled up by whole chunks of nothing, which the model leaves out."""

    media_keys = {"audio": ("input_features", "input_features_mask")}
    padded_keys = ("input_features", "input_features_mask")

    def limits(self, processor: Processor) -> MediaLimits:
        """Sounds aren't cut, and filled up with silence to the processor's shortest length."""
        least = processor.feature_extractor.min_length
        return replace(super().limits(processor), max_audio_seconds=None, min_audio_samples=least)

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Count as the processor does, of the whole frames of a sound by itself."""
        if geometry.kind != "audio":
            return super().foresee(processor, geometry)
        frames = geometry.samples // processor.feature_extractor.hop_length
        tokens = int(processor._get_audio_token_length(torch.tensor(frames), processor.audio_kwargs["n_window"]))
        return Foreseen(processor.audio_token * tokens, frames, frames**2)


ADAPTER = Qwen3ASRAdapter()

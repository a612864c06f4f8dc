"""Whisper: the transformers class with the mixins, whose decoder takes a row's tokens as any decoder does."""

from __future__ import annotations

from typing import Any

import torch
from transformers import WhisperForConditionalGeneration as HFWhisper

from mindspeed_mm.models.common.base_model import adapt_class
from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.utils.errors import DataError


def refuse_rows_without_sound(model: Any, device: torch.device) -> torch.Tensor:
    """The decoder can't do without what the encoder heard.

    Raises:
        DataError: always.
    """
    raise DataError("a micro-batch has no 'input_features': Whisper needs a sound in every row")


TRAITS = FamilyTraits(
    language_model="model.decoder",
    parts={"audio_encoder": ("model.encoder",), "text_decoder": ("model.decoder", "proj_out")},
    towers=(
        Tower(
            "model.encoder",
            ("audio",),
            ("input_features",),
            refuse_rows_without_sound,
            patches_per_row=lambda config: config.max_source_positions,
        ),
    ),
)


class WhisperForConditionalGeneration(adapt_class(HFWhisper)):  # type: ignore[misc]
    """A row's `input_ids`, prompt and transcript, are the decoder's; position i predicts token i + 1.

    transformers shifts labels and puts the first prompt token in front of them: the same ids, but for the last one.
    """

    def forward(
        self,
        input_features: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model.

        Args:
            input_features: [batch, mel bins, frames] float, one window of sound a row.
            attention_mask: [batch, sequence] int64, of `input_ids` where they are given; else as transformers takes it.
            input_ids: [batch, sequence] int64, the decoder's; None: `kwargs` are those of transformers' own forward.
            kwargs: as transformers takes them.
        """
        if input_ids is not None:
            kwargs |= {"decoder_input_ids": input_ids, "decoder_attention_mask": attention_mask}
            attention_mask = None
        return super().forward(input_features, attention_mask, **kwargs)

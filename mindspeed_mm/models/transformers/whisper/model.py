"""Whisper: the transformers class with the mixins, whose decoder takes `input_ids` like other language models."""

from __future__ import annotations

from typing import Any

import torch
from transformers import WhisperForConditionalGeneration as HFWhisper

from mindspeed_mm.models.common.base_model import adapt_class
from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.utils.errors import DataError


def refuse_rows_without_sound(model: Any, device: torch.device) -> torch.Tensor:
    """Refuse a micro-batch without audio, which Whisper's decoder needs in every row.

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
    """`input_ids` hold the decoder's prompt and transcript; position i predicts token i + 1.

    transformers shifts labels to the right, after the first prompt token: the same ids without the last one.
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
            input_features: [batch, mel bins, frames] float, one window of audio per row.
            attention_mask: [batch, sequence] int64, the mask of `input_ids`; without these, as in transformers.
            input_ids: [batch, sequence] int64 of the decoder; None: `kwargs` are those of transformers' own forward.
            kwargs: arguments of transformers' own forward.
        """
        if input_ids is not None:
            kwargs |= {"decoder_input_ids": input_ids, "decoder_attention_mask": attention_mask}
            attention_mask = None
        return super().forward(input_features, attention_mask, **kwargs)

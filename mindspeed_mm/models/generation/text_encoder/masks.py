"""Masks of text encoders that don't wait for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import T5EncoderModel, UMT5EncoderModel
from transformers.masking_utils import create_bidirectional_mask


def make_masks_unread(encoder: Any) -> None:
    """Give an encoder of T5's kind the whole mask of a batch, in place of one with a row for each caption.

    transformers makes the same of the latter, unless it finds by a look at the device that nothing is masked.
    """
    if isinstance(encoder, (T5EncoderModel, UMT5EncoderModel)):
        encoder.register_forward_pre_hook(_give_whole_mask, with_kwargs=True)


def _give_whole_mask(encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    named = {**dict(zip(("input_ids", "attention_mask"), args, strict=False)), **kwargs}
    mask = named.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        config: Any = encoder.config
        like = torch.empty(*mask.shape, 1, dtype=next(encoder.parameters()).dtype, device=mask.device)
        named["attention_mask"] = create_bidirectional_mask(
            config=config, inputs_embeds=like, attention_mask=mask, allow_is_bidirectional_skip=False
        )
    return (), named

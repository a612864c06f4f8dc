"""Collate samples of one shape into a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_mm.data.loading.collate import NOTES
from mindspeed_mm.data.notes import Note
from mindspeed_mm.utils.errors import DataError

GenerationSample = dict[str, Any]

_CLIPS = ("video", "latents", "latents_std")


def collate(samples: Sequence[GenerationSample]) -> dict[str, Any]:
    """Collate samples into a micro-batch.

    Args:
        samples: Samples of one bucket, from `GenerationDataset` or `FeatureDataset`: video, or latents, latents_std and
            text states; beside them caption, sample_key, row_id (-1: a filler), num_tokens, and note and fault of a row
            that was left out.

    Returns:
        `video` [B, 3, T, H, W] and `captions`, or `latents` and `latents_std` [B, C, T', H', W'], `text.<name>` and
        `cond.<name>` [B, …]; `sample_keys` [B] int64, `sample_weights` [B] float32 (0: a filler), `row_ids` [B] int64;
        on the host `num_rows` and `num_tokens` of the samples that aren't fillers, and `rows_left_out`. Text states of
        different lengths are padded with zeros.

    Raises:
        DataError: Samples have different tensors, or tensors of different shapes.
    """
    names = [name for name in samples[0] if name in _CLIPS or name.startswith(("text.", "cond."))]
    batch: dict[str, Any] = {}
    for name in names:
        tensors = [sample[name] for sample in samples if name in sample]
        if len(tensors) != len(samples):
            raise DataError(f"{name}: in {len(tensors)} of {len(samples)} samples of a micro-batch; make features anew")
        batch[name] = _stacked(name, tensors)
    if "caption" in samples[0]:
        batch["captions"] = [sample["caption"] for sample in samples]
    ids = torch.tensor([sample["row_id"] for sample in samples], dtype=torch.int64)
    notes = [Note(sample["note"], sample.get("fault")) for sample in samples if "note" in sample]
    real = ids >= 0
    tokens = sum(sample["num_tokens"] for sample in samples if sample["row_id"] >= 0)
    return {
        **batch,
        "sample_keys": torch.tensor([sample["sample_key"] for sample in samples], dtype=torch.int64),
        "sample_weights": real.to(torch.float32),
        "row_ids": ids,
        "num_rows": int(real.sum()),
        "num_tokens": tokens,
        "rows_left_out": sum(note.fault is not None for note in notes),
        **({NOTES: notes} if notes else {}),
    }


def _stacked(name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if name.startswith("text.") and len({len(tensor) for tensor in tensors if tensor.dim()}) > 1:
        tensors = [_filled(tensor, max(len(other) for other in tensors)) for tensor in tensors]
    if len({tensor.shape for tensor in tensors}) > 1:
        raise DataError(f"{name} has different shapes in a micro-batch: {[tuple(t.shape) for t in tensors]}")
    return torch.stack(list(tensors))


def _filled(tensor: torch.Tensor, length: int) -> torch.Tensor:
    filled = tensor.new_zeros((length, *tensor.shape[1:]))
    filled[: len(tensor)] = tensor
    return filled

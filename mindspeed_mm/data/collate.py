"""Samples to a micro-batch: padded on the right, media stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_mm.configs.data_config import CollateParam
from mindspeed_mm.data.adapter import DataAdapter
from mindspeed_mm.data.encode import IGNORE_INDEX, Sample
from mindspeed_mm.utils.errors import ConfigError, DataError
from mindspeed_mm.utils.log import notice

NOTES = "_notes"


class Collator:
    """Puts samples together into a micro-batch.

    Args:
        adapter: Says which tensors hold one value a token, and which hold media.
        param: `dataloader_param.collate_param`.
        dataset: Its `pad_token_id` pads `input_ids` unless `pad_id` is given; asked for in the process that collates.
    """

    def __init__(self, adapter: DataAdapter, param: CollateParam, dataset: Any) -> None:
        self._side_keys = list(adapter.token_keys)
        self._media_keys = [key for keys in adapter.media_keys.values() for key in keys]
        self._param = param
        self._dataset = dataset
        if not param.ignore_pad_token_for_loss:
            notice("ignore_pad_token_for_loss: false has no effect here, padding is never a target")

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Collate samples.

        Args:
            samples: Dicts with `input_ids` and `labels` [L], and what the adapter names.

        Returns:
            `input_ids`, `labels`, `attention_mask` and token tensors [B, L] int64, media tensors concatenated on
            dim 0 (absent without media), and `num_rows`, the number of samples that aren't fillers.

        Raises:
            DataError: A sample lacks a tensor or holds one that nobody knows.
        """
        known = {"input_ids", "labels", "num_rows", "note", *self._side_keys, *self._media_keys}
        for sample in samples:
            if unknown := sample.keys() - known:
                raise DataError(f"a sample holds {', '.join(sorted(unknown))}, which the data adapter doesn't name")
            if missing := {"input_ids", "labels"} - sample.keys():
                raise DataError(f"a sample without {' and '.join(sorted(missing))}; found {', '.join(sample)}")
        longest = max(len(sample["input_ids"]) for sample in samples)
        multiple = self._param.pad_to_multiple_of or 1
        length = -(-longest // multiple) * multiple
        pad_id = self._pad_id()
        batch: dict[str, Any] = {
            "input_ids": self._stack([sample["input_ids"] for sample in samples], length, pad_id),
            "attention_mask": self._stack([torch.ones_like(sample["input_ids"]) for sample in samples], length, 0),
            "labels": self._stack([sample["labels"] for sample in samples], length, IGNORE_INDEX),
        }
        for key in self._side_keys:
            if any(key in sample for sample in samples):
                rows = [sample.get(key, torch.zeros_like(sample["input_ids"])) for sample in samples]
                batch[key] = self._stack(rows, length, 0)
        for key in self._media_keys:
            if present := [sample[key] for sample in samples if key in sample]:
                batch[key] = torch.cat(present)
        batch["num_rows"] = sum(int(sample.get("num_rows", 1)) for sample in samples)
        if notes := [sample["note"] for sample in samples if "note" in sample]:
            batch[NOTES] = notes
        return batch

    def _pad_id(self) -> int:
        if self._param.pad_id is not None:
            return self._param.pad_id
        value = getattr(self._dataset, "pad_token_id", None)
        if value is None:
            raise ConfigError(
                "dataloader_param.collate_param.pad_id: needed, because the data set has no pad_token_id to pad with"
            )
        return value

    @staticmethod
    def _stack(rows: Sequence[torch.Tensor], length: int, value: int) -> torch.Tensor:
        out = rows[0].new_full((len(rows), length), value)
        for target, row in zip(out, rows, strict=True):
            target[: len(row)] = row
        return out

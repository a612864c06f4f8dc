"""Samples to a micro-batch: padded on the right, media stacked; in packs or one a row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from mindspeed_mm.configs.data_config import CollateParam
from mindspeed_mm.data.adapter import DataAdapter
from mindspeed_mm.data.conversation.encode import TokenSample
from mindspeed_mm.data.media.stacking import stack_media
from mindspeed_mm.data.notes import Note
from mindspeed_mm.data.plan.plan import FILLER
from mindspeed_mm.utils.errors import ConfigError, DataError
from mindspeed_mm.utils.labels import IGNORE_INDEX
from mindspeed_mm.utils.log import notice

NOTES = "_notes"

#: fields of a sample that are not tensors of the model
_HOST_KEYS = ("num_rows", "row_id", "note", "fault", "media_sizes")


class Collator:
    """Puts samples together into a micro-batch.

    Args:
        adapter: Names the tensors with one value per token, and those of media.
        param: `dataloader_param.collate_param`.
        dataset: Its `pad_token_id` pads `input_ids` unless `pad_id` is given; it is read in the process that collates.
    """

    def __init__(self, adapter: DataAdapter, param: CollateParam, dataset: Dataset) -> None:
        self._side_keys = list(adapter.token_keys)
        self._media_keys = [key for keys in adapter.media_keys.values() for key in keys]
        self._padded_keys = adapter.padded_keys
        self._param = param
        self._dataset = dataset
        if not param.ignore_pad_token_for_loss:
            notice("ignore_pad_token_for_loss: false has no effect here, padding is never a target")

    def __call__(self, samples: Sequence[TokenSample]) -> dict[str, Any]:
        """Collate samples, one a row.

        Args:
            samples: Dicts with `input_ids` and `labels` [L], and the tensors that the adapter names; on the host
                `num_rows` 0 of a filler, `row_id` (its number in the data set), `media_sizes`, `note`, and `fault` of a
                row that was left out.

        Returns:
            `input_ids`, `labels`, `attention_mask` and token tensors [B, L] int64, media tensors concatenated on
            dim 0 (absent without media), and on the host `num_rows`, the number of samples that aren't fillers,
            `row_ids` [samples] int64 (-1 for a filler) where samples have them, `media_sizes` [kinds, 3] int64 where
            samples have media, and `rows_left_out`.

        Raises:
            DataError: A sample lacks a tensor, or has an unknown one.
        """
        self._check(samples)
        length = self._padded(max(len(sample["input_ids"]) for sample in samples))
        batch = {
            "input_ids": _stack([sample["input_ids"] for sample in samples], length, self._pad_id()),
            "attention_mask": _stack([torch.ones_like(sample["input_ids"]) for sample in samples], length, 0),
            "labels": _stack([sample["labels"] for sample in samples], length, IGNORE_INDEX),
        }
        for key in self._side_keys_of(samples):
            batch[key] = _stack([_side_values(key, sample) for sample in samples], length, 0)
        return {**batch, **self._media_of(samples), **_host_fields(samples), **_notes_of(samples)}

    def pack(self, rows: Sequence[Sequence[TokenSample]]) -> dict[str, Any]:
        """Collate rows of several samples that never see each other.

        Args:
            rows: The samples of each row, as `__call__` takes them. Fillers among others are left out.

        Returns:
            As `__call__`, with `documents` [B, L] int64 in place of `attention_mask`: 0 is padding, 1, 2, … the number
            of the sample within its row. A sample's first token is no target: the one before belongs to another.
        """
        everyone = [sample for row in rows for sample in row]
        self._check(everyone)
        packs = [[sample for sample in row if _is_real(sample)] or [row[0]] for row in rows]
        length = self._padded(max(sum(len(sample["input_ids"]) for sample in pack) for pack in packs))
        samples = [sample for pack in packs for sample in pack]
        batch = {
            "input_ids": _stack(_joined(packs, lambda s: s["input_ids"]), length, self._pad_id()),
            "documents": _stack([_documents(pack) for pack in packs], length, 0),
            "labels": _stack(_joined(packs, _labels_in_pack), length, IGNORE_INDEX),
        }
        for key in self._side_keys_of(samples):
            batch[key] = _stack(_joined(packs, functools.partial(_side_values, key)), length, 0)
        return {**batch, **self._media_of(samples), **_host_fields(samples), **_notes_of(everyone)}

    def _check(self, samples: Sequence[TokenSample]) -> None:
        known = {"input_ids", "labels", *_HOST_KEYS, *self._side_keys, *self._media_keys}
        for sample in samples:
            if unknown := sample.keys() - known:
                raise DataError(f"a sample holds {', '.join(sorted(unknown))}, which the data adapter doesn't name")
            if missing := {"input_ids", "labels"} - sample.keys():
                raise DataError(f"a sample without {' and '.join(sorted(missing))}; found {', '.join(sample)}")

    def _padded(self, length: int) -> int:
        multiple = self._param.pad_to_multiple_of or 1
        return -(-length // multiple) * multiple

    def _side_keys_of(self, samples: Sequence[TokenSample]) -> list[str]:
        return [key for key in self._side_keys if any(key in sample for sample in samples)]

    def _media_of(self, samples: Sequence[TokenSample]) -> dict[str, torch.Tensor]:
        return stack_media(samples, self._media_keys, self._padded_keys)

    def _pad_id(self) -> int:
        if self._param.pad_id is not None:
            return self._param.pad_id
        value = getattr(self._dataset, "pad_token_id", None)
        if value is None:
            raise ConfigError(
                "dataloader_param.collate_param.pad_id: needed, because the data set has no pad_token_id to pad with"
            )
        return value


def _is_real(sample: TokenSample) -> bool:
    return int(sample.get("num_rows", 1)) > 0


def _side_values(key: str, sample: TokenSample) -> torch.Tensor:
    value = sample.get(key)
    return torch.zeros_like(sample["input_ids"]) if value is None else value


def _labels_in_pack(sample: TokenSample) -> torch.Tensor:
    labels = sample["labels"].clone()
    labels[:1] = IGNORE_INDEX
    return labels


def _documents(pack: Sequence[TokenSample]) -> torch.Tensor:
    return torch.cat([torch.full_like(sample["input_ids"], number) for number, sample in enumerate(pack, start=1)])


def _joined(packs: Sequence[Sequence[TokenSample]], take: Callable[[TokenSample], torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat([take(sample) for sample in pack]) for pack in packs]


def _host_fields(samples: Sequence[TokenSample]) -> dict[str, Any]:
    fields: dict[str, Any] = {"num_rows": sum(int(sample.get("num_rows", 1)) for sample in samples)}
    if all("row_id" in sample for sample in samples):
        ids = [int(sample["row_id"]) if _is_real(sample) else FILLER for sample in samples]
        fields["row_ids"] = torch.tensor(ids, dtype=torch.int64)
    sizes = [sample["media_sizes"] for sample in samples if "media_sizes" in sample]
    if sizes:
        fields["media_sizes"] = torch.stack(sizes).sum(0)
    return fields


def _notes_of(samples: Sequence[Any]) -> dict[str, Any]:
    notes = [Note(sample["note"], sample.get("fault")) for sample in samples if "note" in sample]
    left_out = sum(note.fault is not None for note in notes)
    return {"rows_left_out": left_out, **({NOTES: notes} if notes else {})}


def _stack(rows: Sequence[torch.Tensor], length: int, value: int) -> torch.Tensor:
    out = rows[0].new_full((len(rows), length), value)
    for target, row in zip(out, rows, strict=True):
        target[: len(row)] = row
    return out

"""A data set without files or a model, whose rows are as long as a test wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.media.media import SampleSize
from mindspeed_mm.data.plan.measuring import Measurer

PAD = 0


class FakeRows(Dataset):
    """Row i is [i + 1] × its length; a row of several pieces marks piece k by labels of 1000 × k more.

    Args:
        lengths: Tokens of each row; a list for a row of several pieces, 0 for a row that can't be used.
        max_length: Longest sample.
        streamed: The data set has no length.
        packing: data.json's key.
        patches: Patches of each row.
        grows: Tokens that a row's media take beyond what was foreseen.
    """

    has_fillers = True
    adapter = DefaultAdapter()
    pad_token_id = PAD

    def __init__(
        self,
        lengths: Sequence[int | list[int]],
        max_length: int | None = None,
        streamed: bool = False,
        packing: bool = False,
        patches: Sequence[int] | None = None,
        grows: dict[int, int] | None = None,
        buffer_size: int = 8,
    ) -> None:
        self.lengths = lengths
        self.max_length = max_length
        self.streamed = streamed
        self.patches = patches
        self.grows = grows or {}
        self.measured: list[int] = []
        basic = SimpleNamespace(packing=packing, neat_packing=False, buffer_size=buffer_size)
        self.param = SimpleNamespace(basic_parameters=basic, attr=SimpleNamespace(packing=False))

    def __len__(self) -> int:
        if self.streamed:
            raise TypeError("a stream")
        return len(self.lengths)

    def has_row(self, index: int) -> bool:
        return index < len(self.lengths)

    def pieces(self, index: int) -> list[int]:
        value = self.lengths[index]
        return value if isinstance(value, list) else [value]

    def measure(self, index: int) -> list[SampleSize]:
        self.measured.append(index)
        patches = self.patches[index] if self.patches is not None else 0
        limit = self.max_length or 10**9
        return [
            SampleSize(min(length, limit), patches, patches**2) if length else SampleSize(0, fault=f"fault {index % 2}")
            for length in self.pieces(index)
        ]

    def get(self, index: int, piece: int = 0, room: int | None = None) -> dict[str, Any]:
        length = self.pieces(index)[piece] if index != -1 else 0
        if not length:
            filler = {"input_ids": torch.full((2,), PAD), "labels": torch.full((2,), -100)}
            note = {"note": f"row {index}", "fault": f"fault {index % 2}"} if index != -1 else {}
            return {**filler, "num_rows": torch.tensor(0), **note}
        length += self.grows.get(index, 0)
        if index not in self.grows:
            length = min(length, *(limit for limit in (self.max_length, room) if limit is not None), length)
        ids = torch.full((length,), index + 1)
        return {"input_ids": ids, "labels": ids + 1000 * piece}

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.get(index)

    def where(self, index: int) -> str:
        return f"fake row {index}"


def measurer(dataset: FakeRows, num_workers: int = 0) -> Measurer:
    """A measurer of a data set with a length."""
    return Measurer(dataset, num_workers, lambda: None if dataset.streamed else len(dataset))


def long_tail(count: int, longest: int, seed: int = 0, median: float = 250.0, spread: float = 1.0) -> list[int]:
    """Lengths of a log-normal mix, cut at the longest."""
    drawn = np.random.RandomState(seed).lognormal(np.log(median), spread, count)
    return np.clip(drawn, 1, longest).astype(int).tolist()


def take(iterable: Any, count: int) -> list[Any]:
    """The first items; closes what they come from."""
    items = []
    iterator = iter(iterable)
    for _ in range(count):
        items.append(next(iterator))
    close: Callable[[], None] | None = getattr(iterator, "close", None)
    if close is not None:
        close()
    return items

"""Packed rows, which hold several samples one after the other: their boundaries, and splitting them into samples.

`documents` [batch, sequence] int64 holds for each position the number of its sample within the row (1, 2, …), and 0 for
padding, which is at the end of a row. It replaces `attention_mask`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from mindspeed_mm.accelerator.attention import Documents
from mindspeed_mm.utils.errors import DataError

PACKING_KEY = "dataset_param.basic_parameters.packing: false in data.json (and leave out --use-txt-dynamic-batching)"


def take_documents(batch: dict[str, Any]) -> torch.Tensor | None:
    """Remove `documents` from a micro-batch and return it, on the host.

    An attention_mask that numbers samples (1, 1, 2, 2, 0), as some data loaders write it, is read as `documents`.

    Returns:
        [batch, sequence] int64; None: the rows are not packed.

    Raises:
        DataError: there is an attention_mask beside it, its shape is not that of input_ids, or its numbers aren't 1, 2,
            … with padding at the end.
    """
    documents, mask = batch.pop("documents", None), batch.get("attention_mask")
    if documents is None and isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool((mask > 1).any()):
        documents, mask = batch.pop("attention_mask").long(), None
    if documents is None:
        return None
    if mask is not None:
        raise DataError(
            "a packed micro-batch has 'documents' and an 'attention_mask', which would let its samples see each other; "
            "leave the mask out, padding is where documents are 0"
        )
    expected = tuple(batch["input_ids"].shape)
    if tuple(documents.shape) != expected:
        raise DataError(f"'documents' of a micro-batch are {list(documents.shape)}, expected {list(expected)}")
    before, after = documents[:, :-1], documents[:, 1:]
    goes_on = (after == before) | ((after == before + 1) & (before > 0)) | (after == 0)
    wrong = ~(goes_on.all(1) & (documents[:, 0] <= 1) & (documents[:, 0] >= 0))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        found = documents[row].unique_consecutive().tolist()
        raise DataError(
            f"'documents' of row {row + 1} of a micro-batch go {', '.join(map(str, found[:10]))}; expected 1, 2, … in "
            "order, and 0 only at the end, for padding"
        )
    return documents


def documents_of_mask(mask: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor:
    """Number the documents of rows that are not packed: one of each row, and 0 for padding.

    Args:
        mask: `attention_mask` of a micro-batch, 0 for padding at either end; None: there is none.
        shape: [batch, sequence].

    Raises:
        DataError: another shape, or padding inside of a row.
    """
    if mask is None:
        return torch.ones(*shape, dtype=torch.int64)
    if tuple(mask.shape) != tuple(shape):
        raise DataError(
            f"'attention_mask' of a micro-batch is {list(mask.shape)}, expected {list(shape)}: context parallelism "
            "makes masks of its own"
        )
    documents = (mask > 0).long()
    starts = F.pad(documents, (1, 0)).diff(dim=1) > 0
    wrong = starts.sum(1) > 1
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise DataError(
            f"'attention_mask' of row {row + 1} of a micro-batch has zeros between its tokens; expected padding at the "
            "ends only"
        )
    return documents


def row_documents(batch: Mapping[str, Any], documents: torch.Tensor | None) -> Documents | None:
    """Return where documents are in the rows of a micro-batch, on the host.

    Args:
        batch: input_ids [batch, sequence], and perhaps an attention_mask.
        documents: of packed rows, [batch, sequence] int64; None: each row is one document, and padding.

    Returns:
        None: the mask says more than which tokens are padding, at the ends of rows.
    """
    mask, shape = batch.get("attention_mask"), batch["input_ids"].shape
    if documents is None and mask is None:
        return Documents((((shape[1], True),),) * shape[0])
    if documents is None:
        if not isinstance(mask, torch.Tensor) or mask.shape != shape:
            return None
        documents = (mask > 0).long()
        if bool(((F.pad(documents, (1, 0)).diff(dim=1) > 0).sum(1) > 1).any()):
            return None
    return Documents.of(documents)


def run_lengths(documents: torch.Tensor) -> list[list[int]]:
    """Return the lengths of each row's samples; padding counts as one more sample."""
    return [row.unique_consecutive(return_counts=True)[1].tolist() for row in documents]


def restarting_positions(documents: torch.Tensor) -> torch.Tensor:
    """Return positions [batch, sequence] int64 that restart at 0 with every sample, and with the padding."""
    positions = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return positions - torch.where(starts, positions, 0).cummax(1).values


def plain_positions(model: Any, batch: Mapping[str, Any], documents: torch.Tensor) -> torch.Tensor:
    """`FamilyTraits.packed_positions` of text models."""
    return restarting_positions(documents)


class Unpacked:
    """Converts between packed rows and rows of one sample each, in order.

    Attributes:
        mask: [samples, longest] int64, 1 where a sample has a token.
    """

    def __init__(self, documents: torch.Tensor) -> None:
        """
        Args:
            documents: [batch, sequence] int64.
        """
        self._kept = documents > 0
        self._place = restarting_positions(documents)[self._kept]
        self._sample = (self._place == 0).cumsum(0) - 1
        samples = int(self._sample[-1]) + 1 if len(self._sample) else 0
        longest = int(self._place.max()) + 1 if samples else 0
        self.mask = documents.new_zeros(samples, longest)
        self.mask[self._sample, self._place] = 1

    def take_apart(self, rows: torch.Tensor) -> torch.Tensor:
        """Return packed rows [batch, sequence] as [samples, longest], padded with zeros."""
        apart = rows.new_zeros(self.mask.shape)
        apart[self._sample, self._place] = rows[self._kept]
        return apart

    def put_back(self, apart: torch.Tensor) -> torch.Tensor:
        """Return samples [..., samples, longest] as packed rows [..., batch, sequence], with zeros for padding."""
        rows = apart.new_zeros(*apart.shape[:-2], *self._kept.shape)
        rows[..., self._kept] = apart[..., self._sample, self._place]
        return rows

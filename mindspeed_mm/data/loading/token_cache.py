"""Read the token cache: ids and labels of every row, computed once before training, in an Arrow file.

It contains no media: they are decoded when a sample is read.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mindspeed_mm.data.conversation.encode import PlannedMedium, Prepared
from mindspeed_mm.data.media.media import MediaRef
from mindspeed_mm.utils.errors import BadSample, DataError


class TokenCache:
    """Prepared rows in an Arrow file, mapped into memory; processes of a node share its pages.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._table: Any = None
        if not os.path.isfile(path):
            raise DataError(f"token cache {path}: no such file")

    def prepared(self, row: int, refs: Sequence[MediaRef]) -> list[Prepared] | BadSample:
        """Return the pieces of a row, or its error.

        Args:
            row: Number of the row in its source.
            refs: The references to its media in the row.
        """
        entry = self._rows().slice(row, 1).to_pylist()[0]
        if entry["fault"] is not None:
            return BadSample(entry["note"], entry["fault"])
        bounds = entry["bounds"]
        ids, labels = (np.frombuffer(entry[name], dtype=np.int32).astype(np.int64) for name in ("ids", "labels"))
        types = np.frombuffer(entry["types"], dtype=np.int8).astype(np.int64)
        media = tuple(
            PlannedMedium(ref, text, patches, squared)
            for ref, (text, patches, squared) in zip(refs, json.loads(entry["media"]), strict=False)
        )
        return [
            Prepared(ids[low:high], labels[low:high], types[low:high], media, entry["whole_length"])
            for low, high in itertools.pairwise(bounds)
        ]

    def tokens(self) -> np.ndarray:
        """Tokens of each row, all pieces together, [rows] int64; 0 where a row gives no sample."""
        counts = [
            column.values.to_numpy()[column.offsets.to_numpy()[1:] - 1] for column in self._rows()["bounds"].chunks
        ]
        return np.concatenate(counts).astype(np.int64)

    def __len__(self) -> int:
        return self._rows().num_rows

    def _rows(self) -> Any:
        if self._table is None:
            import pyarrow as pa

            try:
                with pa.memory_map(self.path) as mapped:
                    self._table = pa.ipc.open_file(mapped).read_all()
            except (pa.ArrowInvalid, OSError) as error:
                raise DataError(
                    f"token cache {self.path} can't be read ({error}); delete it, or set overwrite_cache to true"
                ) from error
        return self._table

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None}

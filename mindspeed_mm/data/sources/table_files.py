"""Rows of parquet and arrow files: never more of a file in memory than a few of its parts."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from mindspeed_mm.utils.errors import BadSample, DataError
from mindspeed_mm.utils.extras import require_extra

#: bytes of decoded row groups that one process caches of one parquet file
CACHED_BYTES = 1 << 30
_ROWS_AT_ONCE = 1000


def is_arrow_stream(magic: bytes) -> bool:
    """Whether a file begins like a stream of Arrow messages: a marker, the size of the schema's message, its table."""
    size = int.from_bytes(magic[4:8], "little")
    return magic[:4] == b"\xff\xff\xff\xff" and 0 < size < 1 << 28 and not size % 8


class _TableFile:
    """Rows of a file that consists of parts with many rows each."""

    kind = "table"

    def __init__(self, path: str) -> None:
        self.path = path
        self._opened: Any = None
        require_extra("tables", f"{path}: {self.kind} file")
        try:
            self._ends = list(accumulate(self._sizes()))  # rows up to the end of each part
        except Exception as error:  # pyarrow's own error classes vary by version
            what = f"starts like {self.kind} file but can't be read as one: {error}"
            raise DataError(f"{path}: {what}") from None

    def _sizes(self) -> list[int]:
        """Rows of each part."""
        raise NotImplementedError

    def _part(self, number: int) -> Any:
        """Return one part as an Arrow table or record batch."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def has(self, index: int) -> bool:
        """Whether there is a row `index`."""
        return 0 <= index < len(self)

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index`."""
        if not self.has(index):
            raise IndexError(f"{self.path}: row {index + 1} of {len(self)}")
        number = bisect_right(self._ends, index)
        return self._part(number).slice(index - (self._ends[number - 1] if number else 0), 1).to_pylist()[0]

    def head(self, limit: int) -> Iterator[dict[str, Any] | BadSample]:
        """Yield the first `limit` rows."""
        begin = 0
        for number, end in enumerate(self._ends):
            for low in range(begin, min(end, limit), _ROWS_AT_ONCE):
                high = min(low + _ROWS_AT_ONCE, end, limit)
                yield from self._part(number).slice(low - begin, high - low).to_pylist()
            begin = end

    def where(self, index: int) -> str:
        """Name a row."""
        return f"{self.path}, row {index + 1}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


class ParquetFile(_TableFile):
    """Rows of a parquet file; row groups are decoded when they are read, and the last ones cached up to `CACHED_BYTES`.

    Rows drawn in random order are read fastest where the whole file is cached, or where row groups are small.
    """

    kind = "a parquet"

    def _file(self) -> Any:
        import pyarrow.parquet as parquet

        if self._opened is None:
            self._opened = parquet.ParquetFile(self.path, memory_map=True)
            self._cached: OrderedDict[int, Any] = OrderedDict()
        return self._opened

    def _sizes(self) -> list[int]:
        metadata = self._file().metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self._bytes = [group.total_byte_size for group in groups]
        return [group.num_rows for group in groups]

    def _part(self, number: int) -> Any:
        file = self._file()
        if number not in self._cached:
            others = [self._bytes[other] for other in self._cached]
            while others and sum(others) + self._bytes[number] > CACHED_BYTES:
                self._cached.popitem(last=False)
                del others[0]
            self._cached[number] = file.read_row_group(number, use_threads=False)
        self._cached.move_to_end(number)
        return self._cached[number]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_cached": OrderedDict()}


class ArrowFile(_TableFile):
    """Rows of an arrow file of either form, mapped into memory: processes share its pages."""

    kind = "an arrow"

    def _batches(self) -> Any:
        """The record batches: a reader with random access, or a list of batches that point into the mapping."""
        import pyarrow as pa

        if self._opened is None:
            source = pa.memory_map(self.path)
            if source.read(6) == b"ARROW1":
                self._opened = pa.ipc.open_file(source)
            else:
                source.seek(0)
                self._opened = list(pa.ipc.open_stream(source))
        return self._opened

    def _sizes(self) -> list[int]:
        batches = self._batches()
        count = len(batches) if isinstance(batches, list) else batches.num_record_batches
        return [self._part(number).num_rows for number in range(count)]

    def _part(self, number: int) -> Any:
        batches = self._batches()
        return batches[number] if isinstance(batches, list) else batches.get_batch(number)

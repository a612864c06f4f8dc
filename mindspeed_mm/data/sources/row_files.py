"""Open data files by their content."""

from __future__ import annotations

import json
import os
from typing import Any

from mindspeed_mm.data.sources.csv_file import CsvFile
from mindspeed_mm.data.sources.json_rows import JsonShape, RowBounds, find_lines, find_objects, json_shape
from mindspeed_mm.data.sources.table_files import ArrowFile, ParquetFile, is_arrow_stream
from mindspeed_mm.data.sources.text_rows import BAD_ROW, RowFile, TextFile
from mindspeed_mm.utils.errors import BadSample, DataError

_COMPRESSED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2"}


class JsonFile(TextFile):
    """Rows of a json or jsonl file: one object a line, an array of objects, or objects one after the other."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        shape = json_shape(path)
        if shape is None:
            raise DataError(f"{path}: expected JSON rows")
        self._shape = shape
        self._position = shape.begin

    def _find(self, position: int) -> tuple[RowBounds, int | None] | None:
        return find_lines(self.path, position) if self._shape.by_line else (find_objects(self.path, self._shape), None)

    def where(self, index: int) -> str:
        """Name a row: by its line where rows are lines."""
        return super().where(index) if self._shape.by_line else f"{self.path}, row {index + 1}"

    def _parse(self, text: bytes, index: int) -> dict[str, Any]:
        try:
            value = json.loads(text.decode("utf-8"))
        except UnicodeDecodeError as error:
            what = f"not UTF-8 ({error.reason} at byte {error.start} of the row)"
            raise BadSample(f"{self.where(index)}: {what}", BAD_ROW) from None
        except ValueError as error:
            raise BadSample(f"{self.where(index)}: not valid JSON: {error}; found {text[:60]!r}", BAD_ROW) from None
        if not isinstance(value, dict):
            found = f"expected an object, found {type(value).__name__} {text[:60]!r}"
            raise BadSample(f"{self.where(index)}: {found}", BAD_ROW)
        return value


class MemberFile(JsonFile):
    """The objects of an array that a JSON file's one object holds under a key.

    Args:
        path: The file.
        key: The array's key.
        bounds: Where they are.
    """

    def __init__(self, path: str, key: str, bounds: RowBounds) -> None:
        TextFile.__init__(self, path)
        self._shape = JsonShape(by_line=False, in_array=True, begin=0)
        self._starts, self._ends, self._position = bounds.starts, bounds.ends, None
        self._key = key

    def where(self, index: int) -> str:
        """Name an object of the array."""
        return f"{self.path}, {self._key} {index + 1}"


class LineFile(TextFile):
    """Rows of a file of plain text: each line that isn't blank is a row with the column `text`."""

    def _find(self, position: int) -> tuple[RowBounds, int | None] | None:
        return find_lines(self.path, position)

    def _parse(self, text: bytes, index: int) -> dict[str, Any]:
        try:
            return {"text": text.decode("utf-8-sig").rstrip("\r\n")}
        except UnicodeDecodeError as error:
            what = f"not UTF-8 ({error.reason} at byte {error.start} of the line)"
            raise BadSample(f"{self.where(index)}: {what}", BAD_ROW) from None


def refuse_tokens(path: str) -> None:
    """Refuse the files of a Megatron IndexedDataset, `<prefix>.bin` and `<prefix>.idx`, and their prefix.

    Raises:
        DataError: `path` is one of the three.
    """
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    if os.path.isfile(f"{prefix}.idx") and os.path.isfile(f"{prefix}.bin"):
        raise DataError(
            f"{path}: {prefix}.bin and .idx hold tokens (Megatron's IndexedDataset), which are not read here; expected "
            "the texts that they were made of, in parquet, arrow, json, csv or txt files: a corpus "
            "(data_manager_type: mg) makes tokens of them itself"
        )


def open_rows(path: str, *, is_text: bool = False) -> RowFile:
    """Open a data file by its content, whatever its suffix.

    Args:
        is_text: Rows are plain text: a file named .txt without JSON in it consists of lines.

    Raises:
        DataError: Unreadable or unknown content.
    """
    refuse_tokens(path)
    try:
        with open(path, "rb") as file:
            magic = file.read(16)
    except OSError as error:
        raise DataError(f"{path}: can't be opened: {error.strerror or error}") from None
    if magic.startswith(b"PAR1"):
        return ParquetFile(path)
    if magic.startswith(b"ARROW1") or is_arrow_stream(magic):
        return ArrowFile(path)
    for signature, name in _COMPRESSED.items():
        if magic.startswith(signature):
            raise DataError(
                f"{path}: this is a {name} file; expected json, jsonl, csv, parquet or arrow, not compressed"
            )
    if json_shape(path) is not None:
        return JsonFile(path)
    if path.lower().endswith((".parquet", ".arrow")):
        kind, begin = ("parquet", "PAR1") if path.lower().endswith(".parquet") else ("arrow", "ARROW1")
        raise DataError(f"{path}: this is no {kind} file: it begins with {magic[:8]!r}; expected {begin}")
    return LineFile(path) if is_text and path.lower().endswith(".txt") else CsvFile(path)

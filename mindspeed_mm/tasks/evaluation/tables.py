"""The rows of a benchmark's files in the layouts in which it is published, with their pictures."""

from __future__ import annotations

import base64
import binascii
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm.data.conversation.messages import RowFault
from mindspeed_mm.data.media.media import MediaRef
from mindspeed_mm.data.sources.row_files import open_rows
from mindspeed_mm.data.sources.text_rows import RowFile
from mindspeed_mm.tasks.evaluation.benchmark import Benchmark, BenchmarkLayout, Question, Row, texts_in
from mindspeed_mm.utils.errors import BadSample, DataError, did_you_mean
from mindspeed_mm.utils.text import shorten

_SUFFIXES = (".parquet", ".tsv", ".csv", ".json", ".jsonl")
#: a text of at most so many characters in the place of a picture is the index of the row that has it (VLMEvalKit)
_LONGEST_INDEX = 64
_PICTURES = tuple(f"image_{number}" for number in range(1, 8))


class BenchmarkFile:
    """The rows of a file.

    Args:
        benchmark: whose rows they are.
        path: the file.

    Raises:
        DataError: it can't be read, has no rows, or has none of the benchmark's layouts.
    """

    def __init__(self, benchmark: Benchmark, path: str) -> None:
        self.path = path
        self._file: RowFile | _ListFile = open_rows(path)
        if not self._file.has(0):
            raise DataError(f"{path}: the file has no rows; expected those of {benchmark.name}")
        first = self._file.row(0)
        inner = benchmark.rows_in(first, Path(path))
        if inner is not None and len(self._file) == 1:
            self._file = _ListFile(path, *inner)
            first = self._file.row(0)
        self.layout = _layout_of(benchmark, first, path)
        name = os.path.basename(path)
        self._split = next((split for split in self.layout.splits if split in name), None)
        self._by_index: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self._file)

    def where(self, index: int) -> str:
        """Name a row, for messages."""
        return self._file.where(index)

    def folders(self) -> tuple[str, ...]:
        """Folders where pictures that rows name are looked for."""
        folder = os.path.dirname(self.path)
        return (*(os.path.join(folder, inner) for inner in self.layout.folders), folder, "")

    def question(self, index: int) -> Question:
        """Return a row as the benchmark asks it.

        Raises:
            BadSample: the row can't be used.
        """
        row = self._file.row(index)
        if self._split is not None:
            row = {**row, "split": self._split}
        if missing := [column for column in self.layout.columns if row.get(column) is None]:
            raise BadSample(f"{self.where(index)}: no value of {', '.join(missing)}", "a value is missing")
        try:
            return self.layout.ask(row, lambda: self._pictures(row))
        except RowFault as fault:
            raise BadSample(f"{self.where(index)}: {fault}", fault.reason) from None

    def _pictures(self, row: Row) -> list[MediaRef]:
        """The pictures of a row: columns image_1 …, or one column with one or several of them."""
        if "image_1" in row:
            return [_picture(row[name], name) for name in _PICTURES if row.get(name) is not None]
        value = row[self.layout.picture]
        if isinstance(value, str):
            if not value and row.get("image_path"):
                return [MediaRef("image", path) for path in texts_in(row["image_path"])]
            if "index" in row:  # a tsv of VLMEvalKit
                return [_decoded(self._referred(text)) for text in texts_in(value)]
        return [_picture(value, self.layout.picture)]

    def _referred(self, text: str) -> str:
        """The picture of another row, where the row has that row's index in the place of a picture."""
        if len(text) > _LONGEST_INDEX:
            return text
        if self._by_index is None:
            self._by_index = {str(self._file.row(number).get("index")): number for number in range(len(self._file))}
        if text not in self._by_index:
            raise RowFault(
                f"'image' is '{shorten(text)}'; expected a picture in base64, or the index of a row that has one",
                "no picture",
            )
        return str(self._file.row(self._by_index[text])["image"])


class _ListFile:
    """Rows that are a list inside a file's only object."""

    def __init__(self, path: str, name: str, rows: list[Any]) -> None:
        self.path, self._name, self._rows = path, name, rows
        if not rows or not all(isinstance(row, dict) for row in rows):
            raise DataError(f"{path}: '{name}' holds no objects, or something else; expected the rows")

    def __len__(self) -> int:
        return len(self._rows)

    def has(self, index: int) -> bool:
        return 0 <= index < len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        return dict(self._rows[index])

    def where(self, index: int) -> str:
        return f"{self.path}, {self._name}[{index}]"


class BenchmarkRows:
    """The rows of all files of a benchmark, numbered one file after the other.

    Args:
        benchmark: whose rows they are.
        path: a file, or a folder of files.
        limit: most rows that are used; None: all.
        named_by: flag or key that named `path`, for messages.

    Raises:
        DataError: there is no file, or one can't be read or has another layout.
    """

    def __init__(self, benchmark: Benchmark, path: str, limit: int | None, named_by: str) -> None:
        self.paths = benchmark_files(benchmark, path, named_by)
        self.files = [BenchmarkFile(benchmark, name) for name in self.paths]
        self._ends = np.cumsum([len(file) for file in self.files])
        self._length = int(self._ends[-1]) if limit is None else min(limit, int(self._ends[-1]))

    def __len__(self) -> int:
        return self._length

    def locate(self, index: int) -> tuple[BenchmarkFile, int]:
        """Return the file of a row, and the row's number in it."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self.files[number], index - (int(self._ends[number - 1]) if number else 0)

    def where(self, index: int) -> str:
        """Name file and row, for messages."""
        file, local = self.locate(index)
        return file.where(local)


def benchmark_files(benchmark: Benchmark, path: str, named_by: str) -> tuple[str, ...]:
    """Return the file, or those of a folder that a layout lists, or whose names begin with the benchmark's split.

    Raises:
        DataError: the folder has none.
    """
    place = Path(path)
    if not place.is_dir():
        return (path,)
    if listed := benchmark.files_in(place):
        return tuple(map(str, listed))
    for folders in ([place], [place / "data"], sorted(place.iterdir()) if benchmark.parted else []):
        files = [file for folder in folders for file in _data_files(folder, benchmark.split)]
        if files:
            return tuple(map(str, files))
    names = sorted(item.name for item in place.iterdir() if not item.name.startswith("."))
    raise DataError(
        f"{named_by}: the folder '{path}' has no file {benchmark.split}*{{{','.join(_SUFFIXES)}}} of {benchmark.name}; "
        f"it holds {', '.join(names[:8]) or 'nothing'}{' …' if len(names) > 8 else ''}"
    )


def _data_files(folder: Path, split: str) -> list[Path]:
    return sorted(file for file in folder.glob(f"{split}*") if file.suffix in _SUFFIXES and file.is_file())


def _layout_of(benchmark: Benchmark, row: Row, path: str) -> BenchmarkLayout:
    for layout in benchmark.layouts:
        if all(column in row for column in layout.columns):
            return layout
    nearest = min(benchmark.layouts, key=lambda layout: len(set(layout.columns) - row.keys()))
    missing = [column for column in nearest.columns if column not in row]
    near = "".join(did_you_mean(name, row.keys(), used=nearest.columns) for name in missing[:1])
    expected = "; or ".join(f"{', '.join(layout.columns)} ({layout.name})" for layout in benchmark.layouts)
    raise DataError(
        f"{path}: no layout of {benchmark.name}: {', '.join(map(repr, missing))} missing{near}; found the columns "
        f"{', '.join(map(str, itertools.islice(row, 20)))}; expected {expected}"
    )


def _picture(value: object, column: str) -> MediaRef:
    """A picture as Hugging Face's data sets have it ({bytes, path}), or its file's name."""
    if isinstance(value, dict):
        if value.get("bytes"):
            return MediaRef("image", str(value.get("path") or ""), content=bytes(value["bytes"]))
        value = value.get("path")
    if isinstance(value, str) and value:
        return MediaRef("image", value)
    raise RowFault(f"'{column}' is {shorten(repr(value))}; expected a picture's bytes or its file", "no picture")


def _decoded(text: str) -> MediaRef:
    try:
        return MediaRef("image", content=base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise RowFault(f"'image' begins with '{text[:20]}' and is no base64: {error}", "no picture") from None

"""The folder of converted rows: written under another name, and put in its place when all is done."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np
import yaml

from mindspeed_mm.data.sources.splitting import split_rows
from mindspeed_mm.tools.convert_data.rows import MEDIA_COLUMNS, NewRow
from mindspeed_mm.utils.errors import BadSample, ConfigError, DataError
from mindspeed_mm.utils.extras import require_extra
from mindspeed_mm.utils.files import exchange, fsync_path, is_inside, refuse_unwritable
from mindspeed_mm.utils.text import whole_characters

FORMATS = ("jsonl", "json", "parquet")
REPORT, LEFT_OUT = "conversion.yaml", "left_out.txt"
_SHOWN = 3
_ROWS_AT_ONCE = 1000
#: columns without which the form of later rows isn't recognised, and their empty values
_EMPTY: Mapping[str, Any] = {**{column: [] for column in MEDIA_COLUMNS.values()}, "tools": None}


class OutputFolder:
    """A context in which a folder of rows is made; an error leaves what was there before.

    Args:
        folder: the folder, which doesn't exist, is empty, or was made by this command and may be replaced.
        overwrite: it may be replaced.

    Raises:
        ConfigError: it can't be written, or holds something else.
    """

    def __init__(self, folder: Path, overwrite: bool) -> None:
        if is_inside(os.curdir, folder):
            raise ConfigError(f"--output '{folder}' is the current folder, or around it; expected another one")
        refuse_unwritable(folder, "--output")
        if folder.is_dir() and any(folder.iterdir()) and not (overwrite and (folder / REPORT).is_file()):
            reason = "holds files that this command hasn't made" if overwrite else "isn't empty"
            advice = "give another one" if overwrite else "give another one, or --overwrite"
            raise ConfigError(f"--output '{folder}' {reason}; {advice}")
        self.folder = folder
        self.working = folder.with_name(f".{folder.name}.converting")
        self.left_out: Counter[str] = Counter()
        self.first_faults: dict[str, list[str]] = {}
        self._groups = array("q")
        self._columns: dict[str, None] = {}

    def __enter__(self) -> OutputFolder:
        shutil.rmtree(self.working, ignore_errors=True)
        self.working.mkdir(parents=True)
        self._rows = open(self.working / ".rows", "wb")
        self._faults = open(self.working / LEFT_OUT, "w", encoding="utf-8")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._rows.close()
        self._faults.close()
        shutil.rmtree(self.working, ignore_errors=True)

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, row: NewRow) -> None:
        """Write a row."""
        self._rows.write(json.dumps(row.columns, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
        mark = hashlib.blake2b(os.fsencode(row.group), digest_size=8).digest()
        self._groups.append(int.from_bytes(mark, "big", signed=True))
        self._columns.update(dict.fromkeys(row.columns))

    def leave_out(self, fault: BadSample) -> None:
        """Count a row that can't be used, and list it."""
        self.left_out[fault.reason] += 1
        first = self.first_faults.setdefault(fault.reason, [])
        if len(first) < _SHOWN:
            first.append(str(fault))
        self._faults.write(f"{fault}\n")

    def finish(self, form: str, share: float | None, seed: int, about: Mapping[str, Any]) -> dict[str, int]:
        """Write the files of rows and the report, and put the folder in its place.

        Args:
            form: one of FORMATS.
            share: of the rows (of their groups) for validation; None: none are.
            seed: which ones.
            about: what the report says beside the numbers.

        Returns:
            name of each file → its rows.
        """
        self._rows.close()
        self._faults.close()
        if not self.left_out:
            (self.working / LEFT_OUT).unlink()
        chosen = self._validation_rows(share, seed)
        counts = {}
        for name, wanted in (("train", ~chosen), ("validation", chosen)):
            if wanted.any():
                path = self.working / f"{name}.{form}"
                _WRITERS[form](path, self._chosen_rows(wanted), list(self._columns))
                fsync_path(path)
                counts[path.name] = int(wanted.sum())
        (self.working / ".rows").unlink()
        report = {**about, "rows": counts, "left_out": dict(self.left_out.most_common())}
        (self.working / REPORT).write_text(yaml.safe_dump(report, sort_keys=False, allow_unicode=True), "utf-8")
        self._put_in_place()
        return counts

    def _validation_rows(self, share: float | None, seed: int) -> np.ndarray:
        """Whether each row is for validation, [rows] bool."""
        names, group = np.unique(np.asarray(self._groups), return_inverse=True)
        if share is None:
            return np.zeros(len(group), dtype=bool)
        if len(names) < 2:
            raise DataError(f"--validation {share:g}: all rows have the same image, so that they stay together")
        # in the order of their first rows, so that rows without media are those that val_rate takes
        first = np.full(len(names), len(group))
        np.minimum.at(first, group, np.arange(len(group)))
        _, taken = split_rows(np.arange(len(names)), share, seed)
        rank = np.empty(len(names), dtype=np.int64)
        rank[np.argsort(first)] = np.arange(len(names))
        return np.isin(rank[group], taken)

    def _chosen_rows(self, wanted: np.ndarray) -> Iterator[dict[str, Any]]:
        empty = {name: value for name, value in _EMPTY.items() if name in self._columns and "messages" in self._columns}
        with open(self.working / ".rows", "rb") as rows:
            for line, is_wanted in zip(rows, wanted, strict=True):
                if is_wanted:
                    row = json.loads(line)
                    yield {**row, **{name: value for name, value in empty.items() if name not in row}}

    def _put_in_place(self) -> None:
        if self.folder.is_dir() and exchange(self.working, self.folder):
            fsync_path(self.folder.parent)
            return  # the old content is in the working folder now, and removed with it
        old = self.folder.with_name(f".{self.folder.name}.replaced")
        shutil.rmtree(old, ignore_errors=True)
        if self.folder.exists():
            os.rename(self.folder, old)
        os.rename(self.working, self.folder)
        fsync_path(self.folder.parent)
        shutil.rmtree(old, ignore_errors=True)


def _opened(path: Path) -> TextIO:
    """A JSON file for writing; halves of surrogate pairs, of names that aren't UTF-8, become JSON's escapes."""
    return open(path, "w", encoding="utf-8", errors="backslashreplace")


def _write_lines(path: Path, rows: Iterable[dict[str, Any]], columns: Sequence[str]) -> None:
    with _opened(path) as file:
        file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def _write_array(path: Path, rows: Iterable[dict[str, Any]], columns: Sequence[str]) -> None:
    with _opened(path) as file:
        before = "[\n"
        for row in rows:
            file.write(f"{before}{json.dumps(row, ensure_ascii=False)}")
            before = ",\n"
        file.write("\n]\n")


def _write_parquet(path: Path, rows: Iterable[dict[str, Any]], columns: Sequence[str]) -> None:
    """Columns of text; what isn't text in a row is written as JSON, which the reader takes in any column."""
    require_extra("tables", "--to parquet")
    import pyarrow as pa
    import pyarrow.parquet as parquet

    schema = pa.schema([(column, pa.string()) for column in columns])
    with parquet.ParquetWriter(path, schema) as writer, contextlib.ExitStack() as stack:
        waiting: list[dict[str, Any]] = []
        stack.callback(lambda: waiting and writer.write_table(pa.Table.from_pylist(waiting, schema)))
        for row in rows:
            waiting.append({name: _as_cell(value) for name, value in row.items()})
            if len(waiting) == _ROWS_AT_ONCE:
                writer.write_table(pa.Table.from_pylist(waiting, schema))
                waiting.clear()


def _as_cell(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return text if whole_characters(text) == text else json.dumps(value)
    if value is not None and whole_characters(value) != value:
        raise DataError(
            f"--to parquet: {value!r} isn't UTF-8, as text in parquet has to be; expected --to jsonl or json"
        )
    return value


_WRITERS = {"jsonl": _write_lines, "json": _write_array, "parquet": _write_parquet}

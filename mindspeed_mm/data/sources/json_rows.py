"""Find the rows of a JSON file in one pass over its bytes; two integers are kept per row.

A row is parsed when it is read, so a file of any size costs 16 bytes per row. The shape is taken from the content:
one object a line, an array of objects, or objects one after the other (pretty-printed).
"""

from __future__ import annotations

import json
import mmap
import re
from typing import NamedTuple

import numpy as np

from mindspeed_mm.utils.errors import DataError

_CHUNK = 8 << 20
_BOM = b"\xef\xbb\xbf"
_QUOTE, _BACKSLASH = 34, 92
_OPEN, _CLOSE = (123, 91), (125, 93)  # { [ and } ]


class RowBounds(NamedTuple):
    """Byte offsets of the rows: row i is `data[starts[i]:ends[i]]`."""

    starts: np.ndarray
    ends: np.ndarray


class JsonShape(NamedTuple):
    """The arrangement of rows in a file: one per line, in an array, or one after the other; and where they begin."""

    by_line: bool
    in_array: bool
    begin: int


def json_shape(path: str) -> JsonShape | None:
    """Look at the beginning of a file; None if it doesn't begin like JSON rows.

    Args:
        path: File with UTF-8 text, with or without a byte order mark, LF or CRLF.

    Raises:
        DataError: Empty file or another encoding.
    """
    with open(path, "rb") as file:
        head = file.read(4)
        if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise DataError(f"{path}: the file is UTF-16; save it as UTF-8")
        if not head.strip():
            file.seek(0)
            if not file.read(1 << 16).strip():
                raise DataError(f"{path}: the file is empty; expected rows")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            begin = 3 if data[:3] == _BOM else 0
            first = _skip_space(data, begin)
            if data[first : first + 1] == b"[":
                return JsonShape(by_line=False, in_array=True, begin=first + 1)
            if data[first : first + 1] != b"{":
                return None
            by_line = _is_one_a_line(data, first)
            return JsonShape(by_line, in_array=False, begin=begin if by_line else first)


def find_objects(path: str, shape: JsonShape) -> RowBounds:
    """Find the rows of a file whose rows aren't lines.

    Raises:
        DataError: A cut-off file, or something else than objects between the rows.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _containers(path, data, shape.begin, shape.in_array)


def find_members(path: str) -> dict[str, RowBounds]:
    """Find the objects in the arrays that a file's one object holds, as COCO's files have them.

    Returns:
        key of each array → its objects; nothing if the file doesn't consist of one object.

    Raises:
        DataError: A cut-off file.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        begin = _skip_space(data, 3 if data[:3] == _BOM else 0)
        found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # places of brackets, steps and levels after them
        depth, quotes, low, ended = 0, 0, begin, data[begin : begin + 1] != b"{"
        while low < len(data) and not ended:
            high = _end_of_chunk(data, low)
            at, step, quotes = _brackets(np.frombuffer(data[low:high], dtype=np.uint8), quotes)
            level = depth + np.cumsum(step)
            close = np.flatnonzero(level == 0)
            if len(close):
                if data[low + int(at[close[0]]) + 1 :].strip():
                    return {}
                ended = True
            near = (level <= 3) & ((level < 3) | (step == 1))
            found.append((at[near] + low, step[near], level[near]))
            depth = int(level[-1]) if len(level) else depth
            low = high
        if not ended:
            raise DataError(f"{path}: the file ends inside an object; was it cut off while being written?")
        return _members(data, *(np.concatenate(part) for part in zip(*found, strict=True))) if found else {}


def _members(data: mmap.mmap, at: np.ndarray, step: np.ndarray, level: np.ndarray) -> dict[str, RowBounds]:
    """Key → bounds of the objects of each array, of the brackets of the three outer levels."""
    opens = at[(step == 1) & (level == 2)]
    starts, ends = at[(step == 1) & (level == 3)], at[(step == -1) & (level == 2)] + 1
    owner = np.searchsorted(opens, starts) - 1
    members = {}
    for number, place in enumerate(opens.tolist()):
        key = re.search(rb'"((?:[^"\\]|\\.)*)"\s*:\s*$', data[max(0, place - 400) : place])
        if key is not None and data[place] == _OPEN[1]:
            mine = owner == number
            members[key[1].decode("utf-8", "replace")] = RowBounds(starts[mine], ends[mine])
    return members


def find_lines(path: str, position: int) -> tuple[RowBounds, int] | None:
    """Find rows that are lines in the next chunk of a file; blank lines are no rows.

    Args:
        path: The file.
        position: Byte offset to begin at.

    Returns:
        The rows found (perhaps none), and the next position; None at the end of the file.
    """
    size = _CHUNK
    with open(path, "rb") as file:
        while True:
            file.seek(position)
            data = file.read(size)
            breaks = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == 10)
            if len(data) < size:  # the last chunk: its last line may end without a break
                if not data:
                    return None
                if not data.endswith(b"\n"):
                    breaks = np.append(breaks, len(data))
                return _lines(data, breaks, position), position + len(data)
            if len(breaks):
                return _lines(data, breaks, position), position + int(breaks[-1]) + 1
            size *= 2  # a line longer than the chunk


def _lines(data: bytes, breaks: np.ndarray, position: int) -> RowBounds:
    starts = np.concatenate(([0], breaks[:-1] + 1)).astype(np.int64)
    ends = breaks.astype(np.int64)
    keep = np.ones(len(starts), dtype=bool)
    for i in np.flatnonzero(ends - starts < 64):  # only short lines can be blank
        keep[i] = bool(data[starts[i] : ends[i]].strip())
    return RowBounds(starts[keep] + position, ends[keep] + position)


def _skip_space(data: mmap.mmap, position: int) -> int:
    while data[position : position + 1] in (b" ", b"\t", b"\r", b"\n"):
        position += 1
    return position


def _is_one_a_line(data: mmap.mmap, first: int) -> bool:
    """Whether rows are lines: the first line is a whole object, or the next one opens another at its very start."""
    end = data.find(b"\n", first)
    end = len(data) if end < 0 else end
    try:
        json.loads(data[first:end].decode("utf-8", "replace"))
    except ValueError:
        following = _skip_space(data, end)
        return data[following - 1 : following + 1] == b"\n{"
    return True


def _containers(path: str, data: mmap.mmap, begin: int, in_array: bool) -> RowBounds:
    """Bounds of the objects at depth 0, by counting brackets outside strings, a chunk at a time."""
    starts, ends = [], []
    depth, quotes, low, closed = 0, 0, begin, -1
    while low < len(data) and closed < 0:
        high = _end_of_chunk(data, low)
        block = np.frombuffer(data[low:high], dtype=np.uint8)
        at, step, quotes = _brackets(block, quotes)
        level = depth + np.cumsum(step)
        stop = np.flatnonzero(level < 0)
        if len(stop):
            closed = low + int(at[stop[0]])
            at, step, level = at[: stop[0]], step[: stop[0]], level[: stop[0]]
        starts.append(at[(step == 1) & (level == 1)] + low)
        ends.append(at[(step == -1) & (level == 0)] + low + 1)
        depth = int(level[-1]) if len(level) else depth
        low = high
    bounds = RowBounds(np.concatenate(starts).astype(np.int64), np.concatenate(ends).astype(np.int64))
    if depth > 0 or (in_array and closed < 0):
        raise DataError(f"{path}: the file ends inside row {len(bounds.ends) + 1}; was it cut off while being written?")
    _check_gaps(path, data, bounds, begin, closed if in_array else len(data), in_array)
    return bounds


def _end_of_chunk(data: mmap.mmap, low: int) -> int:
    high = min(low + _CHUNK, len(data))
    while high < len(data) and data[high - 1] == _BACKSLASH:  # an escape must not be cut in two
        high += 1
    return high


def _brackets(block: np.ndarray, quotes: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Positions of brackets outside strings, +1 or -1 for each, and the parity of quotes at the end of the block."""
    quote_at = np.flatnonzero(block == _QUOTE)
    if len(quote_at):
        quote_at = quote_at[~_escaped(block, quote_at)]
    opens = (block == _OPEN[0]) | (block == _OPEN[1])
    at = np.flatnonzero(opens | (block == _CLOSE[0]) | (block == _CLOSE[1]))
    outside = (np.searchsorted(quote_at, at) + quotes) % 2 == 0
    at = at[outside]
    return at, np.where(opens[at], 1, -1), (quotes + len(quote_at)) % 2


def _escaped(block: np.ndarray, quote_at: np.ndarray) -> np.ndarray:
    """Mask of the quotes that follow an odd run of backslashes."""
    escaped = np.zeros(len(quote_at), dtype=bool)
    slashes = np.flatnonzero(block == _BACKSLASH)
    if not len(slashes):
        return escaped
    new_run = np.concatenate(([True], np.diff(slashes) != 1))
    run_start = slashes[np.maximum.accumulate(np.where(new_run, np.arange(len(slashes)), 0))]
    index = np.searchsorted(slashes, quote_at - 1)
    index[index == len(slashes)] = 0
    follows = slashes[index] == quote_at - 1
    escaped[follows] = (quote_at - run_start[index])[follows] % 2 == 1
    return escaped


def _check_gaps(path: str, data: mmap.mmap, bounds: RowBounds, begin: int, end: int, in_array: bool) -> None:
    """Check that there is only space between rows, and one comma in an array: anything else is a wrong row."""
    previous = begin
    for row, (start, stop) in enumerate(zip(bounds.starts.tolist(), bounds.ends.tolist(), strict=True)):
        gap = data[previous:start].strip()
        if gap != (b"," if in_array and row else b""):
            raise DataError(
                f"{path}: before row {row + 1} (byte {previous}): expected "
                f"{'a comma between objects' if in_array else 'only spaces between objects'}, found {bytes(gap[:40])!r}"
            )
        previous = stop
    if rest := data[previous:end].strip().removeprefix(b","):
        raise DataError(f"{path}: after row {len(bounds.ends)}: expected an object, found {bytes(rest[:40])!r}")
    if in_array and (rest := data[end + 1 :].strip()):
        raise DataError(f"{path}: after the array's end: expected nothing more, found {bytes(rest[:40])!r}")

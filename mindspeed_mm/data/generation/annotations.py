"""Annotations of captioned clips: rows of data files, read as a file, its captions and its sizes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from mindspeed_mm.configs.generation_data import GenerationBasicParameters
from mindspeed_mm.data.media.media import MediaRef
from mindspeed_mm.data.media.media_files import find_media
from mindspeed_mm.data.places import Place
from mindspeed_mm.data.sources.files import DataEntry, RowSource
from mindspeed_mm.utils.errors import BadSample, DataError, did_you_mean
from mindspeed_mm.utils.log import info_rank0
from mindspeed_mm.utils.text import whole_characters

PATH_COLUMNS = ("path", "video", "image", "file_name")
CAPTION_COLUMNS = ("cap", "caption", "text")
_PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_CHECKED_ROWS = 16
BAD_ANNOTATION = "an annotation can't be used"


@dataclass(frozen=True)
class Annotation:
    """The annotation of a clip.

    Attributes:
        ref: the file.
        captions: one or several.
        frames, fps, height, width: of the file, where the row has them; they are trusted.
        cut: first frame that belongs to the clip, and the one after the last.
        crop: left, right, top and bottom of the part of the picture that belongs to the clip, in pixels.
    """

    ref: MediaRef
    captions: tuple[str, ...]
    frames: int | None = None
    fps: float | None = None
    height: int | None = None
    width: int | None = None
    cut: tuple[int, int] | None = None
    crop: tuple[int, int, int, int] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether everything is known without the file's header."""
        known = self.height is not None and self.width is not None
        return known and (self.ref.kind == "image" or (self.frames is not None and self.fps is not None))


def open_annotations(basic: GenerationBasicParameters, paths: list[str]) -> RowSource:
    """Open annotation files.

    Args:
        basic: `basic_parameters`.
        paths: `data_path` or `val_data_path`.

    Raises:
        DataError: A file can't be read, or has no rows.
    """
    entries = []
    for path in paths:
        parts = _combined(path) if basic.data_storage_mode == "combine" else [(basic.data_folder, path)]
        entries += [DataEntry(file, (file,), media_dir=folder, max_rows=basic.max_samples) for folder, file in parts]
    return RowSource(entries)


def _combined(path: str) -> list[tuple[str, str]]:
    """(folder of media, annotation file) of each line of a text file."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: can't be read as text: {error}") from None
    parts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 2 or not fields[1]:
            what = f"data_storage_mode combine expects `folder of media,annotation file`, found {line[:80]!r}"
            raise DataError(f"{path}, line {number}: {what}")
        parts.append((_beside(fields[0], path), _beside(fields[1], path)))
    if not parts:
        raise DataError(f"{path}: no line `folder of media,annotation file` in it")
    return parts


def _beside(name: str, path: str) -> str:
    """A path as written, or relative to the file that names it where only that exists."""
    other = os.path.join(os.path.dirname(path), name)
    return other if not os.path.exists(name) and os.path.exists(other) else name


def read_annotation(row: Mapping[str, Any], pictures_only: bool, where: object) -> Annotation:
    """Read a row.

    Args:
        row: path (or video, image, file_name), cap (or caption, text): text or a list; optionally num_frames, fps,
            resolution {height, width}, cut [first frame, frame after the last], crop [left, right, top, bottom].
            Numbers and objects may be written as text, as in csv.
        pictures_only: All files are pictures; else those with a picture's suffix are.
        where: The row, for messages.

    Raises:
        BadSample: A column is missing, or has a wrong value.
    """
    reader = _Reader(row, where)
    path = reader.first_of(PATH_COLUMNS)
    if not isinstance(path, str) or not path:
        raise reader.bad("path", path, "a path")
    is_picture = pictures_only or path.lower().endswith(_PICTURES)
    resolution = reader.value("resolution")
    if resolution is not None and not isinstance(resolution, Mapping):
        raise reader.bad("resolution", resolution, 'an object such as {"height": 720, "width": 1280}')
    sides = _Reader(resolution or {}, where)
    cut, crop = reader.numbers("cut", 2), reader.numbers("crop", 4)
    if cut is not None and not 0 <= cut[0] < cut[1]:
        raise reader.bad("cut", list(cut), "[first frame, frame after the last]")
    if crop is not None and not (0 <= crop[0] < crop[1] and 0 <= crop[2] < crop[3]):
        raise reader.bad("crop", list(crop), "[left, right, top, bottom] in pixels")
    frames, height, width = reader.number("num_frames"), sides.number("height"), sides.number("width")
    return Annotation(
        MediaRef("image" if is_picture else "video", path),
        reader.captions(),
        None if frames is None else int(frames),
        reader.number("fps"),
        None if height is None else int(height),
        None if width is None else int(width),
        None if cut is None else (cut[0], cut[1]),
        None if crop is None else (crop[0], crop[1], crop[2], crop[3]),
    )


class _Reader:
    """Columns of a row, typed."""

    def __init__(self, row: Mapping[str, Any], where: object) -> None:
        self._row, self._where = row, where

    def bad(self, key: str, found: object, expected: str) -> BadSample:
        return BadSample(f"{self._where}: '{key}' is {str(found)[:80]!r}; expected {expected}", BAD_ANNOTATION)

    def value(self, key: str) -> Any:
        """A column; null and empty text count as absent, objects and lists may be written as text."""
        found = self._row.get(key)
        if isinstance(found, str):
            if not found.strip():
                return None
            if found.lstrip()[0] in "[{":
                try:
                    return json.loads(found)
                except ValueError:
                    return found
        return found

    def first_of(self, keys: tuple[str, ...]) -> Any:
        """The value of the first column that exists."""
        for key in keys:
            if self._row.get(key) is not None:
                return self._row[key]
        null = next((key for key in keys if key in self._row), None)
        if null is not None:
            empty = '; write "" for an empty caption' if keys is CAPTION_COLUMNS else ""
            raise BadSample(f"{self._where}: '{null}' is null; expected text{empty}", BAD_ANNOTATION)
        near = next((hint for key in keys if (hint := did_you_mean(key, self._row))), "")
        raise BadSample(
            f"{self._where}: no column {' or '.join(keys)}; found {', '.join(map(str, self._row)) or 'nothing'}{near}",
            BAD_ANNOTATION,
        )

    def captions(self) -> tuple[str, ...]:
        self.first_of(CAPTION_COLUMNS)
        key = next(key for key in CAPTION_COLUMNS if self._row.get(key) is not None)
        found = self._row[key]
        if isinstance(found, str):
            listed = self.value(key)
            found = listed if _is_texts(listed) else [found]
        if not _is_texts(found):
            raise self.bad(key, found, "text, or a list of texts")
        return tuple(whole_characters(text) for text in found)

    def number(self, key: str) -> float | None:
        found = self.value(key)
        if found is None:
            return None
        try:
            number = float(found)
        except (TypeError, ValueError):
            number = -1.0
        if isinstance(found, bool) or not 0 < number < float("inf"):
            raise self.bad(key, found, "a number above 0")
        return number

    def numbers(self, key: str, count: int) -> tuple[int, ...] | None:
        found = self.value(key)
        if found is None:
            return None
        try:
            numbers = tuple(round(float(item)) for item in found)
        except (TypeError, ValueError, OverflowError):
            numbers = ()
        if len(numbers) != count:
            raise self.bad(key, found, f"a list of {count} numbers")
        return numbers


def _is_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def check_first_rows(source: RowSource, pictures_only: bool, skip: bool) -> None:
    """Check the first rows of each file, and that their clips exist, before a run starts.

    Args:
        source: The rows.
        pictures_only: As in `read_annotation`.
        skip: Raise only if no first row of a file can be used; else for any of them.

    Raises:
        DataError: A row can't be used; the message names it and its fault.
    """
    for number in range(len(source.files)):
        file, _, rows = source.head(number, _CHECKED_ROWS)
        faults: list[BadSample] = []
        good = 0
        for local, row in rows:
            place = Place(file, local)
            try:
                if isinstance(row, BadSample):
                    raise row
                find_media(read_annotation(row, pictures_only, place).ref, source.folders_of(number), place)
                good += 1
            except BadSample as error:
                if not skip:
                    raise
                faults.append(error)
        if faults and not good:
            raise DataError(f"none of the first {len(faults)} row(s) of {file.path} can be used; {faults[0]}")
        if faults:
            seen = len(faults) + good
            info_rank0(f"{len(faults)} of the first {seen} rows of {file.path} will be left out: {faults[0]}")

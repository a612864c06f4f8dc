"""COCO's files: one object with `images`, `annotations` and, of boxes, `categories`.

Format: https://cocodataset.org/#format-data. Of an annotation a number and its place in the file are kept in memory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_mm.data.places import Place
from mindspeed_mm.data.sources.json_rows import find_members
from mindspeed_mm.data.sources.row_files import MemberFile
from mindspeed_mm.utils.errors import BadSample, DataError

_HEAD = re.compile(rb'\s*\{\s*"(images|annotations|categories|info|licenses|type)"\s*:\s*[\[{"]')
_BAD_IMAGE = "an image of the file can't be read"
_BAD_ANNOTATION = "an annotation can't be read"
_NO_ANNOTATION = "an image without annotations"
#: of coordinates: what an image's sides are divided into, or None for pixels
BOX_UNITS: Mapping[str, int | None] = {"thousandths": 1000, "pixels": None}


def is_coco(path: str) -> bool:
    """Whether a file is of COCO's form: one object with the arrays `images` and `annotations`."""
    with open(path, "rb") as file:
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf")
    return _HEAD.match(head) is not None and {"images", "annotations"} <= find_members(path).keys()


@dataclass(frozen=True)
class CocoImage:
    """An image with what is said about it.

    Attributes:
        name: its file.
        width, height: pixels; None: the file doesn't say.
        captions: of the whole image.
        boxes: label and [x, y, width, height] in pixels of each object.
        faults: annotations of it that can't be used.
        place: the image, for messages.
    """

    name: str
    width: int | None
    height: int | None
    captions: tuple[str, ...]
    boxes: tuple[tuple[str, tuple[float, ...]], ...]
    faults: tuple[BadSample, ...]
    place: Place


class CocoFile:
    """The images of a file of COCO's form, in the file's order.

    Args:
        path: the file.

    Raises:
        DataError: it has another form.
    """

    def __init__(self, path: str) -> None:
        members = find_members(path)
        missing = [key for key in ("images", "annotations") if key not in members]
        if missing:
            raise DataError(
                f"{path}: expected one object with the arrays 'images' and 'annotations', as COCO's files have, found "
                f"{'the arrays ' + ', '.join(members) if members else 'none'}"
            )
        self.path = path
        self.images = MemberFile(path, "images", members["images"])
        self.annotations = MemberFile(path, "annotations", members["annotations"])
        self._categories: dict[object, str] = {}
        if "categories" in members:
            file = MemberFile(path, "categories", members["categories"])
            for row in file.head(len(file)):
                if isinstance(row, dict) and isinstance(row.get("name"), str):
                    self._categories[row.get("id")] = row["name"]

    def read(self) -> Iterator[CocoImage | BadSample]:
        """Yield its images; for an image or an annotation that can't be used, its fault."""
        keys = np.full(len(self.images), -1, dtype=np.int64)
        faults: dict[int, BadSample] = {}
        for number, row in enumerate(self.images.head(len(self.images))):
            try:
                keys[number] = _whole_number(_checked(row), "id", self.images.where(number), _BAD_IMAGE)
            except BadSample as fault:
                faults[number] = fault
        order = np.argsort(keys, kind="stable")
        owner = np.full(len(self.annotations), -1, dtype=np.int64)
        for number, row in enumerate(self.annotations.head(len(self.annotations))):
            try:
                where = self.annotations.where(number)
                key = _whole_number(_checked(row), "image_id", where, _BAD_ANNOTATION)
                place = int(np.searchsorted(keys, key, sorter=order))
                if place == len(keys) or keys[order[place]] != key:
                    raise BadSample(f"{where}: 'image_id' is {key}, and no image has this id", _BAD_ANNOTATION)
                owner[number] = order[place]
            except BadSample as fault:
                yield fault
        by_image = np.argsort(owner, kind="stable")
        ends = np.searchsorted(owner, np.arange(len(keys)), side="right", sorter=by_image)
        begins = np.searchsorted(owner, np.arange(len(keys)), side="left", sorter=by_image)
        for number in range(len(keys)):
            if number in faults:
                yield faults[number]
                continue
            try:
                yield self._image(number, by_image[begins[number] : ends[number]].tolist())
            except BadSample as fault:
                yield fault

    def _image(self, number: int, annotations: list[int]) -> CocoImage:
        row, where = self.images.row(number), self.images.where(number)
        name = row.get("file_name") or os.path.basename(str(row.get("coco_url") or ""))
        if not isinstance(name, str) or not name:
            found = ", ".join(row)
            raise BadSample(f"{where}: no 'file_name' (or 'coco_url'); keys found: {found}", _BAD_IMAGE)
        if not annotations:
            raise BadSample(f"{where}: {_NO_ANNOTATION}: '{name}'", _NO_ANNOTATION)
        captions: list[str] = []
        boxes: list[tuple[str, tuple[float, ...]]] = []
        faults: list[BadSample] = []
        for index in annotations:
            try:
                said = self._annotation(index)
                if isinstance(said, str):
                    captions.append(said)
                elif said is not None:
                    boxes.append(said)
            except BadSample as fault:
                faults.append(fault)
        width, height = (_side(row.get(key)) for key in ("width", "height"))
        place = Place(self.images, number)
        return CocoImage(name, width, height, tuple(captions), tuple(boxes), tuple(faults), place)

    def _annotation(self, index: int) -> str | tuple[str, tuple[float, ...]] | None:
        """A caption, or a label with its box; None: a region of many objects (`iscrowd`)."""
        row, where = self.annotations.row(index), self.annotations.where(index)
        caption, box = row.get("caption"), row.get("bbox")
        if caption is not None and not isinstance(caption, str):
            raise BadSample(f"{where}: 'caption' is {str(caption)[:80]!r}; expected text", _BAD_ANNOTATION)
        if box is None and caption is not None:
            return caption
        if box is None:
            raise BadSample(
                f"{where}: neither 'caption' nor 'bbox'; keys found: {', '.join(row) or 'none'}", _BAD_ANNOTATION
            )
        if row.get("iscrowd"):
            return None
        numbers = [side for side in box if isinstance(side, (int, float))] if isinstance(box, list) else []
        if len(numbers) != 4 or not all(np.isfinite(numbers)) or min(numbers[2:]) <= 0:
            raise BadSample(
                f"{where}: 'bbox' is {str(box)[:80]}; expected [x, y, width, height] with sides above 0",
                _BAD_ANNOTATION,
            )
        label = self._categories.get(row.get("category_id")) if caption is None else caption
        if label is None:
            raise BadSample(
                f"{where}: 'category_id' is {row.get('category_id')!r}, and no category has this id", _BAD_ANNOTATION
            )
        return label, tuple(float(side) for side in numbers)


def boxes_as_text(image: CocoImage, unit: int | None) -> str:
    """Return the answer that lists an image's objects: JSON of `bbox_2d`, [left, top, right, bottom], and `label`.

    Args:
        image: its boxes; parts of them outside of the image are cut off.
        unit: into how much each side of the image is divided; None: pixels.

    Raises:
        BadSample: the file doesn't say how large the image is, or a box is outside of it.
    """
    if image.width is None or image.height is None:
        raise BadSample(f"{image.place}: no 'width' and 'height' above 0, which boxes are measured by", _BAD_IMAGE)
    objects = []
    for label, (x, y, width, height) in image.boxes:
        corners = []
        for low, size, whole in ((x, width, image.width), (y, height, image.height)):
            ends = (min(max(place, 0.0), whole) for place in (low, low + size))
            corners.append([round(place * (1 if unit is None else unit / whole)) for place in ends])
            if low >= whole or low + size <= 0:
                raise BadSample(
                    f"{image.place}: the box [{x:g}, {y:g}, {width:g}, {height:g}] of '{label}' is outside of the "
                    f"image, {image.width}×{image.height}",
                    _BAD_ANNOTATION,
                )
        objects.append({"bbox_2d": [corners[0][0], corners[1][0], corners[0][1], corners[1][1]], "label": label})
    return json.dumps(objects, ensure_ascii=False)


def _side(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _checked(row: dict[str, Any] | BadSample) -> dict[str, Any]:
    if isinstance(row, BadSample):
        raise row
    return row


def _whole_number(row: Mapping[str, Any], key: str, where: str, reason: str) -> int:
    value = row.get(key)
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadSample(f"{where}: '{key}' is {value!r}; expected a whole number, 0 or above", reason)
    return value

"""Diagrams of AI2D whose labels are replaced by the letters that a question asks for."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm.data.conversation.messages import RowFault
from mindspeed_mm.utils.text import shorten

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

#: left, top, right, bottom, in pixels
Box = tuple[float, float, float, float]

_BOX = (25, 249, 255)
_LARGEST_LETTER = 22  # pixels


@functools.lru_cache(maxsize=4)  # the questions about a diagram follow each other
def draw_letters(image: Path, annotation: Path) -> bytes:
    """Return a PNG file of a diagram with a box and a letter in the place of each label.

    Args:
        image: the diagram.
        annotation: JSON object whose `text` has for each label `rectangle`, [[left, top], [right, bottom]] in pixels,
            and `replacementText`, the letter.

    Raises:
        RowFault: a file isn't there, or has something else.
    """
    from PIL import Image, ImageDraw

    for kind, path in (("image", image), ("annotation", annotation)):
        if not path.is_file():
            raise RowFault(f"{kind} not found: looked for {path}", f"{kind} not found")
    try:
        labels = [
            (_box(label["rectangle"]), str(label["replacementText"]))
            for label in json.loads(annotation.read_text(encoding="utf-8"))["text"].values()
        ]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise RowFault(
            f"{annotation}: expected 'text' with 'rectangle' [[left, top], [right, bottom]] and 'replacementText' of "
            f"each label; {shorten(repr(error))}",
            "no labels",
        ) from None
    try:
        with Image.open(image) as opened:
            picture = opened.convert("RGB")
    except OSError as error:
        raise RowFault(f"{image}: {shorten(str(error))}", "unreadable image") from None
    draw = ImageDraw.Draw(picture)
    for box, letter in labels:
        _draw_label(draw, box, letter)
    file = io.BytesIO()
    picture.save(file, format="PNG", compress_level=1)
    return file.getvalue()


def _box(rectangle: Any) -> Box:
    (left, top), (right, bottom) = rectangle
    return float(left), float(top), float(right), float(bottom)


def _draw_label(draw: ImageDraw, box: Box, letter: str) -> None:
    """A letter as high as its box, but not higher than 22 pixels; a box without a height is left out."""
    left, top, right, bottom = box
    if bottom <= top or right < left:
        return
    draw.rectangle(box, fill=_BOX)
    size = _LARGEST_LETTER
    while size > 4 and _height(draw, letter, size) > bottom - top:
        size -= 1
    draw.text(((left + right) / 2, (top + bottom) / 2), letter, fill="black", font=_font(size), anchor="mm")


def _height(draw: ImageDraw, letter: str, size: int) -> float:
    _, top, _, bottom = draw.textbbox((0, 0), letter, font=_font(size))
    return float(bottom - top)


@functools.cache
def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size=size)

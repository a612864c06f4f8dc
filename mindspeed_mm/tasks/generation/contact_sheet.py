"""All samples on one picture, each with its prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm.tasks.generation.outputs import read_frames, save_picture
from mindspeed_mm.utils.log import notice

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont

SHEET = "contact_sheet.png"
_LIMIT = 256  # samples on a sheet
_SIDES = (96, 224)  # pixels of a cell: small pictures are enlarged, large ones reduced
_GAP = 6
_LINE = 14
_LINES = 2


def write_contact_sheet(root: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Write contact_sheet.png: a cell for each sample; a video has its first, middle and last frame.

    Several samples of one prompt form a row.

    Args:
        root: folder of the samples.
        records: lines of samples.jsonl, at least one.
    """
    from PIL import Image, ImageDraw, ImageFont

    if len(records) > _LIMIT:
        notice(f"{SHEET} shows the first {_LIMIT} of {len(records)} samples")
        records = records[:_LIMIT]
    cells = [_cell(root / record["file"]) for record in records]
    width, height = max(cell.width for cell in cells), max(cell.height for cell in cells)
    of_prompt = max((record["sample"] for record in records), default=0) + 1
    columns = of_prompt if 1 < of_prompt <= 16 else max(1, round(math.sqrt(len(cells) * height / width)))
    rows = -(-len(cells) // columns)
    step_x, step_y = width + _GAP, height + _LINES * _LINE + _GAP
    sheet = Image.new("RGB", (columns * step_x + _GAP, rows * step_y + _GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=11)
    for number, (cell, record) in enumerate(zip(cells, records, strict=True)):
        x, y = _GAP + number % columns * step_x, _GAP + number // columns * step_y
        sheet.paste(cell, (x, y))
        for line, text in enumerate(_lines(str(record["prompt"]), draw, font, width)):
            draw.text((x, y + height + line * _LINE), text, fill="black", font=font)
    save_picture(sheet, root / SHEET)
    return root / SHEET


def _cell(path: Path) -> Image.Image:
    from PIL import Image

    frames = read_frames(path, (0.0, 0.5, 1.0) if path.suffix == ".mp4" else (0.0,))
    pictures = [Image.fromarray(frame) for frame in frames]
    longest = max(pictures[0].size)
    smallest, largest = _SIDES
    if longest < smallest:
        by = -(-smallest // longest)
        pictures = [p.resize((p.width * by, p.height * by), Image.Resampling.NEAREST) for p in pictures]
    elif longest > largest:
        size = tuple(max(1, round(side * largest / longest)) for side in pictures[0].size)
        pictures = [p.resize(size, Image.Resampling.LANCZOS) for p in pictures]
    strip = Image.new("RGB", (sum(p.width for p in pictures) + 2 * (len(pictures) - 1), pictures[0].height), "white")
    x = 0
    for picture in pictures:
        strip.paste(picture, (x, 0))
        x += picture.width + 2
    return strip


def _lines(
    text: str, draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int
) -> list[str]:
    """The text in at most two lines, cut where it is longer."""
    lines: list[str] = []
    rest = " ".join(text.split())
    while rest and len(lines) < _LINES:
        fits = len(rest)
        while fits > 1 and draw.textlength(rest[:fits], font=font) > width:
            fits -= 1
        at = rest.rfind(" ", 0, fits + 1)
        if fits < len(rest) and at > 0:
            fits = at
        lines.append(rest[:fits])
        rest = rest[fits:].lstrip()
    if rest and lines:
        lines[-1] = lines[-1][:-1] + "…"
    return lines

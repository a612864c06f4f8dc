"""Image files as upright RGB pictures of a size that a model's processor accepts."""

from __future__ import annotations

import contextlib
import io
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from mindspeed_mm.configs.data_config import MEDIA_MAX_PIXELS
from mindspeed_mm.data.media.media_files import MediaFile
from mindspeed_mm.utils.errors import BadSample

if TYPE_CHECKING:
    from PIL import Image

_BACKGROUND = (255, 255, 255)
_ORIENTATION = 0x0112  # EXIF
_SIDEWAYS = (5, 6, 7, 8)  # its values that exchange width and height
#: processors refuse more, and no patch grid shows it sensibly
WIDEST_RATIO = 200.0


@dataclass(frozen=True)
class PixelLimits:
    """Limits on the size of a picture or a frame.

    Attributes:
        max_pixels: larger areas are scaled down to this one.
        min_pixels: smaller areas are scaled up to this one.
        factor: shortest side, in pixels, that the processor accepts.
        floor_pixels: the processor's own smallest area: it would scale up what is below.
        max_ratio: largest ratio of the longer side to the shorter one.
    """

    max_pixels: int | None = None
    min_pixels: int | None = None
    factor: int = 1
    floor_pixels: int = 0
    max_ratio: float = WIDEST_RATIO


def fit_size(width: int, height: int, limits: PixelLimits) -> tuple[int, int] | None:
    """Return the size, in pixels, that a picture is scaled to; None if its sides are too unequal.

    The ratio is kept but for rounding. Limits apply together: a maximum never shrinks a picture below what the
    processor accepts (a side of `factor` pixels, `floor_pixels` in area), because it would have to enlarge it again.
    A picture with a side below `factor` is enlarged to the smallest legal size. Pictures inside all limits keep
    their size.
    """
    if max(width, height) > min(width, height) * limits.max_ratio:
        return None
    area, target = width * height, width * height
    if limits.max_pixels and area > limits.max_pixels:
        target = min(area, max(limits.max_pixels, limits.floor_pixels))
    elif limits.min_pixels and area < limits.min_pixels:
        target = limits.min_pixels
    scale = math.sqrt(target / area)
    if min(width, height) * scale < limits.factor:
        scale = limits.factor / min(width, height)
        if area * scale * scale < limits.floor_pixels:
            scale = math.sqrt(limits.floor_pixels / area)
    if scale == 1:
        return width, height
    rounded = math.floor if scale < 1 else math.ceil
    # 1e-9: a side meant to be 28 must not become 29 because 28/27*27 is a little above it
    sides = [rounded(side * scale + (1e-9 if scale < 1 else -1e-9)) for side in (width, height)]
    sides = [max(limits.factor, 1, side) for side in sides]
    longest = int(min(sides) * limits.max_ratio)  # rounding must not make it too narrow for the processor
    return min(sides[0], longest), min(sides[1], longest)


def image_size(file: MediaFile, most: int = MEDIA_MAX_PIXELS) -> tuple[int, int]:
    """Return width and height of an image as `read_image` shows it; no pixels are decoded (but of a PNG
    file with text behind its pixels).

    Args:
        file: The image.
        most: Pixels that a file may have.

    Raises:
        BadSample: The file isn't an image, or has more pixels than `most`.
    """
    with _reading(file, most) as opened:
        if opened.format == "PNG" and _has_late_chunks(opened):
            return _load_upright(opened).size
        return opened.size[::-1] if _orientation(opened) in _SIDEWAYS else opened.size


def read_image(
    file: MediaFile, size: tuple[int, int] | None = None, fast: bool = False, most: int = MEDIA_MAX_PIXELS
) -> Image.Image:
    """Decode an image: upright by EXIF, first frame, RGB with transparency over white.

    Args:
        file: The image.
        size: Width and height to scale it to (bicubic); None leaves it.
        fast: JPEG files at least twice as large as `size` are decoded at a half, a quarter or an eighth.
        most: Pixels that a file may have.

    Raises:
        BadSample: The file can't be decoded, or only a part of it; it has more pixels than `most`, or pixels that are
            no numbers.
    """
    with _reading(file, most) as opened:
        if fast and size is not None and opened.format == "JPEG":
            opened.draft(None, size[::-1] if _orientation(opened) in _SIDEWAYS else size)
        picture = _load_upright(opened)
        if size is not None and picture.mode in ("1", "L") and "transparency" not in picture.info:
            picture = picture.convert("L").resize(size)  # the same values, in a third of the memory
        picture = to_rgb(picture)
    return picture if size is None or size == picture.size else picture.resize(size)


_PIL = threading.RLock()


@contextlib.contextmanager
def _reading(file: MediaFile, most: int) -> Iterator[Image.Image]:
    """An image file opened by PIL; whatever its plugins raise (struct.error, IndexError, …) becomes a BadSample.

    PIL's own limit, twice `most`, stays: the size of some formats is known only while they are decoded.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with _limit_of_pil(most), Image.open(file.open()) as opened:
            width, height = opened.size
            file.check_pixels("image", width, height, most)
            yield opened
    except (BadSample, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise file.fault(
            f"is too large to be decoded as an image: {error}; if it shall be used, set "
            f"preprocess_parameters.media_max_pixels in data.json, now {most}, to its pixels",
            "image too large",
        ) from None
    except UnidentifiedImageError:
        raise file.fault(f"is not an image: {file.beginning()}", "image can't be decoded") from None
    except Exception as error:
        what = (str(error) or type(error).__name__).splitlines()[0]
        raise file.fault(f"can't be decoded as an image: {what}", "image can't be decoded") from None


@contextlib.contextmanager
def _limit_of_pil(most: int) -> Iterator[None]:
    """Set PIL's limit, which is global to the process, and restore it afterwards."""
    from PIL import Image

    with _PIL:
        before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, most
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = before


def _orientation(opened: Image.Image) -> int:
    """The EXIF orientation, 1 … 8; 1 (upright) where there is none or it can't be read."""
    from PIL import Image

    if opened.format == "TIFF":  # PIL turns it while loading, and reports the upright size before
        return 1
    try:
        # not the PNG plugin's own getexif, which decodes the whole picture
        return int(Image.Image.getexif(opened).get(_ORIENTATION) or 1)
    except Exception:  # a damaged block beside a healthy picture
        return 1


def _load_upright(opened: Image.Image) -> Image.Image:
    from PIL.Image import Transpose as turn

    opened.load()
    mirrored = (turn.FLIP_LEFT_RIGHT, turn.ROTATE_180, turn.FLIP_TOP_BOTTOM)
    turns = (*mirrored, turn.TRANSPOSE, turn.ROTATE_270, turn.TRANSVERSE, turn.ROTATE_90)
    orientation = _orientation(opened)
    return opened.transpose(turns[orientation - 2]) if 2 <= orientation <= 8 else opened


def _has_late_chunks(opened: Image.Image) -> bool:
    """Whether a PNG file may have its orientation after the pixels, where it is read only by decoding them."""
    if "exif" in opened.info:
        return False
    file: BinaryIO = opened.fp
    before, late = file.tell(), False
    file.seek(8)
    while len(head := file.read(8)) == 8:
        kind = head[4:]
        late = late or kind in (b"eXIf", b"iTXt", b"zTXt", b"tEXt")
        if kind == b"IEND":
            break
        file.seek(int.from_bytes(head[:4], "big") + 4, io.SEEK_CUR)
    file.seek(before)
    return late


def to_rgb(picture: Image.Image) -> Image.Image:
    """Convert any PIL mode to RGB.

    Transparency is laid over white; 16-bit grey is scaled to 8 bits; floating-point grey between 0 and 1 is scaled to
    0 … 255, other values are cut to that range.

    Raises:
        ValueError: Pixels are NaN or infinite.
    """
    from PIL import Image

    if picture.mode == "RGB" and "transparency" not in picture.info:
        return picture
    if picture.mode.startswith("I;16") or picture.mode in ("I", "F"):
        return _grey(picture).convert("RGB")
    if picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        canvas = Image.new("RGBA", picture.size, (*_BACKGROUND, 255))
        return Image.alpha_composite(canvas, picture).convert("RGB")
    return picture.convert("RGB")


def _grey(picture: Image.Image) -> Image.Image:
    """Deep grey as 8 bits; a grey value that means transparency becomes white."""
    from PIL import Image

    values = np.asarray(picture)
    if picture.mode == "F":
        if not np.isfinite(values).all():
            raise ValueError("it holds pixels that are no numbers (NaN or infinite)")
        grey = values * 255 if values.size and values.min() >= 0 and values.max() <= 1 else values
        grey = np.rint(grey)
    else:
        deep = picture.mode != "I" or values.max(initial=0) > 255
        grey = values.astype(np.int64) // 257 if deep else values  # 65535 → 255
    clear = picture.info.get("transparency")
    if isinstance(clear, int):
        grey = np.where(values == clear, 255, grey)
    return Image.fromarray(grey.clip(0, 255).astype(np.uint8))

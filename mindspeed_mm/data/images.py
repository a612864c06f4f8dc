"""Image files as upright RGB pictures."""

from __future__ import annotations

import io
import math
import os
from typing import TYPE_CHECKING

from mindspeed_mm.data.files import Place
from mindspeed_mm.data.records import ImageRef
from mindspeed_mm.utils.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

_BACKGROUND = (255, 255, 255)


def locate_image(ref: ImageRef, dataset_dir: str, file_dir: str, where: Place) -> str:
    """Return the path of an image: in `dataset_dir`, beside the data file, or as written, the first that exists.

    Raises:
        DataError: None of them exists; the message has the row and the full paths.
    """
    tried = []
    for folder in (dataset_dir, file_dir, ""):
        path = os.path.abspath(os.path.join(folder, ref.path))
        if os.path.isfile(path):
            return path
        if path not in tried:
            tried.append(path)
    raise DataError(f"{where}: image not found: {ref.path!r}; looked for {', '.join(tried)}")


def load_image(
    ref: ImageRef, path: str, where: Place, max_pixels: int | None = None, min_pixels: int | None = None
) -> Image.Image:
    """Open an image: upright by EXIF, first frame, RGB with transparency over white.

    Args:
        ref: The image of the row.
        path: Where it lies (ignored if the row holds the bytes).
        where: The row, for messages.
        max_pixels: Larger images are scaled down to this area, the aspect ratio kept; None leaves them.
        min_pixels: Smaller images are scaled up to this area; None leaves them.

    Raises:
        DataError: The file can't be decoded as an image.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(ref.content) if ref.content is not None else path) as opened:
            opened.load()
            ImageOps.exif_transpose(opened, in_place=True)  # in place: without orientation nothing is copied
            picture = to_rgb(opened)
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        name = path if ref.content is None else f"the bytes of {ref.path}"
        raise DataError(f"{where}: {name} can't be decoded as an image: {error}") from None
    return _fit(picture, max_pixels, min_pixels)


def to_rgb(picture: Image.Image) -> Image.Image:
    """Convert any PIL mode to RGB; transparency is laid over white, 16-bit grey is scaled to 8 bits."""
    from PIL import Image

    if picture.mode == "RGB" and "transparency" not in picture.info:
        return picture
    if picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        canvas = Image.new("RGBA", picture.size, (*_BACKGROUND, 255))
        return Image.alpha_composite(canvas, picture).convert("RGB")
    if picture.mode.startswith("I;16") or (picture.mode == "I" and (picture.getextrema()[1] or 0) > 255):
        import numpy as np

        grey = np.asarray(picture).astype(np.int64) // 257  # 65535 → 255
        picture = Image.fromarray(grey.clip(0, 255).astype(np.uint8))
    return picture.convert("RGB")


def _fit(picture: Image.Image, max_pixels: int | None, min_pixels: int | None) -> Image.Image:
    area = picture.width * picture.height
    target = area
    if max_pixels and area > max_pixels:
        target = max_pixels
    elif min_pixels and area < min_pixels:
        target = min_pixels
    if target == area:
        return picture
    scale = math.sqrt(target / area)
    rounded = math.floor if target < area else math.ceil
    return picture.resize((max(1, rounded(picture.width * scale)), max(1, rounded(picture.height * scale))))

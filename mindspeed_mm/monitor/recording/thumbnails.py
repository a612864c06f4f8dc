"""Small JPEGs of pictures and frames, named by their content."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from PIL import Image

SIDE = 256
"""Longest side of a thumbnail in pixels."""
FRAMES = 4
"""Frames that are kept of a clip, at most."""
_QUALITY = 80


def write_thumbnail(picture: np.ndarray | Image.Image, folder: Path) -> str:
    """Write a picture, reduced to `SIDE` pixels where it is larger, and return the name of its file in `folder`.

    Args:
        picture: [height, width, 3] uint8, or an RGB image of PIL, which stays as it is.
    """
    from PIL import Image

    image = Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture.copy()
    image.thumbnail((SIDE, SIDE))
    content = io.BytesIO()
    image.save(content, "JPEG", quality=_QUALITY)
    name = f"{xxhash.xxh3_64_hexdigest(content.getvalue())}.jpg"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content.getvalue())
    return name


def spread(frames: np.ndarray) -> np.ndarray:
    """Return at most `FRAMES` frames of a clip, evenly spread, with the first and the last one: [n, …]."""
    if len(frames) <= FRAMES:
        return frames
    return frames[np.linspace(0, len(frames) - 1, FRAMES).round().astype(int)]

"""JPEGs of pictures and frames."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
import xxhash

SIDE = 256
"""Longest side of a thumbnail in pixels."""
FRAMES = 4
"""Frames that are kept of a clip, at most."""
_QUALITY = 80


def as_jpeg(picture: np.ndarray, side: int) -> bytes:
    """Return a picture as JPEG, reduced where it is larger.

    Args:
        picture: [height, width, 3] uint8.
        side: its longest side in pixels.
    """
    from PIL import Image

    image = Image.fromarray(picture)
    image.thumbnail((side, side))
    content = io.BytesIO()
    image.save(content, "JPEG", quality=_QUALITY)
    return content.getvalue()


def write_thumbnail(picture: np.ndarray, folder: Path) -> str:
    """Write a picture of at most `SIDE` pixels, and return the name of its file, which is of its content.

    Args:
        picture: [height, width, 3] uint8.
    """
    content = as_jpeg(picture, SIDE)
    name = f"{xxhash.xxh3_64_hexdigest(content)}.jpg"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return name


def pixels_of(video: torch.Tensor) -> np.ndarray:
    """Return [3, frames, height, width] between -1 and 1 as [frames, height, width, 3] uint8."""
    return ((video.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0).numpy()


def spread(frames: np.ndarray) -> np.ndarray:
    """Return at most `FRAMES` frames of a clip, evenly spread, with the first and the last one: [n, …]."""
    if len(frames) <= FRAMES:
        return frames
    return frames[np.linspace(0, len(frames) - 1, FRAMES).round().astype(int)]

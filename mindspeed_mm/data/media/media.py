"""A medium of a row: its reference in the row, its geometry in the header, and its decoded form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

MediaKind = Literal["image", "video", "audio"]
KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")


@dataclass(frozen=True)
class MediaRef:
    """A medium as a row names it.

    Attributes:
        kind: image, video or audio.
        path: path as written; empty for a typed part that takes the next one of the row's column.
        content: the encoded file itself (parquet rows may have it); None: it is at `path`.
        frames: a clip given as pictures; `path` and `content` are then unused.
        fps: if the row has it: frames a second of a clip given as pictures; frames to take per second of a video.
    """

    kind: MediaKind
    path: str = ""
    content: bytes | None = None
    frames: tuple[MediaRef, ...] = ()
    fps: float | None = None


@dataclass(frozen=True)
class Geometry:
    """The sizes that decide the number of tokens of a medium, read from its header without decoding.

    Attributes:
        kind: image, video or audio.
        height, width: pixels of the picture or of every frame: upright, and after the limits of data.json.
        frames: sampled frames of a video.
        fps: sampled frames a second.
        samples: length of a sound at the model's rate.
        times: of each frame, the second at which it is shown; empty: evenly at `fps`.
    """

    kind: MediaKind
    height: int = 0
    width: int = 0
    frames: int = 0
    fps: float = 0.0
    samples: int = 0
    times: tuple[float, ...] = ()

    @property
    def timestamps(self) -> tuple[float, ...]:
        """`times`, with those of evenly shown frames."""
        return self.times or tuple(number / self.fps for number in range(self.frames))


@dataclass(frozen=True)
class DecodedVideo:
    """A decoded video.

    Attributes:
        frames: [frames, height, width, 3] uint8, RGB, upright.
        timestamps: of each frame, the second at which it is shown, counted from the beginning; input of the model.
        fps: sampled frames a second.
        source_fps: frames a second of the file.
        source_frames: frames of the file.
    """

    frames: np.ndarray
    timestamps: Sequence[float]
    fps: float
    source_fps: float
    source_frames: int


@dataclass(frozen=True)
class Foreseen:
    """Prediction of a medium's tokens and patches, from its geometry alone.

    Attributes:
        text: the text that replaces its placeholder token.
        patches: patches that the tower computes.
        squared_patches: sum over pictures, groups of frames or sounds of their patches squared.
        rows: rows of its media tensor; None: one per patch.
    """

    text: str
    patches: int
    squared_patches: int
    rows: int | None = None


@dataclass(frozen=True)
class MediaSize:
    """What an encoder computes for media of one kind.

    Attributes:
        tokens: positions of a row that its outputs take.
        patches, squared_patches: as in `Foreseen`.
    """

    tokens: int = 0
    patches: int = 0
    squared_patches: int = 0

    def __add__(self, other: MediaSize) -> MediaSize:
        return MediaSize(
            self.tokens + other.tokens,
            self.patches + other.patches,
            self.squared_patches + other.squared_patches,
        )


@dataclass(frozen=True)
class SampleSize:
    """The sizes that decide the cost of a sample, known before its media are decoded.

    Attributes:
        tokens: positions of the row, media included; 0: it gives no sample.
        patches: rows of its media tensors (image and video patches, audio frames).
        squared_patches: sum over images, frames of videos and sounds of their patches squared.
        fault: why it gives no sample; None if it does.
        bucket: number of its shape, where samples have shapes; None: they have none, or it fits into any.
    """

    tokens: int
    patches: int = 0
    squared_patches: int = 0
    fault: str | None = None
    bucket: int | None = None

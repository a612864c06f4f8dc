"""Find the file of a medium; errors about it name the row and the file."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_mm.data.media.media import MediaRef
from mindspeed_mm.utils.errors import BadSample
from mindspeed_mm.utils.text import shorten


@dataclass(frozen=True)
class MediaFile:
    """A medium that has been found.

    Attributes:
        path: full path; empty if the row contains the file's bytes.
        content: these bytes.
        label: its name in messages.
        where: the row; turned into text only when a message needs it.
        key: identifies this version of this file; None for bytes of a row.
    """

    path: str
    content: bytes | None
    label: str
    where: object
    key: tuple[str, int, int] | None

    def open(self) -> str | io.BytesIO:
        """Return the input of decoders: the path, or the row's bytes as a file."""
        return self.path if self.content is None else io.BytesIO(self.content)

    def beginning(self) -> str:
        """Describe the beginning of the file: often it is a web page, or empty."""
        if self.content is not None:
            first = self.content[:16]
        else:
            with open(self.path, "rb") as opened:
                first = opened.read(16)
        return f"it begins with {first!r}" if first else "it is empty"

    def check_pixels(self, kind: str, width: int, height: int, most: int) -> None:
        """Raise BadSample if decoding a picture of this size would take more memory than data.json allows."""
        if width * height > most:
            raise self.fault(
                f"is {width}×{height} = {width * height:,} pixels, and at most {most:,} are decoded; if it shall be "
                f"used, set preprocess_parameters.media_max_pixels in data.json to {width * height} or more",
                f"{kind} too large",
            )

    def fault(self, problem: str, reason: str) -> BadSample:
        """Return the error that names row and file. `reason` is counted, so it contains no names."""
        return BadSample(f"{self.where}: {self.label} {problem}", reason)


def find_media(ref: MediaRef, folders: Sequence[str], where: object) -> MediaFile:
    """Find the file of a medium.

    Args:
        ref: The medium as the row names it.
        folders: Where relative paths are looked for, in order; "" is the working folder.
        where: The row, for messages.

    Raises:
        BadSample: It is in none of the folders.
    """
    if ref.content is not None:
        return MediaFile("", ref.content, f"the bytes of {ref.path or 'a column'}", where, None)
    tried: list[str] = []
    for folder in folders or ("",):
        path = os.path.abspath(os.path.join(folder, ref.path))
        if path in tried:
            continue
        try:
            found = os.stat(path)
        except (OSError, ValueError):  # ValueError: a path with a zero byte
            found = None
        if found is not None and stat.S_ISREG(found.st_mode):
            return MediaFile(path, None, path, where, (path, found.st_mtime_ns, found.st_size))
        tried.append(path)
    what = f"{ref.kind} not found"
    looked = ", ".join(shorten(path, 400) for path in tried)
    raise BadSample(f"{where}: {what}: {shorten(repr(ref.path), 400)}; looked for {looked}", what)

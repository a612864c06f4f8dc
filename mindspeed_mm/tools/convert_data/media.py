"""Media of converted rows: found, and named or copied so that the new rows find them."""

from __future__ import annotations

import dataclasses
import filecmp
import hashlib
import io
import os
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from mindspeed_mm.data.media.media import MediaRef
from mindspeed_mm.data.media.media_files import find_media

#: what becomes of media, and the folder of those that are written
MODES = ("relative", "absolute", "copy", "keep")
MEDIA_FOLDER = "media"


class MediaPlacer:
    """Names media as rows in another folder are to name them.

    Bytes in rows become files in any mode.

    Args:
        mode: relative: paths from the new folder; absolute: whole paths; copy: files are copied into it; keep: paths
            as they were written.
        output: the folder of the new rows.
        working: where its content is written until all is done.
    """

    def __init__(self, mode: str, output: Path, working: Path) -> None:
        self._mode, self._output, self._folder = mode, os.path.abspath(output), working / MEDIA_FOLDER
        self.written = 0

    def place(self, ref: MediaRef, folders: Sequence[str], where: object) -> MediaRef:
        """Return a medium with the path that the new row has.

        Args:
            ref: as the row names it.
            folders: where relative paths are looked for, in order.
            where: the row, for messages.

        Raises:
            BadSample: there is no such file.
        """
        if ref.frames:
            pictures = tuple(self.place(picture, folders, where) for picture in ref.frames)
            return dataclasses.replace(ref, frames=pictures)
        if ref.content is not None:
            return dataclasses.replace(ref, path=self._write(ref.content, ref), content=None)
        found = find_media(ref, folders, where).path
        if self._mode == "keep":
            return ref
        if self._mode == "copy":
            return dataclasses.replace(ref, path=self._copy(found, ref.path))
        if self._mode == "absolute":
            return dataclasses.replace(ref, path=found)
        # both with their links, as the reader joins them
        return dataclasses.replace(ref, path=os.path.relpath(found, self._output))

    def _write(self, content: bytes, ref: MediaRef) -> str:
        """Write a file that is named by its content; return its name in the new folder."""
        name = hashlib.sha256(content).hexdigest()[:24] + _suffix(content, ref)
        target = self._folder / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            self.written += 1
        return f"{MEDIA_FOLDER}/{name}"

    def _copy(self, path: str, written: str) -> str:
        """Copy a file to the place that its relative path names, or its name; return its name in the new folder."""
        name = PurePosixPath(os.path.normpath(written))
        if name.is_absolute() or name.parts[0] == ".." or written.startswith("file:"):
            name = PurePosixPath(os.path.basename(path))
        target = self._folder / name
        if target.exists() and not filecmp.cmp(path, target, shallow=False):
            mark = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
            name = name.with_name(f"{name.stem}-{mark}{name.suffix}")
            target = self._folder / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            self.written += 1
        return f"{MEDIA_FOLDER}/{name}"


def _suffix(content: bytes, ref: MediaRef) -> str:
    """The suffix of a file: of a picture by its content, else that of the name beside it."""
    if ref.kind == "image":
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(content)) as picture:
                kind = (picture.format or "").lower()
        except (UnidentifiedImageError, OSError, ValueError):
            kind = ""
        if kind:
            return {"jpeg": ".jpg", "mpo": ".jpg", "tiff": ".tif"}.get(kind, f".{kind}")
    suffix = os.path.splitext(ref.path)[1]
    return suffix if len(suffix) <= 8 and suffix[1:].isalnum() else ""

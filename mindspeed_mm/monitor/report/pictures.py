"""Pictures inside of the page, as long as there is room for them."""

from __future__ import annotations

import base64
from pathlib import Path

from mindspeed_mm.utils.files import is_inside

_KINDS = {b"\xff\xd8\xff": "image/jpeg", b"\x89PNG": "image/png"}
#: a thumbnail is much smaller
_LARGEST = 200_000


class PictureRoom:
    """What is left of the page's size for pictures of a folder."""

    def __init__(self, folder: Path, size: int) -> None:
        """
        Args:
            folder: pictures outside of it are none of the run's.
            size: characters that they may take.
        """
        self._folder, self.left = folder, size
        self._urls: dict[str, str] = {}

    def url(self, name: object) -> str | None:
        """Return a picture as a data URL; None: it isn't there, is no picture, or there is no room.

        Args:
            name: its path in the folder.
        """
        if not isinstance(name, str):
            return None
        if name in self._urls:
            return self._urls[name]
        size = self.size(name)
        if size is None or size > self.left:
            return None
        try:
            content = (self._folder / name).read_bytes()
        except OSError:
            return None
        kind = next((kind for start, kind in _KINDS.items() if content.startswith(start)), None)
        if kind is None:
            return None
        self.left -= size
        self._urls[name] = f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
        return self._urls[name]

    def size(self, name: object) -> int | None:
        """Return the characters that a picture takes; None: it can't be shown."""
        if not isinstance(name, str):
            return None
        path = self._folder / name
        try:
            size = path.stat().st_size
        except (OSError, ValueError):
            return None
        return 4 * size // 3 + 60 if size <= _LARGEST and is_inside(path, self._folder) else None

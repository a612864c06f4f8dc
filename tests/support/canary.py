"""An object whose pickle does something when it is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Canary:
    """Unpickling it makes the folder `path`: who reads it can be found out."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)

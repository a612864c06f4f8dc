"""The names of rows for messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class NamedRows(Protocol):
    """Anything with numbered rows that have names: a file, or all of them."""

    def where(self, index: int) -> str:
        """Name a row for messages."""


@dataclass(frozen=True)
class Place:
    """The name of a row for messages; computed only when a message needs it.

    Attributes:
        source: its file, or all files.
        index: its number there.
    """

    source: NamedRows
    index: int

    def __str__(self) -> str:
        return self.source.where(self.index)

"""What gathers the ranks' objects, as a type."""

from __future__ import annotations

from typing import Protocol, TypeVar

_T = TypeVar("_T")


class GatherObjects(Protocol):
    """Gathers an object of every rank; a collective."""

    def __call__(self, value: _T, /) -> list[_T]:
        """Return every rank's value, by rank."""

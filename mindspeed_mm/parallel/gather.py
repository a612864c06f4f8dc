"""The type of functions that gather an object of every rank."""

from __future__ import annotations

from typing import Protocol, TypeVar

_T = TypeVar("_T")


class GatherObjects(Protocol):
    """Gathers an object of every rank; a collective."""

    def __call__(self, value: _T, /) -> list[_T]:
        """Return the values of all ranks, ordered by rank."""

"""Errors that are sentences for the person who must act, and the nearest valid name."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

from mindspeed_mm.utils.text import printable, shorten_lines


class MMError(Exception):
    """An error whose message states what was found, what was expected and what to write instead.

    Entry scripts print it without a traceback and exit with status 1.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(shorten_lines(printable(str(message))))


class ConfigError(MMError, ValueError):
    """A flag or a configuration file has a value that can't be honoured."""


class DataError(MMError, ValueError):
    """A data file or a row of it can't be used."""


class BadSample(DataError):
    """One row or one of its media can't be used; `on_bad_sample: skip` leaves it out and counts it.

    Attributes:
        reason: the fault in a few words without names, to count by ("image can't be decoded").
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[BadSample], tuple[str, str]]:
        return type(self), (str(self), self.reason)


class CheckpointError(MMError, RuntimeError):
    """A checkpoint or a weight file is missing, damaged or does not fit."""


class TrainingError(MMError, RuntimeError):
    """Training can't continue: its steps change nothing any more."""


def kind_of(error: MMError) -> str:
    """Return the name of the error for messages: ConfigError, DataError, CheckpointError or TrainingError."""
    kinds = (ConfigError, DataError, CheckpointError, TrainingError)
    return next((k.__name__ for k in kinds if isinstance(error, k)), "Error")


def nearest_names(name: str, known: Iterable[str], limit: int = 3, used: Iterable[str | None] = ()) -> list[str]:
    """Return up to `limit` of `known` that look like `name`, best first; none if there is no clear likeness.

    A long text is compared with none. Endings of files (".json") and leading dashes that both have aren't compared.

    Args:
        name: The name that was written.
        known: The existing names.
        limit: Largest number of names to return.
        used: Names that are in use for something else, so that they can't have been meant.
    """
    if len(name) > 400:
        return []
    taken = set(used)
    scores = [(_likeness(name, str(other)), str(other)) for other in known if other not in taken]
    best = sorted((score, other) for score, other in set(scores) if score)
    return [other for _, other in reversed(best)][:limit]


def _likeness(name: str, other: str) -> float:
    """Similarity of two names, up to 1; 0: one can't be meant by the other."""
    one, two = (text.lower().replace("-", "_").lstrip("_") for text in (name, other))
    stems, endings = zip(*map(os.path.splitext, (one, two)), strict=True)
    if endings[0] == endings[1] and endings[0][1:].isalnum():
        one, two = stems
    if not one or not two:
        return 0.0
    ratio = difflib.SequenceMatcher(None, two, one).ratio()
    # names that begin differently ("messages", "images") need more in common than those that begin alike, or of which
    # one ends with the other as a whole ("layers", "model.layers")
    is_end = any(long.endswith((f".{short}", f"_{short}")) for long, short in ((one, two), (two, one)))
    return ratio if ratio >= (0.6 if one[0] == two[0] or is_end else 0.75) else 0.0


def did_you_mean(name: str, known: Iterable[str], used: Iterable[str | None] = ()) -> str:
    """Return `; did you mean 'x'?` (several names joined with or), or an empty string if nothing is near.

    Args:
        name: The name that was written.
        known: The existing names.
        used: Names that can't have been meant (see `nearest_names`).
    """
    names = nearest_names(name, known, used=used)
    if not names:
        return ""
    return "; did you mean " + " or ".join(f"'{n}'" for n in names) + "?"

"""Errors that are sentences for the person who must act, and the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from mindspeed_mm.utils.text import printable, shorten_lines


class MMError(Exception):
    """An error whose message tells a person what was found, what was expected and what to write instead.

    Entry scripts print it without a traceback and exit with status 1.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(shorten_lines(printable(str(message))))


class ConfigError(MMError, ValueError):
    """A flag or a configuration file holds something that can't be honoured."""


class DataError(MMError, ValueError):
    """A data file or a row of it can't be used."""


class BadSample(DataError):
    """One row or one of its media can't be used; `on_bad_sample: skip` leaves it out and counts it.

    Attributes:
        reason: what is wrong, in a few words without names, to count by ("image can't be decoded").
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[BadSample], tuple[str, str]]:
        return type(self), (str(self), self.reason)


class CheckpointError(MMError, RuntimeError):
    """A checkpoint or a weight file is missing, damaged or does not fit."""


class TrainingError(MMError, RuntimeError):
    """Training can't go on: its steps change nothing any more."""


def kind_of(error: MMError) -> str:
    """Return what a person calls the error: ConfigError, DataError, CheckpointError or TrainingError."""
    kinds = (ConfigError, DataError, CheckpointError, TrainingError)
    return next((k.__name__ for k in kinds if isinstance(error, k)), "Error")


def nearest_names(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Return up to `limit` of `known` that look like `name`, best first; a page of text looks like no name."""
    if len(name) > 400:
        return []
    candidates = {str(k).lower().replace("-", "_"): str(k) for k in known}
    wanted = name.lower().replace("-", "_")
    return [candidates[c] for c in difflib.get_close_matches(wanted, candidates, n=limit, cutoff=0.6)]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` (several names joined with or), or an empty string if nothing is near."""
    names = nearest_names(name, known)
    if not names:
        return ""
    return "; did you mean " + " or ".join(f"'{n}'" for n in names) + "?"

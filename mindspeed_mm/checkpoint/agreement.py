"""Steps of all ranks together, which succeed or fail on all of them.

A rank that fails alone, for example on a full disk, would leave the others waiting. So the ranks exchange the outcome
of each step: either the step succeeded on all of them, or all of them raise the same error.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from mindspeed_mm.parallel.gather import GatherObjects
from mindspeed_mm.utils.errors import ConfigError

_T = TypeVar("_T")

_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class RankFailure:
    """The failure of a step on a rank.

    Attributes:
        reason: one line; empty if the rank only knows that another one failed.
    """

    rank: int
    reason: str


class StepFailed(Exception):
    """A step failed on at least one rank; the same on all of them."""

    def __init__(self, step: str, failures: list[RankFailure]) -> None:
        super().__init__(step, failures)
        self.step = step
        self.failures = failures

    def __str__(self) -> str:
        known = [f for f in self.failures if f.reason] or self.failures
        by_reason: dict[str, list[int]] = {}
        for failure in known:
            by_reason.setdefault(failure.reason or "for an unknown reason", []).append(failure.rank)
        parts = [
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {reason}"
            for reason, ranks in by_reason.items()
        ]
        return f"{self.step} failed on {'; '.join(parts)}"


class Agreement:
    """Runs steps on all ranks of a group together."""

    def __init__(self, group: dist.ProcessGroup, folder: Path) -> None:
        """
        Args:
            folder: folder that the ranks write to; the error of a full disk reports its free space.
        """
        self.group = group
        self._folder = folder
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def step(self, name: str, part: Callable[[], _T]) -> list[_T]:
        """Run `part` on every rank and return the results of all ranks, ordered by rank.

        Args:
            name: description of the step for the error, such as "writing the tensors".
            part: called without arguments; its result must be picklable. It may use collectives of the group if it does
                so on every rank.

        Raises:
            StepFailed: on all ranks, if `part` raised on any; on this rank alone, if the others can't be reached.
        """
        value: _T | None = None
        failure: RankFailure | None = None
        try:
            value = part()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # torch's CheckpointException is no Exception
            failure = self._failure(error)
        answers: list[Any] = [(value, failure)]
        if self.size > 1:
            answers = [None] * self.size
            try:
                dist.all_gather_object(answers, (value, failure), group=self.group)
            except RuntimeError as error:
                lost = RankFailure(self.rank, f"the other ranks can't be reached ({first_line(error)})")
                raise StepFailed(name, [failure or lost]) from error
        failures = [failed for _, failed in answers if failed is not None]
        if failures:
            raise StepFailed(name, failures)
        return [answer for answer, _ in answers]

    def _failure(self, error: BaseException) -> RankFailure:
        shared = getattr(error, "failures", None)
        if isinstance(shared, dict):  # torch's CheckpointException: rank → error, the same on all ranks
            if self.rank not in shared:
                return RankFailure(self.rank, "")
            error = shared[self.rank][0]
        full = no_space(error)
        if full is not None:
            return RankFailure(self.rank, f"{first_line(full)} ({free_space(self._folder)})")
        return RankFailure(self.rank, first_line(error))


def on_first_rank(part: Callable[[], object], rank: int, gather: GatherObjects) -> None:
    """Run `part` on rank 0 while the others wait for it.

    Raises:
        ConfigError: on all ranks, with the message of the ConfigError or OSError that `part` raised on rank 0.
    """
    problem: str | None = None
    if rank == 0:
        try:
            part()
        except (ConfigError, OSError) as error:
            problem = str(error) if isinstance(error, ConfigError) else first_line(error)
    problem = gather(problem)[0]
    if problem is not None:
        raise ConfigError(problem)


def no_space(error: BaseException | None) -> OSError | None:
    """Return the error for a full disk in the chain of `error` and its causes; None: there is none.

    On a full disk, closing the file fails too, and torch's writer then raises another error.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error
        error = error.__cause__ or error.__context__
    return None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: '{error.filename}'" if error.filename else error.strerror
    text = str(error).strip()
    line = text.splitlines()[0] if text else ""
    return (
        line if isinstance(error, (OSError, RuntimeError)) and line else f"{type(error).__name__}: {line}".rstrip(": ")
    )


def free_space(path: Path) -> str:
    """Return a phrase with the free space of the file system of `path`."""
    try:
        free = shutil.disk_usage(path).free
    except OSError:
        return f"free space in '{path}' is unknown"
    return f"{free / 1e9:.1f} GB free in '{path}'" if free >= 1e9 else f"{free / 1e6:.1f} MB free in '{path}'"

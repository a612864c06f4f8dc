"""What a tracker is told of a run, and what it can do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from PIL import Image

DEFAULT_PROJECT = "mindspeed_mm"
RecordKind = Literal["step", "evaluation", "samples"]


class Picture(NamedTuple):
    """A picture, or a frame of a clip, that a model in training has made of a prompt."""

    image: Image.Image
    prompt: str


@dataclass(frozen=True)
class Kept:
    """What a run folder keeps of the run in a tracker.

    Attributes:
        run_id: by which the tracker continues it.
        place: where its figures can be seen: an address or a folder.
        step: the last step whose figures it has; 0: none.
        evaluation, samples: likewise, of evaluations and of samples that were drawn.
    """

    run_id: str
    place: str
    step: int = 0
    evaluation: int = 0
    samples: int = 0

    def reached(self, kind: RecordKind) -> int:
        """The last step whose record of a kind it has."""
        return {"step": self.step, "evaluation": self.evaluation, "samples": self.samples}[kind]

    def with_reached(self, kind: RecordKind, iteration: int) -> Kept:
        """Return what is kept once it has that of another step."""
        if kind == "step":
            return replace(self, step=iteration)
        return replace(self, evaluation=iteration) if kind == "evaluation" else replace(self, samples=iteration)

    def at_most(self, iteration: int) -> Kept:
        """Return what is kept if nothing after a step counts."""
        step, evaluation, samples = (min(n, iteration) for n in (self.step, self.evaluation, self.samples))
        return replace(self, step=step, evaluation=evaluation, samples=samples)


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers show it.

    Attributes:
        project: that holds the run; None: nothing was given.
        name: of the run; None: nothing was given.
        default_name: of a run without a name; None: the tracker makes one.
        tags: of the run.
        config: section → setting → value, of JSON's types, without secrets.
        folder: the run folder; None: there is none.
        iteration: step of the checkpoint that the run goes on from; 0: it is new.
        earlier: what an earlier start has kept of the tracker; None: there was none.
    """

    project: str | None
    name: str | None
    default_name: str | None
    tags: tuple[str, ...]
    config: Mapping[str, Any]
    folder: Path | None
    iteration: int = 0
    earlier: Kept | None = None

    @property
    def run_id(self) -> str | None:
        """By which the tracker knows the run; None: it is new there."""
        return None if self.earlier is None else self.earlier.run_id

    def project_or(self, variable: str) -> str | None:
        """The project; None where only an environment variable, which the tracker reads by itself, names one."""
        return self.project or (None if os.environ.get(variable) else DEFAULT_PROJECT)

    def name_or(self, variable: str) -> str | None:
        """The name; None where an environment variable names the run, or the tracker does."""
        return self.name or (None if os.environ.get(variable) else self.default_name)

    def keep(self, run_id: str, place: str) -> Kept:
        """Return what is kept from now on; how far the figures have come counts for the same run only."""
        if self.earlier is None or self.earlier.run_id != run_id:
            return Kept(run_id, place)
        return replace(self.earlier, place=place)


class Tracker(Protocol):
    """A run in a tracker, used by one thread. Its methods may raise anything: `TrackerSink` knows what to do."""

    @property
    def kept(self) -> Kept:
        """What it begins with: records up to these steps don't come to it again."""

    @property
    def is_durable(self) -> bool:
        """Whether what `log` has taken outlives a kill of the process; else `kept` is renewed at the end only."""

    @property
    def gather_seconds(self) -> float:
        """For how long records are gathered that come to `log` together; 0: each comes by itself, at once."""

    def log(self, records: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Take figures of steps, all of them finite; a step may come twice, with figures of other names."""

    def show(self, pictures: Mapping[str, Picture], step: int) -> None:
        """Take pictures by name, which were drawn after a step."""

    def close(self, *, failed: bool) -> None:
        """Finish; what was logged is in the tracker's files when this returns.

        Args:
            failed: whether an error ends the run.
        """


class LoggedByStep:
    """A run of a tracker that takes figures and pictures by W&B's `log`; it has them for good when it is finished."""

    is_durable = False
    gather_seconds = 0.0

    def __init__(self, run: Any, kept: Kept, image: Callable[..., Any]) -> None:
        """
        Args:
            run: what the tracker's `init` has returned.
            kept: what the run folder keeps of it.
            image: makes what the tracker logs of a picture and its `caption`.
        """
        self._run, self.kept, self._image = run, kept, image

    def log(self, records: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Log figures of their steps."""
        for step, figures in records:
            self._run.log(dict(figures), step=step)

    def show(self, pictures: Mapping[str, Picture], step: int) -> None:
        """Log pictures with their prompts."""
        made = {name: self._image(picture.image, caption=picture.prompt) for name, picture in pictures.items()}
        self._run.log(made, step=step)

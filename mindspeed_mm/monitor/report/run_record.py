"""What a run folder tells of its run, whatever of it is there."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mindspeed_mm.checkpoint.run_folder import ENDINGS, REPORT_FOLDER, RUN_FILE, read_record
from mindspeed_mm.monitor.report.lines import whole_lines
from mindspeed_mm.monitor.report.metrics_file import MetricsFile
from mindspeed_mm.monitor.report.state import State, parse_time, state_of

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class LaunchStart:
    """One start of a run, as launch.json has it; what is missing there is empty here.

    Attributes:
        started: when.
        iteration: after which step it went on; 0: a new run.
        train_iters: last step that was wanted; None: not known.
        facts: what the console has shown before the first step: name → text.
        changed: what differs from the start before.
        command: as it was given, `program` that runs in each process.
        processes: number of them.
        versions: package → version.
        commit: of the working directory; "": it is in no checkout.
    """

    started: datetime.datetime | None
    iteration: int
    train_iters: int | None
    facts: dict[str, str]
    changed: tuple[str, ...]
    command: tuple[str, ...]
    working_directory: str
    processes: int | None
    versions: dict[str, str]
    commit: str


@dataclass(frozen=True)
class RunRecord:
    """A run, as far as its folder tells.

    Attributes:
        folder: the run folder.
        name: what it is called on the page.
        state: what has become of it.
        starts: all starts, the last one last.
        settings: key of run.yaml, dotted → its value.
        description: text of run.yaml.
        metrics: figures of its steps and evaluations.
    """

    folder: Path
    name: str
    state: State
    starts: tuple[LaunchStart, ...]
    settings: dict[str, str]
    description: str
    metrics: MetricsFile

    @property
    def recorded(self) -> Path:
        """The folder of what the run has recorded for its report."""
        return self.folder / REPORT_FOLDER

    @property
    def last_step(self) -> int:
        """The last logged step; 0: there is none."""
        return 0 if self.metrics.last is None else self.metrics.last["iteration"]

    @property
    def train_iters(self) -> int | None:
        """The last step that was wanted."""
        return self.starts[-1].train_iters if self.starts else None

    @property
    def facts(self) -> dict[str, str]:
        """What the console has shown before the first step: name → text."""
        return self.starts[-1].facts if self.starts else {}


def read_run(folder: Path, metrics: MetricsFile, name: str | None = None) -> RunRecord:
    """Return what a run folder tells.

    Args:
        metrics: the folder's; what is new in the file is read.
        name: what the run is called; None: as its folder.
    """
    starts = tuple(_start(item) for item in _dicts(read_record(folder).get("starts")))
    started = starts[-1].started if starts else None
    metrics.read()
    description = _text(folder / RUN_FILE)
    return RunRecord(
        folder=folder,
        name=folder.resolve().name if name is None else name,
        state=state_of(folder, started, whole_lines(folder / ENDINGS)),
        starts=starts,
        settings=_settings(description),
        description=description,
        metrics=metrics,
    )


def _start(item: Mapping[str, Any]) -> LaunchStart:
    git = item.get("git")
    commit = ""
    if isinstance(git, dict) and git.get("commit"):
        commit = str(git["commit"]) + (", with changes that are not in it" if git.get("is_changed") else "")
    return LaunchStart(
        started=parse_time(item.get("started")),
        iteration=_whole(item.get("iteration")) or 0,
        train_iters=_whole(item.get("train_iters")),
        facts=_texts(item.get("facts")),
        changed=tuple(map(str, _list(item.get("changed")))),
        command=tuple(map(str, _list(item.get("command")))),
        working_directory=str(item.get("working_directory") or ""),
        processes=_whole(item.get("processes")),
        versions=_texts(item.get("versions")),
        commit=commit,
    )


def _settings(description: str) -> dict[str, str]:
    try:
        content = yaml.load(description, _Loader)  # a safe loader
    except yaml.YAMLError:
        return {}
    return dict(_flat(content, "")) if isinstance(content, dict) else {}


def _flat(value: object, key: str) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        return [item for name, inner in value.items() for item in _flat(inner, f"{key}.{name}" if key else str(name))]
    return [(key, "absent" if value is None else str(value))]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in _list(value) if isinstance(item, dict)]


def _texts(value: object) -> dict[str, str]:
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, dict) else {}

"""What the page says of a run before its curves, and of where it ran."""

from __future__ import annotations

import datetime
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_mm.monitor.console import words
from mindspeed_mm.monitor.report.metrics_file import TRAINING_SECONDS
from mindspeed_mm.monitor.report.run_record import LaunchStart, RunRecord

_STATES = {
    "running": "training",
    "finished": "finished",
    "stopped": "stopped",
    "crashed": "crashed",
    "ended": "ended",
}


@dataclass(frozen=True)
class Heading:
    """What is said first of a run.

    Attributes:
        name, path: of its folder.
        state, state_text: a word for the styles, and one for the reader.
        share: of the steps that are done; None: not known.
        times: when it was started, how long it has trained.
        trouble: its error, or what stopped it; "": nothing.
    """

    name: str
    path: str
    state: str
    state_text: str
    share: float | None
    times: tuple[str, ...]
    trouble_title: str
    trouble: str


@dataclass(frozen=True)
class Tile:
    """A figure in large letters."""

    name: str
    value: str
    unit: str = ""
    note: str = ""


@dataclass(frozen=True)
class ShownStart:
    """A start of the run, in words."""

    title: str
    when: str
    changed: tuple[str, ...]
    goes_on: bool


def heading_of(run: RunRecord) -> Heading:
    """Return what is said first of a run."""
    last, wanted = run.last_step, run.train_iters
    state = _STATES[run.state.name]
    if last and run.state.name in ("running", "finished") and wanted:
        state += f": step {last:,} of {wanted:,}"
    elif last:
        state += f" after step {last:,}" + (f" of {wanted:,}" if wanted else "")
    titles = {"crashed": "It ended by an error.", "stopped": "It was stopped."}
    return Heading(
        name=run.name,
        path=os.path.abspath(run.folder),
        state=run.state.name,
        state_text=state,
        share=min(1.0, last / wanted) if wanted else None,
        times=tuple(_times(run)),
        trouble_title=titles.get(run.state.name, ""),
        trouble=run.state.why if run.state.name in titles else "",
    )


def tiles_of(run: RunRecord) -> list[Tile]:
    """Return the key figures of a run."""
    return list(_tiles(run))


def starts_of(run: RunRecord) -> list[ShownStart]:
    """Return the starts of a run in words."""
    return [
        ShownStart(
            title=f"went on after step {start.iteration:,}" if start.iteration else "started",
            when=_when(start.started),
            changed=start.changed,
            goes_on=start.iteration > 0,
        )
        for start in run.starts
    ]


def environment_of(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return rows of what each run was started with: name → a text for each run."""
    columns = [dict(_environment(run.starts[-1])) if run.starts else {} for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, "") for column in columns]) for name in names]


def _times(run: RunRecord) -> Iterator[str]:
    started = run.starts[0].started if run.starts else None
    if started is not None:
        yield f"started {_when(started)}"
    if run.state.since is not None and run.state.name != "running":
        yield f"ended {_when(run.state.since)}"
    seconds = run.metrics.curves.get(TRAINING_SECONDS)
    if seconds is not None and seconds.count:
        yield f"{words.duration(seconds.high[1])} of training"
    if len(run.starts) > 1:
        yield words.counted(len(run.starts), "start")


def _tiles(run: RunRecord) -> Iterator[Tile]:
    first, last = run.metrics.first, run.metrics.last
    if first is None or last is None:
        return
    loss, begun = _figure(last, "loss"), _figure(first, "loss")
    if loss is not None:
        note = f"{words.loss(begun)} at step {first['iteration']:,}" if begun is not None and first is not last else ""
        yield Tile("Loss", words.loss(loss), note=note)
    for metric, (best, iteration) in run.metrics.best.items():
        title = "Evaluation loss" if metric == "loss" else metric.replace("_", " ").capitalize()
        text = words.loss(best) if metric == "loss" else words.figure(best)
        yield Tile(title, text, note=f"best, at step {iteration:,}")
    tokens, step = _figure(last, "tokens_per_second"), _figure(last, "step_ms")
    if tokens is not None:
        yield Tile("Tokens a second", words.amount(tokens), note=f"{words.amount(last['consumed_tokens'])} so far")
    if step:
        samples = (_figure(last, "global_batch_size") or 0.0) * 1000 / step
        value, _, unit = words.step_time(step).partition(" ")
        yield Tile("Step", value, unit, f"{words.amount(samples)} samples/s")
    mfu = _figure(last, "mfu")
    if mfu is not None:
        yield Tile("MFU", words.per_cent(mfu), note=f"{_figure(last, 'tflops_per_device') or 0:.3g} TFLOP/s a device")
    wait = _figure(last, "data_wait_fraction")
    if wait is not None:
        yield Tile("Waiting for data", words.per_cent(wait), note="of a step")
    memory = _figure(last, "memory_bytes")
    if memory is not None:
        value, _, unit = words.gibibytes(int(memory)).partition(" ")
        yield Tile("Memory", value, unit, "at most, a device")
    wanted = run.train_iters
    if run.state.name == "running" and wanted and step:
        yield Tile("To go", words.duration(step / 1000 * (wanted - last["iteration"])), note="at this speed")
    bad = {"skipped": "skipped_iterations", "NaN": "nan_iterations"}
    counts = [f"{int(number)} {name}" for name, key in bad.items() if (number := _figure(last, key))]
    if counts:
        yield Tile("Bad steps", ", ".join(counts), note="of the last start")


def _environment(start: LaunchStart) -> Iterator[tuple[str, str]]:
    if start.command:
        yield "command", shlex.join(start.command)
    if start.working_directory:
        yield "working directory", start.working_directory
    if start.processes:
        yield "processes", str(start.processes)
    if start.commit:
        yield "git commit", start.commit
    yield from start.versions.items()


def _figure(line: dict[str, Any], name: str) -> float | None:
    value = line.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _when(time: datetime.datetime | None) -> str:
    return "" if time is None else time.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")

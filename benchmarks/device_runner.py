"""Runs the parts of the benchmark on a device, each a process of its own, within a budget, and keeps one table."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NOT_RUN = "not run: "
DEVICE = "device"
"""Key of what is no row of the table, but says which device the figures are of."""
COLUMNS = ("part", "contender", "speed", "step", "MFU", "peak memory", "hidden", "device busy", "host waits", "loss")
"""Titles; what was found or why nothing was comes last."""


@dataclass(frozen=True)
class Part:
    """A process of the benchmark.

    Attributes:
        case: what is trained, or what is checked.
        contender: who trains; "" of what belongs to a case.
        needs: modules that must be installed.
        after: parts that must have succeeded before.
        seconds: after which it is ended.
        least: seconds that must be left for it to be started.
        alone: whether nothing else may run meanwhile, because it is timed.
    """

    case: str
    contender: str = ""
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    seconds: float = 90.0
    least: float = 15.0
    alone: bool = True

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return f"{self.case}: {self.contender}" if self.contender else self.case


class Table:
    """The rows found so far, written anew with each change.

    Args:
        folder: receives device.md and rows.jsonl.
        head: what the figures hold for; lines above the table.
        order: names of the parts, in the order of their rows.

    Attributes:
        device: the device, once a part has said which it is.
    """

    device = ""

    def __init__(self, folder: Path, head: str, order: Sequence[str]) -> None:
        self.folder, self.head, self.rows = folder, head, []
        self._places = {name: place for place, name in enumerate(order)}
        folder.mkdir(parents=True, exist_ok=True)

    rows: list[dict[str, Any]]

    def add(self, part: Part, cells: Mapping[str, Any]) -> None:
        """Add a row."""
        self.rows.append({"part": part.case, "contender": part.contender, **cells})
        self.rows.sort(key=lambda row: self._places[Part(row["part"], row["contender"]).name])
        self.write()

    def not_run(self, part: Part, reason: str) -> None:
        """Add the row of a part that has found nothing."""
        self.add(part, {"note": f"{NOT_RUN}{reason}"})

    def write(self) -> None:
        """Write both files; a kill at any time leaves a whole table."""
        _replace(self.folder / "rows.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows))
        _replace(self.folder / "device.md", self.markdown())

    def markdown(self) -> str:
        """The head and the table."""
        of_device = f"{self.device}; " if self.device else ""
        lines = [
            f"{of_device}{self.head}",
            "",
            f"| {' | '.join((*COLUMNS, 'found'))} |",
            "|---|---|" + "---:|" * 8 + "---|",
        ]
        return "\n".join([*lines, *map(line_of, self.rows)]) + "\n"


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".part")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def line_of(row: Mapping[str, Any]) -> str:
    """A row as a line of the table; what isn't known is a dash."""
    shown = [
        str(row["part"]),
        str(row["contender"] or "–"),
        _speed(row),
        _shown(row.get("step_ms"), "{:,.1f} ms"),
        _shown(row.get("mfu"), "{:.1%}"),
        _shown(row.get("peak_bytes"), "{:.2f} GiB", 2**30),
        _shown(row.get("hidden"), "{:.0%}"),
        _shown(row.get("busy"), "{:.0%}"),
        _shown(row.get("waits"), "{}"),
        _shown(row.get("loss"), "{:.4f}"),
        ": ".join(str(row[key]) for key in ("what", "note") if row.get(key)),
    ]
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in shown)} |"


def _speed(row: Mapping[str, Any]) -> str:
    if "tokens_per_s" in row:
        return f"{row['tokens_per_s']:,.0f} tokens/s"
    return _shown(row.get("samples_per_s"), "{:.3f} samples/s")


def _shown(value: Any, form: str, unit: float = 1) -> str:
    return "–" if value is None else form.format(value / unit if unit != 1 else value)


@dataclass
class Worker:
    """The process of a part; it has imported what it needs when it is told to go on.

    Attributes:
        read: rows of its file that are in the table.
        deadline: when it is ended.
    """

    part: Part
    process: subprocess.Popen[str]
    results: Path
    errors: Path
    read: int = 0
    deadline: float = float("inf")
    goes: bool = False

    def go(self, deadline: float) -> None:
        """Let it begin."""
        assert self.process.stdin is not None
        self.goes, self.deadline = True, deadline
        with suppress(OSError):  # it has ended already, which is seen later
            self.process.stdin.write("go\n")
            self.process.stdin.close()

    def kill(self) -> None:
        """End it and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def new_rows(self) -> list[dict[str, Any]]:
        """Rows that it has written since the last call; a line that isn't whole yet comes later."""
        whole = self.results.read_text(encoding="utf-8").rpartition("\n")[0] if self.results.exists() else ""
        lines = [line for line in whole.split("\n") if line][self.read :]
        self.read += len(lines)
        return [json.loads(line) for line in lines]

    def last_words(self) -> str:
        """The last line that it wrote to its standard error."""
        lines = [line for line in self.errors.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else "no message"


@dataclass
class Runner:
    """Runs parts in their order.

    Attributes:
        command: of a worker, for a part's name and its file of rows.
        deadline: of all, by `clock`.
        together: parts that run at once, where they need not be alone.
        installed: whether a module is there.
        say: receives a line about each part.
    """

    table: Table
    command: Callable[[Part, Path], Sequence[str]]
    deadline: float
    together: int
    folder: Path
    installed: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None
    clock: Callable[[], float] = time.monotonic
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    failed: dict[str, str] = field(default_factory=dict)
    _running: list[Worker] = field(default_factory=list)

    def run(self, parts: Iterable[Part]) -> None:
        """Run all parts; whatever happens in one, the others follow."""
        waiting = list(parts)
        try:
            while waiting or self._running:
                self._start(waiting)
                time.sleep(0.05)
                for worker in [worker for worker in self._running if worker.goes]:
                    self._look(worker)
        finally:
            for worker in self._running:
                worker.kill()
            self.table.write()

    def _start(self, waiting: list[Part]) -> None:
        """Start what may run now, and the process of the next part, which then waits for its turn."""
        for worker in [worker for worker in self._running if not worker.goes]:
            self._admit(worker)
        while waiting and len(self._running) < self.together + 1 and all(worker.goes for worker in self._running):
            part = waiting.pop(0)
            if (reason := self._why_not(part)) is not None:
                self._skip(part, reason)
                continue
            worker = self._open(part)
            self._running.append(worker)
            self._admit(worker)

    def _admit(self, worker: Worker) -> None:
        """Let a worker go on if its turn has come."""
        others, part = [other for other in self._running if other.goes], worker.part
        is_blocked = others and (part.alone or any(other.part.alone for other in others))
        if is_blocked or len(others) >= self.together or any(other.part.name in part.after for other in others):
            return
        if (reason := self._why_not(part)) is not None:
            worker.kill()
            self._running.remove(worker)
            self._skip(part, reason)
            return
        left = self.deadline - self.clock()
        self.say(f"[{left:4.0f} s left] {part.name}")
        worker.go(self.clock() + min(part.seconds, left))

    def _why_not(self, part: Part) -> str | None:
        if missing := [module for module in part.needs if not self.installed(module)]:
            return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        for name in part.after:
            if name in self.failed:
                return f"“{name}” was not: {self.failed[name]}"
        left = self.deadline - self.clock()
        if left >= part.least:
            return None
        return f"{max(left, 0):.0f} s are left, and it takes at least {part.least:.0f} s"

    def _skip(self, part: Part, reason: str) -> None:
        self.failed[part.name] = reason
        self.say(f"not run: {part.name}: {reason}")
        self.table.not_run(part, reason)

    def _open(self, part: Part) -> Worker:
        stem = part.name.replace(":", "").replace(" ", "_")
        results, errors = self.folder / f"{stem}.jsonl", self.folder / f"{stem}.txt"
        results.unlink(missing_ok=True)
        with open(errors, "w") as file:
            process = subprocess.Popen(
                self.command(part, results),
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        return Worker(part, process, results, errors)

    def _look(self, worker: Worker) -> None:
        """Take a worker's new rows; end it if its time is over, and say why if it failed."""
        status = worker.process.poll()
        rows = worker.new_rows()
        for row in rows:
            if DEVICE in row:
                self.table.device = row[DEVICE]
            else:
                self.table.add(worker.part, row)
        reason = None
        if status is None:
            if self.clock() < worker.deadline:
                return
            reason = "ended, its time was over"
        elif status:
            reason = f"ended with status {status}: {worker.last_words()}"
        worker.kill()  # what it has started, too: processes that compile outlive it
        self._running.remove(worker)
        told = [
            row
            for row in self.table.rows
            if (row["part"], row["contender"]) == (worker.part.case, worker.part.contender)
        ]
        if (
            refused := next((row["note"] for row in told if str(row.get("note")).startswith("not run: ")), None)
        ) and len(told) == 1:
            self.failed[worker.part.name] = refused.removeprefix("not run: ")
        if reason is not None:
            self._skip(worker.part, reason)

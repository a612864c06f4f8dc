"""The processes of a run on this machine: torch's elastic launcher, with the signals that it doesn't forward.

`torchrun` ends with a traceback and status 1 after any signal, and at once on SIGUSR1. Here its agent runs in a thread,
and the main thread passes signals on: the ranks save and end with status 0, and so does the launch.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from mindspeed_mm.monitor.signals import name_of
from mindspeed_mm.utils.errors import ConfigError

#: what ends a run, or asks it to save and end: docs/checkpoints.md
FORWARDED = tuple(getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, n))
_LOOK_SECONDS = 0.1
#: signals of one request, as the ranks count them
_SAME_SECONDS = 2.0
#: the request at which processes that still run are killed
_KILLING = 4


class LaunchedRanks:
    """The ranks of a launch on this machine, from start to end."""

    def __init__(self, options: argparse.Namespace) -> None:
        """
        Args:
            options: those of `parse_options`, with the program of the ranks.
        """
        self._options = options
        self._received: list[int] = []
        self._requested: int | None = None
        self._requests, self._last_request = 0, -_SAME_SECONDS
        self._failure: BaseException | None = None
        self._known: set[int] = set()
        self._starts = 0

    def run(self) -> int:
        """Start the ranks, wait for them, and return the status of the launch.

        0: all ranks ended with 0; 128 + a signal's number if a signal ended the run before its first step; else 1.
        """
        previous = {number: signal.signal(number, self._receive) for number in FORWARDED if is_handled(number)}
        agent = threading.Thread(target=self._run_agent, name="torch elastic", daemon=True)
        agent.start()
        try:
            while agent.is_alive():
                agent.join(_LOOK_SECONDS)
                self._look()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self._failure is None:
            return 0
        return 128 + self._requested if self._requested is not None else _report(self._failure)

    def _run_agent(self) -> None:
        from torch.distributed import run

        try:
            run.run(self._options)
        except BaseException as error:  # the main thread reports it
            self._failure = error

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)

    def _look(self) -> None:
        """Pass on the signals that have come, and look at which processes have started."""
        running = _ranks()
        new = [pid for pid in running if pid not in self._known]
        if new and self._known.isdisjoint(running):
            self._starts += 1
            if self._starts > 1 and self._requested is None:
                _say(f"a rank has failed; all start again, from the last checkpoint ({self._restart()})")
        self._known.update(new)
        if self._requested is not None:
            for pid in new:  # after a request, what a failure has started again is not wanted
                _send(pid, self._requested)
        while self._received:
            self._pass_on(self._received.pop(0), running)

    def _restart(self) -> str:
        return f"restart {self._starts - 1} of at most {self._options.max_restarts}"

    def _pass_on(self, number: int, running: Sequence[int]) -> None:
        now = time.monotonic()
        if now - self._last_request >= _SAME_SECONDS:
            self._requests, self._last_request = self._requests + 1, now
        self._requested = number
        if not running and not self._known:
            _say(f"{name_of(number)}: ended before any process had started")
            os._exit(128 + number)
        for pid in running:
            _send(pid, signal.SIGKILL if self._requests >= _KILLING else number)


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """Parse torchrun's options, and after them a program with its words.

    Without --nproc-per-node there is a process a device, and one where there is no device. Several nodes meet at
    --rdzv-endpoint (c10d), or by --master-addr and --node-rank.

    Raises:
        ConfigError: an option is unknown, or hasn't the value that torchrun expects.
    """
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    parser.allow_abbrev = False
    parser.add_argument("--traceback", action="store_true")
    if "PET_NPROC_PER_NODE" not in os.environ:
        parser.set_defaults(nproc_per_node=str(_number_of_devices()))
    options = parser.parse_args(list(words))
    if options.rdzv_endpoint and options.rdzv_backend == "static" and "PET_RDZV_BACKEND" not in os.environ:
        options.rdzv_backend = "c10d"
    if options.rdzv_id == "none" and options.nnodes in ("1", "1:1"):
        options.rdzv_id = uuid.uuid4().hex
    options.signals_to_handle = "SIGQUIT"  # the others are handled here
    return options


def quieten() -> None:
    """Leave what torch's launcher logs to the messages of the ranks and of this command."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)


def share_cores(processes: str) -> None:
    """Set the threads of each process, unless OMP_NUM_THREADS does: one beside a device, else a share of the cores.

    Args:
        processes: of this machine, as --nproc-per-node has them.
    """
    import torch

    from mindspeed_mm.accelerator.environment import usable_cores

    on_host = processes.isdecimal() and not torch.accelerator.is_available()
    threads = usable_cores() // max(1, int(processes)) if on_host else 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))


def is_handled(number: int) -> bool:
    """Whether a signal isn't ignored from the start, as nohup ignores SIGHUP."""
    return signal.getsignal(number) is not signal.SIG_IGN


def _refuse(message: str) -> NoReturn:
    raise ConfigError(
        f"mindspeed-mm train: {message}; options of torchrun stand before what is started, those of the run after it"
    )


def _number_of_devices() -> int:
    import torch

    return max(1, torch.accelerator.device_count() if torch.accelerator.is_available() else 0)


def _ranks() -> list[int]:
    """Return the ids of the processes that this one has started and that still run."""
    import psutil

    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _report(failure: BaseException) -> int:
    """Print what the ranks haven't said themselves; returns the status."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if not isinstance(failure, ChildFailedError):
        _say(f"the processes could not be started: {type(failure).__name__}: {failure}")
        return 1
    rank, first = failure.get_first_failure()
    if first.exitcode < 0:
        _say(f"rank {rank} (process {first.pid}) was ended by {name_of(-first.exitcode)}, and with it the run")
    elif not os.path.exists(first.error_file):
        _say(f"rank {rank} (process {first.pid}) ended with status {first.exitcode}, and with it the run")
    return 1

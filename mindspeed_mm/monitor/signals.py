"""End a run from outside: signals that request a checkpoint and a clean exit, and the end of its launcher."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from mindspeed_mm.utils.first_failure import claim, first_report
from mindspeed_mm.utils.launch import is_first_local_rank

#: the process that started this one, as of the first import
_PARENT = os.getppid()

#: no signal has this number
_END = b"\0"

_active: StopSignal | None = None


class Interrupted(KeyboardInterrupt):
    """A signal ended the run before its first step.

    Attributes:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"{name_of(number)}: ended before the first step; there is nothing to save")
        self.number = number


class StopSignal:
    """Records that a stop was requested; the training loop checks it once a step.

    Before `begin` a signal ends the run by raising `Interrupted`. After it the first SIGINT, SIGTERM or SIGHUP, and
    any SIGUSR1, requests a checkpoint and the end; one of the first three that comes later ends the process at once.
    Signals within `same_seconds` are one request: a scheduler signals every process of a job, and torchrun forwards its
    own signals to the ranks.

    A thread counts signals and ends the process, as the main thread may be waiting for other ranks, where Python runs
    no handlers. It also checks that torchrun still runs: ranks whose launcher was killed would train on uncontrolled.
    They end at once, except for ranks that are about to save on request: these have `orphan_seconds` for it.
    """

    SIGNALS = tuple(
        getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
    )

    def __init__(
        self,
        *,
        same_seconds: float = 2.0,
        patience_seconds: float = 5.0,
        look_seconds: float = 1.0,
        orphan_seconds: float = 30.0,
    ) -> None:
        """
        Args:
            same_seconds: signals within this time of the first one are one request.
            patience_seconds: a process that waits for other ranks is ended this long after a signal before `begin`.
            look_seconds: interval between two checks of the launcher.
            orphan_seconds: time for a checkpoint that was requested before the launcher was gone.
        """
        self.received: int | None = None
        self._same, self._patience, self._look = same_seconds, patience_seconds, look_seconds
        self._orphan, self._alone_since = orphan_seconds, 0.0
        self._saves, self._advice = False, ""
        self._first: tuple[int, float] | None = None
        self._is_announced = False
        self._previous: dict[int, Any] = {}
        self._parent = _PARENT if "TORCHELASTIC_RUN_ID" in os.environ else None

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self.received is not None

    def begin(self, save: str | None) -> None:
        """Let signals request a checkpoint from now on.

        Args:
            save: the run folder, for the advice how to continue; None: nothing is saved.
        """
        self._advice = f"; the last checkpoint in '{save}' is whole, --load '{save}' goes on from it" if save else ""
        self._saves = True

    def __enter__(self) -> StopSignal:
        global _active
        self._reading_end, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        for number in self.SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a shell's background job
                self._previous[number] = signal.signal(number, self._receive)
        _active = self
        self._thread = threading.Thread(target=self._watch, name="stop-signal", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        global _active
        _active = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.write(self._wakeup, _END)  # forked children may have the pipe open, so that closing it has no effect
        self._thread.join()
        os.close(self._wakeup)
        os.close(self._reading_end)

    def leave_a_child(self) -> None:
        """Restore the previous handlers in a child that was forked before `begin`; later children ignore signals."""
        if not self._saves:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        if not self._saves:
            raise Interrupted(number)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._reading_end, selectors.EVENT_READ)
            while True:
                if selector.select(self._look):
                    numbers = os.read(self._reading_end, 64)
                    if _END in numbers:
                        return
                    for number in numbers:
                        if number in self._previous:
                            self._count(number)
                if self._first is not None and not self._saves and time.monotonic() > self._first[1] + self._patience:
                    number = self._first[0]
                    _end(128 + number, str(Interrupted(number)))
                if self._parent is not None and os.getppid() != self._parent:
                    self._end_alone()

    def _end_alone(self) -> None:
        """End the process, as the launcher is gone, unless a checkpoint is about to be saved."""
        self._alone_since = self._alone_since or time.monotonic()
        if not self._is_announced or time.monotonic() > self._alone_since + self._orphan:
            _end(
                1,
                f"torchrun (process {self._parent}), which started this process, has ended without ending it; ending "
                f"at once{self._advice}",
            )

    def _count(self, number: int) -> None:
        """Count a signal; announce the checkpoint at the first one, and end the process at a further one."""
        name = name_of(number)
        if self._saves and first_report() is not None:  # torchrun ends the peers of a failed rank: no step ends
            os._exit(128 + number)
        if self._saves and not self._is_announced:
            self._is_announced = True
            if is_first_local_rank():
                _print(
                    f"{name}: a checkpoint is saved after the running step, then the run ends; another SIGINT or "
                    f"SIGTERM (after {self._same:g} s) ends it at once"
                    if self._advice
                    else f"{name}: the run ends after the running step; another SIGINT or SIGTERM (after "
                    f"{self._same:g} s) ends it at once"
                )
        if self._saves and number == getattr(signal, "SIGUSR1", None):  # schedulers warn with it, maybe repeatedly
            return
        now = time.monotonic()
        if self._first is None:
            self._first = (number, now)
        elif now > self._first[1] + self._same:
            _end(128 + number, f"{name} once more: ended at once, without a further checkpoint{self._advice}")


def name_of(number: int) -> str:
    """Return the name of a signal for messages."""
    name = signal.Signals(number).name
    return "SIGINT (Ctrl-C)" if name == "SIGINT" else name


def _end(status: int, text: str) -> None:
    """End the process at once, from any thread; one rank per machine prints the reason."""
    if claim(text) is None:
        _print(text)
    os._exit(status)


def _print(text: str) -> None:
    """Print on stderr without locks that the main thread may have."""
    with contextlib.suppress(OSError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, f"\n{text}\n".encode())


def _in_a_child() -> None:
    """Adapt a forked child: it has another parent, and before training the previous signal handlers."""
    global _PARENT
    _PARENT = os.getppid()
    if _active is not None:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            _active.leave_a_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_child)

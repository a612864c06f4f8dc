"""What ends a run from outside: signals that ask for a checkpoint and a clean exit, and the end of its launcher."""

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

from mindspeed_mm.utils.first_failure import claim, said
from mindspeed_mm.utils.launch import is_first_local_rank

#: the process that started this one, as of the first import
_PARENT = os.getppid()

#: no signal has this number
_END = b"\0"

_active: StopSignal | None = None


class Interrupted(KeyboardInterrupt):
    """A signal ended the run before its first step.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"{name_of(number)}: ended before the first step; there is nothing to save")
        self.number = number


class StopSignal:
    """Remembers that a stop was asked for; the loop looks at it once a step.

    Before `begin` a signal ends the run by raising `Interrupted`. After it the first SIGINT, SIGTERM or SIGHUP, and
    any SIGUSR1, asks for a checkpoint and the end; one of the first three that comes later ends the process at once.
    What comes within `same_seconds` is the same request: a scheduler signals every process of a job, and torchrun
    sends its own on to the ranks once more.

    A thread counts and ends, as the main thread may be waiting for other ranks, where Python runs no handlers. It also
    looks whether torchrun still runs: ranks whose launcher was killed would train on, out of anybody's reach. They end
    at once, but for ranks that are about to save as they were asked to: these have `orphan_seconds` for it.
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
            same_seconds: signals that come within so long of the first one are one request.
            patience_seconds: what a signal before `begin` has not ended after so long, as it waits for other ranks,
                is ended.
            look_seconds: between two looks at the launcher.
            orphan_seconds: how long a checkpoint may take that was asked for before the launcher was gone.
        """
        self.received: int | None = None
        self._same, self._patience, self._look = same_seconds, patience_seconds, look_seconds
        self._orphan, self._alone_since = orphan_seconds, 0.0
        self._saves, self._advice = False, ""
        self._first: tuple[int, float] | None = None
        self._is_told = False
        self._previous: dict[int, Any] = {}
        self._parent = _PARENT if "TORCHELASTIC_RUN_ID" in os.environ else None

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self.received is not None

    def begin(self, save: str | None) -> None:
        """From now on a signal asks for a checkpoint.

        Args:
            save: the run folder, for the advice how to go on; None: there is nowhere to save.
        """
        self._advice = f"; the last checkpoint in '{save}' is whole, --load '{save}' goes on from it" if save else ""
        self._saves = True

    def __enter__(self) -> StopSignal:
        global _active
        self._ear, self._wakeup = os.pipe()
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
        os.write(self._wakeup, _END)  # forked children may hold the pipe open: closing it tells nothing
        self._thread.join()
        os.close(self._wakeup)
        os.close(self._ear)

    def leave_a_child(self) -> None:
        """Give a child that was forked before `begin` the handlers that were there; later ones stay deaf."""
        if not self._saves:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        if not self._saves:
            raise Interrupted(number)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._ear, selectors.EVENT_READ)
            while True:
                if selector.select(self._look):
                    numbers = os.read(self._ear, 64)
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
        """End, as the launcher is gone, unless a checkpoint is about to be saved."""
        self._alone_since = self._alone_since or time.monotonic()
        if not self._is_told or time.monotonic() > self._alone_since + self._orphan:
            _end(
                1,
                f"torchrun (process {self._parent}), which started this process, has ended without ending it; ending "
                f"at once{self._advice}",
            )

    def _count(self, number: int) -> None:
        """One more signal has arrived."""
        name = name_of(number)
        if self._saves and said() is not None:  # torchrun ends the peers of a rank that failed: no step will end
            os._exit(128 + number)
        if self._saves and not self._is_told:
            self._is_told = True
            if is_first_local_rank():
                _say(
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
    """What a person calls a signal."""
    name = signal.Signals(number).name
    return "SIGINT (Ctrl-C)" if name == "SIGINT" else name


def _end(status: int, text: str) -> None:
    """End the process at once, from any thread; one rank of a machine says why."""
    if claim(text) is None:
        _say(text)
    os._exit(status)


def _say(text: str) -> None:
    """Print beside whatever the main thread is printing."""
    with contextlib.suppress(OSError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, f"\n{text}\n".encode())


def _in_a_child() -> None:
    """A forked child's signals and its parent are its own; before training they do there what they did."""
    global _PARENT
    _PARENT = os.getppid()
    if _active is not None:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            _active.leave_a_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_child)

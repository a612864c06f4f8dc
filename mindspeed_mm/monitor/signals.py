"""SIGTERM and SIGUSR1 ask for a checkpoint and a clean exit."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class StopSignal:
    """Remembers that a stop was asked for; the loop looks at it once a step."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self.received is not None

    def __enter__(self) -> StopSignal:
        for number in self.SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number

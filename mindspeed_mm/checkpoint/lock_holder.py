"""The process that the lock of a run folder names; nothing here imports torch."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

LOCK = "run.lock"


@dataclass(frozen=True)
class Holder:
    """The process that holds the lock of a run folder.

    Attributes:
        host: name of the machine, for messages.
        machine: identifies the machine, its boot and its container; process ids are comparable within one only.
        pid, started: process id and start time; the latter distinguishes processes with the same id ("": unknown).
        launcher: the process that started it; the same for processes that torchrun restarts.
        since: when it acquired the lock.
        token: unique identifier of the run.
    """

    host: str
    machine: str
    pid: int
    started: str
    launcher: str
    since: str
    token: str

    @classmethod
    def this_process(cls) -> Holder:
        """Return this process as holder, from now on."""
        parent = os.getppid()
        now = datetime.datetime.now(datetime.UTC)
        return cls(
            host=socket.gethostname(),
            machine=machine_identity(),
            pid=os.getpid(),
            started=process_start(os.getpid()) or "",
            launcher=f"{parent} {process_start(parent) or ''}" if "TORCHELASTIC_RUN_ID" in os.environ else "",
            since=now.strftime("%Y-%m-%d %H:%M:%S UTC"),
            token=uuid.uuid4().hex,
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, which took it at {self.since}"

    def is_alive(self) -> bool:
        """Whether its process is running; valid on the same machine only."""
        started = process_start(self.pid)
        return started is not None and (started == self.started or not self.started)


def process_start(pid: int) -> str | None:
    """Return the start time of a process of this machine; "": unknown; None: there is no such process."""
    try:
        # the program name, in brackets, may contain any character; zombies have ended already
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *fields = text.rpartition(")")[2].split()
        return None if state in "ZX" else fields[18]
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass  # somebody else's
    return ""


def machine_identity() -> str:
    """Return what identifies this machine, its boot and its container: processes are told apart by their ids there."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)

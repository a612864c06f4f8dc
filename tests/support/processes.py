"""Processes of this machine, found in /proc, and free ports."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path


def processes_below(pid: int) -> dict[int, list[int]]:
    """Process id → ids of its children, for `pid` and all below it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found: dict[int, list[int]] = {}
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        found[one] = children.get(one, [])
        waiting += found[one]
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def environment_of(pid: int) -> bytes:
    """Return the variables of a process, each between zeros; nothing of one that has ended."""
    try:
        return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])

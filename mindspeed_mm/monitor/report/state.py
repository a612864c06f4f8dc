"""What has become of a run: it trains, has ended, or was ended."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mindspeed_mm.checkpoint.lock_holder import LOCK, Holder, machine_identity

StateName = Literal["running", "finished", "stopped", "crashed", "ended"]
#: without a heartbeat for so long, a process on another machine is taken for dead; beats come each 10 s
_SILENT_SECONDS = 90.0


@dataclass(frozen=True)
class State:
    """State of a run.

    Attributes:
        name: stopped: on request, before its last step; ended: nothing tells how.
        why: what stopped it, or its error; "": nothing is known.
        since: when it ended; None: it trains, or nothing tells it.
    """

    name: StateName
    why: str = ""
    since: datetime.datetime | None = None


def state_of(folder: Path, started: datetime.datetime | None, endings: Sequence[Mapping[str, Any]]) -> State:
    """Return the state of the run in a folder.

    Args:
        started: when it was started the last time; None: nothing tells it.
        endings: lines of `report/endings.jsonl`.
    """
    ended = [line for line in endings if _is_after(line, started)]
    failed = next((line for line in ended if line.get("state") == "failed"), None)
    for line in (failed, *reversed(ended)):
        if line is not None and line.get("state") in ("failed", "stopped", "finished"):
            name: StateName = "crashed" if line["state"] == "failed" else line["state"]
            return State(name, _why(line), parse_time(line.get("time")))
    return _state_by_lock(folder / LOCK)


def parse_time(text: object) -> datetime.datetime | None:
    """Return the time of an ISO text with its zone; None: it is none."""
    try:
        found = datetime.datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return None if found is None or found.tzinfo is None else found


def _is_after(line: Mapping[str, Any], started: datetime.datetime | None) -> bool:
    when = parse_time(line.get("time"))
    return when is not None and (started is None or when >= started)


def _why(line: Mapping[str, Any]) -> str:
    why, rank = line.get("why") or "", line.get("rank")
    return f"rank {rank}: {why}" if line.get("state") == "failed" and rank is not None else str(why)


def _state_by_lock(path: Path) -> State:
    try:
        text, beat = path.read_text(encoding="utf-8", errors="replace"), path.stat().st_mtime
    except OSError:
        return State("ended")
    try:
        holder = Holder(**json.loads(text))
    except (ValueError, TypeError):
        return State("ended")
    if holder.machine == machine_identity():
        is_alive = holder.is_alive()
    else:
        is_alive = time.time() - beat < _SILENT_SECONDS
    if is_alive:
        return State("running")
    why = f"{holder.host}: the process of rank 0 ended without a word: it was killed, or its machine went down"
    return State("crashed", why, datetime.datetime.fromtimestamp(beat, datetime.UTC))

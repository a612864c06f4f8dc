"""Let the first failing process of a launch on a machine report its error in full, and the others in one line."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from mindspeed_mm.utils.launch import rank_word
from mindspeed_mm.utils.text import printable

_LONGEST = 300


def claim(text: str) -> str | None:
    """Claim to be the process that reports why this launch ends.

    torchrun gives the ranks of one machine (and of one attempt) a common folder; the first process that creates a
    complete file there reports. No process waits for another. Without torchrun every process reports.

    Args:
        text: the error of this process.

    Returns:
        None: this process reports. Else the report of the first one, after "rank N: ".
    """
    first = _place()
    if first is None:
        return None
    mine = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name(first.name)
    try:
        mine.write_text(f"rank {rank_word()}: {printable(text)}", encoding="utf-8")
        os.link(mine, first)
    except OSError:  # it exists; or the folder is gone, or the disk full: rather two reports than none
        return first_report()
    return None


def first_report() -> str | None:
    """Return the report of the first process; None: no process of this machine has claimed."""
    first = _place()
    if first is None:
        return None
    try:
        return first.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def report_failure(text: str) -> bool:
    """Print on stderr why this process ends, unless another rank has reported the same; in one line, if it differs.

    Returns:
        whether this process was the first to report; torchrun's summary then names it as the root cause.
    """
    sys.stdout.flush()
    text = printable(text)
    first = claim(text)
    if first is None:
        print(f"\n{text}", file=sys.stderr, flush=True)
        write_torchrun_error(text)
        return True
    report_after(first, text)
    return False


def report_after(first: str, text: str, short: str | None = None) -> None:
    """Print on stderr, in one line, why this process ends after another one, whose report is passed to torchrun.

    Only one process of a machine does: what the others find follows from the first failure, too.

    Args:
        first: the report of the other process, as `claim` returned it.
        text: the error of this process, as it would claim.
        short: what is printed of it; None: all.
    """
    write_torchrun_error(first)  # its summary shows any of the ranks that failed within a second
    before, _, its_text = first.partition(": ")
    if its_text != printable(text) and _is_second():
        line = printable(" ".join((short or text).split()))
        line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"
        print(f"rank {rank_word()} ended after {before} had: {line}", file=sys.stderr, flush=True)


def write_torchrun_error(message: str) -> None:
    """Write the error file that torchrun prints as the root cause."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    content = {
        "message": {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
    }
    try:
        with open(path, "w", encoding="utf-8") as f:
            json.dump(content, f)
    except OSError:
        pass


def _is_second() -> bool:
    """Whether no other process of this machine has failed after the first one."""
    first = _place()
    if first is None:
        return True
    try:
        os.close(os.open(first.with_name("second_failure"), os.O_CREAT | os.O_EXCL))
    except OSError:
        return False
    return True


def _place() -> Path | None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path).parent.parent / "first_failure" if path else None

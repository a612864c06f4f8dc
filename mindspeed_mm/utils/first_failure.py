"""Which of a launch's processes on a machine says in full why it ends: the first that claims to."""

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
    """Claim to be the process that tells people why this launch ends.

    torchrun gives the ranks of one machine (and of one attempt) a common folder; whoever makes a file there first,
    complete at once, is the one. Nobody waits for another rank. Without torchrun every process tells for itself.

    Args:
        text: what this process has to say.

    Returns:
        None: this process tells it. Else what the first one had to say instead, after "rank N: ".
    """
    first = _place()
    if first is None:
        return None
    mine = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name(first.name)
    try:
        mine.write_text(f"rank {rank_word()}: {printable(text)}", encoding="utf-8")
        os.link(mine, first)
    except OSError:  # there is one; or no such folder any more, a full disk: rather told twice than not at all
        return said()
    return None


def said() -> str | None:
    """What the first process had to say; None: no process of this machine has claimed."""
    first = _place()
    if first is None:
        return None
    try:
        return first.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def tell(text: str) -> bool:
    """Print on stderr why this process ends, unless another rank has said the same; in short, if it said another thing.

    Returns:
        whether this process was the first to tell; torchrun's summary then names it as the root cause.
    """
    sys.stdout.flush()
    text = printable(text)
    first = claim(text)
    if first is None:
        print(f"\n{text}", file=sys.stderr, flush=True)
        tell_torchrun(text)
        return True
    tell_after(first, text)
    return False


def tell_after(first: str, text: str) -> None:
    """Print on stderr, in one line, why this process ends after another one did; torchrun is told what that one said.

    Args:
        first: what the other one had to say, as `claim` returned it.
    """
    tell_torchrun(first)  # its summary shows any of the ranks that failed within a second
    before, _, its_text = first.partition(": ")
    if its_text != printable(text):
        line = printable(" ".join(text.split()))
        line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"
        print(f"rank {rank_word()} ended after {before} had: {line}", file=sys.stderr, flush=True)


def tell_torchrun(message: str) -> None:
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


def _place() -> Path | None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path).parent.parent / "first_failure" if path else None

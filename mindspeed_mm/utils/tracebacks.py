"""An exception of somebody's code as one sentence, with its traceback in a file that the sentence names."""

from __future__ import annotations

import datetime
import os
import re
import sysconfig
import tempfile
import traceback
from pathlib import Path

from mindspeed_mm.utils.launch import rank_word
from mindspeed_mm.utils.text import printable, shorten

_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)
_WITHIN = "Traceback (most recent call last)"
_OURS = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_LONGEST = 400


def sentence_with_file(error: Exception, folder: str | None) -> str:
    """Write an exception's traceback into a file, and return two lines: what happened where, and the file.

    Args:
        error: the exception; one of a loader's worker has the worker's traceback in its text.
        folder: the run folder; None, or one that can't be written: the folder for temporary files.
    """
    text = printable("".join(traceback.format_exception(error)))
    return f"{sentence_of(error, text)}\n{_kept(text, folder)}"


def sentence_of(error: Exception, text: str) -> str:
    """Return the exception in one line, with the place in the code that isn't a library's.

    Args:
        error: the exception.
        text: its traceback.
    """
    place = "" if isinstance(error, SyntaxError) else _place(text)  # whose message names it
    return what_happened(error) + (f" ({printable(place)})" if place else "")


def what_happened(error: Exception) -> str:
    """Return the class of an exception and the first line of its message; of a loader's worker, the worker's own."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if _WITHIN in str(error):  # torch raises a worker's exception with the worker's traceback as its message
        what = lines[-1].strip()
    else:
        what = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    return printable(shorten(what, _LONGEST))


def _place(text: str) -> str:
    """The innermost frame of somebody's own code; else of this package's; else the innermost one."""
    frames = [found.groupdict() for found in _FRAME.finditer(text)]
    ours = [frame for frame in frames if Path(frame["file"]).is_relative_to(_OURS)]
    own = [frame for frame in frames if frame not in ours and not frame["file"].startswith((*_LIBRARIES, "<"))]
    for chosen in (own, ours, frames):
        if chosen:
            frame = chosen[-1]
            file = os.path.relpath(frame["file"])
            file = frame["file"] if file.startswith(os.pardir) else file
            return f"{file}, line {frame['line']}, in {frame['function']}"
    return ""


def _kept(text: str, folder: str | None) -> str:
    name = f"traceback-rank{rank_word()}.txt"
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    places = [*([Path(folder) / name] if folder else []), Path(tempfile.gettempdir()) / f"{os.getpid()}-{name}"]
    for path in places:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{now}\n{text}", encoding="utf-8")
        except OSError:
            continue
        return f"its traceback is in '{path}'; mindspeed-mm train --traceback … shows it here"
    return text

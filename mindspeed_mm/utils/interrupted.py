"""Imported first by what is started from a command line: Ctrl-C then ends it with one line instead of a traceback.

Python ends the process as one that SIGINT ended: a shell reports status 130.
"""

from __future__ import annotations

import sys
from types import TracebackType

from mindspeed_mm.utils.first_failure import claim

SENTENCE = "interrupted by SIGINT (Ctrl-C)"

_usual = sys.excepthook


def _in_one_line(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        _usual(kind, error, traceback)
    elif claim(SENTENCE) is None:
        print(f"\n{SENTENCE}", file=sys.stderr, flush=True)


sys.excepthook = _in_one_line

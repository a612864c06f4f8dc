"""A pseudo-terminal for a function of ours, and what a terminal shows of what it has written."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable

_SEQUENCE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")


def on_a_terminal(function: Callable[[Callable[[int], None]], None], columns: int = 100) -> str:
    """Return all that a function writes in a child process whose standard streams are a pseudo-terminal.

    Args:
        function: gets a function that gives the terminal another number of columns.
        columns: of the terminal, which has 24 rows.
    """
    pid, master = pty.fork()
    if pid == 0:
        status = 1
        try:
            sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w", encoding="utf-8")
            sys.stderr = os.fdopen(2, "w", encoding="utf-8")
            _resize(columns)
            function(_resize)
            sys.stdout.flush()
            status = 0
        except BaseException as error:
            os.write(1, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(status)
    written = b""
    with contextlib.suppress(OSError):  # the last process on it is gone
        while part := os.read(master, 65536):
            written += part
    os.close(master)
    _, status = os.waitpid(pid, 0)
    text = written.decode()
    assert os.waitstatus_to_exitcode(status) == 0, text
    return text


def _resize(columns: int) -> None:
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


class Screen:
    """What a terminal shows: its lines, whether the cursor is seen, and where it is."""

    def __init__(self, written: str) -> None:
        """
        Raises:
            AssertionError: a control sequence is unknown here.
        """
        self.lines, self.row, self.column, self.shows_cursor = [""], 0, 0, True
        while written:
            sequence = _SEQUENCE.match(written)
            if sequence is not None:
                self._control(sequence[1], sequence[2])
                written = written[sequence.end() :]
            else:
                self._write(written[0])
                written = written[1:]

    def _write(self, character: str) -> None:
        assert character != "\x1b", "an escape sequence that is unknown here"
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.row += 1
            if self.row == len(self.lines):
                self.lines.append("")
        else:
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1

    def _control(self, parameter: str, letter: str) -> None:
        if letter == "m":
            return
        if letter == "K" and parameter == "2":
            self.lines[self.row] = ""
        elif letter == "A":
            self.row = max(0, self.row - int(parameter or 1))
        elif letter in "hl" and parameter == "?25":
            self.shows_cursor = letter == "h"
        else:
            raise AssertionError(f"the sequence {parameter}{letter} is unknown here")

"""The logger of the package: rank 0 logs, and notices are logged once."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from mindspeed_mm.utils.launch import is_first_rank

_logged: set[str] = set()


def _build_logger() -> logging.Logger:
    logger = logging.getLogger("mindspeed_mm")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(levelname)s] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(os.environ.get("MM_LOG_LEVEL", "INFO"))
        logger.propagate = False
    return logger


logger = _build_logger()


def info_rank0(message: str) -> None:
    """Log `message` on rank 0 only."""
    if is_first_rank():
        logger.info(message)


@contextmanager
def log_on_stderr() -> Iterator[None]:
    """Write log lines to standard error, for a program whose standard output is its result."""
    before = log_on(sys.stderr)
    try:
        yield
    finally:
        for handler, stream in before:
            handler.stream = stream


def log_on(stream: TextIO) -> list[tuple[logging.StreamHandler[TextIO], TextIO]]:
    """Write log lines to a stream from now on; returns each handler with its stream before."""
    ours = [handler for handler in logger.handlers if type(handler) is logging.StreamHandler]
    before = [(handler, handler.stream) for handler in ours]
    for handler in ours:
        handler.stream = stream
    return before


def notice(message: str, key: str | None = None) -> None:
    """Log a message for the user once per process, on rank 0.

    Args:
        message: the text.
        key: identifies repetitions; None: the text does.
    """
    key = key or message
    if key in _logged:
        return
    _logged.add(key)
    if is_first_rank():
        logger.warning(message)


def forget_notices() -> None:
    """Let every notice be logged again (between two runs in one process, and in tests)."""
    _logged.clear()

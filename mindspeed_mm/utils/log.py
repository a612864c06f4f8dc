"""Log lines: one logger for the package, notices that are said once, rank 0 speaks."""

from __future__ import annotations

import logging
import os
import sys

from mindspeed_mm.utils.launch import is_first_rank

_said: set[str] = set()


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


def notice(message: str, key: str | None = None) -> None:
    """Say once per process, on rank 0, something the user should know (`key` tells repeats apart; default: the
    text)."""
    key = key or message
    if key in _said:
        return
    _said.add(key)
    if is_first_rank():
        logger.warning(message)


def forget_notices() -> None:
    """Let every notice be said again (between two runs in one process, and in tests)."""
    _said.clear()

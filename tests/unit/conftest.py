"""Fixtures of the unit tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from mindspeed_mm.utils import log


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The messages logged during the test, each notice afresh."""
    messages: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    log.forget_notices()
    monkeypatch.delenv("RANK", raising=False)
    keeper = Keeper()
    log.logger.addHandler(keeper)
    yield messages
    log.logger.removeHandler(keeper)
    log.forget_notices()

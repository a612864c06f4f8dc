"""The line that is renewed on a terminal, and what a terminal shows after it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from mindspeed_mm.monitor.console.base import Console
from mindspeed_mm.monitor.console.live import LiveConsole
from mindspeed_mm.monitor.console.short import ShortConsole
from mindspeed_mm.monitor.records import EvaluationRecord
from mindspeed_mm.utils.log import log_on, logger
from tests.support.records import step_record
from tests.support.terminal import Screen, on_a_terminal

#: usual figures of a step
WELL = {"train_iters": 100, "skipped_iterations": 0, "rows_left_out": 0, "mfu": 0.41}
HEADER = ["model       Qwen3ForCausalLM", "devices     8 × NVIDIA H200"]
SUMMARY = ["trained     20 steps", "try it      mindspeed-mm chat runs/x"]
LEFT = [
    *HEADER,
    "[WARNING] step 7 was skipped",
    " 10/100   10 %  evaluation  loss 1.5000",
    "printed by a library",
    *SUMMARY,
]


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("COLUMNS", "LINES", "NO_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def run_on(console: Console) -> Iterator[None]:
    """A console between header and summary; messages of the package go to the child's own standard output."""
    log_on(sys.stdout)
    console.begin(lambda: HEADER)
    try:
        yield
    finally:
        console.close()
    console.finish(lambda: SUMMARY)


def train(console: Console, resize: Callable[[int], None]) -> None:
    """Twenty steps, with what else may be written meanwhile."""
    with run_on(console):
        for number in range(1, 21):
            console.advance(number)
            console.step(step_record(iteration=number, loss=5.0 / number, **WELL))
            if number == 7:
                logger.warning("step 7 was skipped")
            if number == 10:
                console.evaluation(EvaluationRecord(10, 5, 1.5))
                resize(60)
            if number == 15:
                print("printed by a library", file=sys.stderr, flush=True)
            if number in (7, 20) and isinstance(console, LiveConsole):
                time.sleep(0.3)  # the line is drawn


def test_messages_stay_above_the_line_which_is_gone_at_the_end() -> None:
    written = on_a_terminal(lambda resize: train(LiveConsole(100), resize))
    assert "━" in written and "loss 0.7143" in written and "\x1b[32m" in written
    screen = Screen(written)
    assert [line.rstrip() for line in screen.lines] == [*LEFT, ""]
    assert (screen.shows_cursor, screen.column) == (True, 0)


def test_without_colours_where_nobody_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    written = on_a_terminal(lambda resize: train(LiveConsole(100), resize))
    assert "━" in written and "\x1b[32m" not in written
    assert [line.rstrip() for line in Screen(written).lines] == [*LEFT, ""]


def test_short_lines_have_no_escape_sequences_even_there() -> None:
    written = on_a_terminal(lambda resize: train(ShortConsole(100), resize))
    assert "\x1b" not in written and " 20/100   20 %  loss 0.2500" in written


def test_an_exception_leaves_a_clean_terminal() -> None:
    def fail(resize: Callable[[int], None]) -> None:
        console = LiveConsole(100)
        try:
            with run_on(console):
                console.step(step_record(**WELL))
                time.sleep(0.3)
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            print("SIGINT (Ctrl-C): ended")

    screen = Screen(on_a_terminal(fail))
    assert [line.rstrip() for line in screen.lines] == [*HEADER, "SIGINT (Ctrl-C): ended", ""]
    assert screen.shows_cursor


def test_a_process_that_is_killed_leaves_the_cursor_visible() -> None:
    def end(resize: Callable[[int], None]) -> None:
        console = LiveConsole(100)
        with run_on(console):
            console.step(step_record(**WELL))
            time.sleep(0.3)
            os._exit(0)

    written = on_a_terminal(end)
    assert "loss 2.5000" in written and Screen(written).shows_cursor


def test_a_forked_worker_writes_though_the_line_is_being_drawn() -> None:
    """The lock of the terminal's console may be taken while it is forked; nobody in the child would release it."""

    def fork(resize: Callable[[int], None]) -> None:
        console = LiveConsole(100)
        with run_on(console), console._terminal._lock:
            pid = os.fork()
            if pid == 0:
                logger.warning("row 5 can't be read")
                print("printed by a worker", flush=True)
                os._exit(0)
            os.waitpid(pid, 0)

    written = on_a_terminal(fork)
    assert "[WARNING] row 5 can't be read\r\nprinted by a worker" in written


def test_the_most_important_figures_fit_into_any_width() -> None:
    console = LiveConsole(100)
    for number in range(1, 5):
        console.step(step_record(iteration=10 * number, loss=5.0 - number, **{**WELL, "data_wait_fraction": 0.12}))
    console.advance(42)
    assert console.line(160).plain == (
        "━━━━━━━━━━━━━━━━━━━━  42/100  42 %  loss 1.0000  █▆▃▁  norm 1.25  lr 1.00e-05  1.00k tokens/s  1.23 s/step  "
        "MFU 41 %  1.00 GiB  data wait 12 %  ETA 1m12s"
    )
    assert console.line(80).plain == "42/100  42 %  loss 1.0000  norm 1.25  1.00k tokens/s  data wait 12 %  ETA 1m12s"
    assert console.line(30).plain == "42/100  42 %  loss 1.0000"
    console.work("evaluation")
    assert console.line(40).plain == "42/100  42 %  evaluation …  loss 1.0000"


def test_a_line_before_the_first_figures_and_one_without_finite_losses() -> None:
    console = LiveConsole(8)
    assert console.line(80).plain == "━━━━━━━━━━━━━━━━━━━━  0/8   0 %"
    for number in range(1, 5):
        console.step(step_record(iteration=number, loss=float("nan"), **{**WELL, "train_iters": 8}))
    assert "loss nan" in console.line(200).plain


def test_figures_are_asked_for_when_they_are_old() -> None:
    now = [0.0]
    console = LiveConsole(8, clock=lambda: now[0])
    assert console.is_overdue()  # the first step of a launch
    console.step(step_record(**WELL))
    assert not console.is_overdue()
    now[0] = 5.0
    assert console.is_overdue()
    asks_never = LiveConsole(8, asks=False, clock=lambda: now[0])
    now[0] = 20.0
    assert not asks_never.is_overdue()

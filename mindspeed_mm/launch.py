"""From a launch command to a described run, and from an error to a message; nothing here imports torch."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mindspeed_mm.configs.describe import describe
from mindspeed_mm.configs.environment import TO_FILES, TRACEBACKS
from mindspeed_mm.configs.recipe import Recipe
from mindspeed_mm.configs.run import Run
from mindspeed_mm.configs.working_directory import enter_working_directory
from mindspeed_mm.configs.yaml_run import in_words_of_the_file
from mindspeed_mm.monitor.signals import StopSignal
from mindspeed_mm.utils.errors import MMError, kind_of
from mindspeed_mm.utils.extras import missing_library_as_sentence
from mindspeed_mm.utils.files import refuse_unwritable
from mindspeed_mm.utils.first_failure import claim, first_report, report_after, report_failure, write_torchrun_error
from mindspeed_mm.utils.interrupted import SENTENCE
from mindspeed_mm.utils.lost_rank import lost_connection
from mindspeed_mm.utils.tracebacks import sentence_with_file, what_happened


@contextmanager
def described(recipe: Recipe, argv: Sequence[str] | None = None) -> Iterator[tuple[Run, StopSignal]]:
    """Describe a run for the `with` block that trains it; errors end the process with one message, signals as
    `StopSignal` documents.

    Args:
        recipe: what the script trains.
        argv: the words after the script's name; None: those of this process.
    """
    with errors_as_sentences() as report, StopSignal() as stop:
        words = enter_working_directory(sys.argv[1:] if argv is None else argv)
        with in_words_of_the_file(words):
            run = _described(words, recipe)
            report.folder = run.checkpoint.save
            yield run, stop


def _described(words: Sequence[str], recipe: Recipe) -> Run:
    run = describe(words, recipe)
    if run.checkpoint.save and run.launch.local_rank == 0:
        refuse_unwritable(run.checkpoint.save, "--save")
    return run


@dataclass
class FailureReport:
    """Where a failure is reported.

    Attributes:
        folder: the run folder; None: there is none, or it isn't known yet.
    """

    folder: str | None = None


@contextmanager
def errors_as_sentences() -> Iterator[FailureReport]:
    """Turn whatever ends the run into a message of one rank and the exit status.

    An MMError is printed without a traceback, shown in the launcher's summary, and ends the process with status 1; a
    signal before the first step, or Ctrl-C, with one line and 128 + its number. A collective that another rank has left
    is one line, too, or none if another rank of this machine has failed before. Any other exception is raised as it is,
    or, of a process of `mindspeed-mm train`, one sentence with its traceback in a file; after another rank's failure
    one line says what happened here, as it probably followed from that.
    """
    report = FailureReport()
    try:
        with missing_library_as_sentence():
            yield report
    except MMError as error:
        _outlive_peers()
        report_failure(f"{kind_of(error)}: {error}")
        # peers may be waiting in a collective for this rank: leave at once, the launcher ends them
        os._exit(1)
    except KeyboardInterrupt as error:
        number = getattr(error, "number", signal.SIGINT)
        sentence = str(error) or SENTENCE
        sys.stdout.flush()
        if claim(sentence) is None:
            print(f"\n{sentence}", file=sys.stderr, flush=True)
        os._exit(128 + number)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        lost = lost_connection(error)
        if lost is not None:
            _outlive_peers()
            first = first_report()
            if first is None:
                report_failure(lost)
            else:
                write_torchrun_error(first)
            os._exit(1)
        first = claim(text)
        if first is None:
            write_torchrun_error(text)
            if os.environ.get(TRACEBACKS) != TO_FILES:
                raise
            _outlive_peers()
            sys.stdout.flush()
            print(f"\n{sentence_with_file(error, report.folder)}", file=sys.stderr, flush=True)
            sys.exit(1)
        report_after(first, text, what_happened(error))
        time.sleep(1)  # torchrun ends the other ranks when this one is gone, and the first one may still be printing
        sys.exit(1)


def _outlive_peers() -> None:
    """Let this process print its message: torchrun terminates it as soon as another rank has failed."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

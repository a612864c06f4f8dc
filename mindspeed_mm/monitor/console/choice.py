"""Which form a run's log lines have, and on which rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Literal, TextIO

from mindspeed_mm.configs.environment import STARTER
from mindspeed_mm.configs.run import Run
from mindspeed_mm.monitor.console.base import Console
from mindspeed_mm.monitor.console.full import FullConsole
from mindspeed_mm.monitor.console.live import LiveConsole
from mindspeed_mm.monitor.console.short import ShortConsole
from mindspeed_mm.utils.log import notice

Form = Literal["full", "short", "live"]


def open_console(run: Run, *, is_logging_rank: bool) -> Console:
    """Return the console of this rank.

    Lines in the published form are the last rank's, as Megatron's are. The others are rank 0's, which prints all
    messages, so that the live line knows where they go.

    Args:
        run: the run, with its length.
        is_logging_rank: whether this rank writes the published lines.
    """
    form = form_of(run.logging.log_format, sys.stdout, os.environ)
    if form == "full":
        return FullConsole() if is_logging_rank else Console()
    if run.launch.rank != 0:
        return Console()
    is_given = "log_interval" in run.given
    if form == "live":
        return LiveConsole(run.train_iters, asks=not is_given, in_samples=run.generates_media)
    if run.logging.log_format == "live":
        notice(
            "--log-format live needs a terminal that writes UTF-8 (and neither TERM=dumb nor CI); log lines are short"
        )
    return ShortConsole(run.train_iters, shows_all=is_given, in_samples=run.generates_media)


def form_of(wanted: str, output: TextIO, environment: Mapping[str, str]) -> Form:
    """Return the form of log lines.

    Args:
        wanted: full, short, live, or auto: full unless `mindspeed-mm train` has started the process, then live.
        output: where they go; live needs a terminal that writes UTF-8.
        environment: variables of the process.
    """
    if wanted == "auto":
        wanted = "live" if environment.get(STARTER) else "full"
    if wanted == "full":
        return "full"
    is_dumb = environment.get("TERM", "") in ("", "dumb") or bool(environment.get("CI"))
    has_bars = (output.encoding or "").lower().replace("-", "") == "utf8"
    return "live" if wanted == "live" and output.isatty() and has_bars and not is_dumb else "short"

"""`mindspeed-mm report RUN [RUN …] [--output FILE]`: the report of a run, or of several that are compared."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mindspeed_mm.checkpoint.run_folder import LAUNCH, METRICS, REPORT_PAGE
from mindspeed_mm.monitor.report.image import draw_loss
from mindspeed_mm.monitor.report.metrics_file import MetricsFile
from mindspeed_mm.monitor.report.page import page_of
from mindspeed_mm.monitor.report.run_record import read_run
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.files import replace_file

_COMPARISON = "comparison.html"


def main(words: Sequence[str]) -> int:
    """Write the report; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="mindspeed-mm report",
        description="Make the report of a run of what its folder holds, whether it trains, has ended or was killed.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder; several are compared")
    parser.add_argument(
        "--output",
        type=Path,
        help=f"file to write; default: {REPORT_PAGE} in RUN, of several {_COMPARISON} here",
    )
    options = parser.parse_args(list(words))
    for folder in options.runs:
        _check(folder)
    names = [folder.resolve().name for folder in options.runs]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in options.runs]
    runs = [read_run(folder, MetricsFile(folder), name) for folder, name in zip(options.runs, names)]
    output = options.output or (runs[0].folder / REPORT_PAGE if len(runs) == 1 else Path(_COMPARISON))
    try:
        replace_file(output, page_of(runs))
        if options.output is None and len(runs) == 1:
            draw_loss(runs[0])
    except OSError as error:
        raise ConfigError(f"'{output}' can't be written ({error.strerror}); give another --output") from error
    print(output)
    return 0


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"'{folder}' is no folder; expected a run folder, the --save of a run")
    if not any((folder / name).is_file() for name in (METRICS, LAUNCH)):
        inner = [path.parent.name for path in sorted(folder.glob(f"*/{METRICS}"))]
        hint = f"; of the folders in it, {', '.join(inner[:5])} are run folders" if inner else ""
        raise ConfigError(f"'{folder}' has neither {METRICS} nor {LAUNCH}, so it is no run folder{hint}")

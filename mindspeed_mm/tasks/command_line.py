"""What the commands of inference and evaluation do alike: `--help`, `--dry-run`, and the work."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence

from mindspeed_mm.configs.flags.parser import build_parser
from mindspeed_mm.dry_run import asks_for_dry_run, print_answer

Words = list[str]


def run_command(
    argv: Sequence[str] | None,
    flags: type,
    description: str,
    outline: Callable[[Words], dict[str, object]],
    work: Callable[[Words], object],
) -> int:
    """Run a launch command; return the exit status.

    Args:
        argv: the words after the script's name; None: those of this process.
        flags: the group of the command's flags.
        description: of the command, for `--help`.
        outline: returns what `--dry-run` prints.
        work: does what the words ask for; a number that it returns is the exit status.

    Raises:
        MMError: the command can't be done.
    """
    gc.enable()  # entry scripts begin without it
    words = list(sys.argv[1:] if argv is None else argv)
    if "-h" in words or "--help" in words:
        parser = build_parser((flags,))
        parser.description = description
        parser.print_help()
        return 0
    if asks_for_dry_run(words):
        return print_answer(lambda: outline(words))
    status = work(words)
    return status if isinstance(status, int) else 0

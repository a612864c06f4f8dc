"""`mindspeed-mm COMMAND`: everything that is started by hand. `mindspeed-mm COMMAND --help` tells a command's words."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import mindspeed_mm.utils.interrupted  # noqa: F401  (before what takes long to import)
from mindspeed_mm.utils.errors import ConfigError, MMError, did_you_mean, kind_of
from mindspeed_mm.utils.versions import installed_version


class Command(NamedTuple):
    """A command of the command line.

    Attributes:
        module: its module, imported when it is called.
        function: takes the words after the command and returns the exit status.
        help: one line.
    """

    module: str
    function: str
    help: str


#: name, of one word or two → command
COMMANDS: dict[str, Command] = {
    "init": Command("mindspeed_mm.tools.init.command", "main", "look at a model and rows, and write a run for them"),
    "train": Command("mindspeed_mm.tools.train.command", "main", "train a run's YAML file, or any launch"),
    "dry-run": Command("mindspeed_mm.tools.train.planned", "main", "say what a launch would train, without devices"),
    "data check": Command("mindspeed_mm.tools.data_check", "main", "read a data set without a model: lengths, faults"),
    "data convert": Command("mindspeed_mm.tools.convert_data.command", "main", "write rows in one form, media beside"),
    "data extract-features": Command(
        "mindspeed_mm.tools.feature_extraction.command", "extract_by_words", "encode clips and captions before training"
    ),
    "report": Command("mindspeed_mm.tools.report", "main", "make the page of a run, or of several that are compared"),
    "chat": Command("mindspeed_mm.tasks.inference.chat", "main", "talk to a model"),
    "serve": Command("mindspeed_mm.tasks.serving.command", "main", "answer OpenAI's clients"),
    "export": Command("mindspeed_mm.tools.export", "main", "write a run's weights in the hub's layout"),
    "convert": Command("mindspeed_mm.tools.convert", "main", "convert and inspect weights: mm-convert"),
    "doctor": Command("mindspeed_mm.tools.doctor", "main", "say what this machine can train with, and what hinders it"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"mindspeed-mm {installed_version('mindspeed_mm')}")
        return 0
    try:
        command, rest = find_command(words)
        return getattr(importlib.import_module(command.module), command.function)(rest)
    except MMError as error:
        print(f"{kind_of(error)}: {error}", file=sys.stderr)
        return 1


def find_command(words: Sequence[str]) -> tuple[Command, list[str]]:
    """Return the command that words begin with, and the words after it.

    Raises:
        ConfigError: there is none of this name.
    """
    for count in (2, 1):
        command = COMMANDS.get(" ".join(words[:count]))
        if command is not None and len(words) >= count:
            return command, list(words[count:])
    name = words[0]
    inner = [other.partition(" ")[2] for other in COMMANDS if other.startswith(f"{name} ")]
    if inner:
        found = f" '{words[1]}'" if len(words) > 1 else ""
        raise ConfigError(
            f"mindspeed-mm {name}{found}: expected {' or '.join(filter(None, (', '.join(inner[:-1]), inner[-1])))}"
        )
    raise ConfigError(
        f"mindspeed-mm has no command '{name}'{did_you_mean(name, COMMANDS) or '; it has ' + ', '.join(COMMANDS)}"
    )


def usage() -> str:
    """Return the help of the command line."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    return f"usage: mindspeed-mm COMMAND …\n\n{lines}\n\nmindspeed-mm COMMAND --help; mindspeed-mm --version"


if __name__ == "__main__":
    sys.exit(main())

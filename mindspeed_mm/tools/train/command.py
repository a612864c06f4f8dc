"""The command `mindspeed-mm train [torchrun's options] WHAT [its words]`.

`WHAT` is a run's YAML file, an entry script, a launch script of bash or a run folder. The processes of this machine are
started and watched by `LaunchedRanks`; a launch script finds it in the place of torchrun, and options that stand before
the script take the place of those in it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mindspeed_mm.configs.environment import STARTER, TO_FILES, TRACEBACKS
from mindspeed_mm.configs.working_directory import change_to
from mindspeed_mm.tools.train.processes import FORWARDED, LaunchedRanks, is_handled, parse_options, quieten, share_cores
from mindspeed_mm.tools.train.target import LaunchTarget, find_target

#: options of this command line for a launcher inside of a launch script, as words of one line
_OPTIONS = "MINDSPEED_MM_LAUNCHER_OPTIONS"
#: the file in which that launcher leaves its process id and, at last, its status
_STATE = "MINDSPEED_MM_LAUNCHER_STATE"
_SEPARATOR = "\x1f"
_SCRIPT_RUNNER = "mindspeed_mm.tools.train.script"
_NUMBERS = ("--nproc-per-node", "--nproc_per_node")
_USAGE = """usage: mindspeed-mm train [options of torchrun] WHAT [its words]

WHAT is a run's YAML file (section.key=value after it changes values), an entry script with its flags, a launch
script of bash, or a run folder, whose run it starts again. Often used of torchrun's options:
  --nproc-per-node N     processes on this machine; default: one a device, one where there is none; without
                         devices they share the cores, unless OMP_NUM_THREADS is set
  --max-restarts N       start all again after a failure, from the last checkpoint
  --nnodes N --rdzv-endpoint HOST:PORT     the same command on each of N machines
and of its own:
  --traceback            show an exception's traceback, which is otherwise in a file of the run folder
SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGUSR1 let the run save a checkpoint and end with status 0."""


def main(words: Sequence[str]) -> int:
    """Start what the words name and wait for it.

    Args:
        words: those after `mindspeed-mm train`.

    Returns:
        the exit status, see `LaunchedRanks.run`.

    Raises:
        ConfigError: nothing can be started of these words.
    """
    words = list(words)
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if words else 2
    options, before = _with_overriding(words)
    target = find_target(options.training_script, options.training_script_args)
    if target.bash is not None:
        return _run_bash(target, before)
    if target.processes is not None and not any(word.startswith(_NUMBERS) for word in before):
        options.nproc_per_node = str(target.processes)
    if target.folder is not None:
        change_to(target.folder, options.training_script)
    os.environ[STARTER] = "mindspeed-mm train"  # of a bash script the published log lines are expected
    return _run(options, target.words)


def stand_in(words: Sequence[str]) -> int:
    """Do what torchrun would do inside of a launch script, with the options of `mindspeed-mm train` before its own.

    Args:
        words: those that the script gives to torchrun.
    """
    options, _ = _with_overriding(words)
    script, own = options.training_script, options.training_script_args
    return _run(options, ("-m", script, *own) if options.module else find_target(script, own).words)


def _with_overriding(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the words of a launcher; inside of a script that `mindspeed-mm train` runs, its options come after theirs.

    Returns:
        the options, with the program of the words, and the words before the program.
    """
    overriding = [word for word in os.environ.pop(_OPTIONS, "").split(_SEPARATOR) if word]
    options = parse_options(words)
    program = [options.training_script, *options.training_script_args]
    before = [*words[: len(words) - len(program)], *overriding]
    return (parse_options([*before, *program]) if overriding else options), before


def _run(options: argparse.Namespace, program: Sequence[str]) -> int:
    """Start the processes, each with a program: `-m` and a module or a script, and its words."""
    quieten()
    share_cores(options.nproc_per_node)
    if not options.traceback:
        os.environ.setdefault(TRACEBACKS, TO_FILES)
        program = program if program[0] == "-m" else ("-m", _SCRIPT_RUNNER, *program)
    options.module = program[0] == "-m"
    options.training_script, *options.training_script_args = program[1:] if options.module else program
    state = os.environ.pop(_STATE, None)
    if state is not None:
        Path(state).write_text(str(os.getpid()), encoding="utf-8")
    status = LaunchedRanks(options).run()
    if state is not None:
        Path(state).write_text(f"ended {status}", encoding="utf-8")
    return status


def _run_bash(target: LaunchTarget, options: Sequence[str]) -> int:
    """Run a launch script in which `torchrun` is this command; signals go on to the processes that it starts."""
    with tempfile.TemporaryDirectory(prefix="mindspeed-mm-train-") as folder:
        state = Path(folder) / "launcher"
        program = Path(folder) / "torchrun"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mindspeed_mm.tools.train "$@"\n', encoding="utf-8")
        program.chmod(0o755)
        environment = {
            **os.environ,
            "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}",
            _OPTIONS: _SEPARATOR.join(options),
            _STATE: str(state),
        }
        script = subprocess.Popen(["bash", str(target.bash), *target.words], env=environment)
        pending: list[int] = []
        for number in FORWARDED:
            if is_handled(number):
                signal.signal(number, lambda received, frame: pending.append(received))
        while script.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                script.wait(0.1)
            while pending:
                _pass_on(pending.pop(0), state, script)
        return _status_of(state, script.returncode)


def _pass_on(number: int, state: Path, script: subprocess.Popen[bytes]) -> None:
    word = state.read_text(encoding="utf-8") if state.exists() else ""
    if word.isdigit():
        os.kill(int(word), number)
    elif not word:
        script.send_signal(number)


def _status_of(state: Path, status: int) -> int:
    """The status of the processes that the script started; a pipe into tee hides it from bash."""
    word = state.read_text(encoding="utf-8") if state.exists() else ""
    if word.startswith("ended "):
        return int(word.split()[1]) or max(0, status)
    return status if status >= 0 else 128 - status

"""The command `mindspeed-mm init --model DIRECTORY --data ROWS`: write the file of a run that is ready to start."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mindspeed_mm.checkpoint.launch_record import RUN_FILE
from mindspeed_mm.tools.init.captions import find_captions, measure_clips, write_captions
from mindspeed_mm.tools.init.machine import Machine, this_machine
from mindspeed_mm.tools.init.model_directory import ModelDirectory, read_model_directory
from mindspeed_mm.tools.init.rows import find_rows, measure_rows, require_template
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.extras import require_extra
from mindspeed_mm.utils.files import refuse_unwritable, replace_file
from mindspeed_mm.utils.log import logger


def add_init_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("--model", required=True, metavar="DIRECTORY", help="a model of transformers or diffusers")
    parser.add_argument("--data", required=True, action="append", nargs="+", help="files or folders with the rows")
    parser.add_argument("--output", metavar="FOLDER", help="run folder; absent = runs/<model>-<data>")
    parser.add_argument("--media", metavar="FOLDER", help="folder that paths of media in rows are relative to")
    parser.add_argument("--attr", nargs="+", default=[], metavar="KEY=COLUMN", help="names of columns: docs/data.md")
    parser.add_argument("--template", help="name of a chat template, for a model without one")
    parser.add_argument("--on-bad-sample", choices=["raise", "skip"], default="raise", help="rows that can't be used")
    parser.add_argument("--lora", action="store_true", help="train adapters; else only if the weights don't fit")
    parser.add_argument("--backend", choices=["fsdp2", "megatron"], default="fsdp2", help="of a language model")
    parser.add_argument("--devices", type=int, metavar="N", help="of another machine that will train: its devices")
    parser.add_argument("--memory", type=float, metavar="GIB", help="of another machine that will train: of a device")
    parser.add_argument("--from-scratch", action="store_true", help="begin with random weights")


def main(words: Sequence[str]) -> int:
    """Run the words after `mindspeed-mm init`; return the exit status.

    Raises:
        ConfigError, DataError: the directory or the rows can't be trained on, or the run folder isn't empty.
    """
    parser = argparse.ArgumentParser(
        prog="mindspeed-mm init", description="Look at a model and at rows, and write a run that is ready to start."
    )
    add_init_arguments(parser)
    options = parser.parse_args(list(words))
    _check_machine(options)
    began = time.monotonic()
    names = [name for group in options.data for name in group]
    folder = Path(options.output or default_folder(options.model, names[0]))
    refuse_full(folder)
    refuse_unwritable(folder, "--output")
    with _quiet(), _removed_on_error(folder):
        model = read_model_directory(options.model, from_scratch=options.from_scratch)
        text, found = (_generation if model.is_pipeline else _language)(model, names, folder, options)
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / RUN_FILE, text)
    print("\n".join(found))
    print(f"written: {folder / RUN_FILE} ({time.monotonic() - began:.1f} s)\n")
    print(f"  mindspeed-mm dry-run {folder}    what it would train, without devices")
    print(f"  mindspeed-mm train {folder}      train it")
    return 0


def _check_machine(options: argparse.Namespace) -> None:
    given = [options.devices, options.memory]
    if given.count(None) == 1 or any(value is not None and value <= 0 for value in given):
        raise ConfigError(
            f"--devices is {options.devices} and --memory {options.memory}; expected both above 0, as in --devices 8 "
            "--memory 80, or neither of them for this machine"
        )


def _machine(options: argparse.Namespace) -> Machine:
    """The machine that will train."""
    if options.devices is None:
        return this_machine()
    return Machine(True, "device", options.devices, int(options.memory * 2**30))


def default_folder(model: str, data: str) -> str:
    """Return the run folder where none is named."""
    return f"runs/{Path(model).resolve().name}-{Path(data).resolve().stem}"


def refuse_full(folder: Path) -> None:
    """Refuse a folder with anything in it: nothing is overwritten.

    Raises:
        ConfigError: with what it holds.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output '{folder}' is a file; expected a folder, which may be absent")
    if folder.is_dir() and (held := sorted(entry.name for entry in folder.iterdir())):
        more = f" and {len(held) - 4} more" if len(held) > 4 else ""
        raise ConfigError(
            f"--output '{folder}' is not empty ({', '.join(held[:4])}{more}), and nothing is overwritten; name another "
            "folder by --output"
        )


def _language(
    model: ModelDirectory, names: Sequence[str], folder: Path, options: argparse.Namespace
) -> tuple[str, list[str]]:
    """The text of the file of a language model, and lines about what was found."""
    files = find_rows(
        names,
        options.media or ".",
        _attr(options.attr),
        options.template,
        skips=options.on_bad_sample == "skip",
    )
    require_template(model, files)
    from mindspeed_mm.configs.hf_directory import read_hf_config
    from mindspeed_mm.tools.init.language import most_positions, plan_language, rows_lines, write_language

    hf_config = read_hf_config(model.path, "--model")
    plan = plan_language(
        model,
        hf_config,
        measure_rows(model, files, most_positions(hf_config)),
        _machine(options),
        save=str(folder),
        megatron=options.backend == "megatron",
        lora=options.lora,
        from_scratch=options.from_scratch,
    )
    found = [f"model: {plan.title}", "data: " + "; ".join(rows_lines(plan.rows))]
    return write_language(plan), [*found, *plan.training.summary(plan.unit)]


def _generation(
    model: ModelDirectory, names: Sequence[str], folder: Path, options: argparse.Namespace
) -> tuple[str, list[str]]:
    """The text of the file of a model that makes images or videos, and lines about what was found."""
    is_megatron = options.backend == "megatron"
    given = {"--backend megatron": is_megatron, "--template": options.template, "--attr": options.attr}
    if wrong := next((flag for flag, value in given.items() if value), None):
        raise ConfigError(f"{wrong} is of language models, and --model '{model.path}' is a diffusers pipeline")
    require_extra("generation", f"--model '{model.path}', a diffusers pipeline,")
    files = find_captions(names, options.media, skips=options.on_bad_sample == "skip")
    from mindspeed_mm.tools.init.generation import clips_lines, plan_generation, task_of, write_generation

    task = task_of(model)
    clips = measure_clips(write_captions(files, folder))
    plan = plan_generation(
        model, task, clips, _machine(options), save=str(folder), lora=options.lora, from_scratch=options.from_scratch
    )
    found = [f"model: {plan.title}", "data: " + "; ".join(clips_lines(clips))]
    return write_generation(plan), [*found, *plan.training.summary("samples")]


def _attr(words: Sequence[str]) -> dict[str, str]:
    """The columns and roles of --attr.

    Raises:
        ConfigError: a word isn't KEY=COLUMN.
    """
    found = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not (key and separator and value):
            raise ConfigError(f"--attr {word}: expected KEY=COLUMN, as in --attr prompt=question response=answer")
        found[key] = value
    return found


@contextmanager
def _removed_on_error(folder: Path) -> Iterator[None]:
    """Leave nothing behind in an empty folder, or one that isn't there, if the run can't be written."""
    there = folder.is_dir()
    try:
        yield
    except BaseException:
        for file in folder.glob("*") if folder.is_dir() else ():
            file.unlink()
        if folder.is_dir() and not there:
            folder.rmdir()
        raise


@contextmanager
def _quiet() -> Iterator[None]:
    """Log warnings only: what was recognised is printed at the end."""
    before = logger.level
    logger.setLevel(max(before, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(before)

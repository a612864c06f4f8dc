"""From the words of a launch command to its flags: parsed, checked and settled.

`parse_args` types the flags and logs which have no effect; `validate_args` checks how they fit together, once the
number of processes is known; `resolve_train_iters` gives the length of the run, once the data set is known.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.configs.argument_rules import check_arguments, check_schedule, schedule_lengths
from mindspeed_mm.configs.environment import log_environment_notices
from mindspeed_mm.configs.files import describe_missing
from mindspeed_mm.configs.flags import GROUPS
from mindspeed_mm.configs.flags.from_yaml import TypedFlags, typed_flags
from mindspeed_mm.configs.flags.parsed import ParsedFlags, backend_of
from mindspeed_mm.configs.flags.parser import build_parser, spell_as_declared, stray_words, unknown_flags
from mindspeed_mm.configs.flags.spec import BackendName, Flag, all_flags
from mindspeed_mm.configs.flags.training import TrainingArguments
from mindspeed_mm.configs.hf_directory import describe_missing_model
from mindspeed_mm.configs.implied_backend import imply_fsdp2
from mindspeed_mm.configs.layout_rules import data_parallel_size, settle_layout
from mindspeed_mm.configs.older import drop_older_flags
from mindspeed_mm.configs.run_sections import ScheduleConfig, pick
from mindspeed_mm.configs.scalars import read_int
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.configs.yaml_run import YamlRun, split_yaml
from mindspeed_mm.utils.errors import ConfigError, nearest_names
from mindspeed_mm.utils.files import is_same_path
from mindspeed_mm.utils.launch import this_launch
from mindspeed_mm.utils.log import notice
from mindspeed_mm.utils.text import shorten

ExtraArgsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]

#: flags without which a run of our own entry scripts can't start
REQUIRED = ("mm_model", "mm_data", "micro_batch_size", "lr")
_LENGTHS = ("train_iters", "train_epochs", "train_samples")


def parse_args(
    argv: Sequence[str] | None = None,
    extra_args_provider: ExtraArgsProvider | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    *,
    required: Sequence[str] = REQUIRED,
    backends: Sequence[BackendName] = ("fsdp2",),
    run: YamlRun | None = None,
    own_model: bool = False,
) -> ParsedFlags:
    """Read a launch command.

    Args:
        argv: the words after the script's name; None = those of this process. The first may be the YAML file of a run;
            flags after it take precedence.
        extra_args_provider: adds a script's own flags: gets the parser, returns it.
        args_defaults: attribute → value that replaces the flag's default.
        required: attributes that must be given (a script with its own model and data needs fewer).
        backends: those that the script can take: "fsdp2" (with --use-torch-fsdp2), "ptd" (without).
        run: the run's YAML file, where the script has read it by itself.
        own_model: the model is the script's own, and may read flags that a model of ours has no use for.

    Returns:
        The flags, under Megatron's attribute names: every flag of the schema, the script's own flags, `rank`,
        `world_size`, `local_rank`, `restarts` as torchrun's environment has them, and `backends`.

    Raises:
        ConfigError: unknown flags, wrong values, missing flags or files, things that are not there yet.
    """
    parser: argparse.ArgumentParser = build_parser(GROUPS)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser) or parser
    words = list(sys.argv[1:] if argv is None else argv)
    if run is None:
        run, words = split_yaml(words)
    words = drop_older_flags(spell_as_declared(parser, words), parser._option_string_actions)
    raise_all(unknown_flags(parser, words))
    described = typed_flags(parser, run)
    _lower_own_flags(parser, described)
    parsed, extras = parser.parse_known_args(words)
    raise_all(stray_words(parser, words, extras))

    # Ours leave no default behind; a flag that the script has redefined is the script's own.
    ours = {action.dest for action in parser._actions if action.default is argparse.SUPPRESS}
    args = ParsedFlags(**{item.name: _copy(item.default) for item in all_flags(GROUPS)}, backends=tuple(backends))
    flags = [item for item in all_flags(GROUPS) if item.name in ours]
    _apply_defaults(args, args_defaults or {}, parser)
    given = {item.name: getattr(parsed, item.name) for item in flags if hasattr(parsed, item.name)}
    places = {item.name: item.spelling for item in flags}
    if not given.keys().isdisjoint(_LENGTHS):  # a length of the command line takes the place of the file's
        described.forget(_LENGTHS)
    for name in described.values.keys() - vars(parsed).keys():
        places[name] = described.places[name]
    given = described.values | given
    vars(args).update(described.values | vars(parsed))
    args.given = given | _own_flags_given(parser, vars(parsed))
    if not own_model:
        imply_fsdp2(args)
    _read_environment(args, given)
    args.params_dtype = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    args.use_deter_comp = args.deterministic_mode = args.use_deter_comp or args.deterministic_mode

    backend = backend_of(args)
    problems = _missing_flags(args, required, run) + _refused_flags(flags, given, backend, places, own_model)
    raise_all(problems + _missing_paths(flags, args, backend, places))
    _log_no_effect(flags, given, backend, places)
    log_environment_notices()
    return args


def validate_args(args: ParsedFlags, world_size: int) -> None:
    """Check how the flags fit together, and add what follows from them.

    Sets `world_size`, `data_parallel_size`, `global_batch_size`, `num_microbatches`, the consumed samples (0), and,
    where the length of the run is known already, `train_iters` and `lr_decay_iters`. On the Megatron backend also what
    follows for the layout: see `layout_rules.settle_layout`.

    Args:
        args: what `parse_args` returned.
        world_size: number of processes.

    Raises:
        ConfigError: everything that doesn't fit, in one message.
    """
    args.world_size = world_size
    settle_layout(args)
    args.data_parallel_size = data_parallel_size(args)
    for name in ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples", "iteration"):
        if getattr(args, name, None) is None:
            setattr(args, name, 0)
    if args.global_batch_size is None and args.micro_batch_size is not None:
        rows = args.micro_batch_size * args.data_parallel_size
        args.global_batch_size = rows * (args.gradient_accumulation_steps or 1)
    raise_all(check_arguments(args))
    assert args.micro_batch_size is not None and args.global_batch_size is not None, "both have been checked"
    args.num_microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    if args.weight_decay_incr_style == "constant":
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    if args.train_samples is not None:
        args.train_iters = args.train_samples // args.global_batch_size
    if args.train_iters is not None:
        _settle_schedule(args, args.global_batch_size)


def resolve_train_iters(
    length: TrainingArguments,
    rows: int | None,
    global_batches_per_epoch: float | None,
    why_no_length: str = "this one is streamed",
) -> int:
    """Return the number of optimizer steps in all.

    Args:
        length: of the run, as the flags give it.
        rows: rows in the training data; None for data without a length (streaming).
        global_batches_per_epoch: global batches in one pass over them; None where that isn't known.
        why_no_length: a clause that says why not.

    Returns:
        `train_iters` as given (or `train_samples` over the global batch), else `train_epochs` times the batches of an
        epoch, rounded up; at least 1.

    Raises:
        ConfigError: `--train-epochs` with data that have no length or no rows.
    """
    if length.train_iters is not None:
        return length.train_iters
    assert length.train_epochs is not None, "the length of a run is given in steps, rows or epochs"
    if rows is None or global_batches_per_epoch is None:
        raise ConfigError(
            f"--train-epochs {length.train_epochs:g} needs a data set with a length, and {why_no_length}; "
            "give --train-iters (optimizer steps) or --train-samples (rows) instead"
        )
    if rows < 1:
        raise ConfigError(f"--train-epochs {length.train_epochs:g}: the training data hold no rows")
    # 0.07 × 100 is a little more than 7 in floating point: not an eighth step.
    return max(1, math.ceil(length.train_epochs * global_batches_per_epoch - 1e-9))


def _settle_schedule(args: ParsedFlags, global_batch_size: int) -> None:
    if args.lr_decay_iters is None and args.train_samples is None:
        args.lr_decay_iters = args.train_iters
    if args.lr_decay_samples is None and args.train_samples is not None:
        args.lr_decay_samples = args.train_samples
    lengths = schedule_lengths(pick(ScheduleConfig, args), args.train_samples, global_batch_size)
    raise_all(check_schedule(lengths, args.lr_decay_style))


def _lower_own_flags(parser: argparse.ArgumentParser, described: TypedFlags) -> None:
    """Let the file's values of a script's own flags be their defaults: the command line takes precedence."""
    for action in parser._actions:
        if action.dest in described.values and action.default is not argparse.SUPPRESS:
            action.default, action.required = described.values[action.dest], False


def _own_flags_given(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a script's own flags that differ from their defaults."""
    own = {action.dest: action.default for action in parser._actions if action.default is not argparse.SUPPRESS}
    return {name: values[name] for name, default in own.items() if name in values and values[name] != default}


def _copy(value: object) -> object:
    return list(value) if isinstance(value, list) else value


def _apply_defaults(args: ParsedFlags, defaults: Mapping[str, Any], parser: argparse.ArgumentParser) -> None:
    known = {action.dest for action in parser._actions}
    for name, value in defaults.items():
        if name not in known:
            near = nearest_names(name, known, limit=1)
            if near:
                notice(f"args_defaults: '{name}' is no flag and is only stored; did you mean '{near[0]}'?")
        setattr(args, name, value)


def _read_environment(args: ParsedFlags, given: Mapping[str, Any]) -> None:
    launch = this_launch()
    args.rank, args.world_size, args.restarts = launch.rank, launch.world_size, launch.restarts
    if args.local_rank is None:
        args.local_rank = launch.local_rank
    if backend_of(args) == "ptd" and os.environ.get("VP_SIZE"):
        args.virtual_pipeline_model_parallel_size = _virtual_size(given, os.environ["VP_SIZE"])


def _virtual_size(given: Mapping[str, Any], word: str) -> int:
    """Stages on each pipeline rank, by the flag and by the variable VP_SIZE of published scripts."""
    name = "virtual_pipeline_model_parallel_size"
    try:
        size = read_int(word)
    except ValueError:
        size = 0
    if size < 1:
        raise ConfigError(f"the variable VP_SIZE is '{word}'; expected a whole number from 1 on")
    if given.get(name) not in (None, size):
        raise ConfigError(f"{_spelled(name)} is {given[name]} and the variable VP_SIZE is {size}; keep one of them")
    return size


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def _missing_flags(args: ParsedFlags, required: Sequence[str], run: YamlRun | None) -> list[str]:
    missing = [_spelled(name) for name in required if getattr(args, name, None) is None]
    lengths = [name for name in _LENGTHS if getattr(args, name) is not None]
    problems = []
    if not lengths:
        missing.append("one of " + ", ".join(map(_spelled, _LENGTHS)))
    elif len(lengths) > 1:
        given = " and ".join(f"{_spelled(name)} {getattr(args, name)}" for name in lengths)
        problems.append(f"{given} are given; keep one of them")
    if missing:
        also = f"; {run.file} may give them too, in gpt_args or as sections" if run is not None else ""
        problems.append(f"missing flags: {', '.join(missing)}{also}")
    return problems


def _asks_for_nothing(item: Flag, value: object) -> bool:
    return value in item.harmless or (item.kind is bool and value == item.default)


def _refused_flags(
    flags: Sequence[Flag], given: Mapping[str, Any], backend: BackendName, places: Mapping[str, str], own_model: bool
) -> list[str]:
    return [
        f"{places[item.name]}{'' if item.kind is bool else ' ' + _shown(given[item.name])}: {why}"
        for item in flags
        if (why := item.refused.get(backend) or ("" if own_model else item.not_of_ours))
        and item.name in given
        and not _asks_for_nothing(item, given[item.name])
    ]


def _shown(value: object) -> str:
    return shorten(" ".join(map(str, value)) if isinstance(value, list) else str(value))


def _missing_paths(
    flags: Sequence[Flag], args: ParsedFlags, backend: BackendName, places: Mapping[str, str]
) -> list[str]:
    problems = []
    for item in flags:
        path, place = getattr(args, item.name), places[item.name]
        if not item.path or not path or backend not in item.backends:
            continue
        if item.path == "output":
            if Path(path).is_file():
                problems.append(f"{place} {path} is a file; expected a folder")
        elif not os.path.exists(path):
            if item.name == "load" and args.save and is_same_path(path, args.save):
                continue  # published scripts give one folder for both: there is nothing to load the first time
            describe = describe_missing_model if item.path == "directory" else describe_missing
            problems.append(f"{place}: {describe(path)}")
        elif item.path == "file" and not Path(path).is_file():
            problems.append(f"{place} {path} is a folder; expected a file")
        elif item.path == "directory" and not Path(path).is_dir():
            problems.append(f"{place} {path} is a file; expected a folder")
    return problems


def _log_no_effect(
    flags: Sequence[Flag], given: Mapping[str, Any], backend: BackendName, places: Mapping[str, str]
) -> None:
    """Log one notice for each reason."""
    by_reason: dict[str, list[str]] = {}
    for item in flags:
        if backend in item.no_effect and item.name in given and not _asks_for_nothing(item, given[item.name]):
            by_reason.setdefault(item.no_effect[backend], []).append(places[item.name])
    for why, names in by_reason.items():
        notice(f"{_listed(names)} {'has' if len(names) == 1 else 'have'} no effect here: {why}")


def _listed(places: Sequence[str]) -> str:
    """Join flags and keys of a file, naming the file once."""
    named: set[str] = set()
    parts = []
    for place in places:
        file, _, key = place.rpartition(": ")
        parts.append(key if file in named else place)
        named.add(file)
    return ", ".join(parts)

"""The argparse parser of the flag groups, and the conversion of words to typed values."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from mindspeed_mm.configs.flags.spec import BACKENDS, BackendName, Flag, flags_of
from mindspeed_mm.configs.older import older_flag
from mindspeed_mm.configs.other_scripts import script_of_flag
from mindspeed_mm.configs.scalars import is_null_word, read_bool, read_float, read_int, show
from mindspeed_mm.utils.errors import ConfigError, did_you_mean, nearest_names

#: torchrun's own flags, which belong before the script's name
TORCHRUN_FLAGS = frozenset(
    {
        "nproc_per_node",
        "nnodes",
        "node_rank",
        "master_addr",
        "master_port",
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_id",
        "standalone",
        "max_restarts",
        "log_dir",
        "tee",
        "redirects",
    }
)

#: what one word of a launch command becomes
FlagWord = bool | int | float | str

#: how help shows the values of a switch; the parser's switches are recognised by it
SWITCH_VALUES = "true|false"

#: what other trainers call our flags
OTHER_TRAINERS_NAMES = {
    "learning-rate": "--lr",
    "max-grad-norm": "--clip-grad",
    "grad-clip": "--clip-grad",
    "per-device-train-batch-size": "--micro-batch-size",
    "train-batch-size": "--micro-batch-size",
    "batch-size": "--micro-batch-size",
    "num-train-epochs": "--train-epochs",
    "epochs": "--train-epochs",
    "max-steps": "--train-iters",
    "warmup-steps": "--lr-warmup-iters",
    "lr-warmup-steps": "--lr-warmup-iters",
    "lr-warmup-ratio": "--lr-warmup-fraction",
    "lr-scheduler-type": "--lr-decay-style",
    "output-dir": "--save",
    "save-dir": "--save",
    "load-dir": "--load",
    "save-steps": "--save-interval",
    "eval-steps": "--eval-interval",
    "logging-steps": "--log-interval",
    "resume-from-checkpoint": "--load",
    "metric-for-best-model": "--save-best",
    "load-best-model-at-end": "--save-best",
    "early-stopping-patience": "--early-stop",
    "dataloader-num-workers": "--num-workers",
    "cutoff-len": "--seq-length",
    "max-length": "--seq-length",
    "optim": "--optimizer",
    "gradient-checkpointing": "--recompute-granularity",
    "mixed-precision": "--bf16",
    "dtype": "--bf16",
    "adam-epsilon": "--adam-eps",
    "model-name-or-path": "--mm-model",
    "tp-size": "--tensor-model-parallel-size",
    "tensor-parallel-size": "--tensor-model-parallel-size",
    "cp-size": "--context-parallel-size",
    "ulysses-parallel-size": "--context-parallel-size",
    "ring-attention-size": "--context-parallel-size",
    "cp-type": "--context-parallel-algo",
    "ep-size": "--expert-model-parallel-size",
    "expert-parallel-size": "--expert-model-parallel-size",
}


class FlagParser(argparse.ArgumentParser):
    """argparse whose errors are ConfigErrors with a sentence, and don't end the process."""

    def error(self, message: str) -> NoReturn:
        # argparse writes "argument --lr: …" before the reader's sentence.
        raise ConfigError(
            message.removeprefix("argument ").replace("expected one argument", "expected a value after it")
        )


def build_parser(groups: Iterable[type]) -> FlagParser:
    """Build the parser; an absent flag of the schema sets no attribute, so that the caller knows which were given."""
    parser = FlagParser(
        description="Train a model with mindspeed_mm (docs/configuration.md explains every flag and file).",
        allow_abbrev=False,
        conflict_handler="resolve",  # a user's own flag replaces ours of the same name
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for group in groups:
        flags = flags_of(group)
        section = parser.add_argument_group(flags[0].group)
        for item in flags:
            _add_flag(section, item)
    return parser


def _add_flag(section: argparse._ArgumentGroup, item: Flag) -> None:
    about = "".join(
        [item.help, *_reasons_by_backend("no effect", item.no_effect), *_reasons_by_backend("refused", item.refused)]
    )
    about = about.replace("%", "%%")
    common: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS, "help": about}
    if item.kind is bool and not item.many:
        # A bare switch means on; scripts that are generated from YAML write `--bf16 False`, which means off.
        if item.spellings:
            section.add_argument(
                *item.spellings, type=reader(item), nargs="?", const=True, metavar=SWITCH_VALUES, **common
            )
        if item.off_spellings:
            section.add_argument(
                *item.off_spellings, type=_negated(item), nargs="?", const=False, metavar=SWITCH_VALUES, **common
            )
        return
    options: dict[str, Any] = {"type": reader(item), "metavar": item.type_words.replace(", ", "|").upper()}
    if item.many:
        options |= {"nargs": "+", "action": "extend"}  # given twice: both lists count
    elif item.bare is not None:
        options |= {"nargs": "?", "const": item.bare}
    section.add_argument(*item.spellings, **options, **common)


def _reasons_by_backend(what: str, reasons: Mapping[BackendName, str]) -> list[str]:
    if len(set(reasons.values())) == 1 and len(reasons) == len(BACKENDS):
        return [f" ({what} here: {next(iter(reasons.values()))})"]
    places = {"fsdp2": "with --use-torch-fsdp2", "ptd": "without --use-torch-fsdp2"}
    return [f" ({what} {places[backend]}: {reason})" for backend, reason in reasons.items()]


def reader(item: Flag) -> Callable[[object], FlagWord | None]:
    """Return the function that turns one word into a value of the flag, or raises ArgumentTypeError with a sentence."""
    kinds: Mapping[type, Callable[[object], FlagWord]] = {bool: read_bool, int: read_int, float: read_float, str: str}
    read_kind = kinds[item.kind]

    synonyms = dict(item.synonyms)

    def read(word: object) -> FlagWord | None:
        if item.optional and (word is None or is_null_word(word) or (item.path and word == "")):
            return None
        if isinstance(word, str) and word in item.words:
            return word
        try:
            value = read_kind(synonyms.get(word, word) if isinstance(word, str) else word)
            _check_range(item, value)
        except ValueError as error:
            others = "".join(f", or {other}" for other in item.words)
            raise argparse.ArgumentTypeError(f"found {show(word)}; {error}{others}") from None
        return value

    return read


def _negated(item: Flag) -> Callable[[object], bool]:
    read = reader(item)
    return lambda word: not read(word)


def _check_range(item: Flag, value: FlagWord) -> None:
    if item.choices and value not in item.choices:
        near = did_you_mean(str(value), [str(choice) for choice in item.choices])
        raise ValueError(f"expected one of {', '.join(str(choice) for choice in item.choices)}{near}")
    if isinstance(value, str):
        return
    if item.minimum is not None and value < item.minimum:
        raise ValueError(f"expected at least {item.minimum}")
    if item.above is not None and value <= item.above:
        raise ValueError(f"expected more than {item.above}")
    if item.maximum is not None and value > item.maximum:
        raise ValueError(f"expected at most {item.maximum}")
    if item.below is not None and value >= item.below:
        raise ValueError(f"expected less than {item.below}")


def spell_as_declared(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return the words with flags spelled as the parser declares them.

    `--micro_batch_size` and `--micro-batch-size` are the same flag. A bare switch gets its value, so that it takes no
    word that comes after it, unless that word is true or false.
    """
    known = parser._option_string_actions
    by_dashes = {option.replace("_", "-"): option for option in known}
    spelled = []
    for word, following in itertools.zip_longest(words, words[1:], fillvalue="--"):
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            spelled.append(word)
            continue
        if name not in known:
            name = by_dashes.get(name.replace("_", "-"), name)
        bare_switch = not equals and getattr(known.get(name), "metavar", None) == SWITCH_VALUES
        if bare_switch and not following.startswith("--") and not _is_bool_word(following):
            equals, value = "=", "true"
        spelled.append(name + equals + value)
    return spelled


def _is_bool_word(word: str) -> bool:
    try:
        read_bool(word)
    except ValueError:
        return False
    return True


def unknown_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return a sentence for each word that looks like a flag and is none."""
    known = parser._option_string_actions
    problems = []
    for word in words:
        name = word.partition("=")[0]
        if not word.startswith("--") or word == "--" or name in known:
            continue
        elsewhere = known_elsewhere(name)
        problems.append(f"flag '{name}' {elsewhere}" if elsewhere else f"unknown flag '{name}'{_suggest(name, known)}")
    return problems


def known_elsewhere(name: str) -> str | None:
    """Return a clause about a flag of torchrun, of another script or of an older release; None: it is of none of these.

    Args:
        name: with or without dashes in front, underscores or dashes inside.
    """
    bare = name.removeprefix("--").replace("-", "_")
    if bare in TORCHRUN_FLAGS:
        return "is torchrun's: write it before the script's name"
    older = older_flag(bare)
    if older is not None:
        return f"is of an older release: {older.became}"
    return script_of_flag(bare)


def suggestions(name: str, known: Iterable[str]) -> list[str]:
    """Return the flags that look like `name`, or that another trainer calls by this name."""
    foreign = {f"--{word}": flag for word, flag in OTHER_TRAINERS_NAMES.items()}
    near = nearest_names(name, [*known, *foreign])
    return list(dict.fromkeys(foreign.get(word, word) for word in near))


def _suggest(name: str, known: Iterable[str]) -> str:
    meant = suggestions(name, known)
    return "; did you mean " + " or ".join(f"'{word}'" for word in meant) + "?" if meant else ""


def stray_words(parser: argparse.ArgumentParser, words: Sequence[str], extras: Sequence[str]) -> list[str]:
    """Return a sentence for each word that belongs to no flag."""
    problems = []
    for extra in extras:
        before = words[words.index(extra) - 1] if extra in words[1:] else ""
        if extra.startswith("-") and extra.lstrip("-")[:1].isalpha():
            near = _suggest("--" + extra.lstrip("-"), parser._option_string_actions)
            problems.append(f"unknown flag '{extra}': flags start with two dashes{near}")
        elif extra.endswith((".yaml", ".yml")):
            problems.append(f"stray word '{extra}': the YAML file of a run comes first, right after the script's name")
        elif "=" in extra:
            problems.append(
                f"stray word '{extra}': section.key=value comes right after a run's YAML file, before flags"
            )
        else:
            after = f" (after '{before.partition('=')[0]}')" if before else ""
            problems.append(f"stray word '{extra}'{after}: expected flags that start with --")
    return problems

"""`mm-convert`: convert weights between the hub's layout and torch_dcp, and inspect either. Needs no accelerator.

    mm-convert GenericDCPConverter hf_to_dcp --hf_dir HF --dcp_dir OUT
    mm-convert GenericDCPConverter dcp_to_hf --load_dir RUN_OR_CHECKPOINT --save_dir OUT --model_assets_dir HF
    mm-convert GenericDCPConverter merge_lora --base HF --adapter PEFT_OR_RUN --out OUT
    mm-convert Qwen2_5_VLConverter hf_to_mm --cfg.hf_config.hf_dir HF --cfg.mm_dir OUT
    mm-convert Qwen2_5_VLConverter mm_to_hf --cfg.hf_config.hf_dir HF --cfg.mm_dir RUN --cfg.save_hf_dir OUT
    mm-convert info DIR
    mm-convert verify DIR

The other converters of published commands are names of the same conversion, with their own arguments. Arguments can
also come from a YAML file (`--config`, of which `--print_config` prints a template), or from MM_CONVERT_* variables
with JSONARGPARSE_DEFAULT_ENV=true.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, get_type_hints

import mindspeed_mm.utils.interrupted  # noqa: F401  (before what takes long to import)
from mindspeed_mm.tools.converters import CONVERTERS
from mindspeed_mm.tools.converters.refused import refuse_unknown
from mindspeed_mm.tools.inspect_weights import info, verify_weights
from mindspeed_mm.utils.errors import ConfigError, MMError
from mindspeed_mm.utils.extras import require_extra
from mindspeed_mm.utils.log import notice
from mindspeed_mm.utils.torch_import import import_torch

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

_FUNCTIONS: dict[str, Callable[..., int]] = {"info": info, "verify": verify_weights}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        require_extra("convert", "mm-convert")
        parser, arguments_of = _build_parser(words)
        refuse_unknown(words, arguments_of)
        options = _parse(parser, words)
        _end_quietly_on_closed_pipe()
        import_torch()
        chosen = options[options.command]
        if options.command in _FUNCTIONS:
            return _FUNCTIONS[options.command](**chosen.as_dict())
        arguments = chosen[chosen.direction].as_dict()
        arguments.pop("config", None)
        converters = {converter_class.__name__: converter_class for converter_class in CONVERTERS}
        convert = getattr(converters[options.command](), chosen.direction)
        hints = get_type_hints(convert)
        convert(**{name: _typed(hints[name], value) for name, value in arguments.items()})
        return 0
    except MMError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _build_parser(words: Sequence[str]) -> tuple[ArgumentParser, dict[str, dict[str, frozenset[str]]]]:
    """Build the parser, with the arguments of the converter that is named.

    Args:
        words: the command line; the arguments of other converters than the one that it names are left out.

    Returns:
        the parser, and command → direction → its arguments.
    """
    from jsonargparse import ArgumentParser

    description = (__doc__ or "").splitlines()[0]
    parser = ArgumentParser(prog="mm-convert", description=description, exit_on_error=not _names_direction(words))
    commands = parser.add_subcommands(dest="command")
    arguments_of: dict[str, dict[str, frozenset[str]]] = {name: {} for name in _FUNCTIONS}
    for converter_class, methods in CONVERTERS.items():
        converter_name = converter_class.__name__
        arguments_of[converter_name] = {}
        converter = ArgumentParser(description=_first_line(converter_class))
        commands.add_subcommand(converter_name, converter, help=converter.description)
        directions = converter.add_subcommands(dest="direction")
        for name in methods:
            method = ArgumentParser(description=_first_line(getattr(converter_class, name)))
            if words[:1] == [converter_name]:
                method.add_argument("--config", action="config", help="YAML file with the arguments")
                method.add_method_arguments(converter_class, name, as_positional=False)
            directions.add_subcommand(name, method, help=method.description)
            known = (option for action in method._actions for option in action.option_strings)
            arguments_of[converter_name][name] = frozenset(known)
    for name, function in _FUNCTIONS.items():
        sub = ArgumentParser(description=_first_line(function))
        sub.add_function_arguments(function, as_positional=True)
        commands.add_subcommand(name, sub, help=sub.description)
    return parser, arguments_of


def _parse(parser: ArgumentParser, words: Sequence[str]) -> Namespace:
    """Parse the words; where a direction is named, faults are one sentence instead of the usage of all commands.

    Raises:
        ConfigError: an argument is missing, has a value of another type, or is not one of the direction's.
    """
    try:
        return parser.parse_args(_without_comments(words))
    except ArgumentError as error:  # only where a direction is named
        fault = " ".join(str(error).replace(f"{words[0]}.{words[1]}.", "--").split()).removesuffix(".")
        place = f"{words[0]} {words[1]}"
        raise ConfigError(f"{place}: {fault}; `mm-convert {place} --help` lists the arguments") from error


def _names_direction(words: Sequence[str]) -> bool:
    return len(words) > 1 and words[0] not in _FUNCTIONS and not words[1].startswith("-")


def _without_comments(words: Sequence[str]) -> list[str]:
    """Words of the command line, without `--print_config=comments` if the library that writes comments is missing."""
    asked = "--print_config=comments"
    if asked not in words or importlib.util.find_spec("ruamel") is not None:
        return list(words)
    notice(f"{asked} needs ruamel.yaml, which isn't installed; the file is printed without comments")
    return ["--print_config" if word == asked else word for word in words]


def _typed(hint: object, value: object) -> object:
    """Build the dataclass of a parameter's type from nested dicts; return any other value unchanged."""
    if not (isinstance(hint, type) and is_dataclass(hint) and isinstance(value, Mapping)):
        return value
    hints = get_type_hints(hint)
    return hint(**{name: _typed(hints[name], inner) for name, inner in value.items()})


def _end_quietly_on_closed_pipe() -> None:
    """Let `mm-convert info DIR | head` end without an error."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _first_line(documented: object) -> str:
    return (documented.__doc__ or "").strip().splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())

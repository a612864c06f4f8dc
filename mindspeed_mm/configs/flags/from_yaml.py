"""Values of flags in a YAML file, typed by the parser that types the words of a command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_mm.configs.flags.parser import SWITCH_VALUES, FlagParser, known_elsewhere, suggestions
from mindspeed_mm.configs.older import is_refused, older_flag
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.configs.yaml_run import FlagValue, YamlRun
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice


@dataclass
class TypedFlags:
    """Flags of a run's file: name → value, and name → file and key, for messages."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def forget(self, names: Iterable[str]) -> None:
        """Drop these flags, as if the file didn't give them."""
        for name in names:
            self.values.pop(name, None)
            self.places.pop(name, None)


def typed_flags(parser: argparse.ArgumentParser, run: YamlRun | None) -> TypedFlags:
    """Type a run's flags; its sections are values of the flags whose files they replace.

    A list gives a flag all of its values. False turns a switch off, and null means the default.

    Raises:
        ConfigError: unknown flags with the nearest name, and wrong values: all of them in one message.
    """
    typed = TypedFlags()
    if run is None:
        return typed
    for name, section in run.sections.items():
        typed.values[name], typed.places[name] = section, section.label
    options = [option for option in parser._option_string_actions if option not in ("-h", "--help")]
    by_name = {option.removeprefix("--").replace("-", "_"): option for option in options}
    problems = []
    for item in run.flags:
        place = f"{run.file}: '{item.key}'"
        option = by_name.get(item.name.replace("-", "_"))
        if option is None and (older := older_flag(item.name)) is not None and not is_refused(older, item.value):
            notice(f"{place} has no effect here, of an older release: {older.became}")
            continue
        if option is None:
            problems.append(_unknown(run.file, item, by_name))
            continue
        action = parser._option_string_actions[option]
        try:
            given = _read(action, option, item.value)
        except ConfigError as error:
            problems.append(f"{place} is {show(item.value)}; {_without(str(error), action)}")
            continue
        if action.dest in typed.places:
            problems.append(f"{place} and {typed.places[action.dest]} are the same flag; keep one")
        elif given:
            typed.values |= given
            typed.places[action.dest] = place
    raise_all(problems)
    return typed


def _unknown(file: str, item: FlagValue, by_name: Mapping[str, str]) -> str:
    elsewhere = known_elsewhere(item.name)
    if elsewhere:
        return f"{file}: '{item.key}' is {show(item.value)}; this flag {elsewhere}"
    near = [option.removeprefix("--").replace("-", "_") for option in suggestions("--" + item.name, by_name.values())]
    start = f"{file}: unknown key '{item.key}' (value {show(item.value)})"
    return start + ("; did you mean " + " or ".join(f"'{name}'" for name in near) + "?" if near else "")


def _read(action: argparse.Action, option: str, value: object) -> dict[str, Any]:
    """Return name → typed value of the flag; empty where the value means the default."""
    words = _words(action, option, value)
    if words is None:
        return {}
    alone = FlagParser(add_help=False, allow_abbrev=False)
    alone._add_action(action)
    return {action.dest: getattr(alone.parse_args(words), action.dest)}


def _words(action: argparse.Action, option: str, value: object) -> list[str] | None:
    several = action.nargs in ("+", "*") or (isinstance(action.nargs, int) and action.nargs > 1)
    if action.nargs == 0:  # a switch of the script's own
        if not isinstance(value, bool):
            raise ConfigError("expected true or false")
        off = [name for name in action.option_strings if name.startswith("--no-")]
        return [option] if value else off[:1] if isinstance(action, argparse.BooleanOptionalAction) else None
    if value is None:
        return [f"{option}=null"] if _takes_null(action) and not several else None
    if several:
        ours = action.default is argparse.SUPPRESS
        items = value.split(",") if isinstance(value, str) and ours else value if isinstance(value, list) else [value]
        return [option, *(str(item).strip() for item in items)] if items else None
    if isinstance(value, list):
        raise ConfigError("expected one value, not a list")
    if isinstance(value, bool) and action.metavar != SWITCH_VALUES:
        if action.nargs == "?":  # a flag that may stand without a value
            return [option] if value else None
        raise ConfigError("expected a value, not a switch")
    return [f"{option}={value}"]


def _takes_null(action: argparse.Action) -> bool:
    """Whether null is a value of a flag of the schema, and doesn't only mean its default."""
    if action.default is not argparse.SUPPRESS or not callable(action.type):
        return False
    try:
        return action.type("null") is None
    except argparse.ArgumentTypeError:
        return False


def _without(message: str, action: argparse.Action) -> str:
    """Strip the flag and the value from an error message, which names the key and its value already."""
    for option in ("/".join(action.option_strings), *action.option_strings):
        message = message.removeprefix(f"{option}: ")
    return message.partition("; ")[2] if message.startswith("found ") else message

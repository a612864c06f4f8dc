"""A run in one YAML file, in place of flags and files: `SCRIPT.py run.yaml [section.key=value …] [--flag …]`.

Such files are written in several dialects. The reader of a dialect turns a file's content into a `YamlRun`: values of
flags, and sections in place of model.json, data.json, tools.json and fsdp2.yaml. What comes after is the same for
all: `arguments.parse_args` types the values like words of a command line, whose flags take precedence.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mindspeed_mm.configs.files import YAML_SUFFIXES, FileSection, parse_yaml, read_yaml
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.utils.errors import ConfigError, MMError

#: a word of a command line that takes the place of a value of the file
_OVERRIDE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*=.*", re.DOTALL)


class FlagValue(NamedTuple):
    """A flag's value in a file: its dotted key, the flag's name, and the value as it was read."""

    key: str
    name: str
    value: Any


@dataclass(frozen=True)
class YamlRun:
    """A run as one YAML file describes it.

    Attributes:
        file: its path.
        flags: values of flags, in the file's order.
        sections: the flag for a file (`mm_model`, `mm_data`, `mm_tool`, `fsdp2_config_path`) → the
            section in that file's place.
        names: flag (with its dashes) or key of one of those files → dotted key that gives it in this file, where the
            dialect has keys of its own; errors add it (`in_words_of_the_file`).
    """

    file: str
    flags: Sequence[FlagValue] = ()
    sections: Mapping[str, FileSection] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


class Dialect(NamedTuple):
    """A way to write a run down; a module of the folder `dialects` defines one as its `DIALECT`.

    Attributes:
        marks: dotted keys that show it. If a file has marks of several dialects, the deepest key decides.
        script: the entry script that takes it.
        read: (content, path) → the run.
    """

    marks: frozenset[str]
    script: str
    read: Callable[[Mapping[str, Any], str], YamlRun]

    def fit(self, content: Mapping[str, Any]) -> int:
        """Return how many parts the longest mark has that is among a file's keys; 0: none is."""
        marks = [mark.split(".") for mark in self.marks]
        return max((len(keys) for keys in marks if _has(content, keys)), default=0)


def dialects() -> list[Dialect]:
    """Return the dialects of all modules of the folder `dialects`, by the modules' names."""
    folder = importlib.import_module("mindspeed_mm.configs.dialects")
    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__))
    return [importlib.import_module(f"{folder.__name__}.{name}").DIALECT for name in names]


def split_yaml(words: Sequence[str]) -> tuple[YamlRun | None, list[str]]:
    """Return the run that the first word of a command line names, None if it is no YAML file, and the flags after it.

    Words `section.key=value` right after the file take the place of its values.

    Raises:
        ConfigError: the file can't be read, or is none of a run that starts here.
    """
    if not words or words[0].startswith("-") or not words[0].lower().endswith(YAML_SUFFIXES):
        return None, list(words)
    count = 1
    while count < len(words) and _OVERRIDE.fullmatch(words[count]):
        count += 1
    return read_yaml_run(words[0], words[1:count]), list(words[count:])


def read_yaml_run(path: str, overrides: Sequence[str] = ()) -> YamlRun:
    """Read a run's YAML file.

    Args:
        path: the file.
        overrides: `section.key=value`, each with a value in YAML, which take the place of the file's.

    Raises:
        ConfigError: it is missing, no YAML, of another entry script, or has unknown sections.
    """
    content = read_yaml(path)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: found {show(content)}, expected sections such as gpt_args, model and data")
    dialect = max(dialects(), key=lambda item: item.fit(content))  # of equal ones the first
    if not dialect.fit(content):
        raise ConfigError(
            f"{path}: the section 'gpt_args' is missing: the flags of the run; found {', '.join(map(str, content))}, "
            f"and none of the keys by which files of {' or '.join(other.script for other in dialects()[1:])} are known"
        )
    for word in overrides:
        key, _, value = word.partition("=")
        content = _with_value(content, key.split("."), parse_yaml(value, f"'{word}', after {path}"), word)
    return dialect.read(content, path)


def _has(content: object, keys: Sequence[str]) -> bool:
    return not keys or (isinstance(content, Mapping) and keys[0] in content and _has(content[keys[0]], keys[1:]))


def _with_value(content: object, keys: Sequence[str], value: object, word: str) -> dict[str, Any]:
    """A mapping with another value at a path of keys."""
    if content is None:
        content = {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"'{word}': the file has {show(content)} there, which has no keys; expected an object")
    inner = value if len(keys) == 1 else _with_value(content.get(keys[0]), keys[1:], value, word)
    return {**content, keys[0]: inner}


@contextmanager
def in_words_of_the_file(words: Sequence[str]) -> Iterator[None]:
    """Add to an error how the flags and keys that it names are written in the run's YAML file.

    Args:
        words: those of the command line.
    """
    try:
        yield
    except MMError as error:
        legend = _legend(str(error), words)
        if legend:
            error.args = (f"{error}\n{legend}",)
        raise


def _legend(message: str, words: Sequence[str]) -> str:
    try:
        run, _ = split_yaml(words)
    except ConfigError:
        return ""
    if run is None:
        return ""
    named = [
        f"{name} is '{key}'"
        for name, key in run.names.items()
        if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", message) and f"'{key}'" not in message
    ]
    return f"in {run.file}: {', '.join(named)}" if named else ""

"""A run in one YAML file, in place of flags and files: `pretrain_transformers.py run.yaml [--flag …]`.

Such files are written in several dialects. The reader of a dialect turns a file's content into a `YamlRun`: values of
flags, and sections in place of model.json, data.json, tools.json and fsdp2.yaml. What comes after is the same for
all: `arguments.parse_args` types the values like words of a command line, whose flags take precedence.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mindspeed_mm.configs.files import YAML_SUFFIXES, FileSection, read_yaml
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.utils.errors import ConfigError


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
    """

    file: str
    flags: Sequence[FlagValue] = ()
    sections: Mapping[str, FileSection] = field(default_factory=dict)


class Dialect(NamedTuple):
    """A way to write a run down; a module of the folder `dialects` defines one as its `DIALECT`.

    Attributes:
        marks: top-level keys that other dialects don't have.
        script: the entry script that takes it.
        read: (content, path) → the run; None: not there yet.
    """

    marks: frozenset[str]
    script: str
    read: Callable[[Mapping[str, Any], str], YamlRun] | None


def dialects() -> list[Dialect]:
    """Return the dialects of all modules of the folder `dialects`, by the modules' names."""
    folder = importlib.import_module("mindspeed_mm.configs.dialects")
    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__))
    return [importlib.import_module(f"{folder.__name__}.{name}").DIALECT for name in names]


def split_yaml(words: Sequence[str]) -> tuple[YamlRun | None, list[str]]:
    """Return the run that the first word of a command line names, None if it is no YAML file, and the other words.

    Raises:
        ConfigError: the file can't be read, or is none of a run that starts here.
    """
    if words and not words[0].startswith("-") and words[0].lower().endswith(YAML_SUFFIXES):
        return read_yaml_run(words[0]), list(words[1:])
    return None, list(words)


def read_yaml_run(path: str) -> YamlRun:
    """Read a run's YAML file.

    Raises:
        ConfigError: it is missing, no YAML, of another entry script, or has unknown sections.
    """
    content = read_yaml(path)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: found {show(content)}, expected sections such as gpt_args, model and data")
    for dialect in dialects():
        found = [key for key in content if key in dialect.marks]
        if found and dialect.read is not None:
            return dialect.read(content, path)
        if found:
            raise ConfigError(
                f"{path}: the sections {', '.join(found)} are those of {dialect.script}, which is not there yet; here "
                "a run is written as gpt_args, model and data"
            )
    raise ConfigError(
        f"{path}: the section 'gpt_args' is missing: the flags of the run; found {', '.join(map(str, content))}"
    )

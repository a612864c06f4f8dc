"""A run in one YAML file, in place of flags and files: `pretrain_transformers.py run.yaml [--flag …]`.

Such files are written in several dialects. The reader of a dialect makes a `YamlRun` of a file's content: values of
flags, and sections that stand for model.json, data.json, tools.json and fsdp2.yaml. What comes after is the same for
all: `arguments.parse_args` types the values like words of a command line, and flags of the command line go before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mindspeed_mm.configs.files import YAML_SUFFIXES, FileSection, read_yaml, top_level_anchors
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.configs.sections import join, raise_all
from mindspeed_mm.utils.errors import ConfigError, did_you_mean
from mindspeed_mm.utils.log import notice


class FlagValue(NamedTuple):
    """A flag's value in a file: the dotted key where it stands, the flag's name, and the value as it was read."""

    key: str
    name: str
    value: Any


@dataclass(frozen=True)
class YamlRun:
    """What one YAML file says of a run.

    Attributes:
        file: its path.
        flags: values of flags, in the file's order.
        sections: the Namespace's attribute for a file (`mm_model`, `mm_data`, `mm_tool`, `fsdp2_config_path`) → the
            section in that file's place.
    """

    file: str
    flags: Sequence[FlagValue] = ()
    sections: Mapping[str, FileSection] = field(default_factory=dict)


class Dialect(NamedTuple):
    """A way to write a run down.

    Attributes:
        marks: top-level keys that other dialects don't have.
        script: the entry script that takes it.
        read: (content, path) → the run; None: not there yet.
    """

    marks: frozenset[str]
    script: str
    read: Callable[[Mapping[str, Any], str], YamlRun] | None


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
        ConfigError: it is missing, no YAML, of another entry script, or holds unknown sections.
    """
    content = read_yaml(path)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: found {show(content)}, expected sections such as gpt_args, model and data")
    for dialect in DIALECTS:
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


_FLAG_SECTIONS = ("gpt_args", "lora_args")
#: section → attribute of the Namespace; the last two, which published files give by their paths, may be written out too
_FILE_SECTIONS = {
    "model": "mm_model",
    "data": "mm_data",
    "tool": "mm_tool",
    "tools": "mm_tool",
    "fsdp2": "fsdp2_config_path",
}
_TOOL_PATH = "MM_TOOL_PATH"
#: top-level keys of published files that only hold a value for other places of the file
_VARIABLES = ("DATASET_DIR", "DATASET_PATH", "FSDP2_PATH", "HF_MODEL_LOAD_PATH", "MM_MODEL_LOAD_PATH", "SAVE_PATH")


def _read_gpt_args(content: Mapping[str, Any], path: str) -> YamlRun:
    """The published file of pretrain_transformers.py: flags in gpt_args and lora_args, model and data beside them."""
    anchors, referred = top_level_anchors(path)
    flags: list[FlagValue] = []
    sections: dict[str, FileSection] = {}
    problems = []
    for key, value in content.items():
        if key == _TOOL_PATH:
            flags.append(FlagValue(key, "mm_tool", value))
        elif key in _FLAG_SECTIONS or key in _FILE_SECTIONS:
            if value is not None and not isinstance(value, Mapping):
                problems.append(f"{path}: '{key}' is {show(value)}; expected an object")
            elif key in _FLAG_SECTIONS:
                flags += _leaves(value or {}, key)
            elif _FILE_SECTIONS[key] in sections:
                problems.append(f"{path}: the sections 'tool' and 'tools' are both given; keep one")
            else:
                sections[_FILE_SECTIONS[key]] = FileSection(path, key, value or {})
        elif key not in _VARIABLES and (key not in anchors or isinstance(value, Mapping)):
            known = (*_FLAG_SECTIONS, *_FILE_SECTIONS, _TOOL_PATH, *_VARIABLES)
            hint = did_you_mean(key, known) or f"; keys here: {', '.join(known[:8])}"
            problems.append(f"{path}: unknown key '{key}' (value {show(value)}){hint}")
        elif anchors.get(key) not in referred:
            notice(
                f"{path}: '{key}' has no effect here: no place of the file refers to it (value: &NAME …, place: *NAME)"
            )
    raise_all(problems)
    return YamlRun(path, flags, sections)


def _leaves(values: Mapping[str, Any], prefix: str) -> list[FlagValue]:
    """Flags by their own names, whatever groups they are written in."""
    found = []
    for name, value in values.items():
        key = join(prefix, name)
        found += _leaves(value, key) if isinstance(value, Mapping) else [FlagValue(key, name, value)]
    return found


DIALECTS = (
    Dialect(frozenset({"gpt_args"}), "pretrain_transformers.py", _read_gpt_args),
    Dialect(frozenset({"parallel", "training", "features"}), "train_fsdp2.py", None),
)

"""The published file of pretrain_transformers.py: flags in gpt_args and lora_args, model and data beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_mm.configs.files import FileSection, top_level_anchors
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.configs.sections import join, raise_all
from mindspeed_mm.configs.working_directory import WORKING_DIRECTORY
from mindspeed_mm.configs.yaml_run import Dialect, FlagValue, YamlRun
from mindspeed_mm.utils.errors import did_you_mean
from mindspeed_mm.utils.log import notice

_FLAG_SECTIONS = ("gpt_args", "lora_args")
#: section → name of the flag; the last two, which published files give by their paths, may be written out too
_FILE_SECTIONS = {
    "model": "mm_model",
    "data": "mm_data",
    "tool": "mm_tool",
    "tools": "mm_tool",
    "fsdp2": "fsdp2_config_path",
}
_TOOL_PATH = "MM_TOOL_PATH"
#: top-level keys of published files that only define a value for other places of the file
_VARIABLES = ("DATASET_DIR", "DATASET_PATH", "FSDP2_PATH", "HF_MODEL_LOAD_PATH", "MM_MODEL_LOAD_PATH", "SAVE_PATH")


def _read(content: Mapping[str, Any], path: str) -> YamlRun:
    anchors, referred = top_level_anchors(path)
    flags: list[FlagValue] = []
    sections: dict[str, FileSection] = {}
    problems = []
    for key, value in content.items():
        if key == WORKING_DIRECTORY:
            if not isinstance(value, str):
                problems.append(f"{path}: '{key}' is {show(value)}; expected the path of a folder")
        elif key == _TOOL_PATH:
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
            known = (*_FLAG_SECTIONS, *_FILE_SECTIONS, _TOOL_PATH, WORKING_DIRECTORY, *_VARIABLES)
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


DIALECT = Dialect(frozenset({"gpt_args"}), "pretrain_transformers.py", _read)

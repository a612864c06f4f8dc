"""Where the relative paths of a run's YAML file start: the key `working_directory` of a run folder's run.yaml."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.configs.files import YAML_SUFFIXES, read_yaml
from mindspeed_mm.configs.flags import GROUPS
from mindspeed_mm.configs.flags.spec import all_flags
from mindspeed_mm.utils.log import notice

WORKING_DIRECTORY = "working_directory"


def enter_working_directory(words: Sequence[str]) -> list[str]:
    """Change to the folder where the relative paths of a run's YAML file start, if the file names one.

    Args:
        words: of a command line, which may begin with the file.

    Returns:
        the words as they are read there: the file, and what flags of paths name, start at the folder before.

    Raises:
        ConfigError: the file can't be read.
    """
    if not words or words[0].startswith("-") or not words[0].lower().endswith(YAML_SUFFIXES):
        return list(words)
    folder = working_directory_of(words[0])
    if folder is None or os.path.realpath(folder) == os.path.realpath(os.curdir):
        return list(words)
    absolute = with_absolute_paths(words)
    change_to(folder, words[0])
    return absolute


def change_to(folder: str, file: str) -> None:
    """Change to the folder where relative paths of a file start, and say so."""
    if os.path.realpath(folder) != os.path.realpath(os.curdir):
        os.chdir(folder)
        notice(f"{file}: its relative paths start at {folder}")


def working_directory_of(path: str) -> str | None:
    """Return the folder where the relative paths of a run's YAML file start; None: the current one.

    It is `working_directory`. Where that isn't there, as on another machine, it is the folder around the run folder
    which `save` of the file names, at the place where the run folder lies now.

    Raises:
        ConfigError: the file can't be read.
    """
    content = read_yaml(path)
    named = content.get(WORKING_DIRECTORY) if isinstance(content, Mapping) else None
    if not isinstance(named, str):
        return None
    if os.path.isdir(named):
        return named
    flags = content.get("gpt_args")
    save = flags.get("save") if isinstance(flags, Mapping) else None
    place = Path(os.path.abspath(path)).parent
    if isinstance(save, str) and not os.path.isabs(save):
        parts = Path(os.path.normpath(save)).parts
        if place.parts[-len(parts) :] == parts:
            return str(place.parents[len(parts) - 1])
    notice(f"{path}: '{WORKING_DIRECTORY}' {named} isn't there; its relative paths start at the current folder")
    return None


def with_absolute_paths(words: Sequence[str]) -> list[str]:
    """Return the words of a command line that begins with a file, with its path and those after flags made absolute.

    A name that is no path here (a model's name on the hub, say) stays as it is.
    """
    kinds = {name: item.path for item in all_flags(GROUPS) for name in item.spellings}
    found, kind = [os.path.abspath(words[0])], None
    for word in words[1:]:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            kind = kinds.get(flag.replace("_", "-"))
            found.append(f"{flag}={_absolute(value, kind)}" if equals and kind else word)
        else:
            found.append(_absolute(word, kind) if kind else word)
    return found


def _absolute(path: str, kind: str) -> str:
    return os.path.abspath(path) if path and (kind == "output" or os.path.exists(path)) else path


def named_from(folder: str, path: Any) -> Any:
    """Return a path relative to a folder that it is inside of; anything else as it is."""
    if not isinstance(path, str) or not path:
        return path
    relative = os.path.relpath(os.path.abspath(path), folder)
    return path if relative.split(os.sep)[0] == os.pardir else relative

"""Keys of published configuration files that have no effect here: accepted, and logged once, with the reason.

`published_keys.json` lists the names: for each kind of file, dotted prefix → names at that level. The keys that we
honour are the fields of the sections (`data_config.py`, `model_config.py`, …) and need not be listed there.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from mindspeed_mm.configs.scalars import read_bool, read_float, show
from mindspeed_mm.configs.sections import Section, key_paths, sort_keys
from mindspeed_mm.utils.errors import nearest_names
from mindspeed_mm.utils.log import notice


@functools.cache
def published_paths(kind: str) -> frozenset[str]:
    """Return the dotted paths of one kind of file: `data`, `model` or `tools`."""
    text = resources.files("mindspeed_mm.configs").joinpath("published_keys.json").read_text(encoding="utf-8")
    levels: Mapping[str, Sequence[str]] = json.loads(text)[kind]
    paths = set()
    for prefix, lines in levels.items():
        for name in " ".join(lines).split():
            paths.add(f"{prefix}.{name}" if prefix else name)
    return frozenset(paths)


class NoEffect(NamedTuple):
    """Why the keys whose whole dotted path matches `pattern` have no effect here."""

    pattern: str
    why: str


class Refused(NamedTuple):
    """A key that can't be neglected without changing what is trained, and isn't there yet.

    `when` says which values ask for the missing thing; other values are fine.
    """

    path: str
    when: Callable[[Any], bool]
    sentence: str


def is_on(value: object) -> bool:
    """Whether a published switch is on (anything but a clear false or null counts)."""
    if value is None:
        return False
    try:
        return read_bool(value)
    except ValueError:
        return True


def is_given(value: object) -> bool:
    """Whether a published value is given: not null, not empty."""
    return value not in (None, "", [], {})


def is_not_zero(value: object) -> bool:
    """Whether a published value is given and is another number than 0 (anything but a number counts)."""
    try:
        return is_given(value) and read_float(value) != 0
    except ValueError:
        return True


def refusals(keys: Mapping[str, Any], rules: Iterable[Refused], file: str) -> list[str]:
    """Return the sentences about those of `keys` (path → value) that are refused."""
    return [
        f"{file}: '{rule.path}' is {show(keys[rule.path])}; {rule.sentence}"
        for rule in rules
        if rule.path in keys and rule.when(keys[rule.path])
    ]


def log_no_effect(keys: Iterable[str], rules: Sequence[NoEffect], file: str) -> None:
    """Log once, for each reason, which of `keys` have no effect here. The last rule must match everything."""
    by_reason: dict[str, list[str]] = {}
    for path in keys:
        why = next(rule.why for rule in rules if re.fullmatch(rule.pattern, path))
        by_reason.setdefault(why, []).append(path)
    for why, paths in by_reason.items():
        notice(f"{file}: no effect here: {', '.join(paths)}: {why}")


def warn_of_near_keys(cls: type[Section], mapping: Mapping[str, Any], file: str, published: Iterable[str]) -> None:
    """Log which keys of a user's own file look like misspelt known ones; any others are fine there."""
    published = list(published)
    known = key_paths(cls) + published
    for path in sort_keys(cls, mapping, published).unknown:
        prefix, _, name = path.rpartition(".")
        level = {p.rpartition(".")[2] for p in known if p.rpartition(".")[0] == prefix}
        near = nearest_names(name, level, limit=1)
        if near:
            full = f"{prefix}.{near[0]}" if prefix else near[0]
            notice(f"{file}: key '{path}' is taken as your model's own; did you mean '{full}'?")

"""Keys and flags of older releases and of other trainers: messages say what became of each, not the nearest name.

A key whose neglect would change what is trained is refused with what to write; one that nothing depends on any more is
accepted, and logged once with the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from mindspeed_mm.configs.older_keys import OLDER, Older, SettingKind
from mindspeed_mm.configs.scalars import read_bool, show
from mindspeed_mm.utils.log import notice


@functools.cache
def _table(kind: SettingKind) -> Mapping[str, Older]:
    return {path: row for row in OLDER if row.kind == kind for path in row.paths()}


def older_key(kind: SettingKind, path: str) -> Older | None:
    """Return the row of a key (dotted path) or flag (without dashes in front); None: it is no older one.

    A key inside an object that is older as a whole is older too.
    """
    table = _table(kind)
    while path:
        if path in table:
            return table[path]
        path = path.rpartition(".")[0]
    return None


def settle_older(kind: SettingKind, unknown: MutableMapping[str, Any], file: str) -> list[str]:
    """Take the keys of older releases out of `unknown` (path → value).

    Returns:
        a sentence about each that is refused; the others are logged.
    """
    problems: list[str] = []
    without_effect: dict[tuple[str, str], list[str]] = {}
    for path in list(unknown):
        row = older_key(kind, path)
        if row is None:
            continue
        value = unknown.pop(path)
        if is_refused(row, value):
            problems.append(f"{file}: '{path}' is {show(value)}; this key is of {row.of}: {row.became}")
        else:
            without_effect.setdefault((row.of, row.became), []).append(f"'{path}'")
    for (of, became), paths in without_effect.items():
        notice(f"{file}: no effect here: {', '.join(paths)}, of {of}: {became}")
    return problems


def is_refused(row: Older, value: object) -> bool:
    """Whether a value of an older key asks for something that its neglect would change."""
    if row.fate == "built in" or value in (None, "", [], {}):
        return False
    return row.is_structure or not _is_off(value)


def _is_off(value: object) -> bool:
    if isinstance(value, (int, float)):
        return not value
    try:
        return not read_bool(value)
    except ValueError:
        return False


def older_flag(name: str) -> Older | None:
    """Return the row of a flag, with or without dashes in front, underscores or dashes inside."""
    return older_key("flag", name.lstrip("-").replace("-", "_"))


def drop_older_flags(words: Sequence[str], known: Mapping[str, Any]) -> list[str]:
    """Leave out the flags of older releases that nothing depends on any more, with their values, and log which.

    Args:
        words: of a launch command.
        known: the flags that the parser has; they are never older ones.
    """
    kept: list[str] = []
    without_effect: dict[str, list[str]] = {}
    dropping = False
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0]
            row = older_flag(name) if name not in known else None
            dropping = row is not None and row.fate == "built in"
            if row is not None and dropping:
                without_effect.setdefault(row.became, []).append(name)
        if not dropping:
            kept.append(word)
    for became, names in without_effect.items():
        notice(f"no effect here: {', '.join(names)}, of an older release: {became}")
    return kept

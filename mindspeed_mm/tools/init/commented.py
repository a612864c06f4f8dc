"""YAML with comments: a mapping, and what is said above its keys and at the end of its sections."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

_WIDTH = 110


def commented_yaml(
    heading: Sequence[str], content: Mapping[str, Any], above: Mapping[str, str], after: Mapping[str, Sequence[str]]
) -> str:
    """Return the text of a YAML file.

    Args:
        heading: lines of comments at the top.
        content: nested mappings; anything else is a value.
        above: dotted key → comment that stands above it; one without such a key is an error.
        after: dotted key of a mapping → comments at its end.
    """
    left = {**above, **after}
    lines = [f"# {line}".rstrip() for line in heading]
    for name, value in content.items():
        lines += ["", *_key(name, value, "", (above, after), left, 0)]
    assert not left, f"no such keys: {', '.join(left)}"
    return "\n".join(lines) + "\n"


def _key(
    name: str,
    value: object,
    prefix: str,
    comments: tuple[Mapping[str, str], Mapping[str, Sequence[str]]],
    left: dict[str, Any],
    depth: int,
) -> Iterator[str]:
    above, after = comments
    path = f"{prefix}.{name}" if prefix else name
    if path in above:
        yield from _comment(above[path], depth)
    left.pop(path, None)
    if not isinstance(value, Mapping) or not value:
        yield f"{_indent(depth)}{name}: {_scalar(value)}"
    else:
        yield f"{_indent(depth)}{name}:"
        for inner, item in value.items():
            yield from _key(inner, item, path, comments, left, depth + 1)
    for note in after.get(path, ()):
        yield from _comment(note, depth + 1)


def _comment(text: str, depth: int) -> list[str]:
    lines = textwrap.wrap(text, _WIDTH - 2 * depth - 2, break_long_words=False, break_on_hyphens=False)
    return [f"{_indent(depth)}# {line}" for line in lines]


def _indent(depth: int) -> str:
    return "  " * depth


def _scalar(value: object) -> str:
    dumped = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return dumped.removesuffix("\n").removesuffix("...").strip()

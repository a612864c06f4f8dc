"""Reading JSON and YAML configuration files so that every fault in them is a sentence with its place.

Files are UTF-8 whatever the locale says, with or without a byte-order mark, with any line ends. A key written twice in
one object is an error, because the parsers would silently keep one of the two.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mindspeed_mm.utils.errors import ConfigError, nearest_names
from mindspeed_mm.utils.text import shorten

JSON_SUFFIXES = (".json",)
YAML_SUFFIXES = (".yaml", ".yml")


class FileSection(str):
    """The path of a YAML file, standing for one section of it; it is accepted wherever the path of a whole file is.

    Attributes:
        section: the section's key.
        content: of the section.
    """

    section: str
    content: Mapping[str, Any]

    def __new__(cls, path: str, section: str, content: Mapping[str, Any]) -> FileSection:
        self = super().__new__(cls, path)
        self.section, self.content = section, content
        return self

    def __reduce__(self) -> tuple[type[FileSection], tuple[str, str, Mapping[str, Any]]]:
        return type(self), (str(self), self.section, self.content)

    @property
    def label(self) -> str:
        """The section as messages name it."""
        return f"{self}, section {self.section}"


def describe_missing(path: str | Path) -> str:
    """Return a sentence about a path that doesn't exist, with the nearest name in the same folder."""
    written = shorten(str(path), 400)
    if len(str(path)) > 4096:
        return f"{written} is no path: none is longer than 4096 characters"
    path = Path(path)
    parent = path.absolute().parent
    if os.path.isdir(parent):
        names = nearest_names(path.name, (entry.name for entry in parent.iterdir()), limit=1)
        near = f"; did you mean '{path.with_name(names[0])}'?" if names else ""
        return f"{written} does not exist{near}"
    missing = path.absolute()
    while not os.path.isdir(missing.parent):
        missing = missing.parent
    names = nearest_names(missing.name, (entry.name for entry in missing.parent.iterdir()), limit=1)
    near = f"; '{missing.parent}' holds '{names[0]}'" if names else ""
    return f"{written} does not exist: there is no '{missing}'{near}"


def read_text(path: str | Path) -> str:
    """Read a UTF-8 text file; a byte-order mark and carriage returns are dropped.

    Raises:
        ConfigError: the path is missing or no file, or its bytes aren't UTF-8 (with the line of the first bad byte).
    """
    path = Path(path)
    if not os.path.exists(path):
        raise ConfigError(describe_missing(path))
    if not path.is_file():
        raise ConfigError(f"{path} is a directory; expected a file")
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: str | Path) -> Any:
    """Read a JSON file.

    Raises:
        ConfigError: unreadable, not JSON (with line and column), a key written twice, or NaN/Infinity.
    """
    text = read_text(path)

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise ConfigError(f"{path}: key '{key}' is written twice in one object{_lines_with_key(text, key)}")
            result[key] = value
        return result

    def refuse_constant(name: str) -> None:
        raise ConfigError(f"{path}: {name} is not a JSON value; write a number or null")

    if not text.strip():
        raise ConfigError(f"{path} is empty; expected a JSON object (at least {{}})")
    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from None


def _lines_with_key(text: str, key: str) -> str:
    pattern = re.compile(re.escape(json.dumps(key, ensure_ascii=False)) + r"\s*:")
    lines = [str(number) for number, line in enumerate(text.split("\n"), 1) if pattern.search(line)]
    return f" (it stands in lines {', '.join(lines[:6])})" if len(lines) > 1 else ""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the number forms people write, and without the surprising ones of YAML 1.1.

    `1e-5` and `1E5` are numbers; `1:30` isn't 90, `010` isn't 8 and `2024-01-01` isn't a date: those stay text.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Let an anchor be defined again, as YAML does: an alias means the last one before it."""
        event = self.peek_event()
        if not isinstance(event, yaml.AliasEvent):
            self.anchors.pop(getattr(event, "anchor", None), None)
        return super().compose_node(parent, index)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rsplit(":", 1)[-1] not in ("int", "float", "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


def _construct_unique_mapping(loader: _Loader, node: yaml.MappingNode) -> Any:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key, line = key_node.value, key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, "a key must be text", key_node.start_mark)
        if key in seen:
            problem = f"key '{key}' is written twice in one mapping (first in line {seen[key]})"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        seen[key] = line
    data: dict[Any, Any] = {}
    yield data  # two steps, as SafeLoader does it, so that anchors may refer to the mapping they are in
    loader.flatten_mapping(node)
    data.update({key_node.value: loader.construct_object(value_node) for key_node, value_node in node.value})


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_unique_mapping)


def _yaml_text(path: str | Path) -> str:
    # PyYAML refuses a tab after a value, which YAML allows and published examples contain.
    return re.sub(r"[ \t]+$", "", read_text(path), flags=re.MULTILINE)


def read_yaml(path: str | Path) -> Any:
    """Read a YAML file (plain data only); an empty file gives None.

    Raises:
        ConfigError: unreadable, not YAML (with line, column and reason), or a key written twice.
    """
    return parse_yaml(_yaml_text(path), str(path))


def parse_yaml(text: str, where: str) -> Any:
    """Read YAML text (plain data only); `where` names it in messages.

    Raises:
        ConfigError: not YAML (with line, column and reason), or a key written twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{where}{place}: not YAML: {reason}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())}") from None


def top_level_anchors(path: str | Path) -> tuple[dict[str, str], set[str]]:
    """Return a readable YAML file's anchors: (top-level key → anchor of its value, anchors that are referred to)."""
    anchors: dict[str, str] = {}
    referred: set[str] = set()
    depth, key = 0, None
    for event in yaml.parse(_yaml_text(path), Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            referred.add(event.anchor)
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.NodeEvent):
            if depth == 1 and key is None:
                key = getattr(event, "value", "")
            elif depth == 1:
                if event.anchor and not isinstance(event, yaml.AliasEvent):
                    anchors[str(key)] = event.anchor
                key = None
            depth += isinstance(event, yaml.CollectionStartEvent)
    return anchors, referred

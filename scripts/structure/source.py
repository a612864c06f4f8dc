"""Python files, parsed and not imported."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Hit(NamedTuple):
    """A place that is counted."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Source:
    """A parsed file.

    Attributes:
        path: from the folder of the package, as the tables of `scripts/count_structure.py` name it.
        module: its dotted name, the package's included.
        lines: how many it has.
    """

    path: str
    module: str
    tree: ast.Module
    lines: int

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the file."""
        return list(ast.walk(self.tree))

    @cached_property
    def functions(self) -> list[Function]:
        """Every function of the file, methods and those inside others included."""
        return [node for node in self.nodes if isinstance(node, Function)]

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    def hit(self, node: ast.AST, text: str) -> Hit:
        return Hit(self.path, getattr(node, "lineno", 1), text)

    def is_in(self, places: Sequence[str]) -> bool:
        """Whether the file is one of `places`, or in one of its folders (which end with a slash)."""
        return any(self.path.startswith(place) if place.endswith("/") else self.path == place for place in places)


def read_package(folder: Path) -> list[Source]:
    """Parse every Python file below `folder`, whose name is the package's."""
    return [parse(path, folder, folder.name) for path in sorted(folder.rglob("*.py"))]


def parse(path: Path, folder: Path, package: str) -> Source:
    """Parse one file of a folder, as a module of `package`."""
    text = path.read_text(encoding="utf-8")
    inside = path.relative_to(folder)
    names = (package, *inside.with_suffix("").parts)
    module = ".".join(names[:-1] if names[-1] == "__init__" else names)
    return Source(inside.as_posix(), module, ast.parse(text, str(path)), text.count("\n"))

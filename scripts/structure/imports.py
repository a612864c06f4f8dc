"""Cycles of imports between the files of a package."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from scripts.structure.source import Function, Hit, Source


def import_cycles(package: Sequence[Source], *, deferred: bool = False, typing: bool = False) -> Iterator[Hit]:
    """Every file that is in a cycle of imports, with the way back to it.

    Args:
        package: all its files. `from package import module` is an import of that module alone.
        deferred: whether imports inside functions count.
        typing: whether imports under TYPE_CHECKING count.
    """
    known = {source.module: source for source in package}
    graph: dict[str, dict[str, int]] = {source.module: {} for source in package}
    for source in package:
        for node in _imports(source.tree.body, deferred, typing):
            for name in _imported(node, source, known):
                if name != source.module:
                    graph[source.module].setdefault(name, node.lineno)
    for module, imported in graph.items():
        back = min((way for name in imported if (way := _way(graph, name, module))), key=len, default=None)
        if back is not None:
            yield Hit(known[module].path, imported[back[0]], " → ".join((module, *back)))


def _imports(body: Sequence[ast.stmt], deferred: bool, typing: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from _imports([*(node.body if typing else ()), *node.orelse], deferred, typing)
        elif deferred or not isinstance(node, Function):
            for name in ("body", "orelse", "finalbody"):
                yield from _imports(getattr(node, name, ()), deferred, typing)
            for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                yield from _imports(part.body, deferred, typing)


def _imported(node: ast.Import | ast.ImportFrom, source: Source, known: Mapping[str, Source]) -> Iterator[str]:
    """The modules of the package that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
        return
    base = node.module or ""
    if node.level:
        parents = source.module.split(".")
        parents = parents[: len(parents) - node.level + (1 if source.is_package else 0)]
        base = ".".join((*parents, base)) if base else ".".join(parents)
    for alias in node.names:
        name = f"{base}.{alias.name}"
        if name in known:
            yield name
        elif base in known:
            yield base


def _way(graph: Mapping[str, Mapping[str, int]], start: str, end: str) -> list[str] | None:
    """The shortest way along imports from one module to another, both included."""
    came_from: dict[str, str | None] = {start: None}
    waiting = [start]
    for module in waiting:
        if module == end:
            way = [module]
            while (before := came_from[way[-1]]) is not None:
                way.append(before)
            return way[::-1]
        for name in graph[module]:
            if name not in came_from:
                came_from[name] = module
                waiting.append(name)
    return None

"""Patterns of module paths: `model.layers.{*}`, `{0-23}`, `{1,3,5}`, combinations, and paths after a brace.

Used for wrapping, ignoring, recompute and freezing. Source: the fsdp2.yaml of MindSpeed-MM ("pattern grammar").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from torch import nn

from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.utils.errors import ConfigError, nearest_names
from mindspeed_mm.utils.log import notice

_BRACE = re.compile(r"^\{([^{}]*)\}$")
_NAME = re.compile(r"^[^{}*?]+$")
_ITEM = re.compile(r"^(\d+)(?:-(\d+))?$")
_INDEX_SEGMENT = re.compile(r"(?<![^.])(?:\d+|\{[^{}]*\})(?![^.])")


def expand_patterns(
    root: nn.Module,
    patterns: Iterable[str],
    *,
    where: str,
    older: Mapping[str, str] = MappingProxyType({}),
    at: str = "",
    ignore_missing: bool = False,
) -> dict[str, nn.Module]:
    """Return the modules of `root` that match `patterns`, in order of appearance, each once.

    After `{*}`, only those children count that have the rest of the path (the layers with experts).

    Args:
        root: the module that paths are relative to; the empty pattern matches `root` itself.
        patterns: entries such as `model.layers.{0-3,5}.mlp`.
        where: name of the list in error messages, for example `fsdp2.yaml: sub_modules_to_wrap`.
        older: path prefix of an older layout (whole segments) → its path in `root`. Used if an entry matches nothing;
            a notice gives the current path.
        at: prefix of paths in messages, for example `predictor.` if the paths of the file start at an outer module.
        ignore_missing: entries that match nothing are left out, each with a notice, instead of being an error.

    Raises:
        ConfigError: entries, or indices of them, can't be read or match nothing; the message lists each with the names
            that exist at that level and the nearest path.
    """
    found: dict[str, nn.Module] = {}
    problems: list[str] = []
    for pattern in patterns:
        try:
            for path, module in _find(root, pattern, where, older, at):
                found.setdefault(path, module)
        except _Missing as error:
            if not ignore_missing:
                problems.append(f"{where}: {error}")
            else:
                notice(f"{where}: no effect: {error}")
        except ConfigError as error:
            problems.append(f"{where}: {error}")
    raise_all(problems)
    return found


def expand_parameters(
    root: nn.Module, patterns: Iterable[str], *, where: str, older: Mapping[str, str] = MappingProxyType({})
) -> dict[str, nn.Parameter]:
    """Return the parameters that `patterns` name: all of a module's, or one by its own name (`lm_head.weight`).

    Args:
        root, patterns, where, older: as in `expand_patterns`.

    Raises:
        ConfigError: entries name no parameter; the message lists each with what exists and the nearest path.
    """
    found: dict[str, nn.Parameter] = {}
    problems: list[str] = []
    for pattern in patterns:
        try:
            for path, module in _find(root, pattern, where, older, ""):
                found.update((join_paths(path, name), parameter) for name, parameter in module.named_parameters())
        except ConfigError as error:
            named, known = _parameters_named(root, pattern, where, older)
            found.update(named)
            if not named:
                beside = f"; its parameters: {', '.join(known)}" if known else ""
                problems.append(f"{where}: {error}{beside}")
    raise_all(problems)
    return found


def _parameters_named(
    root: nn.Module, pattern: str, where: str, older: Mapping[str, str]
) -> tuple[dict[str, nn.Parameter], list[str]]:
    """Parameters that an entry gives by their own name; and the names of those that are at its level."""
    above, _, name = str(pattern).strip().rpartition(".")
    try:
        modules = _find(root, above, where, older, "")
    except ConfigError:
        return {}, []
    at_level = {path: dict(module.named_parameters(recurse=False)) for path, module in modules}
    known = sorted({key for parameters in at_level.values() for key in parameters})
    if not all(name in parameters for parameters in at_level.values()):
        return {}, known
    return {join_paths(path, name): parameters[name] for path, parameters in at_level.items()}, known


def join_paths(path: str, below: str) -> str:
    """Return the path of the submodule `below` of the module at `path`; either may be empty."""
    return f"{path}.{below}" if path and below else path or below


def containing_path(path: str, paths: Iterable[str]) -> str | None:
    """Return the innermost of `paths` whose module is or contains the one at `path`; None if there is none."""
    containers = [p for p in paths if not p or f"{path}.".startswith(f"{p}.")]
    return max(containers, key=len, default=None)


def _find(root: nn.Module, pattern: str, where: str, older: Mapping[str, str], at: str) -> list[tuple[str, nn.Module]]:
    if not isinstance(pattern, str):
        raise ConfigError(f"entry {pattern!r} is a {type(pattern).__name__}; expected a module path")
    written = pattern.strip()
    try:
        return _expand(root, written, at)
    except ConfigError:
        current = _current_path(written, older)
        try:
            found = _expand(root, current, at) if current is not None else None
        except ConfigError:
            found = None
        if found is None:
            raise
    name = next(c.__name__ for c in type(root).__mro__ if not c.__name__.startswith("FSDP"))
    notice(f"{where}: '{at}{written}' of an older layout is '{at}{current}' in {name}; write that")
    return found


def _current_path(pattern: str, older: Mapping[str, str]) -> str | None:
    """Return `pattern` in the current layout, by the longest path of `older` that it starts with."""
    for path in sorted(older, key=len, reverse=True):
        if f"{pattern}.".startswith(f"{path}."):
            return older[path] + pattern[len(path) :]
    return None


class _Missing(ConfigError):
    """An entry matches nothing."""


class _NoMatch(Exception):
    """A segment of a path matches nothing."""


def _expand(root: nn.Module, pattern: str, at: str) -> list[tuple[str, nn.Module]]:
    matches: list[tuple[str, nn.Module]] = [("", root)]
    has_any = False  # whether the path so far has a `{*}`
    try:
        for segment in _segments(pattern):
            matches = _steps(matches, segment, at, some=has_any)
            has_any = has_any or segment.replace(" ", "") == "{*}"
    except _NoMatch as error:
        hint = nearest_path(root, at + pattern, at)
        raise _Missing(f"entry '{at}{pattern}' matches nothing: {error}{hint}") from None
    except ConfigError as error:
        raise ConfigError(f"entry '{at}{pattern}' {error}") from None
    return matches


def _steps(
    matches: Sequence[tuple[str, nn.Module]], segment: str, at: str, *, some: bool
) -> list[tuple[str, nn.Module]]:
    """Return the children that a segment names; of `some` matches at least one must have it, else all of them."""
    found: list[tuple[str, nn.Module]] = []
    first: _NoMatch | None = None
    for match in matches:
        try:
            found += _step(match, segment, at)
        except _NoMatch as error:
            if not some:
                raise
            first = first or error
    if first is not None and not found:
        raise first
    return found


def _segments(pattern: str) -> list[str]:
    if not pattern:
        return []
    # the grammar has no dots inside braces, so splitting at dots keeps `{0-3,5}` together
    segments = pattern.split(".")
    for segment in segments:
        if not segment or (not _BRACE.match(segment) and not _NAME.match(segment)):
            raise ConfigError(
                f"can't be read at '{segment}'; expected a path such as 'model.layers.{{*}}', 'model.layers.{{0-23}}' "
                "or 'model.layers.{1,3,5}.mlp'"
            )
    return segments


def _step(match: tuple[str, nn.Module], segment: str, at: str) -> list[tuple[str, nn.Module]]:
    path, module = match
    brace = _BRACE.match(segment)
    if brace is None:
        child = module._modules.get(segment)
        if child is None:
            raise _NoMatch(f"{_level(path, at)} has no '{segment}'{_what_exists(module)}")
        return [(join_paths(path, segment), child)]
    indices = _indices(brace.group(1), path, module, at)
    return [(join_paths(path, str(i)), module._modules[str(i)]) for i in indices]  # type: ignore[misc]


def _indices(spec: str, path: str, module: nn.Module, at: str) -> Sequence[int]:
    present = [int(name) for name, child in module._modules.items() if name.isdigit() and child is not None]
    if not present:
        raise _NoMatch(
            f"{_level(path, at)} is a {type(module).__name__} without numbered children{_what_exists(module)}"
        )
    if spec.strip() == "*":
        return present
    wanted: list[int] = []
    for item in spec.split(","):
        parsed = _ITEM.match(item.strip())
        if parsed is None:
            raise ConfigError(f"holds '{{{spec}}}'; expected {{*}}, or numbers and ranges such as {{0-3,5}}")
        first, last = int(parsed.group(1)), int(parsed.group(2) or parsed.group(1))
        if last < first:
            raise ConfigError(f"holds the empty range '{item.strip()}'; write {last}-{first}")
        wanted.extend(range(first, last + 1))
    missing = [i for i in wanted if i not in present]
    if missing:
        raise ConfigError(
            f"names index {missing[0]}, but {_level(path, at)} has {len(present)} elements ({present[0]}-{present[-1]})"
        )
    return list(dict.fromkeys(wanted))


def _level(path: str, at: str) -> str:
    whole = f"{at}{path}".rstrip(".")
    return f"'{whole}'" if whole else "the model"


def _what_exists(module: nn.Module) -> str:
    names = [name for name, child in module._modules.items() if child is not None]
    if not names:
        return f" (a {type(module).__name__} has no submodules)"
    numbered = [n for n in names if n.isdigit()]
    if len(numbered) == len(names):
        return f"; there is: {numbered[0]}-{numbered[-1]}"
    return f"; there is: {', '.join(names[:20])}" + (", …" if len(names) > 20 else "")


def nearest_path(root: nn.Module, pattern: str, at: str = "") -> str:
    """Return `; did you mean 'path'?` with the path most similar to `pattern`, and its indices; "" if none is similar.

    Args:
        root: the module whose paths are searched.
        at: prefix of `root`'s paths in `pattern` and in the result.
    """
    known = dict.fromkeys(_INDEX_SEGMENT.sub("{*}", at + path) for path, _ in root.named_modules() if path)
    near = nearest_names(_INDEX_SEGMENT.sub("{*}", pattern), known, limit=1)
    if not near:
        return ""
    path, indices = near[0], _INDEX_SEGMENT.findall(pattern)
    if len(indices) == path.count("{*}"):
        path = _INDEX_SEGMENT.sub(lambda _: indices.pop(0), path)
    return f"; did you mean '{path}'?"

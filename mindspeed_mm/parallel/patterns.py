"""The one language for naming modules: `model.layers.{*}`, `{0-23}`, `{1,3,5}`, mixtures, a tail after the brace.

Used for wrapping, ignoring, recompute and freezing. Source: the fsdp2.yaml of MindSpeed-MM ("pattern grammar").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import nn

from mindspeed_mm.utils.errors import ConfigError, did_you_mean

_BRACE = re.compile(r"^\{([^{}]*)\}$")
_ITEM = re.compile(r"^(\d+)(?:-(\d+))?$")


def expand_patterns(root: nn.Module, patterns: Iterable[str], *, where: str) -> dict[str, nn.Module]:
    """Return the modules of `root` that `patterns` name, in order of appearance, each once.

    Args:
        root: the module that paths are relative to; the empty pattern names `root` itself.
        patterns: entries such as `model.layers.{0-3,5}.mlp`.
        where: what to call the list in errors, for example `fsdp2.yaml: sub_modules_to_wrap`.

    Raises:
        ConfigError: an entry, or an index of it, matches nothing; names what exists at that level.
    """
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        for path, module in _expand(root, pattern, where):
            found.setdefault(path, module)
    return found


def _expand(root: nn.Module, pattern: str, where: str) -> list[tuple[str, nn.Module]]:
    matches: list[tuple[str, nn.Module]] = [("", root)]
    for segment in _segments(pattern, where):
        matches = [child for match in matches for child in _step(match, segment, pattern, where)]
    return matches


def _segments(pattern: str, where: str) -> list[str]:
    if not isinstance(pattern, str):
        raise ConfigError(f"{where}: entry {pattern!r} is a {type(pattern).__name__}; expected a module path")
    stripped = pattern.strip()
    if not stripped:
        return []
    # dots inside a brace don't occur in the grammar, so a plain split keeps `{0-3,5}` whole
    segments = stripped.split(".")
    for segment in segments:
        if not segment or (("{" in segment or "}" in segment) and not _BRACE.match(segment)):
            raise ConfigError(
                f"{where}: entry '{pattern}' can't be read at '{segment}'; expected a path such as "
                "'model.layers.{*}', 'model.layers.{0-23}' or 'model.layers.{1,3,5}.mlp'"
            )
    return segments


def _step(match: tuple[str, nn.Module], segment: str, pattern: str, where: str) -> list[tuple[str, nn.Module]]:
    path, module = match
    brace = _BRACE.match(segment)
    if brace is None:
        child = module._modules.get(segment)
        if child is None:
            raise ConfigError(
                f"{where}: entry '{pattern}' matches nothing: {_level(path)} has no '{segment}'"
                f"{_what_exists(module, segment)}"
            )
        return [(_join(path, segment), child)]
    indices = _indices(brace.group(1), path, module, pattern, where)
    return [(_join(path, str(i)), module._modules[str(i)]) for i in indices]  # type: ignore[misc]


def _indices(spec: str, path: str, module: nn.Module, pattern: str, where: str) -> Sequence[int]:
    present = [int(name) for name, child in module._modules.items() if name.isdigit() and child is not None]
    if not present:
        raise ConfigError(
            f"{where}: entry '{pattern}' matches nothing: {_level(path)} is a {type(module).__name__} without numbered "
            f"children{_what_exists(module, '')}"
        )
    if spec.strip() == "*":
        return present
    wanted: list[int] = []
    for item in spec.split(","):
        parsed = _ITEM.match(item.strip())
        if parsed is None:
            raise ConfigError(
                f"{where}: entry '{pattern}' holds '{{{spec}}}'; expected {{*}}, or numbers and ranges such as "
                f"{{0-3,5}}"
            )
        first, last = int(parsed.group(1)), int(parsed.group(2) or parsed.group(1))
        if last < first:
            raise ConfigError(
                f"{where}: entry '{pattern}' holds the empty range '{item.strip()}'; write {last}-{first}"
            )
        wanted.extend(range(first, last + 1))
    missing = [i for i in wanted if i not in present]
    if missing:
        raise ConfigError(
            f"{where}: entry '{pattern}' names index {missing[0]}, but {_level(path)} has {len(present)} elements "
            f"({present[0]}-{present[-1]})"
        )
    return list(dict.fromkeys(wanted))


def _join(path: str, segment: str) -> str:
    return f"{path}.{segment}" if path else segment


def _level(path: str) -> str:
    return f"'{path}'" if path else "the model"


def _what_exists(module: nn.Module, wanted: str) -> str:
    names = [name for name, child in module._modules.items() if child is not None]
    if not names:
        return f" (a {type(module).__name__} has no submodules)"
    numbered = [n for n in names if n.isdigit()]
    if len(numbered) == len(names):
        listed = f"{numbered[0]}-{numbered[-1]}"
    else:
        listed = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
    return f"; there is: {listed}{did_you_mean(wanted, names)}"

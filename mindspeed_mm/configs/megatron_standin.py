"""`from megatron.training import get_args` for scripts written against Megatron-LM, with or without Megatron-LM.

`megatron.training` belongs to Megatron-LM and isn't in the pip package of megatron-core. Two import hooks make the line
work either way, and cost nothing where it isn't used:

* where Megatron-LM is absent, a stand-in module offers `get_args` and `set_args`, and nothing else;
* where it is installed, its own `megatron.training.global_vars` is used, and given our arguments once it is imported.

Neither hook imports megatron-core or looks at `megatron.core`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from mindspeed_mm.configs import global_args

_GLOBALS_MODULE = "megatron.training.global_vars"
_STAND_IN_MODULES = ("megatron.training", _GLOBALS_MODULE)

_STAND_IN_DOC = """Stand-in by mindspeed_mm: Megatron-LM is not installed.

Offers `get_args()` and `set_args(args)`, which are mindspeed_mm.configs.global_args'; for anything else install
Megatron-LM itself.
"""


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Supplies the stand-in. It is last in `sys.meta_path`: used only where no other finder has the module."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "megatron":
            # Without megatron-core there is no such package at all; an empty one lets the submodule be imported.
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name in _STAND_IN_MODULES:
            return importlib.machinery.ModuleSpec(name, self, origin=__file__, is_package=name == "megatron.training")
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "megatron":
            return
        module.__doc__ = _STAND_IN_DOC
        vars(module).update(get_args=global_args.get_args, set_args=global_args.set_args)


class _BridgeFinder(importlib.abc.MetaPathFinder):
    """Gives Megatron-LM's own `global_vars` our arguments once it is imported. It is first in `sys.meta_path`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _GLOBALS_MODULE:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, (_BridgeFinder, _StandInFinder)) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _BridgeLoader(spec.loader)
                return spec
        return None


class _BridgeLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        global_args.mirror_into(module)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)


def install() -> None:
    """Put both hooks in place (once; later calls change nothing)."""
    if not any(isinstance(finder, _BridgeFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BridgeFinder())
    if not any(isinstance(finder, _StandInFinder) for finder in sys.meta_path):
        sys.meta_path.append(_StandInFinder())
    # Imported before us (a script that starts with Megatron's imports): the bridge would come too late.
    loaded = sys.modules.get(_GLOBALS_MODULE)
    if loaded is not None and hasattr(loaded, "_GLOBAL_ARGS"):
        global_args.mirror_into(loaded)

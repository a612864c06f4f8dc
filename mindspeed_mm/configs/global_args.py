"""The run's arguments, reachable from entry scripts and providers by `get_args()`.

Only entry scripts, `training.py` and providers read them; everything else is given what it needs.
"""

from __future__ import annotations

from argparse import Namespace
from types import ModuleType

_args: Namespace | None = None
_mirrors: list[ModuleType] = []


def set_args(args: Namespace | None) -> None:
    """Make `args` the arguments that `get_args()` returns, in Megatron-LM's own global too where that is loaded."""
    global _args
    _args = args
    for module in _mirrors:
        vars(module)["_GLOBAL_ARGS"] = args


def get_args() -> Namespace:
    """Return the run's arguments.

    Raises:
        RuntimeError: nothing has been set yet.
    """
    if _args is None:
        raise RuntimeError(
            "get_args() was called before the arguments were read; call it inside a provider or a forward step, "
            "or call mindspeed_mm.configs.global_args.set_args(parse_args()) first"
        )
    return _args


def destroy_args() -> None:
    """Forget the run's arguments (between two runs in one process, and in tests)."""
    set_args(None)


def mirror_into(module: ModuleType) -> None:
    """Keep Megatron-LM's `megatron.training.global_vars` in step, so that its own `get_args()` returns ours."""
    if module not in _mirrors:
        _mirrors.append(module)
    if _args is not None:
        vars(module)["_GLOBAL_ARGS"] = _args

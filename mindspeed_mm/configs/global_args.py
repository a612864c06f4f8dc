"""The run's arguments as users' scripts know them: flat, under Megatron's attribute names, reachable by `get_args()`.

They are made from the description of the run (`configs.run.Run`), which the package itself reads; a script reads them
in its callbacks.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.text import shorten

if TYPE_CHECKING:
    from mindspeed_mm.configs.run import Run

_args: Namespace | None = None
_run: Run | None = None
_mirrors: list[ModuleType] = []


class PublishedArguments(Namespace):
    """Every flag, `mm` with the files, and how far the run is; what `get_args()` returns while a run trains.

    What the launch has described may be written for a while (published data providers lower `micro_batch_size` and put
    it back): the script then reads its own value, and the run goes on by the description. A value that is still another
    one when the callback has returned is a ConfigError, as it would change nothing. Attributes of a script's own may be
    written, those that its flags and `args_defaults` brought too. A copy (`copy.copy`, `copy.deepcopy`) is a plain
    Namespace of the script's own.

    Args:
        values: by attribute name.
        own: names among them that are the script's own.
    """

    __slots__ = ("_changed", "_described")

    _described: frozenset[str]
    _changed: dict[str, object]

    def __init__(self, values: Mapping[str, Any], own: Iterable[str] = ()) -> None:
        object.__setattr__(self, "_described", frozenset())
        object.__setattr__(self, "_changed", {})
        super().__init__(**values)
        object.__setattr__(self, "_described", frozenset(values).difference(own))

    def __setattr__(self, name: str, value: object) -> None:
        if name in self._described:
            described = self._changed.pop(name) if name in self._changed else getattr(self, name)
            if described is not value and described != value:
                self._changed[name] = described
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._described:
            raise ConfigError(f"del get_args().{name}: it is part of the run's description")
        super().__delattr__(name)

    def refuse_changes(self) -> None:
        """Refuse what a script has written over the description and not put back.

        Raises:
            ConfigError: names each, and where to give it instead.
        """
        if not self._changed:
            return
        problems = [
            f"get_args().{name} is {shorten(repr(getattr(self, name)))} since the script has written it, and the run "
            f"has been described with {shorten(repr(described))}: give --{name.replace('_', '-')} in the launch, or "
            f"args_defaults={{'{name}': …}} to pretrain(), or put it back before the callback returns"
            for name, described in self._changed.items()
        ]
        raise ConfigError("\n".join(problems))

    def __copy__(self) -> Namespace:
        return Namespace(**vars(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Namespace:
        return Namespace(**copy.deepcopy(vars(self), memo))

    def follow(self, **progress: Any) -> None:
        """Take note of how far the run is: `iteration`, `consumed_train_samples`, `train_iters` and so on."""
        vars(self).update(progress)
        object.__setattr__(self, "_described", self._described | progress.keys())


def set_args(args: Namespace | None) -> None:
    """Make `args` the arguments that `get_args()` returns, in Megatron-LM's own global too where that is loaded."""
    global _args, _run
    _args, _run = args, None
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


def current_run() -> Run:
    """Return the description of the run that `get_args()` shows, for callbacks that are called without it.

    Raises:
        RuntimeError: none has been described yet.
    """
    if _run is None:
        raise RuntimeError("a model or data provider was called without its run before one was described")
    return _run


def publish(run: Run, args: PublishedArguments) -> None:
    """Make a run's description the one that `get_args()` and `current_run()` return."""
    global _run
    set_args(args)
    _run = run


def report_progress(**progress: Any) -> None:
    """Let `get_args()` show how far the run is; without a described run nothing happens.

    Raises:
        ConfigError: the script has written over the description (`PublishedArguments.refuse_changes`).
    """
    if isinstance(_args, PublishedArguments):
        _args.refuse_changes()
        _args.follow(**progress)


def destroy_args() -> None:
    """Forget the run's arguments (between two runs in one process, and in tests)."""
    set_args(None)


def mirror_into(module: ModuleType) -> None:
    """Keep Megatron-LM's `megatron.training.global_vars` in step, so that its own `get_args()` returns ours."""
    if module not in _mirrors:
        _mirrors.append(module)
    if _args is not None:
        vars(module)["_GLOBAL_ARGS"] = _args

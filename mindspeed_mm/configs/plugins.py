"""A user's modules that model.json names under `plugin`: they register models when they are imported."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from mindspeed_mm.utils.errors import ConfigError


def import_plugins(modules: Iterable[str]) -> None:
    """Import each module, in order.

    Raises:
        ConfigError: one of them can't be imported; names it and the reason.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"model.json: plugin '{name}' can't be imported ({error}); expected a module on PYTHONPATH or in the "
                "working folder, written with dots"
            ) from error

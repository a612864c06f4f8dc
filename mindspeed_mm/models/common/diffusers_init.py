"""Models of diffusers: recognising them, building them from config.json, and initialising them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from mindspeed_mm.models.common.meta_build import build_on_meta, has_recipes, initialize_from_recipes
from mindspeed_mm.utils.errors import ConfigError, did_you_mean


def is_diffusers_class(model_class: type) -> bool:
    """Whether a class derives from diffusers' ModelMixin; the check is by name, and imports nothing."""
    return any(c.__name__ == "ModelMixin" and c.__module__.startswith("diffusers.") for c in model_class.__mro__)


def diffusers_structure(directory: Path) -> Any:
    """Build the model of a diffusers directory's config.json on meta; None if that file names no diffusers class.

    Raises:
        ConfigError: diffusers has no such class.
    """
    path = directory / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        name = content.get("_class_name")
    except (OSError, ValueError, AttributeError):
        return None
    if name is None:
        return None
    import diffusers

    model_class = getattr(diffusers, str(name), None)
    if not isinstance(model_class, type) or not is_diffusers_class(model_class):
        raise ConfigError(
            f"'{path}' names the class '{name}', which diffusers {diffusers.__version__} has no model of"
            f"{did_you_mean(str(name), dir(diffusers))}"
        )
    return build_on_meta(model_class, content)


class DiffusersInitMixin:
    """Initialises modules as their constructors do; see `build_on_meta`."""

    def _init_weights(self, module: nn.Module) -> None:
        if has_recipes(module):
            initialize_from_recipes(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):  # added after the model was built
            reset()

"""What an adapted diffusers class needs beside the mixins: initialisation of a model that is built on meta."""

from __future__ import annotations

from torch import nn

from mindspeed_mm.models.common.meta_build import has_recipes, initialize_from_recipes


def is_diffusers_class(model_class: type) -> bool:
    """Whether a class derives from diffusers' ModelMixin (told by names: nothing is imported)."""
    return any(c.__name__ == "ModelMixin" and c.__module__.startswith("diffusers.") for c in model_class.__mro__)


class DiffusersInitMixin:
    """Fills modules as their constructors do; see `build_on_meta`."""

    def _init_weights(self, module: nn.Module) -> None:
        if has_recipes(module):
            initialize_from_recipes(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):  # added after the model was built
            reset()

"""Registry of adapted models: `model_id` → class."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

from mindspeed_mm.utils.errors import ConfigError, did_you_mean

T = TypeVar("T", bound=type)


class ModelHub:
    """Finds the class that a model.json means.

    `MODEL_MAPPINGS` may be written to directly, or through `register`. The families of this package are folders of
    `mindspeed_mm.models.transformers` named by their model_id, imported when asked for.
    """

    MODEL_MAPPINGS: ClassVar[dict[str, type]] = {}

    @classmethod
    def register(cls, model_id: str, model_class: T | None = None) -> Any:
        """Register `model_class` under `model_id`; without a class, return a decorator that does.

        Raises:
            ConfigError: the id belongs to another class already.
        """

        def add(new: T) -> T:
            old = cls.MODEL_MAPPINGS.get(model_id)
            if old is not None and (old.__module__, old.__qualname__) != (new.__module__, new.__qualname__):
                raise ConfigError(
                    f"model_id '{model_id}' is registered already, by {old.__module__}.{old.__qualname__}"
                )
            cls.MODEL_MAPPINGS[model_id] = new
            return new

        return add if model_class is None else add(model_class)

    @classmethod
    def import_plugins(cls, modules: Iterable[str]) -> None:
        """Import the modules that model.json's `plugin` lists, so that they can register models.

        Raises:
            ConfigError: one of them can't be imported; names it and the reason.
        """
        for name in modules:
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise ConfigError(
                    f"model.json: plugin '{name}' can't be imported ({error}); expected a module on PYTHONPATH or in "
                    "the "
                    "working folder, written with dots"
                ) from error

    @classmethod
    def find(cls, model_id: str | None) -> type | None:
        """Return the class registered under `model_id`, importing its family folder if there is one; else None."""
        if model_id is None:
            return None
        if model_id not in cls.MODEL_MAPPINGS and model_id in cls.families():
            importlib.import_module(f"mindspeed_mm.models.transformers.{model_id}")
        return cls.MODEL_MAPPINGS.get(model_id)

    @classmethod
    def families(cls) -> list[str]:
        """Ids of the families that are folders of this package."""
        package = importlib.import_module("mindspeed_mm.models.transformers")
        return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.ispkg)

    @classmethod
    def get(cls, model_id: str | None, hf_config: Any, *, where: str = "model.json") -> type:
        """Return the class for a model.

        Args:
            model_id: from model.json. It must be registered, or equal the HF config's model_type. None: the HF
                config's architecture.
            hf_config: the transformers config; authoritative for everything but the class.

        Raises:
            ConfigError: unknown id (with the nearest ones), or an architecture that transformers does not have.
        """
        found = cls.find(model_id) if model_id is not None else cls.find(hf_config.model_type)
        if found is not None:
            return found
        if model_id is not None and model_id != hf_config.model_type:
            known = sorted({*cls.MODEL_MAPPINGS, *cls.families(), hf_config.model_type})
            raise ConfigError(
                f"{where}: model_id '{model_id}' is neither registered nor the model_type of the HF config "
                f"('{hf_config.model_type}'){did_you_mean(model_id, known)}; known: {', '.join(known)}"
            )
        return cls._from_transformers(hf_config, where)

    @classmethod
    def _from_transformers(cls, hf_config: Any, where: str) -> type:
        import transformers

        from mindspeed_mm.models.transformers.base_model import adapt_class

        names = hf_config.architectures or []
        for name in names:
            hf_class = getattr(transformers, name, None)
            if hf_class is not None:
                return adapt_class(hf_class)
        raise ConfigError(
            f"{where}: the HF config's architectures {names} are not in transformers {transformers.__version__}; "
            "register "
            "a class for it through ModelHub (model.json: plugin) or take a checkpoint in transformers' own layout"
        )


def register_model(model_id: str) -> Callable[[T], T]:
    """Decorator form of `ModelHub.register`."""
    return ModelHub.register(model_id)

"""Registry of adapted models: `model_id` → class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from mindspeed_mm.configs.families_not_there import missing_class
from mindspeed_mm.configs.hf_directory import model_id_problem
from mindspeed_mm.configs.model_config import settled_model_id
from mindspeed_mm.configs.plugins import import_plugins
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.models.common.families import (
    REGISTERED_CLASSES,
    Family,
    family_folders,
    find_family,
    known_families,
    register_family,
)
from mindspeed_mm.utils.errors import ConfigError, did_you_mean
from mindspeed_mm.utils.log import notice

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_T = TypeVar("_T", bound="type | Family")


class ModelHub:
    """Finds the class that a model.json names.

    `MODEL_MAPPINGS` may be written to directly, or through `register`. The families of this package are folders of
    `mindspeed_mm.models.transformers`, named by their model_id and imported on first use.
    """

    MODEL_MAPPINGS: ClassVar[dict[str, type]] = REGISTERED_CLASSES

    @classmethod
    def register(cls, model_id: str, model: Any = None) -> Any:
        """Register a class, or a `Family`, under `model_id`; without either, return a decorator that registers a class.

        A class defines how its family is trained on FSDP2; a `Family` may add a data adapter and a Megatron-core form.

        Raises:
            ConfigError: the id belongs to another class or family already.
        """

        def add(new: _T) -> _T:
            register_family(model_id, new)
            return new

        return add if model is None else add(model)

    @classmethod
    def import_plugins(cls, modules: Iterable[str]) -> None:
        """Import the modules that model.json's `plugin` lists, so that they can register models.

        Raises:
            ConfigError: one of them can't be imported; the message names it and the reason.
        """
        import_plugins(modules)

    @classmethod
    def find(cls, model_id: str | None) -> type | None:
        """Return the model class of the family named `model_id`; None: there is no such family."""
        family = find_family(model_id)
        return None if family is None else family.model_class

    @classmethod
    def families(cls) -> list[str]:
        """Return the ids of the families that are folders of this package."""
        return family_folders()

    @classmethod
    def get(cls, model_id: str | None, hf_config: PretrainedConfig, *, where: str = "model.json") -> type:
        """Return the class for a model.

        Args:
            model_id: from model.json. It must be registered, or equal the HF config's model_type. None: the HF
                config's architecture.
            hf_config: the transformers config; authoritative for everything except the class.
            where: the file that states `model_id`, for messages.

        Raises:
            ConfigError: the id is unknown (the message lists the nearest ones) or contradicts the HF config, or
                transformers does not have the architecture.
        """
        source = _config_of(hf_config)
        settled = settled_model_id(model_id, hf_config.model_type)
        if settled != model_id:
            notice(
                f"{where}: 'model_id' is '{model_id}', as published files call it, and {source} describes a "
                f'\'{settled}\': that is what is trained; write "model_id": "{settled}"'
            )
            model_id = settled
        found = cls.find(model_id) if model_id is not None else cls.find(hf_config.model_type)
        if model_id is not None and found is not None and not cls._fits(model_id, found, hf_config):
            raise ConfigError(model_id_problem(where, model_id, source, hf_config.model_type))
        if found is not None:
            return found
        if model_id is not None and model_id != hf_config.model_type:
            if sentence := missing_class(model_id, where):
                raise ConfigError(sentence)
            known = sorted({*known_families(), hf_config.model_type})
            raise ConfigError(
                f"{where}: model_id '{model_id}' is neither registered nor the model_type of the HF config "
                f"('{hf_config.model_type}'){did_you_mean(model_id, known)}; known: {', '.join(known)}"
            )
        return cls._from_transformers(hf_config, where)

    @classmethod
    def _fits(cls, model_id: str, model_class: Any, hf_config: PretrainedConfig) -> bool:
        """Whether a registered class can be the class of the model that the HF config describes."""
        wanted = getattr(model_class, "config_class", None)
        if wanted is None or isinstance(hf_config, wanted) or hf_config.model_type in (model_id, wanted.model_type):
            return True
        if cls.find(hf_config.model_type) is model_class:
            return True  # one class with two ids: a whole Omni model, and its thinker alone
        is_own = model_id not in cls.families()
        return is_own and any(isinstance(getattr(hf_config, name, None), wanted) for name in hf_config.sub_configs)

    @classmethod
    def _from_transformers(cls, hf_config: PretrainedConfig, where: str) -> type:
        import transformers

        from mindspeed_mm.models.common.base_model import adapt_class

        if sentence := missing_class(hf_config.model_type, _config_of(hf_config), "model_type"):
            raise ConfigError(sentence)
        names = hf_config.architectures or []
        for name in names:
            hf_class = getattr(transformers, name, None)
            if hf_class is not None:
                return adapt_class(hf_class)
        likely = likely_architecture(hf_config.model_type)
        write = f"; of model_type '{hf_config.model_type}' it is [\"{likely}\"]" if likely else ""
        source = _config_of(hf_config)
        if not names:
            raise ConfigError(
                f"{source} names no 'architectures', so nothing says which class of transformers the weights are of: "
                f"add the key{write}; or write a registered model_id in {where}"
            )
        raise ConfigError(
            f"{where}: the HF config's architectures {show(names)} are not in transformers {transformers.__version__}"
            f"{write}; register a class for it through ModelHub (model.json: plugin), or take a checkpoint in "
            "transformers' own layout"
        )


def _config_of(hf_config: PretrainedConfig) -> str:
    """The file that a configuration was read from, for messages."""
    return f"{getattr(hf_config, 'name_or_path', '') or 'the HF directory'}/config.json"


def likely_architecture(model_type: str) -> str | None:
    """Return the name of the transformers class that generates text for a model_type; None: there is none."""
    from transformers.models.auto import modeling_auto as auto

    for names in (
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    ):
        if model_type in names:
            return str(names[model_type])
    return None


def register_model(model_id: str) -> Callable[[_T], _T]:
    """Decorator form of `ModelHub.register`."""
    return ModelHub.register(model_id)

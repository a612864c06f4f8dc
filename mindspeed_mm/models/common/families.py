"""The one record of a family of models, and how it is found: by its model_id, or by its model_type.

Importing this module, or a family's folder, imports neither torch nor transformers: what a record names is imported
when it is first asked for.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mindspeed_mm.utils.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed_mm.configs.family_structure import FamilyStructure
    from mindspeed_mm.data.adapter import DataAdapter
    from mindspeed_mm.models.common.family import FamilyTraits
    from mindspeed_mm.models.megatron.family import MegatronFamily

PACKAGE = "mindspeed_mm.models.transformers"
#: reference to the traits of a causal language model without encoders
TEXT = "mindspeed_mm.models.common.family:TEXT_TRAITS"


@dataclass(frozen=True)
class Family:
    """The description of a family, for both backends.

    Each field is the object itself or a reference `module:attribute` to it; a module that begins with a dot is relative
    to `package`, as in an import.

    Attributes:
        model: the class that is trained; one that can't shard itself (a class of transformers) gets the mixins.
        traits: names of its parts; None: those that the class states as `traits`, or what can be inferred of it.
        adapter: how its rows are made ready; None: what suits most families.
        megatron: how its models are built of Megatron-core's modules; None: they train on FSDP2 only.
        package: what references are relative to.
        check_release: raises ConfigError where an installed package is too old for this family, though not for others.
    """

    model: str | type
    traits: str | FamilyTraits | None = None
    adapter: str | DataAdapter | None = None
    megatron: str | MegatronFamily | None = None
    package: str | None = None
    check_release: Callable[[], None] | None = None

    @cached_property
    def model_class(self) -> type:
        """The class to build, with the mixins and the family's traits."""
        from mindspeed_mm.models.common.base_model import adapt_class

        self._check()
        found: Any = self._load(self.model)
        traits = self._load(self.traits)
        if not hasattr(found, "fully_shard"):
            # a class of its own: another record may give the same class other traits
            found = type(found.__name__, (adapt_class(found),), {"__module__": found.__module__})
        if traits is not None:
            found.traits = traits
        return found

    @cached_property
    def data_adapter(self) -> DataAdapter | None:
        """The adapter; None: the family has none of its own."""
        self._check()
        return self._load(self.adapter)

    @cached_property
    def megatron_form(self) -> MegatronFamily | None:
        """How it is built of Megatron-core's modules; None: it isn't. (Megatron-core itself isn't imported.)"""
        return self._load(self.megatron)

    def _check(self) -> None:
        if self.check_release is not None:
            self.check_release()

    def _load(self, value: Any) -> Any:
        return load_reference(value, self.package) if isinstance(value, str) else value


def load_reference(reference: str, package: str | None = None) -> Any:
    """Import what `module:attribute` names.

    Args:
        package: what a module with a dot in front is relative to.
    """
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module, package), attribute)


#: model_id → class, as users register it; `ModelHub.MODEL_MAPPINGS`
REGISTERED_CLASSES: dict[str, type] = {}
_REGISTERED: dict[str, Family] = {}


def register_family(name: str, family: Family | type) -> None:
    """Register a family under its model_id, or the model_type that its config.json has.

    Args:
        family: a class stands for a family of which nothing else is stated.

    Raises:
        ConfigError: the name belongs to another registered family or class.
    """
    old = _REGISTERED.get(name, REGISTERED_CLASSES.get(name))
    if old is not None and _title(old) != _title(family):
        raise ConfigError(f"model_id '{name}' is registered already, by {_title(old)}")
    if isinstance(family, Family):
        _REGISTERED[name] = family
    else:
        REGISTERED_CLASSES[name] = family


def _title(family: Family | type | str) -> str:
    """Where a class comes from; equal after its module was imported again."""
    if isinstance(family, Family):
        return _title(family.model)
    return family if isinstance(family, str) else f"{family.__module__}.{family.__qualname__}"


def find_family(name: str | None) -> Family | None:
    """Return the record of a family: one that was registered, or that of the folder with its name; None: neither.

    A class that a user registered, or wrote into `ModelHub.MODEL_MAPPINGS`, takes the place of the record's.
    """
    if name is None:
        return None
    family = _REGISTERED.get(name)
    if family is None and name in family_folders():
        family = importlib.import_module(f"{PACKAGE}.{name}").FAMILY
    stated = REGISTERED_CLASSES.get(name)
    if stated is None:
        return family
    return Family(stated) if family is None else replace(family, model=stated, traits=None)


def family_folders() -> list[str]:
    """Names of the folders of this package that contain a family."""
    package = importlib.import_module(PACKAGE)
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg)


def known_families() -> list[str]:
    """Names of all families that can be found now."""
    return sorted({*family_folders(), *_REGISTERED, *REGISTERED_CLASSES})


def require_megatron_form(model_type: str) -> MegatronFamily:
    """Return how the models of a HF `model_type` are built of Megatron-core's modules.

    Raises:
        ConfigError: no such family, or one without a Megatron-core form.
    """
    family = find_family(model_type)
    found = None if family is None else family.megatron_form
    if found is None:
        raise ConfigError(
            f"model_type '{model_type}' has no Megatron-core form here; those that have one: "
            f"{', '.join(_with_megatron_form())}; others train with --use-torch-fsdp2"
        )
    return found


def find_family_structure(model_type: str) -> FamilyStructure:
    """Return what the family of a HF `model_type` states about model.json's numbers; see `require_megatron_form`."""
    return require_megatron_form(model_type).structure


def _with_megatron_form() -> Iterator[str]:
    for name in known_families():
        family = find_family(name)
        if family is not None and family.megatron is not None:
            yield name

"""The record of a model family, which is found by model_id or by model_type.

Importing this module, or a family's folder, imports neither torch nor transformers: the objects that a record names are
imported on first use.
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

    Each of the first four fields is the object itself or a reference `module:attribute` to it; a module that begins
    with a dot is relative to `package`, as in an import statement.

    Attributes:
        model: the class that is trained; a class without `fully_shard` (one of transformers) gets the mixins.
        traits: its traits; None: the `traits` of the class, or traits inferred from the class.
        adapter: its data adapter; None: the default adapter, which suits most families.
        megatron: its Megatron-core form; None: the family trains on FSDP2 only.
        package: the package that references are relative to.
        check_release: raises ConfigError if an installed package is too old for this family.
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
            # a subclass, because another record may give the same class other traits
            found = type(found.__name__, (adapt_class(found),), {"__module__": found.__module__})
        if traits is not None:
            found.traits = traits
        return found

    @cached_property
    def data_adapter(self) -> DataAdapter | None:
        """The data adapter; None: the family has none of its own."""
        self._check()
        return self._load(self.adapter)

    @cached_property
    def megatron_form(self) -> MegatronFamily | None:
        """The Megatron-core form; None: there is none. Megatron-core itself isn't imported."""
        return self._load(self.megatron)

    def _check(self) -> None:
        if self.check_release is not None:
            self.check_release()

    def _load(self, value: Any) -> Any:
        return load_reference(value, self.package) if isinstance(value, str) else value


def load_reference(reference: str, package: str | None = None) -> Any:
    """Import and return the object that a reference names.

    Args:
        reference: `module:attribute`.
        package: the package that a module with a leading dot is relative to.
    """
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module, package), attribute)


#: model_id → class, as users registered it; `ModelHub.MODEL_MAPPINGS` is this dictionary
REGISTERED_CLASSES: dict[str, type] = {}
_REGISTERED: dict[str, Family] = {}


def register_family(name: str, family: Family | type) -> None:
    """Register a family under its model_id, or under the model_type in its config.json.

    Args:
        name: the model_id or model_type.
        family: the record, or only the class that is trained.

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
    """Qualified name of a class, which stays the same if its module is imported again."""
    if isinstance(family, Family):
        return _title(family.model)
    return family if isinstance(family, str) else f"{family.__module__}.{family.__qualname__}"


def find_family(name: str | None) -> Family | None:
    """Return the record of a family: a registered one, or that of the folder with its name; None: there is neither.

    A class that a user registered, or wrote into `ModelHub.MODEL_MAPPINGS`, replaces the record's.
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
    """Return the names of the folders of this package that contain a family."""
    package = importlib.import_module(PACKAGE)
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg)


def known_families() -> list[str]:
    """Return the names of all families that are registered or have a folder."""
    return sorted({*family_folders(), *_REGISTERED, *REGISTERED_CLASSES})


def require_megatron_form(model_type: str) -> MegatronFamily:
    """Return the Megatron-core form of the family of a HF `model_type`.

    Raises:
        ConfigError: there is no such family, or it has no Megatron-core form.
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
    """Return how the family of a HF `model_type` reads the numbers in model.json; see `require_megatron_form`."""
    return require_megatron_form(model_type).structure


def _with_megatron_form() -> Iterator[str]:
    for name in known_families():
        family = find_family(name)
        if family is not None and family.megatron is not None:
            yield name

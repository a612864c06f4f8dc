"""What a family of models states about model.json's numbers on the Megatron backend, and how the check finds it.

Families belong to `models/`, which `configs/` doesn't import: the package connects a function that finds them, and the
check of model.json calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from mindspeed_mm.configs.vlm_config import VLMModelConfig

NumberPlace = Literal["text", "vision", "top", "rope"]
#: place → name of an attribute there → value
Numbers = Mapping[NumberPlace, dict[str, Any]]
#: dotted key of model.json → its only valid value, and why
Facts = Mapping[str, tuple[object, str]]


@dataclass(frozen=True)
class ModelNumber:
    """A key of model.json and the attribute of transformers' configuration that it means.

    Attributes:
        path: dotted key.
        place, name: which of the configurations, and the attribute in it.
        read: value in model.json → value of the attribute.
        wins: a value that differs from the HF directory's replaces it, with a notice, instead of being an error.
    """

    path: str
    place: NumberPlace
    name: str
    read: Callable[[Any], Any] = lambda value: value
    wins: bool = False


@dataclass(frozen=True)
class NumbersAlone:
    """How model.json describes a model of the family without a HF directory.

    Attributes:
        defaults: dotted key → value of its attribute where the key is absent; a key that isn't here must be given.
        build: (model.json, numbers) → transformers' configuration.
    """

    defaults: Mapping[str, Any]
    build: Callable[[VLMModelConfig, Numbers], PretrainedConfig]


@dataclass(frozen=True)
class FamilyStructure:
    """The structure of a family's models, as far as model.json may describe it; the defaults suit a Llama-like decoder.

    Attributes:
        qk_norm: whether each head's queries and keys are normalised.
        qkv_bias: whether the projections of queries, keys and values have a bias, where the text configuration has no
            `attention_bias`.
        tower_numbers: keys that describe the vision tower; none: the family has no tower.
        tower_layers: transformers' configuration → number of the tower's layers.
        tower_facts: transformers' configuration → keys that follow from its numbers.
        tower_misfits: (name of model.json, transformers' configuration) → sentences about the tower's numbers.
        alone: None: a model is described by a HF directory only.
    """

    qk_norm: bool = False
    qkv_bias: bool = False
    tower_numbers: tuple[ModelNumber, ...] = ()
    tower_layers: Callable[[PretrainedConfig], int] | None = None
    tower_facts: Callable[[PretrainedConfig], Facts] | None = None
    tower_misfits: Callable[[str, PretrainedConfig], Iterator[str]] | None = None
    alone: NumbersAlone | None = None

    def count_tower_layers(self, config: PretrainedConfig) -> int | None:
        """Layers of the vision tower of a model with this transformers' configuration; None: it has no tower."""
        return None if self.tower_layers is None else self.tower_layers(config)

    def has_qkv_bias(self, text_config: PretrainedConfig) -> bool:
        """Whether the projections of queries, keys and values of a model have a bias."""
        return bool(getattr(text_config, "attention_bias", self.qkv_bias))


_finders: list[Callable[[str], FamilyStructure]] = []


def connect_families(find: Callable[[str], FamilyStructure]) -> None:
    """Let the check of model.json find families.

    Args:
        find: HF model_type → the family's structure; raises ConfigError where it has no Megatron-core form.
    """
    _finders[:] = [find]


def find_structure(model_type: str) -> FamilyStructure:
    """Return what the family of a HF model_type states.

    Raises:
        ConfigError: it has no Megatron-core form.
    """
    (find,) = _finders  # connected by the package's __init__
    return find(model_type)

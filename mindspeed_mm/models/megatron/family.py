"""The Megatron-core form of a family, which the file `megatron.py` of the family's folder states.

Importing this module, or that file, imports neither torch nor Megatron-core: the structure is needed when model.json is
checked, and the rest when a stage is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from mindspeed_mm.configs.family_structure import FamilyStructure
from mindspeed_mm.models.common.families import load_reference

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import nn

    from mindspeed_mm.models.common.megatron_names import ParamMapping
    from mindspeed_mm.models.megatron.text_decoder.names import DecoderShape

LayerSpec: TypeAlias = "Callable[[TransformerConfig], ModuleSpec]"
TensorNames: TypeAlias = "Callable[[str, DecoderShape, str, str], ParamMapping]"


@dataclass(frozen=True)
class Towers:
    """The encoders of a family, built of Megatron-core's modules.

    Attributes:
        image_encoder: (vision config, ParallelSizes, *, layers, has_patch_embedding, has_projector) → module with
            `forward(pixel_values, layout)`, `set_input_tensor`, `param_mapping`, `vision_encoder` and
            `vision_projector`.
        layout: (grid [media, 3] int64 on the host, vision config) → how the patches of media are laid out, made on the
            host: a dataclass of tensors.
        smallest_image: (vision config) → (pixel_values, grid_thw) of one merged patch of zeros.
        positions: (transformers model on meta, batch) → position ids [3, batch, sequence] int64, or None for the plain
            order.
    """

    image_encoder: Callable[..., nn.Module]
    layout: Callable[[torch.Tensor, Any], Any]
    smallest_image: Callable[[Any], tuple[torch.Tensor, torch.Tensor]]
    positions: Callable[[Any, dict[str, Any]], torch.Tensor | None]


@dataclass(frozen=True)
class MegatronFamily:
    """The Megatron-core form of a family; the defaults suit a text model like Llama.

    `layer_spec`, `tensor_names` and `towers` are the object itself or a reference `module:attribute` to it.

    Attributes:
        structure: norms and biases of the decoder, and the rules for model.json's numbers.
        decoder: prefix of the decoder's tensors in the transformers model.
        head: name of the output layer's weight in the transformers model.
        layer_spec: Megatron-core's configuration → the spec of a decoder layer.
        tensor_names: (parameter name, DecoderShape, `decoder`, `head`) → parameter mapping.
        towers: the encoders; None: the family is text only.
    """

    structure: FamilyStructure = field(default_factory=FamilyStructure)
    decoder: str = "model."
    head: str = "lm_head.weight"
    layer_spec: str | LayerSpec = "mindspeed_mm.models.megatron.layers:layer_spec_of"
    tensor_names: str | TensorNames = "mindspeed_mm.models.megatron.text_decoder.names:decoder_tensor"
    towers: str | Towers | None = None

    @cached_property
    def loaded_towers(self) -> Towers | None:
        """`towers`, imported."""
        return load_reference(self.towers) if isinstance(self.towers, str) else self.towers

    def spec_of_layer(self, config: TransformerConfig) -> ModuleSpec:
        """Return the spec of a decoder layer for Megatron-core's configuration of the decoder."""
        return _loaded(self.layer_spec)(config)

    def param_mapping(self, name: str, shape: DecoderShape) -> ParamMapping:
        """Return the transformers tensors that a parameter of the decoder consists of.

        Args:
            name: name in the decoder, with the number of the layer in the whole model.
            shape: sizes that the interleaving depends on.

        Raises:
            KeyError: the decoder has no such parameter.
        """
        return _loaded(self.tensor_names)(name, shape, self.decoder, self.head)


def _loaded(value: Any) -> Any:
    return load_reference(value) if isinstance(value, str) else value

"""Names of a model's tensors with LoRA adapters, as PEFT writes them to files, without its prefix `base_model.model.`.

Inside a model that PEFT has changed, `q_proj.weight` is called `q_proj.base_layer.weight`, in 4 bits
`q_proj.base_layer.weight_nf4`, and an adapter's weight `q_proj.lora_A.default.weight`. Files have `q_proj.weight` and
`q_proj.lora_A.weight`, on both backends.
"""

from __future__ import annotations

import re

#: name of the one adapter of a layer, inside PEFT
ADAPTER = "default"
#: name of a linear layer's weight where it is stored in 4 bits
NF4_WEIGHT = "weight_nf4"

_ADAPTER_TENSOR = re.compile(r"(?:^|\.)lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)(?=\.|$)")
_BASE = re.compile(r"\.base_layer(?=\.|$)")


def is_adapter(name: str) -> bool:
    """Whether a name, in a model or in a file, is that of an adapter's tensor."""
    return _ADAPTER_TENSOR.search(name) is not None


def stored_name(name: str) -> str:
    """Return the name in files of a tensor or module of a model, with or without adapters.

    An adapter of an expert parameter keeps the `base_layer` of the adapter around it, which tells the two apart.
    """
    if is_adapter(name):
        name = name.replace(f"lora_magnitude_vector.{ADAPTER}.weight", "lora_magnitude_vector")
        return re.sub(rf"\.{ADAPTER}(?=\.|$)", "", name)
    return re.sub(rf"\b{NF4_WEIGHT}$", "weight", _BASE.sub("", name))

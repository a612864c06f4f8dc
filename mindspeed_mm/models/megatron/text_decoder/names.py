"""Mapping of the Megatron-core decoder's parameters to transformers tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mindspeed_mm.models.common.megatron_names import ParamMapping, interleaved, same

# name in a layer of transformers' decoder → name in a layer of Megatron-core's, for tensors that are equal in both
_SAME = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
}
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class DecoderShape:
    """Sizes that the interleaving of tensors depends on.

    Attributes:
        groups: query groups (heads of keys and values).
        tensor_parallel: number of ranks over which gate and up projection are interleaved.
    """

    groups: int
    tensor_parallel: int


def decoder_tensor(
    name: str, shape: DecoderShape, layers: str = "model.", head: str = "lm_head.weight"
) -> ParamMapping:
    """Return the transformers tensors that a parameter of the decoder consists of.

    Args:
        name: name in the GPTModel, with the number of the layer in the whole model.
        shape: sizes that the interleaving depends on.
        layers: prefix of the decoder in the transformers model.
        head: name of the output layer's weight in the transformers model.

    Raises:
        KeyError: the decoder has no such parameter.
    """
    plain = {
        "embedding.word_embeddings.weight": f"{layers}embed_tokens.weight",
        "decoder.final_layernorm.weight": f"{layers}norm.weight",
        "output_layer.weight": head,
    }
    if name in plain:
        return same(plain[name])
    match = _LAYER.match(name)
    if match is None:
        raise KeyError(name)
    prefix, inner = f"{layers}layers.{match[1]}.", match[2]
    for theirs, ours in _SAME.items():
        if inner == ours:
            return same(prefix + theirs)
    if inner in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        kind = inner.rsplit(".", 1)[1]
        sources = tuple(f"{prefix}self_attn.{part}_proj.{kind}" for part in "qkv")
        return interleaved(sources, shape.groups)
    if inner == "mlp.linear_fc1.weight":
        return interleaved((f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight"), shape.tensor_parallel)
    raise KeyError(name)

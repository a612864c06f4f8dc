"""Mapping of the Megatron-core vision tower's parameters to transformers tensors."""

from __future__ import annotations

import re

from mindspeed_mm.models.common.megatron_names import ParamMapping, interleaved, regrouped, same

# name in the Megatron-core tower → name in transformers' tower, for tensors that are equal in both
_SAME = {
    "vision_encoder.patch_embed.weight": "patch_embed.proj.weight",
    "vision_projector.norm.weight": "merger.ln_q.weight",
    "vision_projector.mlp.linear_fc1.weight": "merger.mlp.0.weight",
    "vision_projector.mlp.linear_fc1.bias": "merger.mlp.0.bias",
    "vision_projector.mlp.linear_fc2.weight": "merger.mlp.2.weight",
    "vision_projector.mlp.linear_fc2.bias": "merger.mlp.2.bias",
}
# the same for the tensors of a block
_SAME_IN_BLOCK = {
    "input_layernorm.weight": "norm1.weight",
    "pre_mlp_layernorm.weight": "norm2.weight",
    "self_attention.linear_proj.weight": "attn.proj.weight",
    "self_attention.linear_proj.bias": "attn.proj.bias",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
}
_BLOCK = re.compile(r"^vision_encoder\.blocks\.layers\.(\d+)\.(.+)\.(weight|bias)$")


def tower_tensor(name: str, heads: int, tensor_parallel: int, prefix: str = "model.visual.") -> ParamMapping:
    """Return the transformers tensors that a parameter of the tower or its projector consists of.

    Args:
        name: name in the image encoder, with the number of the layer in the whole tower.
        heads: number of attention heads.
        tensor_parallel: number of ranks over which gate and up projection are interleaved.
        prefix: prefix of the tower in the transformers model.

    Raises:
        KeyError: the tower has no such parameter.
    """
    if name in _SAME:
        return same(prefix + _SAME[name])
    match = _BLOCK.match(name)
    if match is None:
        raise KeyError(name)
    number, module, kind = match.groups()
    block = f"{prefix}blocks.{number}."
    if module == "self_attention.linear_qkv":
        return regrouped(f"{block}attn.qkv.{kind}", 3, heads)
    if module == "mlp.linear_fc1":
        return interleaved((f"{block}mlp.gate_proj.{kind}", f"{block}mlp.up_proj.{kind}"), tensor_parallel)
    return same(block + _SAME_IN_BLOCK[f"{module}.{kind}"])

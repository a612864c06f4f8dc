"""What layers made of Megatron-core's modules keep for their backward pass, and where."""

from __future__ import annotations

from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from mindspeed_mm.parallel.chunk_mlp import apply_chunked_mlp
from mindspeed_mm.parallel.offload import apply_offload
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice


def swap_attention(chunk: nn.Module) -> None:
    """Keep what the self-attention of every layer saves for backward in host memory until then.

    Layers that are recomputed whole keep nothing of it, and are left as they are.

    Args:
        chunk: a stage's part of a model; changed in place.

    Raises:
        ConfigError: the norm before attention is recomputed, which frees its output while it is being copied.
    """
    attention: dict[str, nn.Module] = {}
    has_layers = False
    for path, block in chunk.named_modules():
        if not isinstance(block, TransformerBlock):
            continue
        for number, layer in enumerate(block.layers):
            if not isinstance(layer, TransformerLayer):
                continue
            has_layers = True
            if layer.recompute_input_layernorm:
                raise ConfigError(
                    "--swap-attention copies the output of the norm before attention to the host, which "
                    "--recompute-modules layernorm frees; remove one of the two"
                )
            if number >= _recomputed_layers(block):
                attention[f"{path}.layers.{number}.self_attention"] = layer.self_attention
    if has_layers and not attention:
        notice("--swap-attention has no effect here: all layers are recomputed, and keep nothing of their attention")
    apply_offload(attention)


def chunk_mlps(chunk: nn.Module, tokens: int) -> None:
    """Let the MLP of every layer run on some tokens at a time, but for those with experts.

    Args:
        chunk: a stage's part of a model; changed in place.
        tokens: of this rank, over all rows.
    """
    layers = {path: m for path, m in chunk.named_modules() if isinstance(m, TransformerLayer)}
    dense = {f"{path}.mlp": layer.mlp for path, layer in layers.items() if not layer.is_moe_layer}
    apply_chunked_mlp(dense, tokens, "--chunk-mlp-tokens", dim=0)


def _recomputed_layers(block: TransformerBlock) -> int:
    """Number of a block's layers, the first ones, that are recomputed whole."""
    config = block.config
    if config.recompute_granularity != "full":
        return 0
    return config.recompute_num_layers or 0 if config.recompute_method == "block" else len(block.layers)

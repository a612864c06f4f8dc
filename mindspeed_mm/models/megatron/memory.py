"""What layers made of Megatron-core's modules keep for their backward pass, and where."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from mindspeed_mm.parallel.chunk_mlp import apply_chunked_mlp
from mindspeed_mm.parallel.offload import apply_offload, is_offloaded
from mindspeed_mm.utils.log import notice


def offload_layers(part: nn.Module, key: str) -> None:
    """Keep what every layer saves for backward in host memory until then, but for those that are recomputed whole.

    Args:
        part: a stage's part of a model; changed in place.
        key: of the file that asks for it, for messages.
    """
    layers = {path: layer for path, layer, is_recomputed in _layers(part) if not is_recomputed}
    if not layers and any(True for _ in _layers(part)):
        notice(f"{key} has no effect here: all layers are recomputed, and keep nothing but what the stage holds")
    apply_offload(layers)


def swap_attention(chunk: nn.Module) -> None:
    """Keep what the self-attention of every layer saves for backward in host memory until then.

    Layers that are recomputed whole keep nothing of it, and are left as they are.

    Args:
        chunk: a stage's part of a model; changed in place.
    """
    layers = list(_layers(chunk))
    attention = {
        f"{path}.self_attention": layer.self_attention
        for path, layer, is_recomputed in layers
        if not is_recomputed and not is_offloaded(layer)
    }
    if layers and all(is_recomputed for _, _, is_recomputed in layers):
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


def _layers(part: nn.Module) -> Iterator[tuple[str, TransformerLayer, bool]]:
    """Path of each layer, the layer, and whether it is recomputed whole."""
    for path, block in part.named_modules():
        if isinstance(block, TransformerBlock):
            for number, layer in enumerate(block.layers):
                if isinstance(layer, TransformerLayer):
                    yield f"{path}.layers.{number}", layer, number < _recomputed_layers(block)


def _recomputed_layers(block: TransformerBlock) -> int:
    """Number of a block's layers, the first ones, that are recomputed whole."""
    config = block.config
    if config.recompute_granularity != "full":
        return 0
    return config.recompute_num_layers or 0 if config.recompute_method == "block" else len(block.layers)

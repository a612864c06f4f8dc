"""What the recompute flags recompute of a model's blocks: whole blocks, or parts of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.common.block_parts import BlockPart, block_parts
from mindspeed_mm.models.transformers.inferred import block_lists
from mindspeed_mm.parallel.recompute import BlockRecompute, apply_recompute, chosen_blocks, recompute_blocks
from mindspeed_mm.parallel.selective import Operation
from mindspeed_mm.utils.log import notice

#: word of --recompute-modules → part of a block, and the operations in it that aren't run again: the core of attention
#: is all of attention but for its products with weights
_PARTS: Mapping[str, tuple[BlockPart, tuple[Operation, ...]]] = MappingProxyType(
    {
        "core_attn": ("attention", ("linear",)),
        "mlp": ("mlp", ()),
        "moe": ("moe", ()),
        "layernorm": ("norm", ()),
    }
)


def recompute_by_flags(root: nn.Module, config: Fsdp2Config, asked: BlockRecompute) -> None:
    """Recompute blocks, or parts of them, as --recompute-granularity says, before the model is sharded.

    Args:
        root: the unsharded model; it may be on the meta device.
        config: content of fsdp2.yaml, whose recompute_modules replace the flags.
        asked: the flags.
    """
    if asked.granularity != "selective":
        recompute_blocks(root, block_lists(root), config, asked)
        return
    if config.recompute_modules is not None:
        notice("--recompute-granularity selective has no effect here: fsdp2.yaml's recompute_modules decide")
        return
    for word in asked.modules:
        part, keep = _PARTS[word]
        found = block_parts(root, part)
        what = f"--recompute-granularity selective, {word}:"
        if found:
            notice(f"{what} recomputed in backward are {len(found)} modules, as {next(iter(found))}")
        else:
            notice(f"{what} there is nothing like it in the blocks of {type(root).__name__}")
        apply_recompute(found, use_reentrant=False, keep=keep)


def kept_by_flags(asked: BlockRecompute) -> tuple[Operation, ...]:
    """Return the operations whose outputs are kept of what the flags recompute."""
    if asked.granularity == "selective":
        return tuple(operation for word in asked.modules for operation in _PARTS[word][1])
    return ("attention",) if asked.granularity == "full" and asked.blocks_that_keep_attention is not None else ()


def recomputed_by_flags(root: nn.Module, config: Fsdp2Config, asked: BlockRecompute) -> dict[str, nn.Module]:
    """Return the modules, by path, that `recompute_by_flags` recomputes; arguments are the same."""
    if asked.granularity != "selective":
        return chosen_blocks(root, block_lists(root), config, asked)
    if config.recompute_modules is not None:
        return {}
    return {path: m for word in asked.modules for path, m in block_parts(root, _PARTS[word][0]).items()}

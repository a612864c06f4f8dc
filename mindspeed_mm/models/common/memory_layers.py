"""The modules whose activations fsdp2.yaml offloads, and those that it runs on chunks of a micro-batch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.common.block_parts import block_parts
from mindspeed_mm.models.common.paths import listed_modules
from mindspeed_mm.models.transformers.inferred import block_lists
from mindspeed_mm.parallel.chunk_mbs import ChunkPlan
from mindspeed_mm.parallel.patterns import containing_path
from mindspeed_mm.parallel.recompute import BlockRecompute, chosen_blocks
from mindspeed_mm.utils.errors import ConfigError, did_you_mean
from mindspeed_mm.utils.log import notice


@dataclass(frozen=True)
class MemoryModules:
    """Modules of a model by path.

    Attributes:
        offloaded: what they keep for backward waits in host memory.
        chunked: they run on chunks of a micro-batch's rows.
    """

    offloaded: dict[str, nn.Module]
    chunked: dict[str, nn.Module]


def plan_memory(
    root: nn.Module, config: Fsdp2Config, blocks: BlockRecompute, dims: Dims, *, swap_attention: bool = False
) -> MemoryModules:
    """Return the modules that `activation_offload_modules`, --swap-attention and `chunk_mbs_modules` name.

    Args:
        root: the model; it may be on the meta device.
        config: content of fsdp2.yaml.
        blocks: recompute flags.
        dims: sizes of the parallelisms.
        swap_attention: --swap-attention: offload the attention of all blocks, too.

    Raises:
        ConfigError: a path matches nothing, a module with offload is a part of a recomputed one, one that runs on
            chunks isn't recomputed, or context-parallel ranks split the rows whose chunks are to be run.
    """
    offloaded, chunked, recomputed = (
        listed_modules(root, config, key)
        for key in ("activation_offload_modules", "chunk_mbs_modules", "recompute_modules")
    )
    if offloaded or chunked or swap_attention:
        recomputed = {**recomputed, **chosen_blocks(root, block_lists(root), config, blocks)}
    _require_recompute(chunked, recomputed, f"{config.file}: chunk_mbs_modules")
    _refuse_parts_of_recomputed(offloaded, recomputed, f"{config.file}: activation_offload_modules")
    if swap_attention:
        offloaded |= _swapped_attention(root, recomputed)
    if chunked and dims.cp > 1:
        raise ConfigError(
            f"{config.file}: chunk_mbs_modules splits the rows of a micro-batch, whose tokens --context-parallel-size "
            f"{dims.cp} splits over ranks all at once; remove one of the two"
        )
    outermost = {path: m for path, m in offloaded.items() if not _parts_of(path, offloaded)}
    return MemoryModules(outermost, chunked)


def _swapped_attention(root: nn.Module, recomputed: Collection[str]) -> dict[str, nn.Module]:
    """Return the attention of the blocks that aren't recomputed; where there is none, say why."""
    attention = block_parts(root, "attention")
    swapped = {path: module for path, module in attention.items() if not _parts_of(path, recomputed)}
    if not attention:
        notice(
            f"--swap-attention has no effect here: no attention was found in the blocks of {type(root).__name__}; name "
            "it in fsdp2.yaml's activation_offload_modules"
        )
    elif not swapped:
        notice(
            "--swap-attention has no effect here: all blocks are recomputed, and keep nothing of their attention; name "
            "them in fsdp2.yaml's activation_offload_modules, for their inputs"
        )
    return swapped


def _parts_of(path: str, paths: Collection[str]) -> str | None:
    """Return the innermost of `paths` whose module contains the one at `path`; None: it is in none of them."""
    return containing_path(path, [other for other in paths if other != path])


def _require_recompute(modules: Collection[str], recomputed: Collection[str], where: str) -> None:
    """
    Raises:
        ConfigError: one of the modules isn't recomputed.
    """
    kept = [path for path in modules if path not in recomputed]
    if kept:
        rest = f" and {len(kept) - 1} others" if len(kept) > 1 else ""
        raise ConfigError(
            f"{where}: '{kept[0]}'{rest} is not recomputed, so that it would keep the activations of all its parts; "
            f"name the same modules in recompute_modules{did_you_mean(kept[0], recomputed)}"
        )


def _refuse_parts_of_recomputed(modules: Collection[str], recomputed: Collection[str], where: str) -> None:
    """
    Raises:
        ConfigError: one of the modules is a part of a recomputed one, which keeps nothing of its parts.
    """
    for path in modules:
        whole = _parts_of(path, recomputed)
        if whole is not None:
            raise ConfigError(
                f"{where}: '{path}' is a part of '{whole}', which is recomputed and keeps its input only; name "
                f"'{whole}' here, or leave it out of what is recomputed"
            )


def chunk_plan(config: Fsdp2Config) -> ChunkPlan:
    """Return how fsdp2.yaml splits the inputs of `chunk_mbs_modules`."""
    return ChunkPlan(
        config.chunk_mbs_size,
        config.chunk_mbs_batch_dim,
        tuple(config.chunk_mbs_args),
        tuple(config.chunk_mbs_kwargs),
        config.file,
    )

"""The modules whose activations fsdp2.yaml offloads, and those that it runs on chunks of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.common.paths import listed_modules
from mindspeed_mm.models.transformers.inferred import block_lists
from mindspeed_mm.parallel.chunk_mbs import ChunkPlan
from mindspeed_mm.parallel.offload import require_recompute
from mindspeed_mm.parallel.recompute import BlockRecompute, chosen_blocks
from mindspeed_mm.utils.errors import ConfigError


@dataclass(frozen=True)
class MemoryModules:
    """Modules of a model by path.

    Attributes:
        offloaded: their inputs wait for backward in host memory.
        chunked: they run on chunks of a micro-batch's rows.
    """

    offloaded: dict[str, nn.Module]
    chunked: dict[str, nn.Module]


def plan_memory(root: nn.Module, config: Fsdp2Config, blocks: BlockRecompute, dims: Dims) -> MemoryModules:
    """Return the modules that `activation_offload_modules` and `chunk_mbs_modules` name.

    Args:
        root: the model; it may be on the meta device.
        config: content of fsdp2.yaml.
        blocks: recompute flags.
        dims: sizes of the parallelisms.

    Raises:
        ConfigError: a path matches nothing, a module isn't recomputed, or context-parallel ranks split the rows whose
            chunks are to be run.
    """
    found = {
        key: listed_modules(root, config, key)
        for key in ("activation_offload_modules", "chunk_mbs_modules", "recompute_modules")
    }
    recomputed = found.pop("recompute_modules")
    if any(found.values()):
        recomputed = {**recomputed, **chosen_blocks(root, block_lists(root), config, blocks)}
    for key, modules in found.items():
        require_recompute(modules, recomputed, f"{config.file}: {key}")
    if found["chunk_mbs_modules"] and dims.cp > 1:
        raise ConfigError(
            f"{config.file}: chunk_mbs_modules splits the rows of a micro-batch, whose tokens --context-parallel-size "
            f"{dims.cp} splits over ranks all at once; remove one of the two"
        )
    return MemoryModules(found["activation_offload_modules"], found["chunk_mbs_modules"])


def chunk_plan(config: Fsdp2Config) -> ChunkPlan:
    """Return how fsdp2.yaml splits the inputs of `chunk_mbs_modules`."""
    return ChunkPlan(
        config.chunk_mbs_size,
        config.chunk_mbs_batch_dim,
        tuple(config.chunk_mbs_args),
        tuple(config.chunk_mbs_kwargs),
        config.file,
    )

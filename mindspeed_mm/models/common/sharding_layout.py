"""The sizes and the meshes that a model is sharded over, inside of a run and outside of one."""

from __future__ import annotations

import torch.distributed as dist

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.common.build_context import current_build_context
from mindspeed_mm.parallel.meshes import Meshes, build_meshes, parameter_mesh
from mindspeed_mm.parallel.world import World
from mindspeed_mm.utils.errors import ConfigError


def layout_of(process_group: dist.ProcessGroup | None, config: Fsdp2Config) -> tuple[Dims, Meshes]:
    """Return the sizes and the meshes to shard over: those of the run, or outside of one those of a process group."""
    world = current_build_context().world
    if world is None or process_group not in (None, world.gradients.group):
        _refuse_other_groups(world)
        dims = file_dims(dist.get_world_size(process_group), config)
        if not dims.splits_experts:
            return dims, Meshes(parameter_mesh(dims, process_group))
        if dims.world_size != dist.get_world_size():
            raise ConfigError(
                f"{config.file}: expert_parallel_size is {dims.ep}, but the model is sharded over a group of "
                f"{dims.world_size} of {dist.get_world_size()} processes; experts are split over all processes"
            )
        return dims, build_meshes(dims)
    dims = world.dims.with_sharding(config.sharding_size, config.file)  # the model's class may override the file
    is_own = world.meshes is None or dims != world.dims
    return dims, build_meshes(dims) if is_own or world.meshes is None else world.meshes


def _refuse_other_groups(world: World | None) -> None:
    """Refuse a process group of the model's own in a run that splits layers: its losses are those of the run's ranks.

    Raises:
        ConfigError: the run has tensor parallelism.
    """
    if world is not None and world.dims.tp > 1:
        raise ConfigError(
            f"--tensor-model-parallel-size {world.dims.tp}: the model called fully_shard with a process group of its "
            "own; pass the one that it was given, or none"
        )


def file_dims(world_size: int, config: Fsdp2Config) -> Dims:
    """Return the sizes that fsdp2.yaml alone states, for a model that is sharded outside of a run."""
    return Dims.of(
        world_size,
        ep=config.expert_parallel_size,
        ep_shard=config.expert_sharding_size,
        sharding_size=config.sharding_size,
        where=config.file,
    )

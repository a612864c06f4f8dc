"""The device meshes that parameters are sharded over, by the path of their module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mindspeed_mm import accelerator
from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.parallel.patterns import containing_path


@dataclass(frozen=True)
class ParameterMeshes:
    """The mesh of each module's parameters.

    Attributes:
        common: mesh of all modules that `special` doesn't contain: 1-D (shard) or 2-D (replicate, shard).
        special: path of a module → mesh of its parameters, including those of its submodules.
    """

    common: DeviceMesh
    special: Mapping[str, DeviceMesh] = field(default_factory=dict)

    def of(self, path: str) -> DeviceMesh:
        """Return the mesh of the module at `path`: that of the innermost module in `special` which contains it."""
        container = containing_path(path, self.special)
        return self.common if container is None else self.special[container]

    def with_special(self, paths: Iterable[str], mesh: DeviceMesh) -> ParameterMeshes:
        """Return a copy in which the parameters of the modules at `paths` are sharded over `mesh`."""
        return replace(self, special={**self.special, **dict.fromkeys(paths, mesh)})

    @property
    def span_ranks(self) -> bool:
        """Whether any of the meshes has more than one rank."""
        return any(mesh.size() > 1 for mesh in (self.common, *self.special.values()))


@dataclass(frozen=True)
class Meshes:
    """The device meshes of a run, for the views of `Dims`; parts of one layout have the same root mesh.

    Attributes:
        parameters: 1-D ("shard",), or 2-D ("replicate", "shard") if there are replicas (HSDP); shard groups are
            neighbouring ranks.
        tensor: 1-D ("tensor",); None without tensor parallelism. `fully_shard` needs it to have the root mesh of
            `parameters`.
        experts: 1-D ("experts",), the ranks that split the experts of a layer; None without expert parallelism.
        expert_shards: 1-D ("expert_shard",) or 2-D ("expert_copies", "expert_shard"), the ranks that have the same
            experts, in the place of `parameters`; None without expert parallelism.
    """

    parameters: DeviceMesh
    tensor: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    expert_shards: DeviceMesh | None = None


def build_meshes(dims: Dims) -> Meshes:
    """Return the device meshes of all ranks; a collective.

    Args:
        dims: sizes of the parallelisms, without pipeline parallelism.
    """
    parameters, tensor = _replicated(("replicate", dims.dp_replicate), ("shard", dims.dp_shard), ("tensor", dims.tp))
    if not dims.splits_experts:
        return Meshes(parameters, tensor)
    shards, experts = _replicated(
        ("expert_copies", dims.expert_copies), ("expert_shard", dims.ep_shard), ("experts", dims.ep)
    )
    return Meshes(parameters, tensor, experts, shards)


def _replicated(
    copies: tuple[str, int], shard: tuple[str, int], split: tuple[str, int]
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the mesh of copies and shards, without a dimension for a single copy, and that of the split, if any."""
    dims = [dim for dim in (copies, shard, split) if dim is shard or dim[1] > 1]
    root = init_device_mesh(
        accelerator.current().name, tuple(size for _, size in dims), mesh_dim_names=tuple(name for name, _ in dims)
    )
    if split not in dims:
        return root, None
    names = tuple(name for name, _ in dims[:-1])
    return root[names if len(names) > 1 else names[0]], root[split[0]]


def parameter_mesh(dims: Dims, group: dist.ProcessGroup | None = None) -> DeviceMesh:
    """Return the mesh that `fully_shard` shards parameters over, without tensor and expert parallelism.

    Args:
        dims: sizes of the parallelisms.
        group: process group of the data-parallel ranks; None: all ranks.

    Returns:
        `Meshes.parameters`.
    """
    if group is None or group is dist.group.WORLD or dims.world_size == dist.get_world_size():
        return build_meshes(dims).parameters
    device_type = accelerator.current().name
    if dims.dp_replicate == 1:
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=("shard",))
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, dims.dp_shard)
    return DeviceMesh(device_type, ranks, mesh_dim_names=("replicate", "shard"))


def own_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of this rank alone; a collective, unless `mesh` (from `parameter_mesh`) already contains it."""
    if mesh.size(mesh.ndim - 1) == 1:
        return mesh if mesh.ndim == 1 else mesh["shard"]
    every = init_device_mesh(mesh.device_type, (dist.get_world_size(), 1), mesh_dim_names=("ranks", "own"))
    return every["own"]

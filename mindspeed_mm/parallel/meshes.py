"""The device meshes that parameters are sharded over, by the path of their module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mindspeed_mm import accelerator
from mindspeed_mm.parallel.dims import Dims
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


def parameter_mesh(dims: Dims, group: dist.ProcessGroup | None = None) -> DeviceMesh:
    """Return the mesh that `fully_shard` shards parameters over.

    Args:
        dims: sizes of the parallelisms.
        group: process group of the data-parallel ranks; None: all ranks.

    Returns:
        a 1-D mesh ("shard",) if the group shards one copy, else a 2-D mesh ("replicate", "shard") whose shard groups
        are neighbouring ranks (HSDP).
    """
    device_type = accelerator.current().name
    names = ("replicate", "shard")
    if dims.dp_replicate == 1:
        if group is None or group is dist.group.WORLD:
            return init_device_mesh(device_type, (dims.dp_shard,), mesh_dim_names=names[1:])
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=names[1:])
    if dims.dp == dist.get_world_size():
        return init_device_mesh(device_type, (dims.dp_replicate, dims.dp_shard), mesh_dim_names=names)
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, dims.dp_shard)
    return DeviceMesh(device_type, ranks, mesh_dim_names=names)


def own_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of this rank alone; a collective, unless `mesh` (from `parameter_mesh`) already contains it."""
    if mesh.size(mesh.ndim - 1) == 1:
        return mesh if mesh.ndim == 1 else mesh["shard"]
    every = init_device_mesh(mesh.device_type, (dist.get_world_size(), 1), mesh_dim_names=("ranks", "own"))
    return every["own"]

"""Process groups and device meshes of a run."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mindspeed_mm import accelerator
from mindspeed_mm.utils.errors import ConfigError


@dataclass(frozen=True)
class ParallelState:
    """Ranks and groups of a run.

    Attributes:
        rank, world_size: of this process in the whole launch.
        data_parallel_rank, data_parallel_size: which shard of each global batch this process reads.
        data_parallel_group: over which sums of losses, counts and gradients are taken.
        host_group: for tensors in host memory (the same group where the device is the host).
        device: what this process computes on.
    """

    rank: int
    world_size: int
    data_parallel_rank: int
    data_parallel_size: int
    data_parallel_group: dist.ProcessGroup
    host_group: dist.ProcessGroup
    device: torch.device

    @property
    def is_logging_rank(self) -> bool:
        """Whether this process writes the log line (the last rank, as Megatron does)."""
        return self.rank == self.world_size - 1


def world_size_from_env() -> int:
    """WORLD_SIZE as the launcher set it, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def initialize_parallel(
    backend: str | None, timeout_minutes: float = 10.0, needs_cpu_tensors: bool = False
) -> ParallelState:
    """Start the process group (unless there is one) and return the state of a pure data-parallel run.

    Args:
        backend: `--distributed-backend`; what this machine can't use is replaced with a notice.
        timeout_minutes: after which a collective that a rank never joins raises.
        needs_cpu_tensors: whether parameters live in host memory (offload).
    """
    device = accelerator.current()
    device.set_device()
    timeout = timedelta(minutes=timeout_minutes)
    if not dist.is_initialized():
        _default_rendezvous()
        dist.init_process_group(backend=accelerator.resolve_backend(backend, needs_cpu_tensors), timeout=timeout)
    world = dist.group.WORLD
    assert world is not None
    host_group = world if device.name == "cpu" else dist.new_group(backend="gloo", timeout=timeout)
    return ParallelState(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        data_parallel_rank=dist.get_rank(),
        data_parallel_size=dist.get_world_size(),
        data_parallel_group=world,
        host_group=host_group,
        device=device.device(),
    )


def limit_waiting(timeout_minutes: float) -> None:
    """Let a collective of any group of this process raise after `timeout_minutes`.

    Device meshes and Megatron-core make groups that take no timeout of ours, and wait as long as torch likes to.
    """
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in list(dist.distributed_c10d._world.pg_map):
        change(timedelta(minutes=timeout_minutes), group)


def _default_rendezvous() -> None:
    """Let a plain `python pretrain_….py` run as the only rank."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(s.getsockname()[1])


def resolve_sharding_size(
    sharding_size: int | str | None, data_parallel_size: int, *, where: str = "fsdp2.yaml"
) -> int:
    """Return the number of ranks that share one copy of the parameters.

    Args:
        sharding_size: from fsdp2.yaml: an int, "auto" (all data-parallel ranks), or None (1).
        data_parallel_size: number of data-parallel ranks.

    Raises:
        ConfigError: it does not divide the data-parallel size.
    """
    if sharding_size == "auto":
        return data_parallel_size
    size = 1 if sharding_size is None else int(sharding_size)
    if size < 1 or data_parallel_size % size:
        valid = [n for n in range(1, data_parallel_size + 1) if data_parallel_size % n == 0]
        raise ConfigError(
            f"{where}: sharding_size is {size}, which does not divide the data-parallel size {data_parallel_size}; "
            f"valid here: auto, {', '.join(map(str, valid))}"
        )
    return size


def build_own_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of this rank alone. Collective over all ranks, unless `mesh`, of `build_fsdp_mesh`, has one."""
    if mesh.size(mesh.ndim - 1) == 1:
        return mesh if mesh.ndim == 1 else mesh["shard"]
    every = init_device_mesh(mesh.device_type, (dist.get_world_size(), 1), mesh_dim_names=("ranks", "own"))
    return every["own"]


def build_fsdp_mesh(sharding_size: int, group: dist.ProcessGroup | None = None) -> DeviceMesh:
    """Return the mesh for `fully_shard`.

    Args:
        sharding_size: ranks that share one copy of the parameters; must divide the group's size.
        group: the data-parallel group (None: the whole world).

    Returns:
        a 1-D mesh ("shard",) if one copy spans the group, else a 2-D mesh ("replicate", "shard") whose shard
        groups are neighbouring ranks (HSDP).
    """
    device_type = accelerator.current().name
    size = dist.get_world_size(group)
    if sharding_size == size:
        if group is None or group is dist.group.WORLD:
            return init_device_mesh(device_type, (size,), mesh_dim_names=("shard",))
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=("shard",))
    if size == dist.get_world_size():
        return init_device_mesh(
            device_type, (size // sharding_size, sharding_size), mesh_dim_names=("replicate", "shard")
        )
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, sharding_size)
    return DeviceMesh(device_type, ranks, mesh_dim_names=("replicate", "shard"))

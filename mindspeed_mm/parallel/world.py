"""The processes of a run: who they are, and which of them do something together."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from mindspeed_mm import accelerator
from mindspeed_mm.parallel.dims import Dims
from mindspeed_mm.utils.launch import be_the_only_process, is_launched


@dataclass(frozen=True)
class RankSet:
    """Ranks that do something together.

    Attributes:
        rank: this process's number among them.
        size: how many they are.
        group: for their collectives.
    """

    rank: int
    size: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class World:
    """This process and its rank sets, each named by its use.

    Attributes:
        dims: sizes of the kinds of parallelism.
        rank: of this process in the launch.
        device: what this process computes on.
        batch: ranks that read different rows of a global batch. Model-parallel ranks that read the same rows have the
            same number in sets of their own.
        sums: ranks over which the figures of a step are summed: losses, counts, squared gradient norms. All of them.
        host: all ranks, for tensors in host memory; the set of `sums` where the device is the host.
        pipeline_rank, tensor_rank: this process's stage, and its number among tensor-parallel ranks.
    """

    dims: Dims
    rank: int
    device: torch.device
    batch: RankSet
    sums: RankSet
    host: RankSet
    pipeline_rank: int = 0
    tensor_rank: int = 0

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.sums.size

    @property
    def is_logging_rank(self) -> bool:
        """Whether this process writes the log line (the last rank, as Megatron does)."""
        return self.rank == self.size - 1

    @property
    def counts_rows(self) -> bool:
        """Whether this process counts the rows that it reads; others of its model-parallel ranks read them too."""
        return self.tensor_rank == 0 and self.pipeline_rank == 0

    @property
    def counts_losses(self) -> bool:
        """Whether a loss that this process has computed counts; its tensor-parallel ranks have computed it too."""
        return self.tensor_rank == 0


def start_world(
    backend: str | None,
    dims: Dims | None = None,
    *,
    timeout_minutes: float = 10.0,
    needs_cpu_tensors: bool = False,
) -> World:
    """Start the process group, unless there is one, and return the world of a run without model parallelism.

    Args:
        backend: `--distributed-backend`; what this machine can't use is replaced with a notice.
        dims: None: every rank reads rows of its own.
        timeout_minutes: after which a collective that a rank never joins raises.
        needs_cpu_tensors: whether parameters live in host memory (offload).
    """
    device = accelerator.current()
    device.set_device()
    timeout = timedelta(minutes=timeout_minutes)
    if not dist.is_initialized():
        _default_rendezvous()
        dist.init_process_group(backend=accelerator.resolve_backend(backend, needs_cpu_tensors), timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = RankSet(rank, size, group)
    host = everyone
    if not device.is_host:
        host = RankSet(rank, size, dist.new_group(backend="gloo", timeout=timeout))
    return World(dims or Dims.of(size), rank, device.device(), batch=everyone, sums=everyone, host=host)


def limit_waiting(timeout_minutes: float) -> None:
    """Let a collective of any group of this process raise after `timeout_minutes`.

    Device meshes and Megatron-core make groups that take no timeout of ours, and wait as long as torch likes to.
    """
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in list(dist.distributed_c10d._world.pg_map):
        change(timedelta(minutes=timeout_minutes), group)


def _default_rendezvous() -> None:
    """Let a plain `python pretrain_….py` run as the only rank."""
    if is_launched():
        return
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    be_the_only_process(port)

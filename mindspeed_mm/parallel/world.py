"""The processes of a run and the sets of ranks that they form."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mm import accelerator
from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.parallel.meshes import Meshes, build_meshes
from mindspeed_mm.utils.launch import be_the_only_process, is_launched, this_launch


@dataclass(frozen=True)
class RankSet:
    """A set of ranks with a process group.

    Attributes:
        rank: rank of this process in the set.
        size: number of ranks in the set.
        group: process group for their collectives.
    """

    rank: int
    size: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class World:
    """This process and its rank sets, each named by its use.

    Attributes:
        dims: sizes of the parallelisms.
        rank: global rank of this process.
        device: device of this process.
        batch: data-parallel ranks, which read different rows of a global batch. Model-parallel ranks that read the same
            rows have the same rank in their `batch` sets.
        context: context-parallel ranks, which split the tokens of the same rows.
        ring, ulysses: the ranks of `context` that exchange keys and values in a ring, or heads for tokens.
        tensor: tensor-parallel ranks, which split layers.
        gradients: ranks over which the gradient of a parameter is summed, as they process different tokens: all
            data-parallel and context-parallel ranks.
        sums: ranks over which the losses, counts and squared gradient norms of a step are summed: all ranks.
        host: all ranks, for tensors in host memory; the same set as `sums` if the device is the host.
        meshes: device meshes that parameters are sharded over; None on the Megatron backend.
        pipeline_rank: pipeline-parallel rank of this process.
    """

    dims: Dims
    rank: int
    device: torch.device
    batch: RankSet
    context: RankSet
    ring: RankSet
    ulysses: RankSet
    tensor: RankSet
    gradients: RankSet
    sums: RankSet
    host: RankSet
    meshes: Meshes | None = None
    pipeline_rank: int = 0

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
        """Whether this process counts the rows it reads; one of the model-parallel ranks that read the same rows."""
        return self.tensor.rank == 0 and self.pipeline_rank == 0 and self.context.rank == 0

    @property
    def counts_losses(self) -> bool:
        """Whether this process adds its losses; one of the tensor-parallel ranks that compute the same losses."""
        return self.tensor.rank == 0

    @property
    def counts_batches(self) -> bool:
        """Whether this process adds what concerns a micro-batch as a whole; one of the ranks that compute its loss."""
        return self.counts_losses and self.context.rank == 0


def start_world(
    backend: str | None,
    dims: Dims | None = None,
    *,
    timeout_minutes: float = 10.0,
    needs_cpu_tensors: bool = False,
) -> World:
    """Start the process group, unless there is one, and return the world of a run.

    Args:
        backend: `--distributed-backend`; a backend that this machine can't use is replaced, with a notice.
        dims: sizes of the parallelisms, without pipeline parallelism; device meshes are built for them. None: pure data
            parallelism, without meshes.
        timeout_minutes: time after which a collective raises if a rank does not join.
        needs_cpu_tensors: whether collectives need tensors in host memory (parameter offload).
    """
    device = accelerator.current()
    device.set_device()
    timeout = timedelta(minutes=timeout_minutes)
    if not dist.is_initialized():
        _default_rendezvous()
        chosen = accelerator.resolve_backend(backend, needs_cpu_tensors)
        dist.init_process_group(chosen, timeout=timeout, **_of_this_attempt(timeout))
    group = dist.group.WORLD
    assert group is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = RankSet(rank, size, group)
    host = everyone
    if not device.is_host:
        host = RankSet(rank, size, dist.new_group(backend="gloo", timeout=timeout))
    sizes = dims or Dims.of(size)
    view = torch.arange(size).view(sizes.dp, sizes.ring, sizes.ulysses, sizes.tp)
    sets = _RankSets(everyone, timeout)
    return World(
        sizes,
        rank,
        device.device(),
        batch=sets.along(view, 0),
        context=sets.along(view, 1, 2),
        ring=sets.along(view, 1),
        ulysses=sets.along(view, 2),
        tensor=sets.along(view, 3),
        gradients=sets.along(view, 0, 1, 2),
        sums=everyone,
        host=host,
        meshes=build_meshes(sizes) if dims is not None else None,
    )


class _RankSets:
    """Creates the rank sets of this process along the dimensions of a view of all ranks; equal sets share a group."""

    def __init__(self, everyone: RankSet, timeout: timedelta) -> None:
        self._rank, self._timeout = everyone.rank, timeout
        self._known = {tuple(range(everyone.size)): everyone}

    def along(self, view: torch.Tensor, *dims: int) -> RankSet:
        """Return the ranks that differ from this process in `dims` only, in the order of the view."""
        others = [dim for dim in range(view.dim()) if dim not in dims]
        rows = view.permute(*others, *dims).flatten(len(others)).reshape(-1, _product(view, dims))
        ranks = next(row for row in rows.tolist() if self._rank in row)
        key = tuple(ranks)
        if key not in self._known:
            # only its members create a group: one collective for a set instead of one for all sets
            group = dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=True)
            self._known[key] = RankSet(ranks.index(self._rank), len(ranks), group)
        return self._known[key]


def _product(view: torch.Tensor, dims: tuple[int, ...]) -> int:
    size = 1
    for dim in dims:
        size *= view.shape[dim]
    return size


def limit_waiting(timeout_minutes: float) -> None:
    """Set the timeout of the collectives of all process groups of this process.

    Device meshes and Megatron-core create groups without this timeout, which would wait for torch's default.
    """
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in list(dist.distributed_c10d._world.pg_map):
        change(timedelta(minutes=timeout_minutes), group)


def _of_this_attempt(timeout: timedelta) -> dict[str, Any]:
    """Return what a process group is made with after a restart: keys of its own in the launcher's store.

    The launcher keeps its store, where the attempt before has left the addresses of processes that are gone.
    """
    restarts = this_launch().restarts
    if not restarts:
        return {}
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return {"store": dist.PrefixStore(f"restart {restarts}", store), "rank": rank, "world_size": size}


def _default_rendezvous() -> None:
    """Set the rendezvous of a single process, for a plain `python pretrain_….py` without a launcher."""
    if is_launched():
        return
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    be_the_only_process(port)

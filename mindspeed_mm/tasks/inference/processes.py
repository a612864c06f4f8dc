"""The processes of a launch that answers: their group, and what they tell each other."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from mindspeed_mm.parallel.world import start_world
from mindspeed_mm.tasks.inference.describe import AnswerRun
from mindspeed_mm.utils.launch import this_launch

Gathered = TypeVar("Gathered")
_WAIT = timedelta(days=30)  # processes may have very different amounts of work


class Processes:
    """The processes of a launch.

    Args:
        rank, size: place of this one, and their number.
        group: group for values in host memory; None: there is one process.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size, self._group = rank, size, group

    def gather(self, value: Gathered) -> list[Gathered]:
        """Return the values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


def join_processes(run: AnswerRun) -> Processes:
    """Join the processes of a launch; sharded parameters get the device's own collectives."""
    launch = this_launch()
    if run.sharding is not None:
        world = start_world(
            run.distributed_backend,
            timeout_minutes=run.timeout_minutes,
            needs_cpu_tensors=run.sharding.offload_to_cpu,
        )
        return Processes(world.rank, world.size, world.host.group)
    if launch.world_size == 1:
        return Processes()
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_WAIT)
    return Processes(launch.rank, launch.world_size, dist.group.WORLD)

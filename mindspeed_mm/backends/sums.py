"""The one small all-reduce of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindspeed_mm.data.counting import BatchCounts
from mindspeed_mm.parallel.state import ParallelState


@dataclass
class ReducedSums:
    """Global sums of a step.

    Attributes:
        device: float vector on the device, in the order handed in.
        counts: known on the host.
        stop: ranks that asked to stop.
    """

    device: torch.Tensor
    counts: BatchCounts
    stop: float


def reduce_step_sums(
    device_values: torch.Tensor, counts: BatchCounts, modalities: list[str], stop_requested: bool, state: ParallelState
) -> ReducedSums:
    """Sum a step's figures over all data-parallel ranks.

    Figures that are known on the host (rows, tokens, media, a stop request) must be known there again at once: which
    tower is idle decides what the optimizer touches. Where the device is the host, everything travels in one vector;
    elsewhere the host's part goes through the host group, which runs beside the device's queue instead of waiting for
    it.

    Args:
        device_values: [k] float, on the device.
        counts: this rank's.
        modalities: names in `counts.media`, the same on every rank.
    """
    host = torch.tensor(
        [
            counts.rows,
            counts.tokens,
            counts.positions,
            counts.targets,
            counts.squared_lengths,
            counts.patches,
            float(stop_requested),
            *(counts.media.get(m, 0) for m in modalities),
        ],
        dtype=torch.float64,
    )
    if device_values.device.type == "cpu":
        together = torch.cat([device_values.double(), host])
        if state.data_parallel_size > 1:
            dist.all_reduce(together, group=state.data_parallel_group)
        device_values, host = together[: len(device_values)], together[len(device_values) :]
    elif state.data_parallel_size > 1:
        work = dist.all_reduce(host, group=state.host_group, async_op=True)
        dist.all_reduce(device_values, group=state.data_parallel_group)
        work.wait()
    *numbers, stop = host[:7].tolist()
    media = dict(zip(modalities, map(int, host[7:].tolist()), strict=True))
    summed = BatchCounts(*map(int, numbers), media=media, wait_seconds=counts.wait_seconds)
    return ReducedSums(device_values, summed, stop)

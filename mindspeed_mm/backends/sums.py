"""What a step adds up, and its one small all-reduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mm.backends.protocol import normalise_loss_output
from mindspeed_mm.data.counting import BatchCounts
from mindspeed_mm.parallel.state import ParallelState


class StepSums:
    """Sums over the micro-batches of a step, on this rank.

    Attributes:
        loss, denominator: float scalars on the device.
        metrics: further figures of the loss function.
        micro_batches: whose loss was added.
        is_sum: whether losses are sums with a denominator; else they are means.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self.loss = torch.zeros((), dtype=dtype, device=device)
        self.denominator = self.loss.clone()
        self.metrics: dict[str, torch.Tensor] = {}
        self.micro_batches = 0
        self.is_sum = True

    def add(self, output: Any) -> torch.Tensor:
        """Add what a `loss_func` returned; returns the loss, with its graph."""
        loss, denominator, metrics = normalise_loss_output(output)
        self.micro_batches += 1
        self.is_sum = denominator is not None
        self.loss = self.loss + loss.detach().to(self.loss)
        if denominator is not None:
            self.denominator = self.denominator + denominator.detach().to(self.denominator)
        for name, value in metrics.items():
            if name == "loss":
                continue  # the loop's own figure, computed from the sums
            number = torch.as_tensor(value, dtype=self._dtype).detach().to(self._device)
            if number.numel() == 1:
                self.metrics[name] = self.metrics.get(name, 0) + number.reshape(())
        return loss


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

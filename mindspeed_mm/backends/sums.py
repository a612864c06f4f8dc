"""What a step adds up, and its one small all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mm.backends.protocol import normalise_loss_output
from mindspeed_mm.data.counting import BatchCounts
from mindspeed_mm.parallel.state import ParallelState

_SUMMED = ("rows", "tokens", "positions", "targets", "squared_lengths", "patches", "rows_left_out")


class StepSums:
    """Sums over the micro-batches of a step, on this rank.

    Attributes:
        loss, denominator: float scalars on the device.
        metrics: further figures of the loss function, each [2]: a sum, and what it is to be divided by.
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
            figure = self._figure(value)
            if figure is not None:
                self.metrics[name] = self.metrics.get(name, 0) + figure
        return loss

    def figures(self, names: Sequence[str]) -> torch.Tensor:
        """[2 * names], zeros for a metric that no micro-batch had; `means_of` reads their sums over ranks."""
        zeros = self.loss.new_zeros(2)
        return torch.cat([zeros[:0], *(self.metrics.get(name, zeros) for name in names)])

    def _figure(self, value: Any) -> torch.Tensor | None:
        """A (sum, denominator) pair as [2]; a number is the mean of one micro-batch; anything else is no figure."""
        is_pair = isinstance(value, tuple) and len(value) == 2
        parts = value if is_pair else (value, self.loss.new_ones(()))
        numbers = [torch.as_tensor(part, dtype=self._dtype).detach().to(self._device) for part in parts]
        if any(number.numel() != 1 for number in numbers):
            return None
        return torch.cat([number.reshape(1) for number in numbers])


def means_of(names: Sequence[str], figures: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each metric's sum over its denominator.

    Args:
        figures: [2 * names], what `StepSums.figures` gives, summed over ranks.
    """
    sums, denominators = figures.view(-1, 2).unbind(1)
    return dict(zip(names, (sums / denominators.clamp(min=1e-30)).unbind(), strict=True))


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
        counts: this rank's. What is told of each rank by itself (`wait_seconds`, `cost`) has a place of its own in the
            vector, which is zero on the others.
        modalities: names in `counts.media`, the same on every rank.
    """
    ranks, rank = state.data_parallel_size, state.data_parallel_rank
    told = [*(getattr(counts, name) for name in _SUMMED), float(stop_requested)]
    told += [counts.media.get(m, 0) for m in modalities]
    host = torch.zeros(len(told) + 2 * ranks, dtype=torch.float64)
    host[: len(told)] = torch.tensor(told, dtype=torch.float64)
    waits, costs = host[len(told) :].view(2, ranks)
    waits[rank], costs[rank] = counts.wait_seconds, counts.cost
    if device_values.device.type == "cpu":
        together = torch.cat([device_values.double(), host])
        if state.data_parallel_size > 1:
            dist.all_reduce(together, group=state.data_parallel_group)
        device_values, host = together[: len(device_values)], together[len(device_values) :]
    elif state.data_parallel_size > 1:
        work = dist.all_reduce(host, group=state.host_group, async_op=True)
        dist.all_reduce(device_values, group=state.data_parallel_group)
        work.wait()
    waits, costs = host[len(told) :].view(2, ranks)
    *numbers, stop = host[: len(_SUMMED) + 1].tolist()
    media = dict(zip(modalities, map(int, host[len(_SUMMED) + 1 : len(told)].tolist()), strict=True))
    summed = BatchCounts(
        **dict(zip(_SUMMED, map(int, numbers), strict=True)),
        media=media,
        row_ids=counts.row_ids,
        wait_seconds=float(waits.max()),
        cost=float(costs.sum()),
        imbalance=imbalance(costs),
    )
    return ReducedSums(device_values, summed, stop)


def imbalance(costs: torch.Tensor) -> float:
    """The largest cost of a rank over the mean, 1 if all are equal.

    Args:
        costs: [ranks] float64; ranks that share another's rows have zero and don't count.
    """
    having = costs[costs > 0]
    return float(having.max() / having.mean()) if len(having) else 1.0

"""The sums of a step over its micro-batches, and the one small all-reduce that sums them over ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

from mindspeed_mm.backends.protocol import StepResult, normalise_loss_output
from mindspeed_mm.data.loading.counting import BatchCounts, RankCounts
from mindspeed_mm.models.common.expert_load import FIGURES, RoutedTokens, load_figures
from mindspeed_mm.parallel.world import RankSet, World
from mindspeed_mm.utils.errors import ConfigError

_SUMMED = ("rows", "tokens", "positions", "targets", "rows_left_out")


class StepSums:
    """Sums over the micro-batches of a step, on this rank.

    Attributes:
        loss: float scalar on the device.
        denominator: float scalar on the device: the divisor of a sum. For mean losses it only shows whether there were
            targets: their number if the loss function returns it, else 1 for each micro-batch.
        metrics: further metrics of the loss function, each [2]: its sum and its denominator.
        is_pair: whether the loss function returned a metric as a pair (sum, denominator), or as a number.
        routed: tokens that were sent to each expert, [experts]; empty without experts.
        layers: name of a layer with experts → their number, in the order of `routed`.
        sums, means: number of micro-batches whose loss was a sum with a denominator, or a mean.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self.loss = torch.zeros((), dtype=dtype, device=device)
        self.denominator = self.loss.clone()
        self.metrics: dict[str, torch.Tensor] = {}
        self.is_pair: dict[str, bool] = {}
        self.routed = self.loss.new_zeros(0)
        self.layers: Mapping[str, int] = {}
        self.sums = self.means = 0

    def add(self, output: object) -> torch.Tensor:
        """Add the return value of a `loss_func`; returns the loss, with its autograd graph.

        Raises:
            ConfigError: the loss function returned another form for an earlier micro-batch of the step.
        """
        loss, denominator, metrics = normalise_loss_output(output)
        if denominator is None:
            self.means += 1
            own = metrics.get("loss")
            denominator = own[1] if _is_pair(own) else 1.0
        else:
            self.sums += 1
        _refuse_sums_and_means(self.sums, self.means)
        if isinstance(denominator, torch.Tensor):
            denominator = denominator.detach().to(self.denominator, non_blocking=True)
        self.loss = self.loss + loss.detach().to(self.loss)
        self.denominator = self.denominator + denominator
        for name, value in metrics.items():
            if name == "loss":
                continue  # the training loop computes the loss from the sums
            if isinstance(value, RoutedTokens):
                self.routed = value.counts.to(self.loss) + (self.routed if len(self.routed) else 0)
                self.layers = value.layers
                continue
            figure = self._figure(value)
            if figure is not None:
                _refuse_two_forms(name, {self.is_pair.setdefault(name, _is_pair(value)), _is_pair(value)})
                self.metrics[name] = self.metrics.get(name, 0) + figure
        return loss

    def figures(self, names: Iterable[str]) -> torch.Tensor:
        """Return sums and denominators of metrics, [2 * names]; zeros for a metric that no micro-batch returned."""
        zeros = self.loss.new_zeros(2)
        return torch.cat([zeros[:0], *(self.metrics.get(name, zeros) for name in names)])

    def routed_to(self, experts: int) -> torch.Tensor:
        """Return `routed` for a known number of experts: zeros if no micro-batch returned it."""
        return self.routed if len(self.routed) == experts else self.loss.new_zeros(experts)

    def _figure(self, value: object) -> torch.Tensor | None:
        """Return a (sum, denominator) pair as [2]; a number gets the denominator 1; None for anything else."""
        parts = value if _is_pair(value) else (value, self.loss.new_ones(()))
        tensors = [torch.as_tensor(part, dtype=self._dtype).detach() for part in parts]
        numbers = [tensor.to(self._device, non_blocking=True) for tensor in tensors]  # a waiting copy stalls the queue
        if any(number.numel() != 1 for number in numbers):
            return None
        return torch.cat([number.reshape(1) for number in numbers])


@dataclass
class ReducedStep:
    """The sums of a step over all ranks; tensors are on the device.

    Attributes:
        squared_norm: float scalar: squared norm of the sum of gradients, not yet divided.
        divisor: float scalar: divisor of the sums of gradients and losses.
        loss: float scalar: the loss, divided.
        has_targets: bool scalar: whether the global batch had any targets.
        names: names of the metrics.
        metrics: [2 * names] float: sum and denominator of each metric.
        counts: counts of the global batch, on the host.
        stop, log: whether any rank requested a stop, or that the step is logged.
        load: tokens that were sent to each expert; None: there are none, or this rank hasn't met them.
    """

    squared_norm: torch.Tensor
    divisor: torch.Tensor
    loss: torch.Tensor
    has_targets: torch.Tensor
    names: Sequence[str]
    metrics: torch.Tensor
    counts: BatchCounts
    stop: bool
    log: bool
    load: RoutedTokens | None = None

    def figures(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the values that `result` builds a StepResult from, on the device: [3 + 2 * names].

        Args:
            norm: norm of the step's gradient.
        """
        return torch.cat([torch.stack([self.loss, norm, self.has_targets.to(norm)]), self.metrics])

    def result(self, figures: Sequence[float], *, learning_rate: float, loss_scale: float) -> StepResult:
        """Return the step's result; a metric that no micro-batch of any rank returned is left out.

        Args:
            figures: return value of `figures`, copied to the host.
        """
        loss, norm, has_targets, *metrics = figures
        pairs = zip(self.names, metrics[::2], metrics[1::2], strict=True)
        return StepResult.of(
            loss,
            norm,
            has_targets=bool(has_targets),
            learning_rate=learning_rate,
            loss_scale=loss_scale,
            metrics={name: total / denominator for name, total, denominator in pairs if denominator},
        )


class StepReducer:
    """Sums the losses, metrics and counts of a step over all ranks.

    A rank knows only the metrics and the kinds of media that it has seen itself, so the ranks synchronize their names:
    the reduction of a step carries a flag for new names, and only if a rank sets it do all ranks gather the new names
    and sum their values. In every other step a rank adds zeros for names that it has not seen.

    Counts on the host (rows, tokens, media, requests) must be on the host again at once after the sum, as idle
    towers decide which parameters the optimizer steps. If the device is the host, one vector carries everything; on
    accelerators the host's part uses the host group, which runs in parallel to the device's queue instead of waiting
    for it.
    """

    def __init__(self, world: World) -> None:
        """
        Args:
            world: sums are taken over its rank set `sums`; its `host` has the same ranks. Those that read the same rows
                have one place in its `batch`.
        """
        self._batch = world.batch
        self._sums, self._host = world.sums, world.host
        self._counts_batches = world.counts_batches
        self._is_pair: dict[str, bool] = {}  # the same on all ranks: each metric, in the order of the device's vector
        self._media: list[str] = []
        self._layers: Mapping[str, int] = {}  # those with experts, once this rank has met them
        self._experts = 0  # length of the vector of tokens that were sent to each expert

    def reduce(
        self, sums: StepSums, squared_norm: torch.Tensor, counts: BatchCounts, requests: tuple[bool, bool]
    ) -> ReducedStep:
        """Sum losses, metrics and counts of a training step over all ranks.

        Args:
            squared_norm: float scalar on the device: this rank's part of the squared norm.
            counts: counts of this rank. Values that are needed of each rank separately (`wait_seconds`, `memory_bytes`;
                `cost` and `tokens` of each data-parallel rank) have one element for each in the vector, which is zero
                on the other ranks.
            requests: whether this rank requests a stop, and that the step is logged.

        Raises:
            ConfigError: the loss function returned different forms.
        """
        for name in sums.is_pair.keys() & self._is_pair.keys():
            _refuse_two_forms(name, {sums.is_pair[name], self._is_pair[name]})
        has_new = not (sums.is_pair.keys() <= self._is_pair.keys() and counts.media.keys() <= set(self._media))
        has_new = has_new or len(sums.routed) > self._experts
        values = [sums.sums, self._means(sums), has_new, *requests]
        values += [getattr(counts, name) for name in _SUMMED]
        values += [counts.media.get(kind, 0) for kind in self._media]
        apart = [*_placed((counts.wait_seconds, counts.memory_bytes), self._sums)]
        apart += _placed((counts.cost, counts.tokens), self._batch)
        host = torch.tensor([*values, *apart], dtype=torch.float64)

        own = torch.stack([squared_norm.to(sums.loss), sums.loss, sums.denominator])
        device, host = self._sum(torch.cat([own, sums.figures(self._is_pair), sums.routed_to(self._experts)]), host)
        figures, routed = device[3:].split([2 * len(self._is_pair), self._experts])

        summed_up = host.tolist()
        waits, memory, costs, tokens = _split(summed_up[len(values) :], 2 * [self._sums.size] + 2 * [self._batch.size])
        with_sum, means, with_new, stop, log, *numbers = map(int, summed_up[: len(values)])
        _refuse_sums_and_means(with_sum, means)
        media = dict(zip(self._media, numbers[len(_SUMMED) :], strict=True))
        if with_new:
            new, new_routed, new_media = self._agree(sums, counts.media)
            figures, media = torch.cat([figures, new]), media | new_media
            routed = torch.cat([routed, new_routed])
        summed = BatchCounts(
            **dict(zip(_SUMMED, numbers, strict=False)),  # type: ignore[arg-type]
            media=media,
            row_ids=counts.row_ids,
            wait_seconds=max(waits),
            flops=None if counts.flops is None else sum(costs),
            imbalance=imbalance(costs),
            ranks=RankCounts(costs, [int(n) for n in tokens], [int(n) for n in memory] if any(memory) else ()),
        )
        squared, loss, denominator = device[:3].unbind()
        divisor = (torch.full_like(denominator, means) if means else denominator).clamp(min=1e-30)
        has_targets = ~(denominator <= 0)  # True for NaN: a broken denominator is not a lack of targets
        names = list(self._is_pair)
        load = None
        if self._experts:
            names, figures = [*names, *FIGURES], torch.cat([figures, load_figures(routed)])
            self._layers = sums.layers or self._layers
            load = RoutedTokens(routed, self._layers) if self._layers else None
        asks = stop > 0, log > 0
        return ReducedStep(squared, divisor, loss / divisor, has_targets, names, figures, summed, *asks, load)

    def reduce_loss(self, sums: StepSums) -> tuple[float, float]:
        """Return (loss sum, denominator) of an evaluation over all ranks.

        Raises:
            ConfigError: the loss function returned a sum in one micro-batch and a mean in another.
        """
        host = torch.tensor([sums.sums, self._means(sums)], dtype=torch.float64)
        device, host = self._sum(torch.stack([sums.loss, sums.denominator]), host)
        with_sum, means = host.tolist()
        _refuse_sums_and_means(with_sum, means)
        loss, denominator = device.tolist()
        return loss, denominator if denominator <= 0 or not means else means

    def _means(self, sums: StepSums) -> int:
        """Return how many micro-batches' means this rank adds: context-parallel ranks have parts of the same ones."""
        return sums.means if self._counts_batches else 0

    def _sum(self, device: torch.Tensor, host: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both vectors, summed over all ranks."""
        if self._host is self._sums:  # the device is the host
            together = torch.empty(len(device) + len(host), dtype=torch.float64)
            together[: len(device)], together[len(device) :] = device, host
            if self._sums.size > 1:
                dist.all_reduce(together, group=self._sums.group)
            return together[: len(device)], together[len(device) :]
        if self._sums.size > 1:
            work = dist.all_reduce(host, group=self._host.group, async_op=True)
            dist.all_reduce(device, group=self._sums.group)
            work.wait()
        return device, host

    def _agree(self, sums: StepSums, media: Mapping[str, int]) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
        """Add the names that are new to any rank, and the number of experts, on all ranks; a collective.

        Returns:
            the sums over all ranks of the new metrics, [2 * names], of the tokens that were sent to each expert,
            [experts] ([0] if their number was known), and of the new kinds of media.
        """
        own = (
            {name: pair for name, pair in sums.is_pair.items() if name not in self._is_pair},
            {kind: number for kind, number in media.items() if kind not in self._media},
            len(sums.routed),
        )
        everyone = [own]
        if self._sums.size > 1:
            everyone = [own] * self._sums.size
            dist.all_gather_object(everyone, own, group=self._host.group)
        forms: dict[str, set[bool]] = {}
        totals: dict[str, int] = {}
        for metrics, kinds, _ in everyone:
            for name, pair in metrics.items():
                forms.setdefault(name, set()).add(pair)
            for kind, number in kinds.items():
                totals[kind] = totals.get(kind, 0) + number
        names = sorted(forms)
        for name in names:
            _refuse_two_forms(name, forms[name])
            self._is_pair[name] = True in forms[name]
        self._media += sorted(totals)
        experts = 0 if self._experts else max(number for _, _, number in everyone)
        self._experts = self._experts or experts
        new = torch.cat([sums.figures(names), sums.routed_to(experts)])
        if len(new) and self._sums.size > 1:
            dist.all_reduce(new, group=self._sums.group)
        figures, routed = new.split([2 * len(names), experts])
        return figures, routed, totals


def _placed(values: Sequence[float], ranks: RankSet) -> list[float]:
    """Values of this rank, each in its place among zeros for the others of a set."""
    found = []
    for value in values:
        found += [0.0] * ranks.size
        found[ranks.rank - ranks.size] = value
    return found


def _split(values: Sequence[float], sizes: Sequence[int]) -> list[Sequence[float]]:
    """Consecutive parts of these sizes."""
    ends = list(itertools.accumulate(sizes))
    return [values[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def imbalance(costs: Sequence[float]) -> float:
    """Return the largest cost of a rank divided by the mean, 1 if all are equal.

    Args:
        costs: cost of each rank; ranks that share another rank's rows have zero and are left out.
    """
    nonzero = [cost for cost in costs if cost > 0]
    return max(nonzero) * len(nonzero) / sum(nonzero) if nonzero else 1.0


def _is_pair(value: object) -> TypeGuard[tuple[Any, Any]]:
    return isinstance(value, tuple) and len(value) == 2


def _refuse_sums_and_means(sums: float, means: float) -> None:
    if sums and means:
        raise ConfigError(
            "loss_func returned (loss_sum, num_tokens, metrics) for one micro-batch of a step and a mean, (loss, "
            "metrics) or a bare tensor, for another; a step can't be divided by tokens and by micro-batches at once: "
            "return the same form for every micro-batch, with num_tokens 0 where there are none"
        )


def _refuse_two_forms(name: str, forms: set[bool]) -> None:
    if len(forms) > 1:
        raise ConfigError(
            f"loss_func returned its metric '{name}' as a number for one micro-batch and as a pair (sum, denominator) "
            "for another; the one is averaged over micro-batches and the other divided by its denominators: return "
            "the same form for every micro-batch"
        )

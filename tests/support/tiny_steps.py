"""A line of two weights on either backend, whose micro-batches say what the loss function shall return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.models.common.base_model import FSDP2Mixin, WeightInitMixin
from mindspeed_mm.models.common.module import MultiModalModule
from tests.support.runs import run_of


@dataclass
class Micro:
    """A micro-batch: (sum, targets, metrics), or without `targets` (mean, metrics).

    Attributes:
        factor: on the loss, whose gradient is (1, 2) times it.
    """

    targets: float | None = 1.0
    metrics: dict[str, Any] = field(default_factory=dict)
    factor: float = 1.0


class Line(MultiModalModule, FSDP2Mixin, WeightInitMixin):
    """w · (1, 2), on the FSDP2 backend."""

    def __init__(self) -> None:
        super().__init__({})
        self.weight = nn.Parameter(torch.ones(1, 2))

    def forward(self) -> torch.Tensor:
        return (self.weight * torch.tensor([1.0, 2.0])).sum()


class Chunk(nn.Module):
    """The same as Megatron's schedules want it."""

    def __init__(self) -> None:
        super().__init__()
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=True
        )
        self.weight = nn.Parameter(torch.ones(1, 2))

    def set_input_tensor(self, tensor: Any) -> None:
        pass

    def forward(self) -> torch.Tensor:
        return (self.weight * torch.tensor([1.0, 2.0])).sum()


def forward_step(data: Iterator[Micro], model: Any) -> tuple[torch.Tensor, Any]:
    """Forward pass of one micro-batch."""
    micro = next(data)

    def loss_func(output: torch.Tensor) -> Any:
        loss = output * micro.factor
        if micro.targets is None:
            return loss, micro.metrics
        return loss, micro.targets, micro.metrics

    return model(), loss_func


class TinySteps:
    """A backend with a model and an optimizer on this rank."""

    def __init__(self, kind: str, model: Any = None, **flags: Any) -> None:
        """
        Args:
            kind: fsdp2 or ptd.
            model: class of the model; None: `Line` or `Chunk`.
        """
        flags = {"seq_length": 8, "micro_batch_size": 1, "clip_grad": 0.0, **flags}
        if kind == "fsdp2":
            from mindspeed_mm.backends.fsdp2 import FSDP2Backend

            self.backend: Any = FSDP2Backend()
            run = run_of(world_size=dist.get_world_size(), use_torch_fsdp2=True, **flags)
            self.backend.setup(run)
            self.backend.build_model(model or Line, load_weights=True)
        else:
            from mindspeed_mm import accelerator

            accelerator.prepare_megatron()
            from mindspeed_mm.backends.ptd import PTDBackend

            self.backend = PTDBackend()
            run = run_of(world_size=dist.get_world_size(), **flags)
            self.backend.setup(run)
            self.backend.build_model(model or Chunk, load_weights=True)
        self.backend.build_optimizer(self.backend.model, run)

    def step(self, micros: Sequence[Micro]) -> Any:
        """Train a step on this rank's micro-batches; returns its result."""
        from mindspeed_mm.data.loading.counting import BatchCounts

        self.backend.forward_backward(forward_step, iter(micros), len(micros))
        return self.backend.step(BatchCounts(rows=len(micros)), False).result()

    def module(self) -> Any:
        """The model, not wrapped."""
        model = self.backend.model
        return model if isinstance(model, nn.Module) else model[0].module

    def weight(self) -> list[float]:
        """The weights, whole."""
        weight = self.module().weight.detach()
        return getattr(weight, "full_tensor", lambda: weight)().flatten().tolist()

    def state(self) -> list[Any]:
        """Weights, momenta, counts of steps, averages, the schedule and the loss scale."""
        optimizer = getattr(self.backend.optimizer, "optimizer", self.backend.optimizer)
        momenta = [
            (name, getattr(value, "full_tensor", lambda value=value: value)().flatten().tolist())
            for state in optimizer.state.values()
            for name, value in sorted(state.items())
            if isinstance(value, torch.Tensor)
        ]
        ema = getattr(self.backend, "ema", None)
        averages = [t.full_tensor().tolist() for t in ema.tensors().values()] + [ema.state_dict()] if ema else []
        return [
            self.weight(),
            momenta,
            [group.get("step", 0) for group in optimizer.param_groups],  # Megatron's count of steps
            averages,
            self.backend.schedule.state_dict(),
            self.backend.loss_scale.state_dict(),
        ]


def own_part(plan: Sequence[Sequence[Sequence[Micro]]]) -> list[Sequence[Micro]]:
    """This rank's micro-batches of each step of a plan [step][rank][micro-batch]."""
    return [ranks[dist.get_rank()] for ranks in plan]


class CountedCollectives:
    """Counts the collectives that are issued while it is entered."""

    NAMES = ("all_reduce", "all_gather_object", "all_gather", "broadcast", "barrier", "all_gather_into_tensor")

    def __enter__(self) -> dict[str, int]:
        self.counts: dict[str, int] = {}
        self._patches = [mock.patch.object(dist, name, self._counted(name)) for name in self.NAMES]
        for patch in self._patches:
            patch.start()
        return self.counts

    def __exit__(self, *_: Any) -> None:
        for patch in self._patches:
            patch.stop()

    def _counted(self, name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] = self.counts.get(name, 0) + 1
            return original(*args, **kwargs)

        return call

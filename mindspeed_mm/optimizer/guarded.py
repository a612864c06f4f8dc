"""Optimizer steps that the device can skip: the host launches a step without knowing whether it will be applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from mindspeed_mm import accelerator
from mindspeed_mm.optimizer.clip import all_parameters, scale_gradients
from mindspeed_mm.optimizer.groups import ParamGroup


class Skippable(Protocol):
    """An optimizer that reads from the device whether to apply a step: `ElementWise` or Muon.

    Attributes:
        param_groups: its parameter groups.
        grad_scale, found_inf, divides: see `ElementWise`.
    """

    param_groups: list[ParamGroup]
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None
    divides: bool

    def step(self) -> None:
        """Step every parameter that has a gradient, unless `found_inf` is 1."""

    def take_back(self) -> None:
        """Restore counts of steps on the host, once it knows that the last step was skipped."""


class GuardedOptimizer:
    """Steps an optimizer unless a flag on the device is set; the host never reads the flag to launch a step.

    Kernels are given the flag; `finish_step` restores what the host counted.
    """

    def __init__(self, optimizer: Skippable) -> None:
        """
        Args:
            optimizer: from `build_optimizer`, or the optimizer inside of Megatron's.
        """
        self._optimizer = optimizer

    def step(self, factor: torch.Tensor, finite: torch.Tensor, groups: Sequence[ParamGroup] | None = None) -> None:
        """Step with the gradients times `factor`; if `finite` is False, parameters and state stay unchanged.

        Args:
            factor: float scalar on the device.
            finite: bool scalar on the device.
            groups: the parameter groups to step; None: all groups of the optimizer.
        """
        optimizer = self._optimizer
        everything = optimizer.param_groups
        busy = everything if groups is None else list(groups)
        scalars = torch.stack([(1.0 / factor).float(), (~finite).float()])
        if accelerator.current().holds(scalars) and _on_host(busy):
            # kernels on the host would read them before a copy beside the queue has arrived
            scalars = scalars.cpu()
        divisor, optimizer.found_inf = scalars.unbind()
        if optimizer.divides:  # while the kernel reads the gradients: no further pass over them
            optimizer.grad_scale = divisor
        else:
            scale_gradients(all_parameters(busy), factor.float())
        optimizer.param_groups = busy
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = everything

    def finish_step(self, *, stepped: bool) -> None:
        """Restore the step counts on the host if the last step was skipped.

        Args:
            stepped: value of the step's `finite`, read by the host.
        """
        if not stepped:
            self._optimizer.take_back()


def _on_host(groups: Sequence[ParamGroup]) -> bool:
    """Whether parameters are in host memory (offload_to_cpu); all parameters of a group are on one device."""
    current = accelerator.current()
    return any(not current.holds(p) for group in groups for p in group["params"][:1])

"""Optimizer steps that the device can skip: the host launches a step without knowing whether it will be applied."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_mm import accelerator
from mindspeed_mm.optimizer.clip import all_parameters, local_tensor, number_of_copies, scale_gradients

_CHUNK = 2**26  # number of values that are backed up at a time

ParamGroup = dict[str, Any]
"""A parameter group of torch's optimizers."""


@runtime_checkable
class SkipsByItself(Protocol):
    """An optimizer whose kernel reads from the device whether to apply the step.

    Attributes:
        found_inf: float scalar; 1: `step` leaves parameters and their state unchanged.
    """

    found_inf: torch.Tensor | None


class GuardedOptimizer:
    """Steps an optimizer unless a flag on the device is set; the host never reads the flag to launch a step.

    A fused optimizer receives the flag. For other optimizers the parameters and states are backed up, some parameters
    at a time, and restored on the device if the step is skipped. `finish_step` restores step counts on the host.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """
        Args:
            optimizer: from `build_optimizer`, or the torch optimizer inside of Megatron's.
        """
        self._optimizer = optimizer
        self._skips = optimizer if isinstance(optimizer, SkipsByItself) else None
        self._counts: list[tuple[MutableMapping[str, Any], Any]] = []

    def step(self, factor: torch.Tensor, finite: torch.Tensor, groups: Sequence[ParamGroup] | None = None) -> None:
        """Step with the gradients times `factor`; if `finite` is False, parameters and state stay unchanged.

        Args:
            factor: float scalar on the device.
            finite: bool scalar on the device.
            groups: the parameter groups to step; None: all groups of the optimizer.
        """
        optimizer = self._optimizer
        if optimizer.defaults.get("fused"):
            step_fused(optimizer, 1.0 / factor, ~finite)
            return
        busy = list(optimizer.param_groups if groups is None else groups)
        scale_gradients(all_parameters(busy), factor.float())
        self._counts = [(group, group.get("step")) for group in busy]
        everything = optimizer.param_groups
        try:
            if self._skips is not None:
                optimizer.param_groups, self._skips.found_inf = busy, (~finite).float()
                optimizer.step()
            else:
                for group in busy:
                    self._step_and_restore(group, finite)
        finally:
            optimizer.param_groups = everything

    def finish_step(self, *, stepped: bool) -> None:
        """Restore the step counts on the host if the last step was skipped.

        Args:
            stepped: value of the step's `finite`, read by the host.
        """
        if not stepped:
            for owner, before in self._counts:
                if before is None:
                    owner.pop("step", None)
                else:
                    owner["step"] = before
        self._counts = []

    @torch.no_grad()
    def _step_and_restore(self, group: ParamGroup, finite: torch.Tensor) -> None:
        """Step a group's parameters a chunk at a time, and restore them and their state if `finite` is False."""
        optimizer, own = self._optimizer, group
        for params in _chunks([p for p in group["params"] if p.grad is not None]):
            own = {**group, "params": params}
            kept = [(p, p.detach().clone(), _copies(optimizer.state.get(p, {}))) for p in params]
            optimizer.param_groups = [own]
            optimizer.step()
            for param, value, state in kept:
                _select(finite, param.detach(), value)
                for name, new in _tensors(optimizer.state[param]).items():
                    before = state.get(name, torch.zeros_like(new))  # state that the first step creates starts as zeros
                    if name == "step":  # torch keeps it on the host
                        self._counts.append((optimizer.state[param], before))
                    else:
                        _select(finite, new, before)
        group.update({name: value for name, value in own.items() if name != "params"})


def step_fused(optimizer: torch.optim.Optimizer, grad_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
    """Step a fused optimizer without an additional pass over the gradients, and without waiting for the device.

    Args:
        optimizer: from `build_optimizer`, with fused=True.
        grad_scale: scalar; the kernel divides gradients by it while it reads them.
        found_inf: bool scalar; True: the kernel leaves parameters and state unchanged.
    """
    scalars = torch.stack([grad_scale.float(), found_inf.float()])
    if accelerator.current().holds(scalars) and _on_host(optimizer):
        # the optimizer would copy them asynchronously, and its kernel on the host would read them before they arrive
        scalars = scalars.cpu()
    optimizer.grad_scale, optimizer.found_inf = scalars.unbind()
    optimizer.step()


def _on_host(optimizer: torch.optim.Optimizer) -> bool:
    """Whether parameters are in host memory (offload_to_cpu); all parameters of a group are on one device."""
    current = accelerator.current()
    return any(not current.holds(p) for group in optimizer.param_groups for p in group["params"][:1])


def _tensors(state: MutableMapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _copies(state: MutableMapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in _tensors(state).items()}


def _select(finite: torch.Tensor, new: torch.Tensor, before: torch.Tensor) -> None:
    """Restore `before` into `new` if `finite` is False, without waiting for the device."""
    own, kept = local_tensor(new), local_tensor(before)
    own.copy_(torch.where(finite.to(own.device), own, kept))


def _chunks(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Split parameters into chunks of about `_CHUNK` values of a rank, alike on all ranks, even with uneven shards."""
    chunk: list[nn.Parameter] = []
    values = 0
    for param in parameters:
        chunk.append(param)
        ranks = param.device_mesh.size() if isinstance(param, DTensor) else 1
        values += param.numel() * number_of_copies(param, ranks) // ranks
        if values >= _CHUNK:
            yield chunk
            chunk, values = [], 0
    if chunk:
        yield chunk

"""Where the state of an element-wise optimizer is between steps, and how its kernels get it."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mindspeed_mm.optimizer.clip import local_tensor

_CHUNK = 2**26  # number of values that foreach kernels step at a time: they make temporary tensors of all of them

States = MutableMapping[Any, dict[str, Any]]
"""Parameter → its state by name: an optimizer's `state`."""


@dataclass(frozen=True)
class Piece:
    """Plain tensors for one call of a kernel, all on one device: entry i of each list belongs to entry i of the others.

    Attributes:
        params, grads: this rank's parts of parameters and gradients, or ranges of them.
        states: for each name of the state, the tensors of the same shapes.
        steps: counts of steps, float scalars; empty for an optimizer that needs none.
    """

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    states: tuple[list[torch.Tensor], ...]
    steps: list[torch.Tensor]


class StateHome(Protocol):
    """Keeps the state tensors that have the shape of their parameter."""

    def ensure(
        self, states: States, group: dict[str, Any], names: Sequence[str], params: Sequence[torch.Tensor]
    ) -> None:
        """Create the missing state of `params`, which are of `group`: zeros."""

    def pieces(
        self,
        states: States,
        group: dict[str, Any],
        names: Sequence[str],
        params: Sequence[torch.Tensor],
        steps: Sequence[torch.Tensor],
        found_inf: torch.Tensor | None,
    ) -> Iterator[Piece]:
        """Yield what is to be stepped; what a kernel did to a piece is kept before the next one is yielded.

        Args:
            names: of the state tensors.
            params: those of the group that have a gradient.
            steps: their counts of steps; empty: there are none.
            found_inf: float scalar; 1: the kernel leaves its tensors as they are, and so must the state be. None: 0.
        """

    def settle(self) -> None:
        """Wait until the host may read and write the state."""


class Resident:
    """The state is beside the parameters, with their device, dtype and sharding."""

    def ensure(
        self, states: States, group: dict[str, Any], names: Sequence[str], params: Sequence[torch.Tensor]
    ) -> None:
        """See `StateHome`."""
        for param in params:
            state = states[param]
            for name in names:
                if state.get(name) is None:
                    state[name] = torch.zeros_like(param)

    def pieces(
        self,
        states: States,
        group: dict[str, Any],
        names: Sequence[str],
        params: Sequence[torch.Tensor],
        steps: Sequence[torch.Tensor],
        found_inf: torch.Tensor | None,
    ) -> Iterator[Piece]:
        """See `StateHome`; everything at once for a fused kernel."""
        first, values = 0, 0
        for end, param in enumerate(params, 1):
            values += local_tensor(param).numel()
            if end == len(params) or (values >= _CHUNK and not group["fused"]):
                chosen, first_step = params[first:end], steps[first:end]
                kept = tuple([local_tensor(states[p][name]) for p in chosen] for name in names)
                grads = [local_tensor(p.grad) for p in chosen if p.grad is not None]
                yield Piece([local_tensor(p) for p in chosen], grads, kept, list(first_step))
                first, values = end, 0

    def settle(self) -> None:
        """See `StateHome`."""

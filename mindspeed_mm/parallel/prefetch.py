"""Overlap of communication with compute: prefetch of units in the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


class PrefetchRecorder:
    """Sets forward and backward prefetch after recording the execution order of units in one forward pass.

    Registration order is not execution order: a model may register its language model before its vision tower, and
    prefetching in the wrong order silently loses the overlap. So hooks record the order of the first forward pass, and
    are removed after it.
    """

    def __init__(self, root: nn.Module, units: Sequence[nn.Module], num_forward: int, num_backward: int) -> None:
        """Record `units` (FSDP modules below `root`) during the next forward pass of `root`.

        Args:
            num_forward: number of following units to prefetch during a unit's forward pass; 0: none.
            num_backward: number of preceding units to prefetch during a unit's backward pass; 0: torch's default, which
                prefetches one.
        """
        self.order: list[FSDPModule] = []
        self._counts = (num_forward, num_backward)
        self._seen: set[int] = set()
        self._handles: list[Any] = []
        if not any(self._counts):
            return
        for unit in units:
            if isinstance(unit, FSDPModule) and unit is not root:
                self._handles.append(unit.register_forward_pre_hook(self._record))
        self._handles.append(root.register_forward_hook(self._finish))

    def _record(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if id(module) not in self._seen:
            self._seen.add(id(module))
            self.order.append(module)  # type: ignore[arg-type]

    def _finish(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for handle in self._handles:
            handle.remove()
        set_prefetch(self.order, *self._counts)


def set_prefetch(order: Sequence[FSDPModule], num_forward: int, num_backward: int) -> None:
    """Set explicit prefetch along `order`, the execution order of the units in forward."""
    for i, unit in enumerate(order):
        if num_forward:
            unit.set_modules_to_forward_prefetch(list(order[i + 1 : i + 1 + num_forward]))
        if num_backward:
            unit.set_modules_to_backward_prefetch(list(reversed(order[max(0, i - num_backward) : i])))

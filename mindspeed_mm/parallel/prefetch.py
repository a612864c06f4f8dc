"""Overlap of communication with compute: which units are gathered ahead, in the order in which they really run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


class PrefetchRecorder:
    """Sets forward and backward prefetch after having watched one forward pass.

    Registration order is not execution order (a model may register its language model before its vision tower), and
    a list in the wrong order loses the overlap without a word. So the first forward is observed: the units' order is
    what ran, and the hooks are removed again.
    """

    def __init__(self, root: nn.Module, units: Sequence[nn.Module], num_forward: int, num_backward: int) -> None:
        """Watch `units` (FSDP modules below `root`) during the next forward of `root`.

        Args:
            num_forward: how many following units are gathered while one runs forward (0: none).
            num_backward: how many preceding units are gathered while one runs backward (0: none set here; torch
                itself still gathers one).
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
    """Set explicit prefetch along `order`, the units as they run forward."""
    for i, unit in enumerate(order):
        if num_forward:
            unit.set_modules_to_forward_prefetch(list(order[i + 1 : i + 1 + num_forward]))
        if num_backward:
            unit.set_modules_to_backward_prefetch(list(reversed(order[max(0, i - num_backward) : i])))

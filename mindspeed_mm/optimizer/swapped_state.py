"""The state of an element-wise optimizer in host memory, streamed through the device during a step (--swap-optimizer).

Each parameter group's state lies in a few flat tensors of pinned memory. A step goes through them in ranges: while
one is stepped, the next one is copied to the device beside its queue, and the one before back to the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mindspeed_mm import accelerator
from mindspeed_mm.optimizer.clip import local_tensor
from mindspeed_mm.optimizer.state_homes import Piece, Resident, States

_ALIGNED = 64  # values: parts of a parameter start at multiples, as kernels round their vectors and tails differently
_FRACTION = 64  # a range holds about this part of all state; up to three are on the device
_LARGEST = 2**26  # values of a range
_MEMORY = 2**28  # values of a flat tensor, if one parameter has no more


@dataclass
class _Part:
    """The values `first` … `end` of a parameter's local part, and where a range holds them."""

    param: torch.Tensor
    first: int
    end: int
    place: int


@dataclass
class _Range:
    """Consecutive values of flat tensors, one tensor a name of the state."""

    memory: int
    start: int
    end: int
    parts: list[_Part] = field(default_factory=list)


@dataclass
class _GroupState:
    """The state of a group: for each name the flat tensors, and the ranges in which a step goes through them."""

    memories: dict[str, list[torch.Tensor]]
    ranges: list[_Range]


class Swapped:
    """The state is in host memory, with the dtype and sharding of the parameters; on the host, too, as a plain copy."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        """
        Args:
            groups: all parameter groups of the optimizer.
        """
        total = sum(local_tensor(param).numel() for group in groups for param in group["params"])
        size = min(max(total // _FRACTION, _ALIGNED), _LARGEST)
        self._size = size // _ALIGNED * _ALIGNED
        self._groups: dict[int, _GroupState] = {}

    def ensure(
        self, states: States, group: dict[str, Any], names: Sequence[str], params: Sequence[torch.Tensor]
    ) -> None:
        """See `StateHome`; of the whole group at once."""
        if names and group["params"] and id(group["params"][0]) not in self._groups:
            self._groups[id(group["params"][0])] = self._lay_out(states, group["params"], names)

    def pieces(
        self,
        states: States,
        group: dict[str, Any],
        names: Sequence[str],
        params: Sequence[torch.Tensor],
        steps: Sequence[torch.Tensor],
    ) -> Iterator[Piece]:
        """See `StateHome`."""
        if not names:
            yield from Resident().pieces(states, group, names, params, steps)
            return
        own, busy = self._groups[id(group["params"][0])], {id(param): i for i, param in enumerate(params)}
        ranges = [r for r in own.ranges if any(id(part.param) in busy for part in r.parts)]
        values = {id(param): (_flat(local_tensor(param)), _gradient(param)) for param in params}
        storing: deque[tuple[list[torch.Tensor], list[Callable[[], None]]]] = deque()
        following = self._fetch(own, ranges[0], params[0]) if ranges else None
        for number, current in enumerate(ranges):
            assert following is not None
            (tensors, arrivals), following = following, None
            if number + 1 < len(ranges):
                following = self._fetch(own, ranges[number + 1], params[0])
            for arrived in arrivals:
                arrived()
            parts = [part for part in current.parts if id(part.param) in busy]
            cut = [(part.place, part.place + part.end - part.first) for part in parts]
            yield Piece(
                [values[id(p.param)][0][p.first : p.end] for p in parts],
                [values[id(p.param)][1][p.first : p.end] for p in parts],
                tuple([tensor[start:end] for start, end in cut] for tensor in tensors),
                [steps[busy[id(p.param)]] for p in parts] if steps else [],
            )
            storing.append((tensors, self._store(own, current, tensors)))
            if len(storing) > 1:
                _wait(storing.popleft()[1])  # its tensors must not be freed before
        while storing:
            _wait(storing.popleft()[1])

    def settle(self) -> None:
        """See `StateHome`."""
        accelerator.current().synchronize()

    def _lay_out(self, states: States, params: Sequence[torch.Tensor], names: Sequence[str]) -> _GroupState:
        """Allocate the state of a group and place it into `states`; cut it into ranges."""
        places, sizes = [], [0]
        for param in params:
            length = -(-local_tensor(param).numel() // _ALIGNED) * _ALIGNED
            if sizes[-1] and sizes[-1] + length > _MEMORY:
                sizes.append(0)
            places.append((len(sizes) - 1, sizes[-1]))
            sizes[-1] += length
        like = local_tensor(params[0]).detach()
        memories = {name: [_zeros(like, size) for size in sizes] for name in names}
        ranges: list[_Range] = []
        for param, (memory, place) in zip(params, places, strict=True):
            local = local_tensor(param).detach()
            for name in names:
                kept = memories[name][memory][place : place + local.numel()]
                states[param][name] = _as(param, kept.as_strided(local.shape, local.stride()))
            self._cut(ranges, param, memory, place)
        return _GroupState(memories, ranges)

    def _cut(self, ranges: list[_Range], param: torch.Tensor, memory: int, place: int) -> None:
        first, number = 0, local_tensor(param).numel()
        while first < number:
            last = ranges[-1] if ranges and ranges[-1].memory == memory else None
            if last is None or place + first - last.start >= self._size:
                last = _Range(memory, place + first, place + first)
                ranges.append(last)
            end = min(number, first + self._size - (place + first - last.start))
            last.parts.append(_Part(param, first, end, place + first - last.start))
            last.end, first = place + end, end

    def _fetch(
        self, own: _GroupState, wanted: _Range, like: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[Callable[[], None]]]:
        """Start to copy a range to where parameters are; returns its tensors, and what waits for them."""
        tensors, arrivals = [], []
        for memories in own.memories.values():
            source = memories[wanted.memory][wanted.start : wanted.end]
            tensors.append(torch.empty_like(source, device=like.device))
            arrivals.append(accelerator.current().copy_beside(tensors[-1], source))
        return tensors, arrivals

    def _store(self, own: _GroupState, current: _Range, tensors: list[torch.Tensor]) -> list[Callable[[], None]]:
        """Start to copy a range back; returns what waits for it."""
        kept = (memories[current.memory][current.start : current.end] for memories in own.memories.values())
        return [accelerator.current().copy_beside(to, tensor) for to, tensor in zip(kept, tensors, strict=True)]


def _wait(copies: Sequence[Callable[[], None]]) -> None:
    for wait in copies:
        wait()


def _zeros(like: torch.Tensor, size: int) -> torch.Tensor:
    return accelerator.current().host_memory(like.new_empty(1).expand(size)).zero_()  # shape and device of a whole one


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a dense tensor in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _gradient(param: torch.Tensor) -> torch.Tensor:
    """Return the values of this rank's part of the gradient in the order of the parameter's memory."""
    assert param.grad is not None
    own, grad = local_tensor(param), local_tensor(param.grad)
    return _flat(grad if grad.stride() == own.stride() else torch.empty_like(own).copy_(grad))


def _as(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return `local` with the sharding of a parameter. `DTensor.from_local` would move it to the device."""
    return DTensor(local, param._spec, requires_grad=False) if isinstance(param, DTensor) else local

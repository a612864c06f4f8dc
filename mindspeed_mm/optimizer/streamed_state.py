"""State of an element-wise optimizer that is elsewhere, or in another form, between steps, which take it in ranges.

With --swap-optimizer it lies in a few flat tensors of pinned host memory: while one range is stepped, the next one is
copied to the device beside its queue, and the one before back to the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch.distributed.tensor import DTensor

from mindspeed_mm import accelerator
from mindspeed_mm.optimizer.clip import local_tensor
from mindspeed_mm.optimizer.state_homes import Piece, Resident, States

ALIGNED = 256
"""Values: parts of a parameter start at multiples, as kernels round their vectors and tails differently."""

_FRACTION = 64  # a range of swapped state holds about this part of all; up to three are on the device
_LARGEST = 2**26  # values of such a range
_MEMORY = 2**26  # values of a flat tensor, if one parameter has no more: torch pins the next power of two

Memory = TypeVar("Memory")


@dataclass
class ParamPart:
    """The values `first` … `end` of a parameter's local part, and where a range holds them."""

    param: torch.Tensor
    first: int
    end: int
    place: int


@dataclass
class Range:
    """Consecutive values `start` … `end` of flat memory number `memory` of each name of the state."""

    memory: int
    start: int
    end: int
    parts: list[ParamPart] = field(default_factory=list)


@dataclass
class GroupState(Generic[Memory]):
    """The state of a group: for each name the flat memories, and the ranges in which a step goes through them."""

    memories: dict[str, list[Memory]]
    ranges: list[Range]


class Streamed(Generic[Memory]):
    """A `StateHome` whose state is fetched and stored in ranges of flat memory."""

    def __init__(self, size: int) -> None:
        """
        Args:
            size: values of a range.
        """
        self._size = max(size // ALIGNED, 1) * ALIGNED
        self._groups: dict[int, GroupState[Memory]] = {}

    def ensure(
        self, states: States, group: dict[str, Any], names: Sequence[str], params: Sequence[torch.Tensor]
    ) -> None:
        """See `StateHome`; of the whole group at once."""
        own = group["params"]
        if names and own and id(own[0]) not in self._groups:
            self._groups[id(own[0])] = self._lay_out(states, own, names)

    def pieces(
        self,
        states: States,
        group: dict[str, Any],
        names: Sequence[str],
        params: Sequence[torch.Tensor],
        steps: Sequence[torch.Tensor],
        found_inf: torch.Tensor | None,
    ) -> Iterator[Piece]:
        """See `StateHome`."""
        if not names:
            yield from Resident().pieces(states, group, names, params, steps, found_inf)
            return
        own, busy = self._groups[id(group["params"][0])], {id(param): i for i, param in enumerate(params)}
        ranges = [r for r in own.ranges if any(id(part.param) in busy for part in r.parts)]
        values = {id(param): (flat(local_tensor(param)), _gradient(param)) for param in params}
        storing: deque[tuple[list[torch.Tensor], list[Callable[[], None]]]] = deque()
        following = self._fetch(own, ranges[0], params[0]) if ranges else None
        for number, current in enumerate(ranges):
            assert following is not None
            (tensors, arrivals), following = following, None
            if number + 1 < len(ranges):
                following = self._fetch(own, ranges[number + 1], params[0])
            _wait(arrivals)
            parts = [part for part in current.parts if id(part.param) in busy]
            cut = [(part.place, part.place + part.end - part.first) for part in parts]
            yield Piece(
                [values[id(p.param)][0][p.first : p.end] for p in parts],
                [values[id(p.param)][1][p.first : p.end] for p in parts],
                tuple([tensor[start:end] for start, end in cut] for tensor in tensors),
                [steps[busy[id(p.param)]] for p in parts] if steps else [],
            )
            storing.append((tensors, self._store(own, current, tensors, found_inf)))
            if len(storing) > 1:
                _wait(storing.popleft()[1])  # its tensors must not be freed before
        while storing:
            _wait(storing.popleft()[1])

    def settle(self) -> None:
        """See `StateHome`."""
        accelerator.current().synchronize()

    def _allocate(self, name: str, like: torch.Tensor, size: int) -> Memory:
        """Return flat memory of zeros.

        Args:
            like: a parameter's local part.
        """
        raise NotImplementedError

    def _entry(self, param: torch.Tensor, memory: Memory, place: int) -> object:
        """Return what the optimizer's state shall have for a parameter, which begins at `place` of `memory`."""
        raise NotImplementedError

    def _fetch(
        self, own: GroupState[Memory], wanted: Range, like: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[Callable[[], None]]]:
        """Start to make a range available where parameters are; returns a tensor a name, and what waits for them."""
        raise NotImplementedError

    def _store(
        self,
        own: GroupState[Memory],
        current: Range,
        tensors: Sequence[torch.Tensor],
        found_inf: torch.Tensor | None,
    ) -> list[Callable[[], None]]:
        """Start to put a range back; returns what waits for it.

        Args:
            found_inf: 1: `tensors` are as they were fetched.
        """
        raise NotImplementedError

    def _lay_out(self, states: States, params: Sequence[torch.Tensor], names: Sequence[str]) -> GroupState[Memory]:
        """Allocate the state of a group and place it into `states`; cut it into ranges."""
        places, sizes = [], [0]
        for param in params:
            length = -(-local_tensor(param).numel() // ALIGNED) * ALIGNED
            if sizes[-1] and sizes[-1] + length > _MEMORY:
                sizes.append(0)
            places.append((len(sizes) - 1, sizes[-1]))
            sizes[-1] += length
        like = local_tensor(params[0]).detach()
        memories = {name: [self._allocate(name, like, size) for size in sizes] for name in names}
        ranges: list[Range] = []
        for param, (memory, place) in zip(params, places, strict=True):
            for name in names:
                states[param][name] = self._entry(param, memories[name][memory], place)
            self._cut(ranges, param, memory, place)
        return GroupState(memories, ranges)

    def _cut(self, ranges: list[Range], param: torch.Tensor, memory: int, place: int) -> None:
        first, number = 0, local_tensor(param).numel()
        while first < number:
            last = ranges[-1] if ranges and ranges[-1].memory == memory else None
            if last is None or place + first - last.start >= self._size:
                last = Range(memory, place + first, place + first)
                ranges.append(last)
            end = min(number, first + self._size - (place + first - last.start))
            last.parts.append(ParamPart(param, first, end, place + first - last.start))
            last.end, first = place + end, end


class Swapped(Streamed[torch.Tensor]):
    """The state is in host memory, with the dtype and sharding of the parameters; on the host, too, as a plain copy."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        """
        Args:
            groups: all parameter groups of the optimizer.
        """
        total = sum(local_tensor(param).numel() for group in groups for param in group["params"])
        super().__init__(min(total // _FRACTION, _LARGEST))

    def _allocate(self, name: str, like: torch.Tensor, size: int) -> torch.Tensor:
        # `expand`: a tensor of the whole shape on the device, without its memory
        return accelerator.current().host_memory(like.new_empty(1).expand(size)).zero_()

    def _entry(self, param: torch.Tensor, memory: torch.Tensor, place: int) -> torch.Tensor:
        own = local_tensor(param).detach()
        local = memory[place : place + own.numel()].as_strided(own.shape, own.stride())
        # not `DTensor.from_local`, which would move it to the device
        return DTensor(local, param._spec, requires_grad=False) if isinstance(param, DTensor) else local

    def _fetch(
        self, own: GroupState[torch.Tensor], wanted: Range, like: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[Callable[[], None]]]:
        tensors, arrivals = [], []
        for memories in own.memories.values():
            source = memories[wanted.memory][wanted.start : wanted.end]
            tensors.append(torch.empty_like(source, device=like.device))
            arrivals.append(accelerator.current().copy_beside(tensors[-1], source))
        return tensors, arrivals

    def _store(
        self,
        own: GroupState[torch.Tensor],
        current: Range,
        tensors: Sequence[torch.Tensor],
        found_inf: torch.Tensor | None,
    ) -> list[Callable[[], None]]:
        kept = (memories[current.memory][current.start : current.end] for memories in own.memories.values())
        return [accelerator.current().copy_beside(to, tensor) for to, tensor in zip(kept, tensors, strict=True)]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a dense tensor in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _gradient(param: torch.Tensor) -> torch.Tensor:
    """Return the values of this rank's part of the gradient in the order of the parameter's memory."""
    assert param.grad is not None
    own, grad = local_tensor(param), local_tensor(param.grad)
    return flat(grad if grad.stride() == own.stride() else torch.empty_like(own).copy_(grad))


def _wait(copies: Sequence[Callable[[], None]]) -> None:
    for wait in copies:
        wait()

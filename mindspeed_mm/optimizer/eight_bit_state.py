"""State of an element-wise optimizer in 8 bits a value (--optimizer adam8bit), in torchao's format.

Source: 8-bit optimizers via block-wise quantization (arXiv 2110.02861); torchao.optim. A block of 256 values has a
float32 scale, its largest magnitude, and of each value the number of the nearest entry in a table. A step goes through
the state in ranges, which it decodes, and encodes afterwards; the kernels are those of float32 state.

torchao's own optimizers compile a kernel for each parameter, which an NPU can't; know no step that the device skips;
and of a DTensor whose parts differ between ranks they quantise some ranks' only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_mm.optimizer.clip import local_tensor
from mindspeed_mm.optimizer.state_homes import Piece, Resident, States
from mindspeed_mm.optimizer.streamed_state import ALIGNED, GroupState, Range, Streamed
from mindspeed_mm.utils.extras import require_extra

_RANGE = 2**23  # values that are decoded at a time
_SMALLEST = 4096  # values of a rank's part; the state of smaller ones stays in float32, as torchao leaves it
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


@dataclass(frozen=True)
class Codes:
    """Values in 8 bits: a flat memory, or a range of one.

    Attributes:
        codes: uint8 [values], entries of `table`.
        scales: float32 [values / ALIGNED], of each block.
        table: float32 [256], rising.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    table: torch.Tensor

    def cut(self, start: int, end: int) -> Codes:
        """Return the blocks that hold the values `start` … `end`; `start` is a multiple of ALIGNED."""
        blocks = slice(start // ALIGNED, -(-end // ALIGNED))
        return Codes(self.codes[blocks.start * ALIGNED : blocks.stop * ALIGNED], self.scales[blocks], self.table)

    def decode(self) -> torch.Tensor:
        """Return the values, float32."""
        return _torchao().dequant_with_qmap(self.codes, self.table, self.scales)

    def encode(self, values: torch.Tensor, found_inf: torch.Tensor | None = None) -> None:
        """Take other values, float32.

        Args:
            found_inf: 1: they are what `decode` returned, and nothing changes. It would otherwise, where the largest
                magnitude of a block is negative: the lowest entry of the table is above -1.
        """
        scaled, scales = _torchao().scale_tensor(values, ALIGNED)
        codes = _torchao().quantize_8bit_with_qmap(scaled, self.table)
        if found_inf is not None:
            codes = torch.where(found_inf == 0, codes, self.codes)
            scales = torch.where(found_inf == 0, scales, self.scales)
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    def encode_again(self, values: torch.Tensor) -> None:
        """Take what `decode` returned of some codes, such that `decode` returns it again; others as `encode` does."""
        self.encode(values)
        blocks = values.view(-1, ALIGNED)
        largest = blocks.abs().amax(-1)
        # a block whose largest magnitude was negative: that value is lowest entry · scale, rounded
        guess = largest / self.table[0].abs()
        for scales in (guess, _next(guess, 0.0), _next(guess, math.inf)):
            codes = _torchao().quantize_8bit_with_qmap(blocks / scales.view(-1, 1).clip(1e-30), self.table)
            again = (_torchao().dequant_with_qmap(codes, self.table, scales) == blocks).all(-1)
            better = again & ~(self.decode().view_as(blocks) == blocks).all(-1)
            self.scales.copy_(torch.where(better, scales, self.scales))
            kept = self.codes.view_as(codes)
            kept.copy_(torch.where(better.view(-1, 1), codes, kept))


@dataclass(frozen=True)
class EightBitTensor:
    """The state tensor of a parameter in 8 bits, which checkpoints hold in float32.

    Attributes:
        param: the parameter, whose shape and sharding it has.
    """

    param: torch.Tensor
    codes: Codes

    dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole parameter."""
        return self.param.shape

    def values(self) -> torch.Tensor:
        """Return this rank's part in float32, with the shape of the parameter's."""
        own = local_tensor(self.param).detach()
        return self.codes.decode()[: own.numel()].as_strided(own.shape, own.stride())

    def put(self, values: torch.Tensor) -> None:
        """Take this rank's part, of the shape of the parameter's.

        Args:
            values: any dtype and device.
        """
        own = local_tensor(self.param).detach()
        padded = torch.zeros(self.codes.codes.numel(), dtype=torch.float32, device=own.device)
        padded.as_strided(own.shape, own.stride()).copy_(values)
        self.codes.encode_again(padded)


class EightBit(Streamed[Codes]):
    """AdamW's state is beside the parameters, in 8 bits a value and a scale for each block of 256."""

    def __init__(self) -> None:
        """
        Raises:
            ConfigError: torchao is not installed.
        """
        require_extra("quantization", "--optimizer adam8bit")
        super().__init__(_RANGE)
        self._small = Resident()

    def ensure(
        self, states: States, group: dict[str, Any], names: Sequence[str], params: Sequence[torch.Tensor]
    ) -> None:
        """See `StateHome`."""
        self._small.ensure(states, group, names, [p for p in params if not _is_large(p)])
        super().ensure(states, _large_of(group), names, params)

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
        small, large = ([i for i, p in enumerate(params) if _is_large(p) == wanted] for wanted in (False, True))
        of_small, of_large = ([params[i] for i in chosen] for chosen in (small, large))
        yield from self._small.pieces(states, group, names, of_small, [steps[i] for i in small], found_inf)
        if of_large:
            all_large, own_steps = _large_of(group), [steps[i] for i in large]
            yield from super().pieces(states, all_large, names, of_large, own_steps, found_inf)

    def _allocate(self, name: str, like: torch.Tensor, size: int) -> Codes:
        table = torch.tensor(_table(_SIGNED[name]), dtype=torch.float32, device=like.device)
        codes = torch.full((size,), int((table == 0).nonzero()), dtype=torch.uint8, device=like.device)
        return Codes(codes, torch.full((size // ALIGNED,), 1e-12, device=like.device), table)

    def _entry(self, param: torch.Tensor, memory: Codes, place: int) -> EightBitTensor:
        return EightBitTensor(param, memory.cut(place, place + local_tensor(param).numel()))

    def _fetch(
        self, own: GroupState[Codes], wanted: Range, like: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[Callable[[], None]]]:
        memories = (of_name[wanted.memory] for of_name in own.memories.values())
        return [memory.cut(wanted.start, wanted.end).decode().to(like.dtype) for memory in memories], []

    def _store(
        self,
        own: GroupState[Codes],
        current: Range,
        tensors: Sequence[torch.Tensor],
        found_inf: torch.Tensor | None,
    ) -> list[Callable[[], None]]:
        for of_name, values in zip(own.memories.values(), tensors, strict=True):
            of_name[current.memory].cut(current.start, current.end).encode(values.float(), found_inf)
        return []


def _is_large(param: torch.Tensor) -> bool:
    return local_tensor(param).numel() >= _SMALLEST


def _large_of(group: dict[str, Any]) -> dict[str, Any]:
    return {**group, "params": [param for param in group["params"] if _is_large(param)]}


def _next(values: torch.Tensor, towards: float) -> torch.Tensor:
    return torch.nextafter(values, torch.full_like(values, towards))


@functools.cache
def _table(signed: bool) -> tuple[float, ...]:
    return tuple(_torchao().create_dynamic_map(signed=signed))


@functools.cache
def _torchao() -> Any:
    from torchao.optim import quant_utils

    return quant_utils

"""Linear layers whose frozen weights are stored in 4 bits (NF4), as the base model of QLoRA.

Each row of a weight is cut into blocks of 64; a block is stored as its largest absolute value and, for each weight, the
index of the nearest of 16 values. A row is stored for itself, so that the result doesn't depend on how rows are
distributed over ranks. Computation is in the dtype of the layer's inputs, with the weight restored for the time of it.
Source: Dettmers et al., QLoRA, arXiv:2305.14314, section 3; the 16 values are those of its appendix E.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from mindspeed_mm.models.contract import as_trainable
from mindspeed_mm.utils.adapter_names import NF4_WEIGHT, is_adapter, stored_name
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import info_rank0

BLOCK = 64
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_SCALE_BYTES = 4
_AT_ONCE = 1 << 22  # weights that are packed at a time: their intermediate values take several times their size


class NF4Linear(nn.Linear):
    """A linear layer with its weight in 4 bits; frozen. `quantize_base` makes one of an `nn.Linear`.

    Attributes:
        weight_nf4: [out_features, bytes of a row] uint8; see `quantize`.
        computes_in: dtype of `weight`.
    """

    weight_nf4: nn.Parameter
    computes_in: torch.dtype

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The restored weight, [out_features, in_features]: a new tensor on each access, whole if rows are sharded."""
        packed = self.weight_nf4
        packed = packed.full_tensor() if isinstance(packed, DTensor) else packed
        return restore(packed.detach(), self.in_features, self.computes_in)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input @ weight.T + bias, [..., out_features] in the input's dtype."""
        return _PackedLinear.apply(input, self.weight_nf4, self.bias)  # type: ignore[no-any-return]


class _PackedLinear(torch.autograd.Function):
    """A linear layer that keeps its packed weight for backward rather than the restored one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.in_features = x.shape[-1]
        return functional.linear(x, restore(packed, x.shape[-1], x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        (gradient,) = gradients
        if not ctx.needs_input_grad[0]:
            return None, None, None
        (packed,) = ctx.saved_tensors
        return gradient @ restore(packed, ctx.in_features, gradient.dtype), None, None


@torch.no_grad()
def quantize(weight: torch.Tensor) -> torch.Tensor:
    """Quantise rows.

    Args:
        weight: [rows, in_features], floating-point.

    Returns:
        [rows, bytes_of_row(in_features)] uint8: of each row the codes, two weights a byte, the first in the upper four
        bits, and then its blocks' largest absolute values, float32. The last block of a row may be shorter.
    """
    rows, width = weight.shape
    blocks, of_codes = -(-width // BLOCK), -(-width // 2)
    packed = torch.empty(rows, bytes_of_row(width), dtype=torch.uint8, device=weight.device)
    bounds = _bounds(weight.device)
    count = max(1, _AT_ONCE // max(1, width))
    for start in range(0, rows, count):
        part = functional.pad(weight[start : start + count].float(), (0, blocks * BLOCK - width))
        part = part.view(-1, blocks, BLOCK)
        scales = part.abs().amax(dim=2)
        codes = torch.bucketize(part / scales.where(scales > 0, 1).unsqueeze(2), bounds, out_int32=True)
        codes = codes.to(torch.uint8).view(-1, blocks * BLOCK // 2, 2)[:, :of_codes]
        into = packed[start : start + count]
        into[:, :of_codes] = codes[:, :, 0] << 4 | codes[:, :, 1]
        into[:, of_codes:] = scales.view(torch.uint8)
    return packed


def restore(packed: torch.Tensor, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """Restore what `quantize` has quantised: [rows, in_features] in `dtype`; products are computed in float32."""
    rows, blocks, of_codes = packed.shape[0], -(-in_features // BLOCK), -(-in_features // 2)
    values = _pairs(packed.device)[packed[:, :of_codes].int()].view(rows, -1)
    if values.shape[1] < blocks * BLOCK:
        values = functional.pad(values, (0, blocks * BLOCK - values.shape[1]))
    scales = packed[:, of_codes:].contiguous().view(torch.float32)
    values.view(rows, blocks, BLOCK).mul_(scales.unsqueeze(2))
    return values[:, :in_features].to(dtype)


def bytes_of_row(in_features: int) -> int:
    """Size of a packed row: 0.5625 bytes a weight where blocks are full."""
    return -(-in_features // 2) + -(-in_features // BLOCK) * _SCALE_BYTES


def quantize_base(model: nn.Module, computes_in: torch.dtype) -> None:
    """Store the weights of a model's frozen linear layers in NF4, in place, before the model is sharded.

    Left as they are: the output layer, layers with fewer inputs than a block, weights that several layers share, and
    layers of a class of their own.

    Args:
        model: with its adapters; its weights may be on the meta device, to be filled by `load_weights`.
        computes_in: dtype of what the layers compute.

    Raises:
        ConfigError: there is no such layer.
    """
    head = as_trainable(model).output_layer
    shared = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    layers = [
        (path, module)
        for path, module in model.named_modules()
        if type(module) is nn.Linear
        and module is not head
        and module.in_features >= BLOCK
        and not is_adapter(f"{path}.weight")
        and not any(p.requires_grad or shared[id(p)] > 1 for p in module.parameters())
    ]
    for _, layer in layers:
        weight = layer.weight
        packed = (
            torch.empty(weight.shape[0], bytes_of_row(weight.shape[1]), dtype=torch.uint8, device="meta")
            if weight.is_meta
            else quantize(weight.detach())
        )
        del layer.weight
        layer.__class__ = NF4Linear  # in place: hooks on the layer, and PEFT's layer around it, stay as they are
        layer.register_parameter(NF4_WEIGHT, nn.Parameter(packed, requires_grad=False))
        layer.computes_in = computes_in  # type: ignore[assignment]
    weights = sum(layer.in_features * layer.out_features for _, layer in layers)
    if not layers:
        raise ConfigError(
            f"--lora-quantize nf4: {as_trainable(model).name} has no frozen linear layer of {BLOCK} inputs or more"
        )
    info_rank0(f"QLoRA: {weights} weights of {len(layers)} linear layers in NF4")


def refuse_experts(model: nn.Module) -> None:
    """Raise if experts are single parameters of three dimensions, which would stay as they are.

    Raises:
        ConfigError: the message names one.
    """
    stacked = [n for n, p in model.named_parameters() if p.dim() == 3 and "experts" in n.split(".")]
    if stacked:
        raise ConfigError(
            f"--lora-quantize nf4: the experts of {as_trainable(model).name} are stacked in parameters of three "
            f"dimensions ({stored_name(stacked[0])}), and only linear layers are stored in 4 bits; leave the flag out"
        )


def packed_layers(model: nn.Module) -> dict[int, NF4Linear]:
    """Return the quantised layers of a model by the id of their packed weight."""
    return {id(m.weight_nf4): m for m in model.modules() if isinstance(m, NF4Linear)}


@functools.cache
def _bounds(device: torch.device) -> torch.Tensor:
    values = torch.tensor(NF4, device=device)
    return (values[1:] + values[:-1]) / 2


@functools.cache
def _pairs(device: torch.device) -> torch.Tensor:
    """Byte → the two values that it stands for, [256, 2] float32."""
    values = torch.tensor(NF4, device=device)
    return torch.stack((values.repeat_interleave(16), values.repeat(16)), dim=1)

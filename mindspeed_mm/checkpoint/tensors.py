"""The tensors of a checkpoint and their names.

Names are those of the model without adapters, and PEFT's of adapters (`utils/adapter_names.py`).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mindspeed_mm.checkpoint.lazy import Region, whole
from mindspeed_mm.optimizer.build import BuiltOptimizer
from mindspeed_mm.optimizer.eight_bit_state import EightBitTensor
from mindspeed_mm.utils.adapter_names import is_adapter, stored_name
from mindspeed_mm.utils.wrapped import unwrapped


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters (a tied one once) and persistent buffers by their checkpoint keys.

    Of a model with adapters, only what is trained: the rest is the base model's.
    """
    tensors = persistent_tensors(model)
    if any(map(is_adapter, tensors)):
        tensors = trained_tensors(model)
    return {f"model.{name}": tensor.detach() for name, tensor in tensors.items()}


def trained_tensors(model: nn.Module, *, tied_once: bool = True) -> dict[str, torch.Tensor]:
    """Return the trained parameters by their names in files; sharded ones stay sharded.

    Args:
        tied_once: see `persistent_tensors`.
    """
    tensors = persistent_tensors(model, tied_once=tied_once)
    return {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}


def optimizer_tensors(model: nn.Module, optimizer: BuiltOptimizer) -> dict[str, torch.Tensor | EightBitTensor]:
    """Return every tensor of the optimizer's state by its checkpoint key; missing state is created."""
    optimizer.ensure_state()
    tensors: dict[str, torch.Tensor | EightBitTensor] = {}
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, (torch.Tensor, EightBitTensor)):
                tensors[f"optimizer.{stored_name(name)}.{key}"] = value
    return tensors


def persistent_tensors(model: nn.Module, *, tied_once: bool = True) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by their names in files; sharded ones stay sharded.

    Args:
        tied_once: list a tied parameter once; False: under each of its names.
    """
    named = model.named_parameters(remove_duplicate=tied_once)
    tensors: dict[str, torch.Tensor] = {stored_name(name): param for name, param in named}
    for module_name, module in model.named_modules(remove_duplicate=tied_once):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[stored_name(f"{module_name}.{name}" if module_name else name)] = buffer
    return tensors


@torch.no_grad()
def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, Region]:
    """Return this rank's part of a tensor, which may be written into, and its region in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, whole(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    # not to_local(): it returns a new tensor, and replacing that one's storage would not change the DTensor
    return unwrapped(tensor._local_tensor), tuple(zip(offset, shape))

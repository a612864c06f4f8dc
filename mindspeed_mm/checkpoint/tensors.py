"""Which tensors a checkpoint holds, and under which names."""

from __future__ import annotations

import torch
from torch import nn

from mindspeed_mm.optimizer.build import ensure_state


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (a tied one once) and persistent buffers, by name, as they are: sharded ones stay sharded."""
    tensors: dict[str, torch.Tensor] = {f"model.{n}": p.detach() for n, p in model.named_parameters()}
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[f"model.{module_name}.{name}" if module_name else f"model.{name}"] = buffer
    return tensors


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of the optimizer's state, by parameter name; state that no step has made yet is made."""
    ensure_state(optimizer)
    tensors: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{name}.{key}"] = value
    return tensors

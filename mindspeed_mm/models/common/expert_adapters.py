"""LoRA adapters of parameters, such as the stacked weights of experts, which PEFT calls `target_parameters`.

PEFT keeps the adapters of E experts in one A [rank * E, in], expert by expert, and one B [out, rank * E], in which the
experts of each row of A come one after the other. Here they are stacked as the weights are, A [E, rank, in] and
B [E, out, rank], so that an expert's adapters can live where the expert does. Files of PEFT keep PEFT's shapes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from mindspeed_mm.parallel.tensor import own_part, replaced_parameters
from mindspeed_mm.utils.adapter_names import ADAPTER, is_adapter


def stack_by_expert(model: nn.Module) -> None:
    """Stack the adapters of parameters by expert, and let their layers compute with parts of parameters.

    Args:
        model: into which PEFT has just inserted its adapters; may be on the meta device.
    """
    from peft.tuners.lora.layer import ParamWrapper

    for layer in [m for m in model.modules() if isinstance(m, ParamWrapper)]:
        down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
        weight: nn.Parameter = layer.get_param()
        if weight.dim() == 3:
            down.weight = nn.Parameter(_stacked("lora_A", down.weight.detach(), len(weight)).contiguous())
            up.weight = nn.Parameter(_stacked("lora_B", up.weight.detach(), len(weight)).contiguous())
        _compute_with_parts(layer)


def _compute_with_parts(layer: Any) -> None:
    """Replace the forward method of PEFT's layer, which can't add B A to a part of a parameter; the numbers are its."""
    owner, name, scaling = layer.get_base_layer(), layer.parameter_name, layer.scaling[ADAPTER]
    weight: nn.Parameter = layer.get_param()
    # the experts of some models are stored [E, in, out]
    is_transposed = weight.dim() == 3 and not layer._did_swap_in_out_features
    down, up, inner = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER], layer.base_layer

    def run(*args: Any, **kwargs: Any) -> Any:
        weight = own_part(owner._parameters[name])
        left, right = (own_part(module.weight).to(weight.dtype) for module in (up, down))
        if is_transposed:
            left, right = right.mT, left.mT
        adapted = torch.baddbmm if weight.dim() == 3 else torch.addmm
        with replaced_parameters(owner, {name: adapted(weight, left, right, alpha=scaling)}):
            return inner(*args, **kwargs)

    layer.forward = run


def is_stacked(name: str, parameters: Collection[str]) -> bool:
    """Whether a tensor's name in files is that of an adapter of one of `parameters`.

    Args:
        parameters: names of the parameters with adapters, of `AdapterPlan.parameters`.
    """
    owner = name.split(".lora_")[0]
    while owner.endswith(".base_layer"):
        owner = owner.removesuffix(".base_layer")
    return is_adapter(name) and owner in {parameter.rpartition(".")[0] for parameter in parameters}


def to_peft(name: str, tensor: torch.Tensor, parameters: Collection[str]) -> torch.Tensor:
    """Return a tensor in the shape that it has in files of PEFT.

    Args:
        name: its name in files.
        tensor: as the model has it; other tensors than adapters of `parameters` are returned as they are.
        parameters: see `is_stacked`.
    """
    if tensor.dim() != 3 or not is_stacked(name, parameters):
        return tensor
    return tensor.flatten(0, 1) if ".lora_A." in name else tensor.permute(1, 2, 0).flatten(1, 2)


def from_peft(name: str, tensor: torch.Tensor, parameters: Collection[str], wanted: torch.Size) -> torch.Tensor:
    """Return a tensor of PEFT's files in the shape that the model has it in: `to_peft` reversed.

    Args:
        name: its name in files.
        tensor: returned as it is where its shape isn't that of PEFT for a tensor of `wanted`.
        parameters: see `is_stacked`.
        wanted: shape in the model.
    """
    expected = to_peft(name, torch.empty(wanted, device="meta"), parameters).shape
    if len(wanted) != 3 or tensor.shape != expected or not is_stacked(name, parameters):
        return tensor
    return _stacked(name, tensor, wanted[0])


def _stacked(name: str, tensor: torch.Tensor, experts: int) -> torch.Tensor:
    if "lora_A" in name:
        return tensor.view(experts, -1, tensor.shape[1])
    return tensor.view(tensor.shape[0], -1, experts).permute(2, 0, 1)

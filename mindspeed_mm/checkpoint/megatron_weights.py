"""Weights of transformers' layout in and out of Megatron-core models split over tensor-parallel ranks and stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from mindspeed_mm.checkpoint.lazy import LazyTensor, Node, Region, whole
from mindspeed_mm.models.common.megatron_names import Made
from mindspeed_mm.utils.errors import CheckpointError

MadeOf = Callable[[str], Made]


@torch.no_grad()
def load_parameters(
    chunk: nn.Module, values: Mapping[str, Node], made_of: MadeOf, tensor_rank: int, rename: Callable[[str], str]
) -> None:
    """Fill a chunk's parameters from transformers' tensors, each rank reading its part of them only.

    Args:
        values: name in transformers' model → expression over what files hold.
        made_of: name of a Megatron-core tensor in the whole model → how it is made.
        tensor_rank: this rank among the tensor-parallel ones.
        rename: a parameter's name in the chunk → its name in the whole model.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    for name, param in chunk.named_parameters():
        made = made_of(rename(name))
        missing = [s for s in made.sources if s not in values]
        if missing:
            raise CheckpointError(f"no value for {missing[0]}, which {rename(name)} is made of")
        joined = made.join([LazyTensor(values[s]) for s in made.sources])
        node = joined.node if isinstance(joined, LazyTensor) else None
        assert node is not None
        region = tensor_region(param, tensor_rank)
        if any(start + length > size for (start, length), size in zip(region, node.shape)):
            raise CheckpointError(
                f"{' and '.join(made.sources)} give a tensor of shape {node.shape}, and {rename(name)} needs rows or "
                f"columns {region}: configuration and weights don't belong together"
            )
        node.read_into(region, param.data)


def tensor_region(param: torch.Tensor, tensor_rank: int) -> Region:
    """Which part of the whole tensor a tensor-parallel rank's parameter is."""
    region = list(whole(param.shape))
    if getattr(param, "tensor_model_parallel", False):
        dim = param.partition_dim  # type: ignore[attr-defined]
        region[dim] = (tensor_rank * param.shape[dim], param.shape[dim])
    return tuple(region)

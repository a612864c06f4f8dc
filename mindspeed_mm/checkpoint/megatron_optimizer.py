"""What Megatron-core's optimizers step on this rank, and the state that they keep for it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import nn

from mindspeed_mm.checkpoint.megatron_parts import FlatRange, Stepped


def is_spread(optimizer: Any) -> bool:
    """Whether each data-parallel rank steps a range of the elements of its own."""
    return isinstance(optimizer, DistributedOptimizer)


def stepped_parameters(optimizer: Any) -> dict[nn.Parameter, Stepped]:
    """What an optimizer steps here, by parameter; nothing if this rank has nothing to train."""
    if optimizer.is_stub_optimizer:
        return {}
    inner = optimizer.optimizer
    groups = {id(main): group for group in inner.param_groups for main in group["params"]}
    return {
        param: Stepped(main, span, groups[id(main)], inner.state[main]) for param, main, span in _stepped(optimizer)
    }


def _stepped(optimizer: Any) -> Iterator[tuple[nn.Parameter, torch.Tensor, FlatRange]]:
    pairs: Iterator[tuple[nn.Parameter, torch.Tensor]]
    if isinstance(optimizer, DistributedOptimizer):
        pairs = chain(
            _pairs(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
            _pairs(optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        )
        for param, main in pairs:
            owned = optimizer._get_model_param_range_map(param)["param"]
            yield param, main, (owned.start, owned.end)
        return
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        pairs = chain(
            _pairs(optimizer.float16_groups, optimizer.fp32_from_float16_groups),
            _pairs(optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
        )
    else:
        groups = [group["params"] for group in optimizer.optimizer.param_groups]
        pairs = _pairs(groups, groups)
    for param, main in pairs:
        yield param, main, (0, param.numel())


def _pairs(params: list[list[Any]], mains: list[list[Any]]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    return zip(chain.from_iterable(params), chain.from_iterable(mains), strict=True)


@torch.no_grad()
def ensure_parameter_state(stepped: Stepped) -> None:
    """Give a parameter the state that its first step would create."""
    for name in state_names(stepped.group):
        if stepped.state.get(name) is None:
            stepped.state[name] = torch.zeros_like(stepped.main)


def state_names(group: dict[str, Any]) -> tuple[str, ...]:
    """The tensors that an optimizer keeps for each parameter of a group: Adam's averages, SGD's momentum."""
    if counts_steps(group):
        return "exp_avg", "exp_avg_sq"
    return ("momentum_buffer",) if group.get("momentum") else ()


def counts_steps(group: dict[str, Any]) -> bool:
    """Whether the group's optimizer is an Adam, which counts its steps in the group."""
    return "betas" in group

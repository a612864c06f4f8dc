"""The main parameters of Megatron-core's optimizers on this rank, and their optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import nn

from mindspeed_mm.checkpoint.megatron.parts import FlatRange, MainParameter


def is_spread(optimizer: Any) -> bool:
    """Whether each data-parallel rank steps its own range of elements (the distributed optimizer)."""
    return isinstance(optimizer, DistributedOptimizer)


def main_parameters(optimizer: Any) -> dict[nn.Parameter, MainParameter]:
    """Return the main parameters of an optimizer on this rank, by model parameter; empty for a stub optimizer."""
    if optimizer.is_stub_optimizer:
        return {}
    inner = optimizer.optimizer
    groups = {id(main): group for group in inner.param_groups for main in group["params"]}
    return {
        param: MainParameter(main, span, groups[id(main)], inner.state[main]) for param, main, span in _mains(optimizer)
    }


def _mains(optimizer: Any) -> Iterator[tuple[nn.Parameter, torch.Tensor, FlatRange]]:
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


def ensure_state(optimizer: Any) -> None:
    """Create the state of parameters that have not been stepped yet, as their first step would."""
    if optimizer is not None and not optimizer.is_stub_optimizer:
        optimizer.optimizer.ensure_state()


def state_names(group: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the state tensors of each parameter in a group: Adam's moments or SGD's momentum."""
    if counts_steps(group):
        return "exp_avg", "exp_avg_sq"
    return ("momentum_buffer",) if group.get("momentum") else ()


def counts_steps(group: dict[str, Any]) -> bool:
    """Whether the group has a step count, as Adam's groups do."""
    return "betas" in group

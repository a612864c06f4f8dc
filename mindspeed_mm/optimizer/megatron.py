"""Megatron-core's optimizers over the framework's parameter groups; imports megatron, for the PTD backend only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, _get_megatron_optimizer_based_on_param_groups
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.megatron_compat import use_optimizers
from mindspeed_mm.configs.run import Run
from mindspeed_mm.configs.run_sections import OptimizerConfig as RunOptimizer
from mindspeed_mm.optimizer.build import state_home
from mindspeed_mm.optimizer.elementwise import SGD, FusedAdam
from mindspeed_mm.optimizer.groups import IsIdle, build_param_groups
from mindspeed_mm.optimizer.guarded import GuardedOptimizer
from mindspeed_mm.utils.errors import ConfigError

_TOWER = "modalities"


class NamedChunk(Protocol):
    """A chunk of the model that maps its parameters to transformers' names.

    Attributes:
        model: the module, not wrapped.
    """

    model: nn.Module

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return the names of transformers' tensors that a parameter consists of; its own name if there are none."""

    def modalities_of(self, name: str) -> tuple[str, ...]:
        """Return the modalities that a parameter's tower encodes; (): the parameter belongs to no tower."""


def build_megatron_optimizer(
    model: Sequence[nn.Module],
    chunks: Sequence[NamedChunk],
    run: Run,
    params_dtype: torch.dtype,
    trained: Sequence[str],
) -> MegatronOptimizer:
    """Return Megatron's optimizer for the wrapped chunks of this rank.

    Weight decay, learning-rate factors and names are those of `build_param_groups`, by transformers' names. The
    parameters of a tower are in separate groups, so that steps in which the tower is idle are not counted.

    Args:
        model: chunks in Megatron's DistributedDataParallel.
        chunks: the same chunks, not wrapped.
        run: settings of the run.
        trained: names of the parameters that are trained on any rank, from `trained_names`.

    Returns:
        a DistributedOptimizer, Float16OptimizerWithFloat16Params or FP32Optimizer; a stub optimizer if this rank has no
        trained parameters.

    Raises:
        ConfigError: Megatron-core's distributed optimizer doesn't support the optimizer, or no parameter is trained.
    """
    if run.optimizer.optimizer == "sgd" and run.parallel.use_distributed_optimizer:
        raise ConfigError("--optimizer sgd: Megatron's distributed optimizer steps Adam only; remove one of the flags")
    groups = _groups(chunks, run, trained)
    use_optimizers(FusedAdam, partial(SGD, fused=accelerator.current().supports_fused_optimizers()))
    config = OptimizerConfig(
        optimizer="sgd" if run.optimizer.optimizer == "sgd" else "adam",
        lr=run.optimizer.lr,
        weight_decay=run.optimizer.weight_decay,
        adam_beta1=run.optimizer.adam_beta1,
        adam_beta2=run.optimizer.adam_beta2,
        adam_eps=run.optimizer.adam_eps,
        sgd_momentum=run.optimizer.sgd_momentum,
        fp16=params_dtype == torch.float16,
        bf16=params_dtype == torch.bfloat16,
        params_dtype=params_dtype,
        loss_scale=1.0 if params_dtype == torch.float16 else None,
        use_distributed_optimizer=run.parallel.use_distributed_optimizer,
        overlap_param_gather=run.parallel.overlap_param_gather,
        clip_grad=0.0,  # the step engine clips, together with the division by the global batch's tokens
    )
    model_parallel = parallel_state.get_model_parallel_group()
    optimizer = _get_megatron_optimizer_based_on_param_groups(
        config,
        model_chunks=list(model),
        param_groups=groups,
        per_model_buffers={i: chunk.buffers for i, chunk in enumerate(model)},
        model_parallel_group=model_parallel,
        data_parallel_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        data_parallel_group_gloo=None,
        data_parallel_group_idx=model_parallel.rank(),
        intra_dist_opt_group=parallel_state.get_intra_distributed_optimizer_instance_group(),
    )
    if not optimizer.is_stub_optimizer:
        optimizer.optimizer.home = state_home(optimizer.optimizer.param_groups, run.optimizer)
    if hasattr(optimizer, "grad_scaler"):
        optimizer.grad_scaler = None  # the step engine scales the loss
    return optimizer


def sum_of_squares(optimizer: MegatronOptimizer, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return this rank's part of the squared gradient norm; tied and tensor-parallel replicas count once."""
    gradients = [] if optimizer.is_stub_optimizer else optimizer.get_main_grads_for_grad_norm()
    gradients = [g for g in gradients if g.numel()]
    if not gradients:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch.stack(torch._foreach_norm(gradients, 2.0, dtype=torch.float32)).to(dtype)
    return norms.square().sum()


def step_busy_groups(
    optimizer: MegatronOptimizer, guard: GuardedOptimizer, factor: torch.Tensor, finite: torch.Tensor, is_idle: IsIdle
) -> None:
    """Step with the gradients times `factor`, except for towers without input in the whole global batch.

    The gradients of such a tower are zero, but Adam would still decay its weights, update its moments and count the
    step; the parameters of a group share one step count.

    Args:
        optimizer: an optimizer from `build_megatron_optimizer` that is not a stub.
        guard: guard of the torch optimizer inside of it.
        factor: float scalar on the device.
        finite: bool scalar on the device; False: parameters and optimizer state stay unchanged.
        is_idle: whether the tower of these modalities had no input.
    """
    groups = optimizer.param_groups
    guard.step(factor, finite, [g for g in groups if not is_idle(g[_TOWER])])
    optimizer.param_groups = []  # already stepped: Megatron only copies to 16-bit parameters and gathers over ranks
    try:
        optimizer.step_with_ready_grads()
    finally:
        optimizer.param_groups = groups


def trained_names(chunks: Sequence[NamedChunk]) -> list[str]:
    """Return the names of the trained parameters of this rank, as transformers' names if the chunks map them."""
    return [name for chunk in chunks for own, _ in _trained(chunk) for name in chunk.names_of(own)]


def _trained(chunk: NamedChunk) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in chunk.model.named_parameters() if param.requires_grad]


def _refuse_parts(names: tuple[str, ...], config: RunOptimizer) -> None:
    """Raise if a flag selects only some of the transformers' tensors that form one parameter."""
    for flag, words in (
        ("weight-decay-exclude-modules", config.weight_decay_exclude_modules),
        ("lr-scale-modules", config.lr_scale_modules),
    ):
        for wanted in words:
            hit = [name for name in names if wanted.lower() in name.lower()]
            if hit and len(hit) < len(names):
                raise ConfigError(
                    f"--{flag} {wanted}: {', '.join(names)} are one parameter on the Megatron "
                    f"backend, and only {', '.join(hit)} have this in their names; name what all of them have, or add "
                    "--use-torch-fsdp2"
                )


def _groups(chunks: Sequence[NamedChunk], run: Run, trained: Sequence[str]) -> list[dict[str, Any]]:
    named: dict[tuple[str, ...], list[tuple[str, nn.Parameter]]] = {(): []}
    for chunk in chunks:
        for name, param in _trained(chunk):
            names = chunk.names_of(name)
            _refuse_parts(names, run.optimizer)
            named.setdefault(chunk.modalities_of(name), []).append((names[0], param))
    groups = []
    for modalities, parameters in named.items():
        for group in build_param_groups(
            parameters,
            no_decay_names=run.optimizer.weight_decay_exclude_modules,
            scaled_names=run.optimizer.lr_scale_modules,
            lr_mult=run.optimizer.lr_mult,
            known_names=trained,
        ):
            # keys that Megatron-core expects in each parameter group
            own = {
                "is_expert_parallel": False,
                "default_config": True,
                "max_lr": run.optimizer.lr,
                "min_lr": run.schedule.min_lr,
            }
            groups.append({**group, **own, _TOWER: list(modalities)})
    return groups

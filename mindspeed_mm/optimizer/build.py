"""Build the optimizer of --optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.configs.run_sections import OptimizerConfig
from mindspeed_mm.optimizer.eight_bit_state import EightBit
from mindspeed_mm.optimizer.elementwise import SGD, AdamW, ElementWise
from mindspeed_mm.optimizer.groups import ParamGroup, build_param_groups
from mindspeed_mm.optimizer.muon import Muon, matrix_names
from mindspeed_mm.optimizer.state_homes import Resident, StateHome
from mindspeed_mm.optimizer.streamed_state import Swapped
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice

BuiltOptimizer: TypeAlias = ElementWise | Muon


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, *, head: nn.Module | None = None, computes_in_fp32: bool = False
) -> BuiltOptimizer:
    """Return AdamW (--optimizer adam, adamw or adam8bit), SGD or Muon over the trainable parameters of `model`.

    Args:
        config: optimizer settings of the run.
        head: the output layer of the model, which Muon leaves to AdamW; None: it is known by its name only.
        computes_in_fp32: whether the model computes in float32; Muon's Newton–Schulz steps do so too then.

    Raises:
        ConfigError: --optimizer is unknown, or the parameter groups can't be built.
    """
    matrices = matrix_names(model, head) if config.optimizer == "muon" else None
    groups = build_param_groups(
        model.named_parameters(),
        no_decay_names=config.weight_decay_exclude_modules,
        scaled_names=config.lr_scale_modules,
        lr_mult=config.lr_mult,
        matrices=matrices,
    )
    home = state_home(groups, config)
    betas, fused = (config.adam_beta1, config.adam_beta2), accelerator.current().supports_fused_optimizers()
    if config.optimizer in ("adam", "adamw", "adam8bit"):
        return AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=fused, home=home)
    if config.optimizer == "sgd":
        return SGD(groups, lr=config.lr, momentum=config.sgd_momentum, fused=fused, home=home)
    if matrices is not None:
        others = [name for group in groups for name in group["names"] if name not in matrices]
        notice(
            f"--optimizer muon: {len(matrices)} weights are orthogonalised, {len(others)} other parameters use AdamW"
        )
        return Muon(
            groups,
            lr=config.lr,
            momentum=config.muon_momentum,
            ns_steps=config.ns_steps,
            matched_adamw_rms=config.matched_adamw_rms,
            betas=betas,
            eps=config.adam_eps,
            fused=fused,
            dtype=torch.float32 if computes_in_fp32 else torch.bfloat16,
        )
    raise ConfigError(f"--optimizer {config.optimizer} is unknown; expected adam, adamw, adam8bit, sgd or muon")


def state_home(groups: Sequence[ParamGroup], config: OptimizerConfig) -> StateHome:
    """Return where the state of an element-wise optimizer shall be between steps.

    Args:
        groups: all of its parameter groups.

    Raises:
        ConfigError: adam8bit, and torchao is not installed.
    """
    if config.optimizer == "adam8bit":
        return EightBit()
    if not config.swap_optimizer:
        return Resident()
    current = accelerator.current()
    if not current.is_host and not any(current.holds(p) for group in groups for p in group["params"]):
        notice("--swap-optimizer has no effect: offload_to_cpu keeps parameters and optimizer in host memory already")
        return Resident()
    return Swapped(groups)

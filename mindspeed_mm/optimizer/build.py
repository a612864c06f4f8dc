"""Build the optimizer of --optimizer."""

from __future__ import annotations

import torch
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.configs.run_sections import OptimizerConfig
from mindspeed_mm.optimizer.groups import build_param_groups
from mindspeed_mm.utils.errors import ConfigError


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return AdamW (--optimizer adam or adamw) or SGD over the trainable parameters of `model`.

    Args:
        config: optimizer settings of the run.

    Raises:
        ConfigError: --optimizer is unknown, or the parameter groups can't be built.
    """
    groups = build_param_groups(
        model.named_parameters(),
        no_decay_names=config.weight_decay_exclude_modules,
        scaled_names=config.lr_scale_modules,
        lr_mult=config.lr_mult,
    )
    if config.optimizer in ("adam", "adamw"):
        return torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=accelerator.current().supports_fused_adamw(),
        )
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum)
    raise ConfigError(f"--optimizer {config.optimizer} is unknown; expected adam, adamw or sgd")


@torch.no_grad()
def ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer state of every parameter that has not been stepped yet, as its first step would.

    A tower may have been idle so far, but saving and loading a checkpoint need the same entries for all parameters.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            if isinstance(optimizer, torch.optim.AdamW) and "exp_avg" not in state:
                on_device = group.get("fused") or group.get("capturable")
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if on_device else "cpu")
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
            elif isinstance(optimizer, torch.optim.SGD) and group["momentum"] and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(param)

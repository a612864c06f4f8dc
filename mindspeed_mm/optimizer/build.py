"""Build the optimizer that the flags name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.optimizer.groups import build_param_groups
from mindspeed_mm.utils.errors import ConfigError


def build_optimizer(model: nn.Module, args: Any) -> torch.optim.Optimizer:
    """Return AdamW (--optimizer adam or adamw) or SGD over the trainable parameters of `model`.

    Args:
        args: lr, adam_beta1, adam_beta2, adam_eps, sgd_momentum, weight_decay_exclude_modules, lr_scale_modules,
            lr_mult.
    """
    groups = build_param_groups(
        model.named_parameters(),
        no_decay_names=args.weight_decay_exclude_modules or (),
        scaled_names=args.lr_scale_modules or (),
        lr_mult=args.lr_mult,
    )
    if args.optimizer in ("adam", "adamw"):
        return torch.optim.AdamW(
            groups,
            lr=args.lr,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_eps,
            fused=accelerator.current().supports_fused_adamw(),
        )
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr, momentum=args.sgd_momentum)
    raise ConfigError(f"--optimizer {args.optimizer} is unknown; expected adam, adamw or sgd")


@torch.no_grad()
def ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state that its first step would create.

    A parameter may not have been stepped yet (a tower idle so far), but a checkpoint and its resume need the same
    entries for all.
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

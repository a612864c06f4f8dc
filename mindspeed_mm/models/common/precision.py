"""What a model in 16 bits keeps in float32, found by what its library states."""

from __future__ import annotations

import torch
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.models.contract import as_trainable
from mindspeed_mm.parallel.float32 import find_kept
from mindspeed_mm.parallel.fsdp2 import ShardPlan


def keep_precision(model: nn.Module, plan: ShardPlan) -> None:
    """Let a plan of fully_shard keep in float32 what the model's library keeps so; without 16-bit compute, nothing.

    Args:
        model: not wrapped yet; it may be on the meta device.
    """
    dtype, view = plan.mp_policy.param_dtype, as_trainable(model)
    if dtype not in (torch.float16, torch.bfloat16):
        return
    plan.keep_in_float32(find_kept(model, view.keeps_in_float32(dtype)), accelerator.current().device())
    plan.casts_hidden_states_only = view.is_transformers

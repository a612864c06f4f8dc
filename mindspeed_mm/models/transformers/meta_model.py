"""The class of a transformers model, and models of it on the meta device."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def type_without_fsdp(model: nn.Module) -> Any:
    """Return the model's class before fully_shard derived `FSDP<Name>` from it."""
    return next(c for c in type(model).__mro__ if not c.__name__.startswith("FSDP"))


def build_meta_copy(model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """Build an unsharded meta model of the same class and configuration; None if `model` is not from transformers.

    Args:
        model: the model, sharded or not.
        dtype: dtype of the copy's parameters; None: that of `model`.
    """
    if not isinstance(model, PreTrainedModel):
        return None
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    config = copy.deepcopy(model.config)  # building writes the dtype into it and its sub-configs
    with torch.device("meta"):
        return type_without_fsdp(model)._from_config(config, dtype=dtype or own)


def config_for(model_class: Any, hf_config: PretrainedConfig) -> Any:
    """Return the configuration that a class is built from: `hf_config` or one of its sub-configs (of an Omni model)."""
    wanted = getattr(model_class, "config_class", None)
    if wanted is None or isinstance(hf_config, wanted):
        return hf_config
    parts = (getattr(hf_config, name, None) for name in hf_config.sub_configs)
    return next((part for part in parts if isinstance(part, wanted)), hf_config)


def build_meta_model(model_class: Any, hf_config: PretrainedConfig) -> Any:
    """Build a meta model of a transformers class and configuration, in float32, with its weights tied."""
    with torch.device("meta"):
        model = model_class._from_config(copy.deepcopy(hf_config), dtype=torch.float32)
    model.tie_weights()
    return model

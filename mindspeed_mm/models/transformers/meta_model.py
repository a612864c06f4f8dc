"""The class of a transformers model, and models of it on the meta device."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mindspeed_mm.models.contract import as_trainable
from mindspeed_mm.utils.adapter_names import is_adapter

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


def keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Give float32 to the parameters of a model in `dtype` that transformers' own loading keeps in it."""
    is_kept = as_trainable(model).keeps_in_float32(dtype)
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None and is_kept(f"{path}.{name}" if path else name):
                module._parameters[name] = nn.Parameter(param.float(), requires_grad=False)


def build_from_meta(meta_model: Any, dtype: torch.dtype) -> Any:
    """Build a model for generation of one on the meta device, on this process's device; its parameters have no values.

    Args:
        meta_model: has the mixins of `adapt_class`; it is not changed.
        dtype: of the parameters, but for those of adapters and those that transformers keeps in float32.
    """
    model = copy.deepcopy(meta_model)
    casts: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None and not is_adapter(f"{path}.{name}"):
                module._parameters[name] = casts.setdefault(id(param), nn.Parameter(param.to(dtype)))
    keep_in_float32(model, dtype)
    model.weights_come_later = True
    model._post_fully_shard()  # storage, and the values of buffers that no file holds
    return model.requires_grad_(False).eval()

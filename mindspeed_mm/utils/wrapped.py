"""Tensors inside of the wrappers that gather a parameter in another form than it is kept in."""

from __future__ import annotations

from typing import Any

import torch


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside of a wrapper with an all-gather of its own, as torchao's of float8 weights; else itself.

    It shares the wrapper's memory: what is written into it, or what its `data` is set to, is the parameter's value.
    """
    if not hasattr(tensor, "fsdp_pre_all_gather"):
        return tensor
    wrapper: Any = tensor
    (name, *_), _ = wrapper.__tensor_flatten__()
    return getattr(wrapper, name)

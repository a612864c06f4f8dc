"""The base class of multimodal models."""

from __future__ import annotations

from typing import Any

from torch import nn


class MultiModalModule(nn.Module):
    """An nn.Module that keeps its configuration; users' own models derive from it.

    Attributes:
        config: whatever the model was built from.
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return the state dict for a checkpoint, which is that of `state_dict`."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)


def unwrap_model(model: nn.Module) -> Any:
    """Return the user's own module from wrappers that hold it as `.module` (Megatron's DistributedDataParallel)."""
    inner = model
    while isinstance(wrapped := inner._modules.get("module"), nn.Module):
        inner = wrapped
    return inner

"""Fractional position ids, passed to the language model in the dtype in which they were computed.

FSDP casts the floating-point inputs of a unit to its compute dtype. bfloat16 does not represent all positions above 256
exactly, so fractional positions bypass the units' casts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ExactPositions:
    """Passes the positions of the current batch to the language model's call."""

    def __init__(self, language_model: nn.Module) -> None:
        """
        Args:
            language_model: takes `position_ids`. It must not be wrapped yet, so that the hook runs after FSDP's.
        """
        self._positions: torch.Tensor | None = None
        language_model.register_forward_pre_hook(self._hook, with_kwargs=True)

    def for_batch(self, batch: dict[str, Any]) -> None:
        """Keep floating-point `position_ids` for the next forward, and replace those of `batch` by integers."""
        positions = batch.get("position_ids")
        self._positions = positions if positions is not None and positions.is_floating_point() else None
        if self._positions is not None:
            batch["position_ids"] = self._positions.long()

    def _hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions, self._positions = self._positions, None
        return args, kwargs if positions is None else {**kwargs, "position_ids": positions}

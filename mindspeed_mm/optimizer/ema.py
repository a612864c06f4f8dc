"""Exponential moving average of the trained parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.optimizer.clip import local_tensor
from mindspeed_mm.utils.adapter_names import stored_name

_CHUNK = 2**26  # number of values whose differences are in memory at a time


class Ema:
    """Averages of a model's trainable parameters, in float32, with the sharding of the parameters.

    After the n-th step that was not skipped, `average += (1 - decay) * (parameter - average)`, where decay is 0 for the
    first step, and min(max_decay, n / (n + 9)) afterwards.

    Source: `EMAModel` in diffusers' training_utils, without its warmup; n / (n + 9) is its (1 + s) / (10 + s) with
    s = n - 1.

    Attributes:
        max_decay: upper bound of the decay.
    """

    def __init__(self, model: nn.Module, max_decay: float) -> None:
        """
        Args:
            model: the sharded model, with its weights loaded.
        """
        self.max_decay = max_decay
        named = [(stored_name(name), param) for name, param in model.named_parameters() if param.requires_grad]
        self._parameters = [param for _, param in named]
        self._averages = {name: param.detach().to(torch.float32, copy=True) for name, param in named}
        device = next((local_tensor(p).device for p in self._parameters), torch.device("cpu"))
        # a tensor on the device, as only the device knows whether the step being launched is skipped
        self._steps = torch.zeros((), dtype=accelerator.current().sum_dtype, device=device)

    @torch.no_grad()
    def update(self, stepped: torch.Tensor) -> None:
        """Update the averages after an optimizer step, without waiting for the device.

        Args:
            stepped: bool scalar; False: the step was skipped, and the averages stay unchanged.
        """
        stepped = stepped.to(self._steps.device)
        self._steps += stepped
        share = (9 / (self._steps + 9)).clamp(min=1 - self.max_decay)  # 1 - n / (n + 9)
        share = torch.where(self._steps <= 1, torch.ones_like(share), share)
        share = torch.where(stepped, share, torch.zeros_like(share))
        for parameters, averages in self._chunks():
            differences = torch._foreach_sub(parameters, averages)
            torch._foreach_mul_(differences, share.to(averages[0].dtype))
            torch._foreach_add_(averages, differences)

    @torch.no_grad()
    def restart(self) -> None:
        """Reset the averages to the current parameters."""
        for param, average in zip(self._parameters, self._averages.values(), strict=True):
            local_tensor(average).copy_(local_tensor(param.detach()))
        self._steps.zero_()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights inside the context, and restore its weights exactly afterwards.

        Parameters and averages are swapped, without a copy of the whole model. Parameters that are not float32 are
        copied, as swapping would round their averages.
        """
        kept = self._exchange()
        try:
            yield
        finally:
            self._exchange(kept)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the averages by their checkpoint keys."""
        return {f"ema.{name}": average for name, average in self._averages.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the maximum decay; waits for the device."""
        return {"steps": int(self._steps), "max_decay": self.max_decay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of steps; the maximum decay stays that of this run."""
        self._steps.fill_(int(state["steps"]))

    @torch.no_grad()
    def _exchange(self, kept: dict[int, torch.Tensor] | None = None) -> dict[int, torch.Tensor]:
        """Swap parameters and averages; parameters of another dtype are overwritten, or restored from `kept`."""
        replaced = {}
        for i, (param, average) in enumerate(zip(self._parameters, self._averages.values(), strict=True)):
            ours, averaged = local_tensor(param.detach()), local_tensor(average)
            if ours.dtype != averaged.dtype:
                replaced[i] = ours.clone()
                ours.copy_(averaged if kept is None else kept[i])
                continue
            before = ours.clone()
            ours.copy_(averaged)
            averaged.copy_(before)
        return replaced

    def _chunks(self) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Yield local parts of parameters and of their averages in chunks of about `_CHUNK` values."""
        parameters: list[torch.Tensor] = []
        averages: list[torch.Tensor] = []
        values = 0
        for param, average in zip(self._parameters, self._averages.values(), strict=True):
            parameters.append(local_tensor(param.detach()))
            averages.append(local_tensor(average))
            values += averages[-1].numel()
            if values >= _CHUNK:
                yield parameters, averages
                parameters, averages, values = [], [], 0
        if averages:
            yield parameters, averages

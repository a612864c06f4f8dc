"""An exponential moving average of what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.optimizer.clip import local_tensor

_CHUNK = 2**26  # values: differences of so many parameters are held at a time


class Ema:
    """Averages of the trainable parameters of a model, in float32, sharded as they are.

    After the n-th step that was not skipped, `average += (1 - decay) * (parameter - average)`, where decay is 0 for the
    first step, and min(max_decay, n / (n + 9)) afterwards.

    Source: `EMAModel` in diffusers' training_utils, without its warmup (where n / (n + 9) reads (1 + s) / (10 + s) of
    s = n - 1).

    Attributes:
        max_decay: the highest decay.
    """

    def __init__(self, model: nn.Module, max_decay: float) -> None:
        """
        Args:
            model: sharded already, with its weights.
        """
        self.max_decay = max_decay
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        self._parameters = [param for _, param in named]
        self._averages = {name: param.detach().to(torch.float32, copy=True) for name, param in named}
        device = next((local_tensor(p).device for p in self._parameters), torch.device("cpu"))
        # a tensor: whether a step was skipped is known on the device alone while it is launched
        self._steps = torch.zeros((), dtype=accelerator.current().sum_dtype, device=device)

    @torch.no_grad()
    def update(self, stepped: torch.Tensor) -> None:
        """Take in the parameters after an optimizer step, without waiting for the device.

        Args:
            stepped: scalar bool: False: the step was skipped, and so is this.
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
        """Begin anew with the parameters as they are."""
        for param, average in zip(self._parameters, self._averages.values(), strict=True):
            local_tensor(average).copy_(local_tensor(param.detach()))
        self._steps.zero_()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the averaged weights meanwhile, and exactly those that it has now afterwards.

        A parameter and its average change places; no further copy of the model is made. Parameters that are not float32
        are kept beside, as their averages would be rounded.
        """
        kept = self._exchange()
        try:
            yield
        finally:
            self._exchange(kept)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The averages, under the keys of a checkpoint."""
        return {f"ema.{name}": average for name, average in self._averages.items()}

    def state_dict(self) -> dict[str, Any]:
        """How many steps were taken in, and the highest decay; waits for the device."""
        return {"steps": int(self._steps), "max_decay": self.max_decay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after `state["steps"]` steps; the decay is this run's."""
        self._steps.fill_(int(state["steps"]))

    @torch.no_grad()
    def _exchange(self, kept: dict[int, torch.Tensor] | None = None) -> dict[int, torch.Tensor]:
        """Swap parameters and averages; those of another dtype are overwritten, or put back from `kept`."""
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
        """Local parts of parameters and of their averages, some at a time."""
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

"""Learning-rate and weight-decay schedules, as Megatron defines them.

Source: the flags --lr-decay-style, --lr-warmup-*, --lr-wsd-*, --weight-decay-incr-style of Megatron-LM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from mindspeed_mm.configs.run import Run
from mindspeed_mm.utils.errors import ConfigError


@dataclass(frozen=True)
class ScheduleOptions:
    """Options of a schedule over optimizer steps, counted from 0.

    Attributes:
        max_lr, min_lr, warmup_init_lr: learning rates.
        warmup_steps, decay_steps: steps at which warmup and decay end.
        decay_style: constant, linear, cosine, inverse-square-root or WSD.
        wsd_decay_steps, wsd_decay_style: length and shape (linear, cosine, exponential, minus_sqrt) of WSD's decay.
        start_weight_decay, end_weight_decay, weight_decay_style: weight decay over decay_steps; the style is constant,
            linear or cosine.
    """

    max_lr: float
    min_lr: float = 0.0
    warmup_init_lr: float = 0.0
    warmup_steps: float = 0.0
    decay_steps: float = 1.0
    decay_style: str = "constant"
    wsd_decay_steps: float = 0.0
    wsd_decay_style: str = "exponential"
    start_weight_decay: float = 0.0
    end_weight_decay: float = 0.0
    weight_decay_style: str = "constant"

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_lr <= self.max_lr:
            raise ConfigError(f"--min-lr is {self.min_lr} and --lr {self.max_lr}; expected 0 <= --min-lr <= --lr")
        if self.warmup_init_lr > self.max_lr:
            raise ConfigError(f"--lr-warmup-init is {self.warmup_init_lr}, above --lr {self.max_lr}")
        if self.warmup_steps and self.warmup_steps >= self.decay_steps:
            raise ConfigError(
                f"warmup takes {self.warmup_steps:g} iterations, but decay ends at {self.decay_steps:g} "
                "(--lr-decay-iters, "
                "or --train-iters): make warmup shorter"
            )

    def lr(self, step: float) -> float:
        """Return the learning rate after `step` optimizer steps."""
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.warmup_init_lr + (self.max_lr - self.warmup_init_lr) * step / self.warmup_steps
        if self.decay_style == "constant":
            return self.max_lr
        if step > self.decay_steps:
            return self.min_lr
        if self.decay_style == "inverse-square-root":
            warmup = max(self.warmup_steps, 1)
            return max(self.min_lr, self.max_lr * math.sqrt(warmup / max(step, 1)))
        return self.min_lr + self._decay_coefficient(step) * (self.max_lr - self.min_lr)

    def _decay_coefficient(self, step: float) -> float:
        ratio = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        if self.decay_style == "linear":
            return 1.0 - ratio
        if self.decay_style == "cosine":
            return 0.5 * (math.cos(math.pi * ratio) + 1.0)
        if self.decay_style == "WSD":
            start = self.decay_steps - self.wsd_decay_steps
            if step <= start:
                return 1.0
            ratio = (step - start) / self.wsd_decay_steps
            shapes = {
                "linear": 1.0 - ratio,
                "cosine": 0.5 * (math.cos(math.pi * ratio) + 1.0),
                "exponential": 2.0 * 0.5**ratio - 1.0,
                "minus_sqrt": 1.0 - math.sqrt(ratio),
            }
            return shapes[self.wsd_decay_style]
        raise ConfigError(f"--lr-decay-style '{self.decay_style}' is unknown")

    def weight_decay(self, step: float) -> float:
        """Return the weight decay after `step` optimizer steps."""
        start, end = self.start_weight_decay, self.end_weight_decay
        if self.weight_decay_style == "constant" or step >= self.decay_steps:
            return end
        ratio = step / self.decay_steps
        if self.weight_decay_style == "cosine":
            ratio = 0.5 * (math.cos(math.pi * (1 - ratio)) + 1.0)
        return start + ratio * (end - start)


class HasGroups(Protocol):
    """An optimizer of torch or of Megatron.

    Attributes:
        param_groups: parameter groups, each with its `lr` and `weight_decay`.
    """

    param_groups: list[dict[str, Any]]


class Schedule:
    """Sets learning rate and weight decay of an optimizer's groups, scaled by each group's `lr_mult` and `wd_mult`."""

    def __init__(self, optimizer: HasGroups, options: ScheduleOptions) -> None:
        self.optimizer = optimizer
        self.options = options
        self.steps = 0
        self._apply()

    def step(self) -> None:
        """Advance by one optimizer step; not called for skipped steps."""
        self.steps += 1
        self._apply()

    @property
    def current_lr(self) -> float:
        """Learning rate of the next step, for a group with lr_mult 1."""
        return self.options.lr(self.steps)

    def _apply(self) -> None:
        lr, decay = self.options.lr(self.steps), self.options.weight_decay(self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = decay * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return {"steps": number of optimizer steps}; the options come from the flags."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after `state["steps"]` steps, with the schedule of this run's flags."""
        self.steps = int(state["steps"])
        self._apply()


def schedule_options(run: Run) -> ScheduleOptions:
    """Return the schedule of a run whose length has been resolved.

    Raises:
        ConfigError: --lr-decay-style WSD without a valid length of its decay.
    """
    lengths = run.schedule_lengths()
    if run.schedule.lr_decay_style == "WSD" and not 0 < lengths.wsd_decay <= lengths.decay:
        raise ConfigError(
            "--lr-decay-style WSD needs --lr-wsd-decay-iters (or -samples): between 1 and the "
            f"{lengths.decay:g} steps of the whole decay"
        )
    return ScheduleOptions(
        max_lr=run.optimizer.lr,
        min_lr=run.schedule.min_lr,
        warmup_init_lr=run.schedule.lr_warmup_init,
        warmup_steps=lengths.warmup,
        decay_steps=lengths.decay,
        decay_style=run.schedule.lr_decay_style,
        wsd_decay_steps=lengths.wsd_decay,
        wsd_decay_style=run.schedule.lr_wsd_decay_style,
        start_weight_decay=run.optimizer.start_weight_decay,
        end_weight_decay=run.optimizer.end_weight_decay,
        weight_decay_style=run.optimizer.weight_decay_incr_style,
    )

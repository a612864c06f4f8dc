"""Loss scaling for float16: a fixed scale, or a dynamic one that adapts to overflowing gradients.

Source: Megatron-LM's `ConstantGradScaler` and `DynamicGradScaler` (megatron/core/optimizer/grad_scaler.py) and its
flags --loss-scale, --initial-loss-scale, --min-loss-scale, --loss-scale-window, --hysteresis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_mm.configs.flags.model import PrecisionArguments
from mindspeed_mm.utils.log import notice

_GROWTH, _BACKOFF = 2.0, 0.5
_DYNAMIC_FLAGS = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


class LossScale:
    """A fixed loss scale.

    Attributes:
        scale: loss scale of the next backward pass.
        is_dynamic: whether `update` may change the scale; a step's result is then needed before the next backward pass.
    """

    is_dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def update(self, *, overflowed: bool) -> None:
        """Update the scale after a step; not called for a step without targets.

        Args:
            overflowed: the step was skipped because its gradients were not finite.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON values that a resumed run needs: none, as a fixed scale comes from the flags."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned; an empty mapping changes nothing."""


class DynamicLossScale(LossScale):
    """A loss scale that is halved when gradients overflow and doubled after `window` steps without overflow.

    The first `hysteresis` - 1 overflows, consecutive or not, are tolerated; each further one halves the scale. The
    count of tolerated overflows is reset when the scale is doubled, after `window` consecutive finite steps.
    """

    is_dynamic = True

    def __init__(self, initial: float, *, minimum: float = 1.0, window: float = 1000, hysteresis: int = 2) -> None:
        """
        Args:
            initial: initial scale.
            minimum: lower bound of the scale.
            window: number of consecutive finite steps after which the scale is doubled.
            hysteresis: number of overflows until the scale is halved for the first time.
        """
        super().__init__(initial)
        self._minimum, self._window, self._hysteresis = minimum, window, hysteresis
        self._finite_steps = 0
        self._overflows_left = hysteresis

    def update(self, *, overflowed: bool) -> None:
        """See `LossScale`."""
        if overflowed:
            self._finite_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self._halve()
            return
        self._finite_steps += 1
        if self._finite_steps >= self._window:
            self._finite_steps = 0
            self._overflows_left = self._hysteresis
            self.scale *= _GROWTH

    def state_dict(self) -> dict[str, Any]:
        """Return {"scale", "growth_tracker", "hysteresis_tracker"}, the keys that Megatron uses."""
        return {
            "scale": self.scale,
            "growth_tracker": self._finite_steps,
            "hysteresis_tracker": self._overflows_left,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned, within the limits of this run's flags.

        Args:
            state: an empty mapping (from a checkpoint without a dynamic scale) changes nothing.
        """
        if state:
            self.scale = max(float(state["scale"]), self._minimum)
            self._finite_steps = int(state["growth_tracker"])
            self._overflows_left = min(int(state["hysteresis_tracker"]), self._hysteresis)

    def _halve(self) -> None:
        if self.scale <= self._minimum:
            notice(
                f"fp16: gradients are not finite even at the smallest loss scale ({self.scale:g}, --min-loss-scale), "
                "and each such step is skipped; look for its cause in the data and the learning rate, lower "
                "--min-loss-scale, or compute in bf16"
            )
        self.scale = max(self.scale * _BACKOFF, self._minimum)


def build_loss_scale(precision: PrecisionArguments, compute_dtype: str) -> LossScale:
    """Return the loss scale of a run, and log a notice for each loss-scale flag that has no effect.

    Args:
        precision: precision flags of the run.
        compute_dtype: "bf16", "fp16" or "fp32".

    Returns:
        scale 1 unless the run computes in fp16; in fp16 the fixed --loss-scale, or a dynamic one without this flag.
    """
    if compute_dtype != "fp16":
        why = f"only fp16 needs a loss scale, and this run computes in {compute_dtype}"
        _report_no_effect(precision, ("loss_scale", *_DYNAMIC_FLAGS), why)
        return LossScale()
    if precision.loss_scale is not None:
        _report_no_effect(precision, _DYNAMIC_FLAGS, "--loss-scale fixes the loss scale")
        return LossScale(precision.loss_scale)
    return DynamicLossScale(
        precision.initial_loss_scale,
        minimum=precision.min_loss_scale,
        window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
    )


def _report_no_effect(precision: PrecisionArguments, names: tuple[str, ...], why: str) -> None:
    for name in names:
        default = getattr(PrecisionArguments, name)
        if getattr(precision, name, default) != default:
            notice(f"--{name.replace('_', '-')} has no effect here: {why}")

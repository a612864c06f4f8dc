"""The solver from noise to a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.configs.sora_inference import Sampler
from mindspeed_mm.models.generation.diffusion.objective import Objective
from mindspeed_mm.utils.errors import ConfigError

if TYPE_CHECKING:
    from diffusers import SchedulerMixin


def build_sampler(
    objective: Objective, model_id: str | None, sampler: Sampler | None = None, shift: float | None = None
) -> SchedulerMixin:
    """Return diffusers' scheduler for a model trained with an objective.

    Args:
        objective: objective of the training.
        model_id: `diffusion.model_id`; UniPCMultistepScheduler selects that solver.
        sampler: euler, or unipc (Zhao et al. 2023, second order); None: by model_id, else the objective's own.
        shift: shift of flow matching's timesteps; None: that of the training.

    Raises:
        ConfigError: a solver or shift of flow matching for a model of another objective.
    """
    if sampler is None and model_id == "UniPCMultistepScheduler":
        sampler = "unipc"
    return with_shift(objective.sampling_scheduler(), sampler, shift)


def with_shift(scheduler: SchedulerMixin, sampler: Sampler | None, shift: float | None) -> SchedulerMixin:
    """Return a scheduler of flow matching with another solver or shift; `scheduler` itself if neither is given."""
    import diffusers

    if sampler is None and shift is None:
        return scheduler
    config = scheduler.config
    is_euler = isinstance(scheduler, diffusers.FlowMatchEulerDiscreteScheduler)
    is_unipc = isinstance(scheduler, diffusers.UniPCMultistepScheduler) and config.get("use_flow_sigmas")
    if not (is_euler or is_unipc):
        raise ConfigError(
            f"--sampler and --shift are of flow matching, and this model is sampled with {type(scheduler).__name__}; "
            "leave them out"
        )
    if shift is None:
        shift = float(config["shift"] if is_euler else config["flow_shift"])
        dynamic = is_euler and config["use_dynamic_shifting"]
    else:
        dynamic = False
    if sampler == "unipc" or (sampler is None and is_unipc):
        if dynamic:
            raise ConfigError("--sampler unipc: this model's shift follows the size of a sample; give --shift as well")
        return diffusers.UniPCMultistepScheduler(
            num_train_timesteps=config["num_train_timesteps"],
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=shift,
        )
    if dynamic:
        return scheduler
    return diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=config["num_train_timesteps"], shift=shift)

"""Building an objective from model.json's `diffusion`."""

from __future__ import annotations

from mindspeed_mm.configs.sora_config import DiffusionConfig
from mindspeed_mm.models.generation.diffusion.ddpm import ddpm
from mindspeed_mm.models.generation.diffusion.flow_matching import flow_matching
from mindspeed_mm.models.generation.diffusion.objective import Objective
from mindspeed_mm.models.generation.predictor.family import FamilyDefaults
from mindspeed_mm.utils.errors import ConfigError, did_you_mean

#: published and diffusers names → the objective that they train
OBJECTIVES = {
    "flow_matching": "flow_matching",
    "wan_flow_match_scheduler": "flow_matching",
    "hunyuanvideo_15_diffusion": "flow_matching",
    "FlowMatchEulerDiscreteScheduler": "flow_matching",
    "UniPCMultistepScheduler": "flow_matching",
    "ddpm": "ddpm",
    "DDPMScheduler": "ddpm",
    "DDIMScheduler": "ddpm",
    "CogVideoXDDIMScheduler": "ddpm",
    "CogVideoXDPMScheduler": "ddpm",
}


def build_objective(config: DiffusionConfig, defaults: FamilyDefaults, file: str) -> Objective:
    """Build the objective.

    Raises:
        ConfigError: an unknown model_id, boundaries without a timestep between them, a prediction that doesn't fit.
    """
    if config.model_id is not None and config.model_id not in OBJECTIVES:
        raise ConfigError(
            f"{file}: 'diffusion.model_id' is '{config.model_id}'; expected one of {', '.join(OBJECTIVES)}"
            f"{did_you_mean(config.model_id, OBJECTIVES)}"
        )
    if config.min_timestep_boundary >= config.max_timestep_boundary:
        raise ConfigError(
            f"{file}: 'diffusion.min_timestep_boundary' {config.min_timestep_boundary} is not below "
            f"'max_timestep_boundary' {config.max_timestep_boundary}; no timestep is left (0 is noise, 1 is data)"
        )
    kind = OBJECTIVES[config.model_id] if config.model_id is not None else defaults.objective
    flows = config.prediction_type in (None, "flow_prediction")
    if kind == "flow_matching" and not flows:
        raise ConfigError(
            f"{file}: 'diffusion.prediction_type' is '{config.prediction_type}', and flow matching predicts "
            "flow_prediction; write that, or model_id: ddpm"
        )
    if kind == "ddpm" and config.prediction_type == "flow_prediction":
        raise ConfigError(
            f"{file}: 'diffusion.prediction_type' is 'flow_prediction', and ddpm predicts epsilon, v_prediction or "
            "sample; write one of these, or model_id: flow_matching"
        )
    if kind == "flow_matching":
        for key in ("trained_betas", "rescale_betas_zero_snr"):
            if getattr(config, key):
                raise ConfigError(
                    f"{file}: 'diffusion.{key}' is given, and flow matching has no betas; remove it, or write "
                    "model_id: ddpm"
                )
    if config.trained_betas is not None and len(config.trained_betas) != config.num_train_timesteps:
        raise ConfigError(
            f"{file}: 'diffusion.trained_betas' has {len(config.trained_betas)} numbers, and "
            f"'diffusion.num_train_timesteps' is {config.num_train_timesteps}; there is one beta a timestep"
        )
    return flow_matching(config, defaults) if kind == "flow_matching" else ddpm(config, defaults)

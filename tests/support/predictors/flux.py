"""Tiny Flux transformers, with and without guidance, and a plain loss as diffusers' examples compute it."""

from __future__ import annotations

import torch

from tests.support.predictors import Case

NAME = "flux"
_TINY = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "pooled_projection_dim": 10,
    "guidance_embeds": False,
    "axes_dims_rope": (4, 4, 8),
}


def noised_by_scheduler(latents, noise, positions, **scheduler_config):
    """Noise that a scheduler puts on pictures at unshifted noise levels; what it tells the model of them.

    Returns:
        noisy latents, timesteps [batch].
    """
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    scheduler = FlowMatchEulerDiscreteScheduler(**scheduler_config)
    said = scheduler.config
    tokens = latents.shape[-2] * latents.shape[-1] // 4
    mu = calculate_shift(tokens, said.base_image_seq_len, said.max_image_seq_len, said.base_shift, said.max_shift)
    scheduler.set_timesteps(sigmas=positions.tolist(), mu=mu if said.use_dynamic_shifting else None)
    return scheduler.scale_noise(latents, scheduler.timesteps, noise), scheduler.timesteps.float()


def logit_normal(draws):
    """Positions at quantiles of the logit-normal density."""
    return torch.distributions.Normal(0, 1).icdf(draws).sigmoid()


def _loss(model, latents, noise, draws, text, guidance):
    from diffusers import FluxPipeline

    latents, noise = latents[:, :, 0], noise[:, :, 0]
    batch, channels, height, width = latents.shape
    noisy, timesteps = noised_by_scheduler(latents, noise, logit_normal(draws), use_dynamic_shifting=True)
    predicted = model(
        hidden_states=FluxPipeline._pack_latents(noisy, batch, channels, height, width),
        timestep=timesteps / 1000,
        guidance=guidance.expand(batch) if guidance is not None else None,
        pooled_projections=text["pooled_projections"],
        encoder_hidden_states=text["encoder_hidden_states"],
        txt_ids=torch.zeros(text["encoder_hidden_states"].shape[1], 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, "cpu", torch.float32),
        return_dict=False,
    )[0]
    predicted = FluxPipeline._unpack_latents(predicted, height * 8, width * 8, 8)
    return ((predicted - (noise - latents)) ** 2).reshape(batch, -1).mean(1).mean()


def _plain(model, latents, noise, draws, text, conditions):
    return _loss(model, latents, noise, draws, text, None)


def _plain_guided(model, latents, noise, draws, text, conditions):
    return _loss(model, latents, noise, draws, text, torch.tensor([3.5]))


_TEXT = {"encoder_hidden_states": (7, 12), "pooled_projections": (10,)}
_LATENT = (4, 1, 6, 8)
CASES = {
    "t2i": Case(_TINY, _LATENT, _TEXT, _plain, task="t2i"),
    "guided": Case(
        {**_TINY, "guidance_embeds": True}, _LATENT, _TEXT, _plain_guided, task="t2i", diffusion={"guidance": 3.5}
    ),
}

"""A tiny HunyuanVideo transformer."""

from __future__ import annotations

import torch

from tests.support.predictors import Case

NAME = "hunyuanvideo"
_TINY = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 10,
    "num_layers": 1,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "patch_size": 2,
    "patch_size_t": 1,
    "guidance_embeds": True,
    "text_embed_dim": 16,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (2, 4, 4),
}
_SHIFT, _GUIDANCE = 7.0, 6.0


def logit_normal(draws, shift):
    """Sigmas of draws: the logistic function of normal values, shifted towards noise."""
    sigmas = torch.sigmoid(torch.distributions.Normal(0.0, 1.0).icdf(draws))
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def _plain(model, latents, noise, draws, text, conditions):
    sigmas = logit_normal(draws, _SHIFT).float()
    spread = sigmas.view(-1, 1, 1, 1, 1)
    guidance = torch.full((len(latents),), _GUIDANCE) * 1000.0 if model.config.guidance_embeds else None
    predicted = model(
        hidden_states=(1.0 - spread) * latents + spread * noise, timestep=sigmas * 1000, guidance=guidance, **text
    ).sample
    return torch.nn.functional.mse_loss(predicted, noise - latents)


_TEXT = {"encoder_hidden_states": (7, 16), "encoder_attention_mask": (7,), "pooled_projections": (8,)}
CASES = {
    "t2v": Case(_TINY, (4, 3, 4, 6), _TEXT, _plain, diffusion={"guidance": _GUIDANCE}),
    "t2v-no-guidance": Case({**_TINY, "guidance_embeds": False}, (4, 1, 4, 4), _TEXT, _plain),
}

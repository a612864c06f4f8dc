"""Tiny HunyuanVideo 1.5 transformers: text to video, image to video."""

from __future__ import annotations

import torch

from tests.support.predictors import Case
from tests.support.predictors.hunyuanvideo import logit_normal

NAME = "hunyuanvideo15"
_TINY = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "patch_size": 1,
    "patch_size_t": 1,
    "text_embed_dim": 16,
    "text_embed_2_dim": 8,
    "image_embed_dim": 12,
    "rope_axes_dim": (2, 2, 4),
}


def _plain(model, latents, noise, draws, text, conditions):
    sigmas = logit_normal(draws, 3.0).float()
    spread = sigmas.view(-1, 1, 1, 1, 1)
    noisy = (1.0 - spread) * latents + spread * noise
    if conditions:
        shown, picture = conditions["condition"], conditions["image_embeds"]
    else:
        shown, picture = torch.zeros(len(latents), 5, *latents.shape[2:]), torch.zeros(len(latents), 729, 12)
    predicted = model(
        hidden_states=torch.cat([noisy, shown], 1), timestep=sigmas * 1000, image_embeds=picture, **text
    ).sample
    return torch.nn.functional.mse_loss(predicted, noise - latents)


def _first_frame(latents):
    shown = torch.zeros(len(latents), 5, *latents.shape[2:])
    shown[:, :4, 0] = latents[:, :, 0] * 0.9
    shown[:, 4, 0] = 1
    picture = torch.stack([torch.linspace(-1, 1, 60).view(5, 12) * sample.std() for sample in latents])
    return {"condition": shown, "image_embeds": picture}


_TEXT = {
    "encoder_hidden_states": (7, 16),
    "encoder_attention_mask": (7,),
    "encoder_hidden_states_2": (5, 8),
    "encoder_attention_mask_2": (5,),
}
CASES = {
    "t2v": Case(_TINY, (4, 2, 3, 4), _TEXT, _plain),
    "i2v": Case(_TINY, (4, 3, 3, 4), _TEXT, _plain, task="i2v", conditions=_first_frame),
}

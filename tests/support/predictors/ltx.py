"""Tiny LTX transformers: text to video, image to video."""

from __future__ import annotations

import math

import torch

from tests.support.predictors import Case

NAME = "ltx"
_TINY = {
    "in_channels": 6,
    "out_channels": 6,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 16,
    "num_layers": 2,
    "caption_channels": 12,
}


def _sigmas(draws, tokens):
    """Logistic function of normal values whose mean grows with the tokens, from 0.95 at 1024 to 2.05 at 4096."""
    mean = 0.95 + (2.05 - 0.95) * (tokens - 1024) / (4096 - 1024)
    normal = math.sqrt(2) * torch.special.erfinv(2 * draws - 1)
    return torch.sigmoid(normal + mean).float()


def _plain(model, latents, noise, draws, text, conditions):
    batch, channels, frames, height, width = latents.shape
    sigmas = _sigmas(draws, frames * height * width)
    spread = sigmas.view(-1, 1, 1, 1, 1)
    noisy, target = (1.0 - spread) * latents + spread * noise, noise - latents
    timestep = sigmas * 1000
    if conditions:
        noisy[:, :, 0] = conditions["known_latents"][:, :, 0]
        timestep = timestep[:, None].repeat(1, frames * height * width)
        timestep[:, : height * width] = 0
    predicted = model(
        hidden_states=noisy.flatten(2).transpose(1, 2),
        timestep=timestep,
        num_frames=frames,
        height=height,
        width=width,
        rope_interpolation_scale=(8 / 25, 32, 32),
        **text,
    ).sample
    predicted = predicted.transpose(1, 2).reshape(batch, channels, frames, height, width)
    first = 1 if conditions else 0
    return torch.nn.functional.mse_loss(predicted[:, :, first:], target[:, :, first:])


def _known_frame(latents):
    known = torch.zeros_like(latents[:, :1])
    known[:, :, 0] = 1
    return {"known_latents": latents * 0.9, "known": known}


_TEXT = {"encoder_hidden_states": (7, 12), "encoder_attention_mask": (7,)}
CASES = {
    "t2v": Case(_TINY, (6, 2, 3, 4), _TEXT, _plain),
    "i2v": Case(_TINY, (6, 3, 2, 4), _TEXT, _plain, task="i2v", conditions=_known_frame),
}

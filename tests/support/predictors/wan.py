"""Tiny Wan transformers: text to video, image to video, and a timestep for each token."""

from __future__ import annotations

import math

import torch

from tests.support.predictors import Case
from tests.support.tiny_diffusers import diffusers_config

NAME = "wan"
_TINY = diffusers_config("wan")
_SHIFT = 5.0


def _sigmas_and_weights(draws):
    """Published Wan training: a table of 1000 shifted sigmas, and a bell of weights over its timesteps."""
    table = torch.linspace(1, 0, 1001, dtype=torch.float64)[:-1]
    table = _SHIFT * table / (1 + (_SHIFT - 1) * table)
    bell = torch.exp(-2 * ((table * 1000 - 500) / 1000) ** 2)
    bell = bell - bell.min()
    bell = bell * (1000 / bell.sum())
    index = (draws * 1000).long()
    return table[index].float(), bell[index].float()


def _plain(model, latents, noise, draws, text, conditions):
    sigmas, weights = _sigmas_and_weights(draws)
    spread = sigmas.view(-1, 1, 1, 1, 1)
    noisy = (1.0 - spread) * latents + spread * noise
    inputs = torch.cat([noisy, conditions["condition"]], 1) if conditions else noisy
    predicted = model(
        hidden_states=inputs,
        timestep=sigmas * 1000,
        encoder_hidden_states=text["encoder_hidden_states"],
        encoder_hidden_states_image=conditions.get("encoder_hidden_states_image"),
    ).sample
    loss = torch.nn.functional.mse_loss(predicted, noise - latents, reduction="none")
    return (loss.mean((1, 2, 3, 4)) * weights).mean()


def _plain_ti2v(model, latents, noise, draws, text, conditions):
    sigmas, weights = _sigmas_and_weights(draws)
    spread = sigmas.view(-1, 1, 1, 1, 1)
    noisy = (1.0 - spread) * latents + spread * noise
    noisy[:, :, 0] = conditions["known_latents"][:, :, 0]
    frames, height, width = latents.shape[2:]
    timestep = (sigmas * 1000).view(-1, 1).repeat(1, frames * height * width // 4)
    timestep[:, : height * width // 4] = 0
    states = text["encoder_hidden_states"]
    predicted = model(hidden_states=noisy, timestep=timestep, encoder_hidden_states=states).sample
    loss = torch.nn.functional.mse_loss(predicted[:, :, 1:], (noise - latents)[:, :, 1:], reduction="none")
    return (loss.mean((1, 2, 3, 4)) * weights).mean()


def _first_frame(latents):
    mask = torch.zeros(len(latents), 4, *latents.shape[2:])
    mask[:, :, 0] = 1
    image = torch.stack([torch.full((5, 20), math.sin(float(sample.sum()))) for sample in latents])
    return {"condition": torch.cat([mask, latents * 0.5], 1), "encoder_hidden_states_image": image}


def _known_frame(latents):
    known = torch.zeros_like(latents[:, :1])
    known[:, :, :1] = 1
    return {"known_latents": latents * 0.9, "known": known}


_TEXT = {"encoder_hidden_states": (12, 16)}
_WAN = {"model_id": "wan_flow_match_scheduler", "shift": _SHIFT}
CASES = {
    "t2v": Case(_TINY, (4, 2, 8, 8), _TEXT, _plain, diffusion=_WAN),
    "i2v": Case(
        {**_TINY, "in_channels": 12, "image_dim": 20, "added_kv_proj_dim": 24},
        (4, 2, 8, 8),
        _TEXT,
        _plain,
        task="i2v",
        conditions=_first_frame,
        diffusion=_WAN,
    ),
    "ti2v": Case(_TINY, (4, 3, 8, 8), _TEXT, _plain_ti2v, task="ti2v", conditions=_known_frame, diffusion=_WAN),
}

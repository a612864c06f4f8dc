"""Tiny Stable Diffusion 3 transformers (3, and 3.5 with norms and second attentions), and a plain loss."""

from __future__ import annotations

from tests.support.predictors import Case
from tests.support.predictors.flux import logit_normal, noised_by_scheduler

NAME = "sd3"
_TINY = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 10,
    "pos_embed_max_size": 8,
}


def _plain(model, latents, noise, draws, text, conditions):
    latents, noise = latents[:, :, 0], noise[:, :, 0]
    noisy, timesteps = noised_by_scheduler(latents, noise, logit_normal(draws), shift=3.0)
    predicted = model(
        hidden_states=noisy,
        timestep=timesteps,
        encoder_hidden_states=text["encoder_hidden_states"],
        pooled_projections=text["pooled_projections"],
        return_dict=False,
    )[0]
    return ((predicted - (noise - latents)) ** 2).reshape(len(latents), -1).mean(1).mean()


_TEXT = {"encoder_hidden_states": (7, 12), "pooled_projections": (10,)}
CASES = {
    "t2i": Case(_TINY, (4, 1, 6, 8), _TEXT, _plain, task="t2i"),
    "3.5": Case(
        {**_TINY, "qk_norm": "rms_norm", "dual_attention_layers": (0,)}, (4, 1, 8, 8), _TEXT, _plain, task="t2i"
    ),
}

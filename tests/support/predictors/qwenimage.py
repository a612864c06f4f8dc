"""A tiny Qwen-Image transformer, and a plain loss as diffusers' examples compute it."""

from __future__ import annotations

from tests.support.predictors import Case
from tests.support.predictors.flux import logit_normal, noised_by_scheduler

NAME = "qwenimage"
_TINY = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "axes_dims_rope": (4, 4, 8),
}
_SCHEDULER = {"use_dynamic_shifting": True, "max_shift": 0.9, "max_image_seq_len": 8192}


def _plain(model, latents, noise, draws, text, conditions):
    from diffusers import QwenImagePipeline

    batch, channels, _, height, width = latents.shape
    noisy, timesteps = noised_by_scheduler(latents, noise, logit_normal(draws), **_SCHEDULER)
    predicted = model(
        hidden_states=QwenImagePipeline._pack_latents(noisy, batch, channels, height, width),
        timestep=timesteps / 1000,
        encoder_hidden_states=text["encoder_hidden_states"],
        encoder_hidden_states_mask=text["encoder_hidden_states_mask"],
        img_shapes=[[(1, height // 2, width // 2)]] * batch,
        return_dict=False,
    )[0]
    predicted = QwenImagePipeline._unpack_latents(predicted, height * 8, width * 8, 8)
    return ((predicted - (noise - latents)) ** 2).reshape(batch, -1).mean(1).mean()


CASES = {
    "t2i": Case(
        _TINY,
        (4, 1, 6, 8),
        {"encoder_hidden_states": (7, 12), "encoder_hidden_states_mask": (7,)},
        _plain,
        task="t2i",
    ),
}

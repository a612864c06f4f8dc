"""Tiny CogVideoX transformers: sine and rotary positions, 1.5 with tokens of two frames, image to video."""

from __future__ import annotations

import torch

from tests.support.predictors import Case

NAME = "cogvideox"
_TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 12,
    "num_layers": 2,
    "sample_width": 8,
    "sample_height": 4,
    "sample_frames": 9,
    "patch_size": 2,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": 6,
}
_ROTARY = {**_TINY, "use_rotary_positional_embeddings": True}
_15 = {**_ROTARY, "patch_size_t": 2, "patch_bias": False, "sample_width": 16, "sample_height": 16}


def _rotary(config, frames, height, width):
    """As diffusers' train_cogvideox_lora does it: crops of the base grid, or its corner where frames are patched."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

    grid, base = (height // 2, width // 2), (config.sample_height // 2, config.sample_width // 2)
    if config.patch_size_t is None:
        crops = get_resize_crop_region_for_grid(grid, base[1], base[0])
        return get_3d_rotary_pos_embed(config.attention_head_dim, crops, grid, frames)
    return get_3d_rotary_pos_embed(
        config.attention_head_dim, None, grid, frames // config.patch_size_t, grid_type="slice", max_size=base
    )


def _plain(model, latents, noise, draws, text, conditions):
    """The published fine-tuning loss: the error of the clean latents that the prediction of v stands for, weighted."""
    from diffusers import CogVideoXDPMScheduler

    rotary = model.config.use_rotary_positional_embeddings
    scheduler = CogVideoXDPMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=1.0 if rotary else 3.0,
    )
    timesteps = 999 - (draws * 1000).long()
    video, sound = latents.permute(0, 2, 1, 3, 4), noise.permute(0, 2, 1, 3, 4)
    noisy = scheduler.add_noise(video, sound, timesteps)
    inputs = noisy
    if conditions:
        image = conditions["condition"].permute(0, 2, 1, 3, 4)
        inputs = torch.cat([noisy, torch.zeros_like(noisy)], 2)
        inputs[:, : image.shape[1], noisy.shape[2] :] = image
    predicted = model(
        hidden_states=inputs,
        encoder_hidden_states=text["encoder_hidden_states"],
        timestep=timesteps,
        ofs=None if model.config.ofs_embed_dim is None else torch.full((1,), 2.0),
        image_rotary_emb=_rotary(model.config, *noisy.shape[1:2], *noisy.shape[3:]) if rotary else None,
    ).sample
    clean = scheduler.get_velocity(predicted, noisy, timesteps)
    weights = 1 / (1 - scheduler.alphas_cumprod[timesteps]).view(-1, 1, 1, 1, 1)
    return (weights * (clean - video) ** 2).reshape(len(video), -1).mean(1).mean().float()


def _first_frame(latents):
    image = torch.zeros_like(latents)
    image[:, :, 0] = latents[:, :, 0] * 0.9
    return {"condition": image}


_TEXT = {"encoder_hidden_states": (6, 12)}
_I2V = {"in_channels": 8}
CASES = {
    "t2v": Case(_TINY, (4, 3, 4, 8), _TEXT, _plain),
    "t2v-rotary": Case(_ROTARY, (4, 2, 6, 4), _TEXT, _plain),
    "t2v-1.5": Case(_15, (4, 3, 4, 8), _TEXT, _plain),
    "i2v": Case({**_ROTARY, **_I2V}, (4, 3, 4, 8), _TEXT, _plain, task="i2v", conditions=_first_frame),
    "i2v-1.5": Case(
        {**_15, **_I2V, "ofs_embed_dim": 8}, (4, 3, 4, 8), _TEXT, _plain, task="i2v", conditions=_first_frame
    ),
}

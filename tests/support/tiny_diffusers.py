"""Diffusion transformers of diffusers, with a few thousand parameters each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "wan": (
        "WanTransformer3DModel",
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 32,
            "ffn_dim": 32,
            "num_layers": 2,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 64,
        },
    ),
    "hunyuan": (
        "HunyuanVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 10,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "patch_size": 1,
            "patch_size_t": 1,
            "guidance_embeds": True,
            "text_embed_dim": 16,
            "pooled_projection_dim": 8,
            "rope_axes_dim": (2, 4, 4),
        },
    ),
    "hunyuan15": (
        "HunyuanVideo15Transformer3DModel",
        {
            "in_channels": 4,
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
            "target_size": 16,
            "task_type": "t2v",
        },
    ),
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 4,
            "text_embed_dim": 8,
            "num_layers": 2,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 8,
            "patch_size": 2,
            "temporal_compression_ratio": 4,
            "max_text_seq_length": 8,
        },
    ),
    "flux": (
        "FluxTransformer2DModel",
        {
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": [4, 4, 8],
        },
    ),
    "qwenimage": (
        "QwenImageTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "guidance_embeds": False,
            "axes_dims_rope": (8, 4, 4),
        },
    ),
    "ltx": (
        "LTXVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "cross_attention_dim": 16,
            "num_layers": 2,
            "qk_norm": "rms_norm_across_heads",
            "caption_channels": 16,
        },
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            "sample_size": 16,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "caption_projection_dim": 16,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 24,
            "pos_embed_max_size": 16,
            "qk_norm": "rms_norm",
            "dual_attention_layers": (0,),
        },
    ),
}

NAMES = tuple(_CONFIGS)


def diffusers_class(name: str) -> Any:
    """The class of one of `NAMES`."""
    import diffusers

    return getattr(diffusers, _CONFIGS[name][0])


def diffusers_config(name: str) -> dict[str, Any]:
    """What its constructor is given."""
    return dict(_CONFIGS[name][1])


def build_diffusers(name: str, seed: int = 0) -> Any:
    """A model as its own constructor makes it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return diffusers_class(name)(**diffusers_config(name))


def wan_inputs(batch_size: int = 1, seed: int = 0) -> dict[str, Any]:
    """Inputs of the tiny Wan transformer."""
    made = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch_size, 4, 2, 8, 8, generator=made),
        "timestep": torch.randint(0, 1000, (batch_size,), generator=made),
        "encoder_hidden_states": torch.randn(batch_size, 6, 16, generator=made),
        "return_dict": False,
    }


def flat_loss(model: Callable[..., Any], inputs: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
    """The mean squared difference between a model's answer and `target`."""
    return (model(**inputs)[0] - target).square().mean()

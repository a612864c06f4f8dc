"""Whole diffusers pipelines of picture models with a few thousand parameters each, made from nothing; and Wan's."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.tiny_video_pipelines import WORDS, t5, tokenizer, transformer


def clip(width: int, projection: int | None = None) -> Any:
    """A CLIP of captions, with a projection of that width or without."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    sizes = {"intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 16}
    described = CLIPTextConfig(
        vocab_size=len(WORDS),
        hidden_size=width,
        projection_dim=projection or 4,
        eos_token_id=1,
        bos_token_id=2,
        **sizes,
    )
    return (CLIPTextModel if projection is None else CLIPTextModelWithProjection)(described)


def umt5(width: int) -> Any:
    """A UMT5 encoder."""
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(vocab_size=len(WORDS), d_model=width, d_kv=4, d_ff=16, num_layers=1, num_heads=2, pad_token_id=0)
    )


def qwen(width: int) -> Any:
    """A Qwen2.5-VL of words and pictures."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    words = {
        "vocab_size": len(WORDS),
        "hidden_size": width,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 10000.0},
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    sight = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": width}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=words, vision_config=sight))


def autoencoder_of_pictures() -> Any:
    """AutoencoderKL as Flux and Stable Diffusion 3 have it."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4, 4, 4, 4),
        latent_channels=4,
        norm_num_groups=2,
        sample_size=64,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).eval()


def flux() -> Any:
    """FluxPipeline."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=autoencoder_of_pictures(),
        text_encoder=clip(10).eval(),
        tokenizer=tokenizer(model_max_length=8),
        text_encoder_2=t5(12).eval(),
        tokenizer_2=tokenizer(),
        transformer=transformer("flux-guided"),
    )


def sd3() -> Any:
    """StableDiffusion3Pipeline."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    return StableDiffusion3Pipeline(
        transformer=transformer("sd3-3.5"),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder_of_pictures(),
        text_encoder=clip(4, 4).eval(),
        tokenizer=tokenizer(model_max_length=8),
        text_encoder_2=clip(6, 6).eval(),
        tokenizer_2=tokenizer(model_max_length=8),
        text_encoder_3=t5(12).eval(),
        tokenizer_3=tokenizer(),
    )


def qwenimage() -> Any:
    """QwenImagePipeline."""
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImagePipeline

    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        vae=AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[0.5, 0.7, 0.9, 1.1],
        ).eval(),
        text_encoder=qwen(12).eval(),
        tokenizer=tokenizer(),
        transformer=transformer("qwenimage-t2i"),
    )


def autoencoder_wan(*, compressed: bool = False) -> Any:
    """AutoencoderKLWan of 2.1, or of the 5B model of 2.2, whose latents stand for 16 pixels."""
    from diffusers import AutoencoderKLWan

    more: dict[str, Any] = {}
    if compressed:
        more = {
            "in_channels": 12,
            "out_channels": 12,
            "patch_size": 2,
            "is_residual": True,
            "decoder_base_dim": 4,
            "scale_factor_spatial": 16,
        }
    with torch.random.fork_rng(devices=[]):
        return AutoencoderKLWan(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[0.5, 0.7, 0.9, 1.1],
            **more,
        ).eval()


def wan(*, compressed: bool = False) -> Any:
    """WanPipeline."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    return WanPipeline(
        tokenizer=tokenizer(),
        text_encoder=umt5(16).eval(),
        transformer=transformer("wan-t2v"),
        vae=autoencoder_wan(compressed=compressed),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
    )

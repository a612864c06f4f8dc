"""Whole diffusers pipelines of video models with a few thousand parameters each, made from nothing."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.predictors import cases

WORDS = ("<pad>", "</s>", "<unk>", "a", "red", "fox", "runs", "the", "sea", "at", "night", "sign", "says", "open")
CAPTIONS = ["a red fox runs", 'the sign says "open" at night the sea']


def tokenizer(**more: Any) -> Any:
    """Words and punctuation marks as tokens, padded on the right."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="right", **more
    )


def t5(width: int, vocabulary: int = len(WORDS)) -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=vocabulary, d_model=width, d_kv=4, d_ff=16, num_layers=1, num_heads=2))


def transformer(label: str, **more: Any) -> Any:
    """The transformer of a case, in evaluation mode."""
    import diffusers

    from mindspeed_mm.models.generation.predictor.family import families

    name, case = cases()[label]
    return getattr(diffusers, families()[name].model_class_name)(**{**case.config, **more}).eval()


def hunyuanvideo() -> Any:
    """HunyuanVideoPipeline."""
    from diffusers import AutoencoderKLHunyuanVideo, FlowMatchEulerDiscreteScheduler, HunyuanVideoPipeline
    from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    clip = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=2
    )
    return HunyuanVideoPipeline(
        text_encoder=LlamaModel(LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, **sizes)).eval(),
        tokenizer=tokenizer(),
        transformer=transformer("hunyuanvideo-t2v"),
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=CLIPTextModel(CLIPTextConfig(vocab_size=len(WORDS), eos_token_id=1, **clip)).eval(),
        tokenizer_2=tokenizer(),
    )


def hunyuanvideo15(task: str) -> Any:
    """HunyuanVideo15Pipeline, HunyuanVideo15ImageToVideoPipeline."""
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        ClassifierFreeGuidance,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideo15ImageToVideoPipeline,
        HunyuanVideo15Pipeline,
    )
    from transformers import ByT5Tokenizer, SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    language = Qwen2_5_VLTextConfig(
        vocab_size=len(WORDS), num_key_value_heads=2, rope_parameters=rope, pad_token_id=0, **sizes
    )
    made = {
        "text_encoder": Qwen2_5_VLTextModel(language).eval(),
        "tokenizer": tokenizer(chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}"),
        "transformer": transformer(f"hunyuanvideo15-{task}", target_size=32),
        "vae": AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1
        ).eval(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
        "text_encoder_2": t5(8, 384).eval(),
        "tokenizer_2": ByT5Tokenizer(),
        "guider": ClassifierFreeGuidance(guidance_scale=1.0, enabled=False),
    }
    if task == "i2v":
        vision = SiglipVisionConfig(
            hidden_size=12, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
        )
        made["image_encoder"] = SiglipVisionModel(vision).eval()
        made["feature_extractor"] = SiglipImageProcessor(size={"height": 16, "width": 16})
    pipeline = (HunyuanVideo15Pipeline if task == "t2v" else HunyuanVideo15ImageToVideoPipeline)(**made)
    # the tiny tokenizer makes fewer tokens of the template; a caption begins behind it
    pipeline.prompt_template_encode_start_idx = len(tokenizer()(pipeline.system_message).input_ids)
    pipeline.tokenizer_max_length, pipeline.tokenizer_2_max_length = 12, 16
    return pipeline


def cogvideox(label: str, *, inverted: bool = False) -> Any:
    """CogVideoXPipeline, CogVideoXImageToVideoPipeline."""
    from diffusers import (
        AutoencoderKLCogVideoX,
        CogVideoXDDIMScheduler,
        CogVideoXImageToVideoPipeline,
        CogVideoXPipeline,
    )

    vae = AutoencoderKLCogVideoX(
        latent_channels=4,
        block_out_channels=(4, 4, 4, 4),
        layers_per_block=1,
        norm_num_groups=2,
        invert_scale_latents=inverted,
    )
    scheduler = CogVideoXDDIMScheduler(
        prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing"
    )
    pipeline = CogVideoXPipeline if "-t2v" in label else CogVideoXImageToVideoPipeline
    return pipeline(
        tokenizer=tokenizer(),
        text_encoder=t5(12).eval(),
        vae=vae.eval(),
        transformer=transformer(label),
        scheduler=scheduler,
    )


def ltx(task: str) -> Any:
    """LTXPipeline, LTXImageToVideoPipeline."""
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXImageToVideoPipeline,
        LTXPipeline,
    )

    vae = AutoencoderKLLTXVideo(
        latent_channels=6,
        block_out_channels=(4, 4, 4, 4),
        decoder_block_out_channels=(4, 4, 4, 4),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    )
    with torch.no_grad():
        vae.latents_mean.copy_(torch.linspace(-1, 1, 6))
        vae.latents_std.copy_(torch.linspace(0.5, 2, 6))
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, shift_terminal=0.1
    )
    return (LTXPipeline if task == "t2v" else LTXImageToVideoPipeline)(
        scheduler=scheduler,
        vae=vae.eval(),
        text_encoder=t5(12).eval(),
        tokenizer=tokenizer(),
        transformer=transformer(f"ltx-{task}"),
    )

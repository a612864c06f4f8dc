"""Qwen3-Omni as published: a thinker with experts, beside a talker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family, padded_vocabulary
from tests.support.families.qwen2_5_omni import WRAP, ids_of, save_whole, whole_row
from tests.support.families.qwen3_vl import TEXT, VISION
from tests.support.families.qwen3_vl_moe import EXPERTS
from tests.support.tiny_omni import tiny_omni_processor_dir

_TOKENS = {
    "image_token_id": "<|IMAGE|>",
    "video_token_id": "<|VIDEO|>",
    "audio_token_id": "<|AUDIO|>",
    "vision_start_token_id": "<|vision_bos|>",
    "vision_end_token_id": "<|vision_eos|>",
    "audio_start_token_id": "<|audio_bos|>",
}
AUDIO = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "output_dim": 64}
AUDIO |= {"num_mel_bins": 128, "max_source_positions": 100, "downsample_hidden_size": 6}


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import (
        AutoProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3OmniMoeProcessor,
        Qwen3OmniMoeThinkerConfig,
        Qwen3OmniMoeThinkerForConditionalGeneration,
        WhisperFeatureExtractor,
    )

    older = AutoProcessor.from_pretrained(tiny_omni_processor_dir(path / "parts"))
    size = {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 16}
    image = Qwen2VLImageProcessor(patch_size=16, size=size)
    video = Qwen2VLVideoProcessor(patch_size=16, size=size)
    sound: Any = WhisperFeatureExtractor(feature_size=128, padding_side="right")
    template = older.chat_template
    processor = Qwen3OmniMoeProcessor(image, video, sound, older.tokenizer, chat_template=template)
    processor.save_pretrained(path)
    tokenizer = processor.tokenizer
    text = {**TEXT, **EXPERTS, "vocab_size": padded_vocabulary(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3OmniMoeThinkerConfig(
        text_config=text,
        vision_config=VISION,
        audio_config=AUDIO,
        position_id_per_seconds=13,
        **ids_of(tokenizer, _TOKENS),
    )
    thinker = Qwen3OmniMoeThinkerForConditionalGeneration(config)
    return save_whole(path, thinker, "qwen3_omni_moe", ("talker", "code2wav"))


def published_30b() -> Any:
    """The configuration of the thinker of Qwen3-Omni 30B-A3B."""
    from transformers import Qwen3OmniMoeThinkerConfig

    text = {"hidden_size": 2048, "intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32}
    text |= {"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 152064}
    text |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    vision = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 2048}
    audio = {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
    audio |= {"output_dim": 2048}
    return Qwen3OmniMoeThinkerConfig(text_config=text, vision_config=vision, audio_config=audio)


FAMILY = Family(
    make,
    wrap=WRAP,
    kinds=("image", "video", "audio"),
    whole=whole_row,
    published={"30B-A3B": (published_30b, 31_719_205_488)},
)

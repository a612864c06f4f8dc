"""Qwen2.5-Omni as published: the thinker's weights beside those of a talker, which a run keeps as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.families import Family, randomize
from tests.support.families.qwen2_vl import TEXT
from tests.support.tiny_omni import tiny_omni_processor_dir

_TOKENS = {
    "image_token_index": "<|IMAGE|>",
    "video_token_index": "<|VIDEO|>",
    "audio_token_index": "<|AUDIO|>",
    "vision_start_token_id": "<|vision_bos|>",
    "vision_end_token_id": "<|vision_eos|>",
    "audio_start_token_id": "<|audio_bos|>",
    "audio_end_token_id": "<|audio_eos|>",
}
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
VISION |= {"window_size": 56, "fullatt_block_indexes": [1]}
AUDIO = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "output_dim": 64}
AUDIO |= {"num_mel_bins": 128, "max_source_positions": 100}


def ids_of(tokenizer: Any, names: Mapping[str, str]) -> dict[str, int]:
    """Token ids that the configuration names."""
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


def save_whole(path: Path, thinker: Any, model_type: str, others: tuple[str, ...]) -> Path:
    """Save a thinker as a part of a whole model, with a few weights of the other parts.

    Args:
        others: names of the other parts.
    """
    randomize(thinker).save_pretrained(path)
    file = path / "model.safetensors"
    tensors = {f"thinker.{name.removeprefix('thinker.')}": tensor for name, tensor in load_file(file).items()}
    generator = torch.Generator().manual_seed(1)
    for part in others:
        tensors[f"{part}.model.layers.0.mlp.experts.0.gate_proj.weight"] = torch.randn(6, 10, generator=generator)
        tensors[f"{part}.head.weight"] = torch.randn(3, 5, generator=generator).bfloat16()
    save_file(tensors, file, metadata={"format": "pt"})
    said = json.loads((path / "config.json").read_text(encoding="utf-8"))
    whole = {"architectures": said["architectures"], "model_type": model_type, "thinker_config": said}
    (path / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    return path


def whole_row(processor: Any, messages: list[Any], media: Mapping[str, list[Any]]) -> Mapping[str, Any]:
    """What the processor makes of a row; it is told that clips have two frames a second."""
    arguments: dict[str, Any] = {"images": media.get("image"), "audio": media.get("audio")}
    if "video" in media:
        arguments["videos"] = [clip.frames for clip in media["video"]]
        arguments["videos_kwargs"] = {"do_sample_frames": False, "fps": 2.0}
    text = processor.apply_chat_template(messages, tokenize=False)
    return processor(text=[text], return_tensors="pt", **{k: v for k, v in arguments.items() if v is not None})


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import AutoProcessor, Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

    processor = AutoProcessor.from_pretrained(tiny_omni_processor_dir(path / "parts", seconds=2))
    processor.save_pretrained(path)
    tokenizer = processor.tokenizer
    text = {**TEXT, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "tie_word_embeddings": False}
    config = Qwen2_5OmniThinkerConfig(
        text_config=text, vision_config=VISION, audio_config=AUDIO, **ids_of(tokenizer, _TOKENS)
    )
    thinker = Qwen2_5OmniThinkerForConditionalGeneration(config)
    return save_whole(path, thinker, "qwen2_5_omni", ("talker", "token2wav"))


def published_7b() -> Any:
    """The configuration of the thinker of Qwen2.5-Omni 7B."""
    from transformers import Qwen2_5OmniThinkerConfig

    text = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    text |= {"num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False}
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
    audio = {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
    return Qwen2_5OmniThinkerConfig(text_config=text, vision_config=vision, audio_config=audio)


WRAP = ("model.audio_tower.layers.{*}", "model.visual.blocks.{*}", "model.language_model.layers.{*}")

FAMILY = Family(
    make,
    wrap=WRAP,
    kinds=("image", "video", "audio"),
    whole=whole_row,
    published={"7B": (published_7b, 8_931_813_888)},
)

"""Qwen2-Audio: sounds in windows (of two seconds here), each numbered by the processor's own template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family, randomize
from tests.support.tiny import tiny_qwen3_dir

_SECONDS = 2


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import (
        AutoTokenizer,
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3_dir(path, weights=False))
    tokenizer.add_tokens(["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"], special_tokens=True)
    sound: Any = WhisperFeatureExtractor(feature_size=24, chunk_length=_SECONDS)
    Qwen2AudioProcessor(sound, tokenizer).save_pretrained(path)
    text = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    text |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    audio = {"model_type": "qwen2_audio_encoder", "num_mel_bins": 24, "encoder_layers": 2, "d_model": 32}
    audio |= {"encoder_attention_heads": 2, "encoder_ffn_dim": 48, "max_source_positions": 50 * _SECONDS}
    token = tokenizer.convert_tokens_to_ids("<|AUDIO|>")
    config = Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=token)
    randomize(Qwen2AudioForConditionalGeneration(config)).save_pretrained(path)
    return path


def published_7b() -> Any:
    """The configuration of Qwen2-Audio 7B."""
    from transformers import Qwen2AudioConfig

    text = {"model_type": "qwen2", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    text |= {"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 156032}
    return Qwen2AudioConfig(text_config=text)


FAMILY = Family(
    make,
    wrap=("model.audio_tower.layers.{*}", "model.language_model.layers.{*}"),
    kinds=("audio",),
    published={"7B": (published_7b, 8_397_094_912)},
)

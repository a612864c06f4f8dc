"""Qwen3-ASR: rows with one sound, or with text alone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.families import Family, randomize
from tests.support.tiny import tiny_qwen3_dir, words

_NAMES = {
    "audio_token": "<|audio_pad|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
_TEMPLATE = """{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'audio' -%}{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def rows(folder: Path) -> list[dict[str, Any]]:
    """Transcripts with their language, of sounds shorter and longer than the chunks of the tower; a talk without."""
    rng, made = random.Random(3), []
    for number in range(8):
        sounds = [f"{number % 3}.wav"] if number % 4 else []
        question = "<audio>" if sounds else words(rng, 4)
        answer = "language English<asr_text>" * bool(sounds) + words(rng, rng.choice([2, 6, 11]))
        turns = [("system", words(rng, 2)), ("user", question), ("assistant", answer)]
        messages = [{"role": role, "content": content} for role, content in turns]
        made.append({"messages": messages, "images": [], "videos": [], "audios": sounds})
    return made


def whole(processor: Any, messages: list[Any], media: Mapping[str, list[Any]]) -> Mapping[str, Any]:
    """The processor's own result; it wants to be told that there is no sound."""
    text = processor.apply_chat_template(messages, tokenize=False)
    return processor(text=[text], audio=media.get("audio"))


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import (
        AutoTokenizer,
        Qwen2Tokenizer,
        Qwen3ASRConfig,
        Qwen3ASRFeatureExtractor,
        Qwen3ASRForConditionalGeneration,
        Qwen3ASRProcessor,
    )

    AutoTokenizer.from_pretrained(tiny_qwen3_dir(path, weights=False)).save_pretrained(path)
    tokenizer = Qwen2Tokenizer.from_pretrained(path, extra_special_tokens={**_NAMES, "asr_token": "<asr_text>"})
    sound = Qwen3ASRFeatureExtractor(feature_size=24)
    Qwen3ASRProcessor(sound, tokenizer, chat_template=_TEMPLATE).save_pretrained(path)
    text = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048}
    text |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "tie_word_embeddings": True}
    audio = {"model_type": "qwen3_asr_encoder", "num_mel_bins": 24, "encoder_layers": 2, "d_model": 32}
    audio |= {"encoder_attention_heads": 2, "encoder_ffn_dim": 48, "output_dim": 64, "downsample_hidden_size": 8}
    config = Qwen3ASRConfig(
        audio_config={**audio, "n_window_infer": 100},
        text_config=text,
        audio_token_id=tokenizer.convert_tokens_to_ids("<|audio_pad|>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    randomize(Qwen3ASRForConditionalGeneration(config)).save_pretrained(path)
    return path


def published_1_7b() -> Any:
    """The configuration of Qwen3-ASR 1.7B."""
    from transformers import Qwen3ASRConfig

    return Qwen3ASRConfig(audio_config={"model_type": "qwen3_asr_encoder", "output_dim": 2048})


FAMILY = Family(
    make,
    wrap=("model.audio_tower.layers.{*}", "model.language_model.layers.{*}"),
    kinds=("audio",),
    rows=rows,
    whole=whole,
    published={"1.7B": (published_1_7b, 2_038_052_480)},
)

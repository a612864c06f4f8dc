"""Whisper: a sound (in windows of two seconds here) and its transcript, no chat."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.families import Family, randomize
from tests.support.tiny import tiny_qwen3_dir, words

_SECONDS = 2
_TOKENS = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|notimestamps|>",
)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Transcripts of sounds, of different lengths."""
    rng, made = random.Random(5), []
    for number in range(8):
        turns = [("user", "<audio>"), ("assistant", words(rng, rng.choice([1, 3, 9, 14])))]
        messages = [{"role": role, "content": content} for role, content in turns]
        made.append({"messages": messages, "images": [], "videos": [], "audios": [f"{number % 3}.wav"]})
    return made


def whole(processor: Any, messages: list[Any], media: Mapping[str, list[Any]]) -> Mapping[str, Any]:
    """The processor's labels, all of them, are what prompt, transcript and end become."""
    sound, text = media["audio"][0], messages[-1]["content"]
    made = processor(audio=sound, text=[text], sampling_rate=16_000, return_tensors="pt")
    return {"input_ids": made["labels"], "input_features": made["input_features"]}


def outputs(model: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
    """As fine-tuning with transformers does it: labels without the start token, which shifting puts in front again."""
    from transformers.models.whisper.modeling_whisper import shift_tokens_right

    tokens, config = inputs["input_ids"][:, 1:], model.config
    shifted = shift_tokens_right(tokens, config.pad_token_id, config.decoder_start_token_id)
    logits = model(input_features=inputs["input_features"], decoder_input_ids=shifted).logits
    return logits[0], inputs["labels"][0, 1:]


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    learnt = json.loads((tiny_qwen3_dir(path / "bytes", weights=False) / "tokenizer.json").read_text())["model"]
    vocab = {**learnt["vocab"], **{token: len(learnt["vocab"]) + number for number, token in enumerate(_TOKENS)}}
    merges = [tuple(pair) for pair in learnt["merges"]]
    tokenizer = WhisperTokenizer(vocab=vocab, merges=merges, language="english", task="transcribe")
    tokenizer.add_tokens(list(_TOKENS), special_tokens=True)
    tokenizer.pad_token = _TOKENS[0]
    sound: Any = WhisperFeatureExtractor(feature_size=24, chunk_length=_SECONDS)
    WhisperProcessor(sound, tokenizer).save_pretrained(path)
    ids = {"pad_token_id": _TOKENS[0], "bos_token_id": _TOKENS[0], "eos_token_id": _TOKENS[0]}
    ids |= {"decoder_start_token_id": _TOKENS[1]}
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 24}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40}
    sizes |= {"max_source_positions": 50 * _SECONDS, "max_target_positions": 256, "vocab_size": len(tokenizer)}
    config = WhisperConfig(**sizes, **{name: tokenizer.convert_tokens_to_ids(token) for name, token in ids.items()})
    randomize(WhisperForConditionalGeneration(config)).save_pretrained(path)
    return path


def published(width: int, encoder: int, decoder: int, heads: int, vocabulary: int, mel_bins: int) -> Any:
    """The configuration of a published size."""
    from transformers import WhisperConfig

    names = {"encoder_attention_heads": heads, "decoder_attention_heads": heads}
    names |= {"encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width, "d_model": width}
    names |= {"encoder_layers": encoder, "decoder_layers": decoder}
    return WhisperConfig(**names, vocab_size=vocabulary, num_mel_bins=mel_bins)


FAMILY = Family(
    make,
    wrap=("model.encoder.layers.{*}", "model.decoder.layers.{*}"),
    kinds=("audio",),
    packs=False,
    rows=rows,
    whole=whole,
    outputs=outputs,
    flags={"micro_batch_size": 2},
    published={
        "tiny": (lambda: published(384, 4, 4, 6, 51865, 80), 37_760_640),
        "small": (lambda: published(768, 12, 12, 12, 51865, 80), 241_734_912),
        "large-v3": (lambda: published(1280, 32, 32, 20, 51866, 128), 1_543_490_560),
        "large-v3-turbo": (lambda: published(1280, 32, 4, 20, 51866, 128), 808_878_080),
    },
)

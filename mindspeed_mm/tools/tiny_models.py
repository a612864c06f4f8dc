"""Build small, real Hugging Face directories from scratch: tokenizer, processor, configuration, random weights.

The quick start and the tests need a model directory that looks like one from the hub and is small enough for a laptop
without a network. The classes are the published ones (`Qwen2Tokenizer`, `Qwen2_5_VLProcessor`, …), only smaller.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm.utils.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, Qwen2_5_VLConfig, Qwen2_5_VLProcessor, Qwen2Tokenizer, Qwen3Config

# The published order; ids follow the vocabulary of plain tokens in exactly this order.
SPECIAL_TOKENS: tuple[str, ...] = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Added tokens that stay visible when special tokens are skipped.
PLAIN_TOKENS: tuple[str, ...] = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
PAD_TOKEN = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
DEFAULT_SYSTEM = "You are a helpful assistant."

_BYTES = 256
_CONTENT = (
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif part['type'] == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>"
    "{%- elif part['type'] == 'text' -%}{{ part['text'] }}"
    "{%- endif -%}{%- endfor -%}{%- endif -%}"
)


def chatml_template(default_system: str | None = DEFAULT_SYSTEM) -> str:
    """Return a ChatML chat template (Jinja) whose messages may have image, video and text parts.

    Args:
        default_system: system message put before conversations that bring none; None puts nothing.
    """
    system = ""
    if default_system is not None:
        system = (
            "{%- if messages[0]['role'] != 'system' -%}"
            "{{ '<|im_start|>system\\n' + " + json.dumps(default_system) + " + '<|im_end|>\\n' }}"
            "{%- endif -%}"
        )
    turn = "{{ '<|im_start|>' + message['role'] + '\\n' }}" + _CONTENT + "{{ '<|im_end|>\\n' }}"
    generate = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
    return system + "{%- for message in messages -%}" + turn + "{%- endfor -%}" + generate


def build_byte_bpe_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    out_dir: str | Path,
    *,
    default_system: str | None = DEFAULT_SYSTEM,
    model_max_length: int = 32768,
) -> Qwen2Tokenizer:
    """Train a byte-level BPE on `texts`; save it as a Qwen2 tokenizer with Qwen's added tokens and a ChatML template.

    Args:
        texts: texts from which the merges are learnt; any other text is still encodable, byte by byte.
        vocab_size: size of the whole vocabulary, the added tokens included. Fewer tokens result if `texts` is too
            short to give that many merges.
        out_dir: folder that receives `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.
        default_system: see `chatml_template`.
        model_max_length: longest sequence, in tokens, written to the tokenizer's configuration.

    Raises:
        ConfigError: `vocab_size` is too small for the 256 bytes and the added tokens.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    smallest = _BYTES + len(SPECIAL_TOKENS) + len(PLAIN_TOKENS)
    if vocab_size < smallest:
        raise ConfigError(f"vocab_size {vocab_size}: expected at least {smallest} (256 bytes and the added tokens)")

    # eos and pad are named last: naming them in the constructor gives them the first free ids (transformers 5).
    unnamed: dict[str, Any] = {"unk_token": None, "eos_token": None, "pad_token": None}
    like_qwen = Qwen2Tokenizer(vocab={}, merges=[], **unnamed).backend_tokenizer
    learner = Tokenizer(models.BPE())
    learner.normalizer = like_qwen.normalizer
    learner.pre_tokenizer = like_qwen.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS) - len(PLAIN_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    learnt = json.loads(learner.to_str())["model"]
    merges = [tuple(pair) for pair in learnt["merges"]]

    tokenizer = Qwen2Tokenizer(vocab=learnt["vocab"], merges=merges, **unnamed)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_TOKENS])
    tokenizer.eos_token = END_OF_TURN
    tokenizer.pad_token = PAD_TOKEN
    tokenizer.model_max_length = model_max_length
    tokenizer.chat_template = chatml_template(default_system)
    tokenizer.save_pretrained(out_dir)
    return tokenizer


def build_qwen2_5_vl_processor(
    tokenizer: Qwen2Tokenizer,
    out_dir: str | Path,
    *,
    image_mean: Sequence[float] | None = None,
    image_std: Sequence[float] | None = None,
    min_pixels: int = 28 * 28,
    max_pixels: int = 28 * 28 * 64,
) -> Qwen2_5_VLProcessor:
    """Save a Qwen2.5-VL processor (image, video and text) around `tokenizer`.

    Args:
        tokenizer: from `build_byte_bpe_tokenizer`; its chat template becomes the processor's.
        out_dir: folder that receives `processor_config.json` beside the tokenizer's files.
        image_mean: per channel (R, G, B), in units of the 0…1 pixel range; None keeps the published values.
        image_std: as `image_mean`.
        min_pixels: smallest image area in pixels; smaller images are scaled up. 28 · 28 is one token after merging.
        max_pixels: largest image area in pixels; larger images are scaled down.
    """
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    pixels: dict[str, Any] = {"size": {"shortest_edge": min_pixels, "longest_edge": max_pixels}}
    if image_mean is not None:
        pixels["image_mean"] = list(image_mean)
    if image_std is not None:
        pixels["image_std"] = list(image_std)
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**pixels),
        chat_template=tokenizer.chat_template,
    )
    processor.save_pretrained(out_dir)
    return processor


def qwen2_5_vl_config(
    tokenizer: Qwen2Tokenizer,
    *,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    tie_word_embeddings: bool = False,
) -> Qwen2_5_VLConfig:
    """Return a small Qwen2.5-VL configuration that fits `tokenizer`.

    Args:
        tokenizer: gives the vocabulary size and the ids of the special tokens.
        text: language model fields that replace the small defaults (hidden size 64, 2 layers).
        vision: vision tower fields that replace the small defaults (hidden size 32, 2 blocks).
        tie_word_embeddings: whether the output layer is the input embedding.
    """
    from transformers import Qwen2_5_VLConfig

    text_fields = _text_fields(tokenizer) | (text or {})
    head_dim = text_fields["hidden_size"] // text_fields["num_attention_heads"]
    # One part of the rotary frequencies for time and three of eight each for height and width, as published.
    side = head_dim * 3 // 16
    text_fields.setdefault(
        "rope_parameters",
        {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [head_dim // 2 - 2 * side, side, side]},
    )
    vision_fields: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    } | (vision or {})
    vision_fields["out_hidden_size"] = text_fields["hidden_size"]
    return Qwen2_5_VLConfig(
        text_config=text_fields,
        vision_config=vision_fields,
        image_token_id=_token_id(tokenizer, "<|image_pad|>"),
        video_token_id=_token_id(tokenizer, "<|video_pad|>"),
        vision_start_token_id=_token_id(tokenizer, "<|vision_start|>"),
        vision_end_token_id=_token_id(tokenizer, "<|vision_end|>"),
        tie_word_embeddings=tie_word_embeddings,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        dtype="float32",
    )


def qwen3_config(
    tokenizer: Qwen2Tokenizer, *, text: dict[str, Any] | None = None, tie_word_embeddings: bool = True
) -> Qwen3Config:
    """Return a small Qwen3 (text) configuration that fits `tokenizer`; arguments as for `qwen2_5_vl_config`."""
    from transformers import Qwen3Config

    fields = _text_fields(tokenizer) | {"head_dim": 16} | (text or {})
    return Qwen3Config(
        **fields, tie_word_embeddings=tie_word_embeddings, architectures=["Qwen3ForCausalLM"], dtype="float32"
    )


def save_model_dir(config: PreTrainedConfig, tokenizer: Qwen2Tokenizer, out_dir: str | Path, seed: int | None) -> None:
    """Write `config.json` and `generation_config.json`, and random fp32 weights if `seed` is given.

    Args:
        config: configuration of one of the models above.
        tokenizer: gives the ids at which generation stops.
        out_dir: folder of the tokenizer or processor.
        seed: seed of the random weights; None writes none (a run then needs `"train_from_scratch": true`).
    """
    import transformers

    generation = transformers.GenerationConfig(
        do_sample=False,
        eos_token_id=[_token_id(tokenizer, END_OF_TURN), _token_id(tokenizer, PAD_TOKEN)],
        pad_token_id=_token_id(tokenizer, PAD_TOKEN),
    )
    if seed is not None:
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = getattr(transformers, config.architectures[0])(config)
        model.generation_config = generation
        model.save_pretrained(out_dir)
    else:
        config.save_pretrained(out_dir)
        generation.save_pretrained(out_dir)


def _text_fields(tokenizer: Qwen2Tokenizer) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": _token_id(tokenizer, PAD_TOKEN),
        "eos_token_id": _token_id(tokenizer, END_OF_TURN),
    }


def _token_id(tokenizer: Qwen2Tokenizer, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    if not isinstance(found, int):
        raise ConfigError(f"the tokenizer has no token {token!r}; expected one from build_byte_bpe_tokenizer")
    return found

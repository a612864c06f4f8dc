"""Gemma 4 in its small sizes: sounds, an embedding for each layer, the last layers without keys of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family, randomize
from tests.support.tiny_vision import byte_tokenizer, text_config

_TOKENS = {
    "bos_token": "<bos>",
    "eos_token": "<turn|>",
    "start_of_turn_token": "<|turn>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
}
_TEMPLATE = """{{- bos_token -}}{%- for message in messages -%}
{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{- part.text -}}{%- else -%}{{- '<|' + part.type + '|>' -}}{%- endif -%}
{%- endfor -%}{%- endif -%}{{- '<turn|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}"""
_LAYERS = ["sliding_attention", "full_attention"]
TEXT: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 24,
    "layer_types": _LAYERS,
    "sliding_window": 18,
    "final_logit_softcapping": 2.0,
    "hidden_size_per_layer_input": 0,
}
_SMALL = {"num_hidden_layers": 4, "layer_types": 2 * _LAYERS, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "position_embedding_size": 640,
}
_AUDIO = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [16, 8],
    "attention_chunk_size": 4,
    "attention_context_left": 5,
    "output_proj_dims": 24,
}


def make_size(path: Path, text: dict[str, Any], vision: dict[str, Any], audio: dict[str, Any] | None) -> Path:
    """A directory with weights, of a size with these parts."""
    import torch
    import transformers as hf

    tokenizer = byte_tokenizer(path, _TOKENS, adds_bos=True)
    hf.Gemma4Processor(
        hf.Gemma4AudioFeatureExtractor(feature_size=16),
        hf.Gemma4ImageProcessor(patch_size=4, max_soft_tokens=70),
        tokenizer,
        hf.Gemma4VideoProcessor(patch_size=4, max_soft_tokens=70),
        chat_template=_TEMPLATE,
    ).save_pretrained(path)
    names = ("boi", "image", "video", "boa", "audio")
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(_TOKENS[f"{name}_token"]) for name in names}
    config = hf.Gemma4Config(
        text_config=text_config(tokenizer, **{**TEXT, **text}),
        vision_config={**_VISION, **vision},
        audio_config=audio,
        eoi_token_id=tokenizer.convert_tokens_to_ids(_TOKENS["eoi_token"]),
        eoa_token_index=tokenizer.convert_tokens_to_ids(_TOKENS["eoa_token"]),
        **ids,
    )
    model = randomize(hf.Gemma4ForConditionalGeneration(config))
    generator = torch.Generator().manual_seed(1)
    sizes = {"layer_scalar": 1.0, "std_scale": 1.0, "std_bias": 0.0, "input_min": -2.0, "input_max": 2.0}
    sizes |= {"output_min": -1.5, "output_max": 1.5}
    for name, buffer in model.named_buffers():
        if (last := name.rpartition(".")[2]) in sizes:
            buffer.copy_(sizes[last] + 0.05 * torch.randn(buffer.shape, generator=generator))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_norm.weight"):
                parameter.div_(4)  # scores aren't divided by the root of the head's size: the norms' weights are small
            elif "norm" in name and "post" in name:
                parameter.div_(4)  # a norm behind each part would make large what is as small as rounding
            elif "audio_tower" in name and "self_attn" in name:
                parameter.mul_(4)  # scores that differ from each other
    model.save_pretrained(path)
    return path


def make(path: Path) -> Path:
    """A directory with weights."""
    import transformers as hf

    rows = len(byte_tokenizer(path, _TOKENS))
    text = {**_SMALL, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": rows}
    return make_size(path, text, {"use_clipped_linears": True}, hf.Gemma4AudioConfig(**_AUDIO).to_dict())


FAMILY = Family(
    make,
    wrap=("model.vision_tower.encoder.layers.{*}", "model.audio_tower.layers.{*}", "model.language_model.layers.{*}"),
    kinds=("image", "video", "audio"),
    flags={"micro_batch_size": 2},
)

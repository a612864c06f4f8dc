"""ERNIE 4.5 VL: a layer with experts of texts and of images before a dense one; videos of merged frames."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.families import Family, randomize
from tests.support.tiny_vision import byte_tokenizer, text_config

_TOKENS = {
    "bos_token": "<|begin_of_sentence|>",
    "eos_token": "</s>",
    "image_token": "<|IMAGE_PLACEHOLDER|>",
    "image_start_token": "<|IMAGE_START|>",
    "image_end_token": "<|IMAGE_END|>",
    "video_token": "<|VIDEO_PLACEHOLDER|>",
    "video_start_token": "<|VIDEO_START|>",
    "video_end_token": "<|VIDEO_END|>",
}
_TEMPLATE = """{{- bos_token -}}{%- for message in messages -%}
{{- 'User: ' if message.role == 'user' else 'Assistant: ' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- 'Picture:<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>' -}}
{%- elif part.type == 'video' -%}{{- 'Video:<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '</s>' if message.role == 'assistant' else '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant: ' -}}{%- endif -%}"""
_TEXT = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "mlp_layer_types": ["sparse", "dense"],
    "moe_intermediate_size": [24, 16],
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [3, 3, 2]},
}
_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
_PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}


def make(path: Path) -> Path:
    """A directory with weights; the times that published processors draw on frames need a font."""
    import transformers as hf

    tokenizer = byte_tokenizer(path, _TOKENS)
    image = hf.Ernie4_5_VLMoeImageProcessor(size=_PIXELS)
    video = hf.Ernie4_5_VLMoeVideoProcessor(size=_PIXELS, min_frames=2, draw_on_frames=False, font="none")
    hf.Ernie4_5_VLMoeProcessor(image, tokenizer, video, chat_template=_TEMPLATE).save_pretrained(path)
    text = text_config(tokenizer, **_TEXT)
    del text["head_dim"]
    names = (name.removesuffix("_token") for name in _TOKENS if name[:5] in ("image", "video"))
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(_TOKENS[f"{name}_token"]) for name in names}
    config = hf.Ernie4_5_VLMoeConfig(text_config=text, vision_config=_VISION, **ids)
    randomize(hf.Ernie4_5_VLMoeForConditionalGeneration(config)).save_pretrained(path)
    return path


def outputs(model: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Logits [n, vocabulary] and the tokens that follow [n], with the experts that the processor chooses for tokens."""
    import torch
    from transformers import Ernie4_5_VLMoeProcessor

    taken = {key: value for key, value in inputs.items() if key != "labels"}
    chosen = Ernie4_5_VLMoeProcessor.create_moe_mm_token_type_ids(model.config, taken["input_ids"].numpy())
    logits = model(**taken, moe_mm_token_type_ids=torch.from_numpy(chosen)).logits
    return logits[0, :-1], inputs["labels"][0, 1:]


FAMILY = Family(
    make,
    wrap=("model.vision_tower.blocks.{*}", "model.language_model.layers.{*}"),
    kinds=("image", "video"),
    flags={"micro_batch_size": 2},
    outputs=outputs,
)

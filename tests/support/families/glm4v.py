"""GLM-4.1V: images, and videos as pictures with their seconds; images and videos share their token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.families import Family, randomize
from tests.support.tiny import tiny_qwen3_dir

# the model's own: nothing ends an answer but what follows it
TEMPLATE = """[gMASK]<sop>
{%- for msg in messages %}
    {%- if msg.role == 'system' %}
<|system|>
{{ msg.content }}
    {%- elif msg.role == 'user' %}
<|user|>{{ '\n' }}
        {%- if msg.content is string %}
{{ msg.content }}
        {%- else %}
            {%- for item in msg.content %}
                {%- if item.type == 'video' %}
<|begin_of_video|><|video|><|end_of_video|>
                {%- elif item.type == 'image' %}
<|begin_of_image|><|image|><|end_of_image|>
                {%- elif item.type == 'text' %}
{{ item.text }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
    {%- elif msg.role == 'assistant' %}
<|assistant|>
{{ msg.content if msg.content is string else msg.content[0].text }}
    {%- endif %}
{%- endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
_IDS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}


def processor_dir(path: Path, template: str = TEMPLATE) -> Any:
    """Save a GLM-4.1V processor with a small tokenizer in `path`; returns the tokenizer."""
    from transformers import AutoTokenizer, Glm4vImageProcessor, Glm4vProcessor, Glm4vVideoProcessor

    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3_dir(path, weights=False))
    turns = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    tokenizer.add_tokens([*turns, *_IDS.values()], special_tokens=True)
    size = {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 2 * 8}
    image, video = Glm4vImageProcessor(size=size), Glm4vVideoProcessor(size=size)
    Glm4vProcessor(image, tokenizer, video, chat_template=template).save_pretrained(path)
    return tokenizer


def stops_of(tokenizer: Any) -> list[int]:
    """Ids at which generation stops."""
    return tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>", "<|observation|>"])


def ids_of(tokenizer: Any) -> dict[str, int]:
    """Token ids that the configuration names."""
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in _IDS.items()}


ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_parameters": ROPE,
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_heads": 2,
    "out_hidden_size": 64,
    "image_size": 56,
}


def outputs(model: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Logits and labels of a row that may have images and videos: transformers' own forward takes one kind only."""
    import torch

    inner, embeddings = model.model, model.get_input_embeddings()(inputs["input_ids"])
    types, positions = inputs["mm_token_type_ids"], None
    if "image_grid_thw" in inputs or "video_grid_thw" in inputs:
        grids = {key: inputs.get(key) for key in ("image_grid_thw", "video_grid_thw")}
        positions, _ = inner.get_rope_index(inputs["input_ids"], types, **grids)
    if "pixel_values" in inputs:
        images = inner.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        embeddings = embeddings.masked_scatter((types == 1).unsqueeze(-1), torch.cat(images))
    if "pixel_values_videos" in inputs:
        videos = inner.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"]).pooler_output
        embeddings = embeddings.masked_scatter((types == 2).unsqueeze(-1), torch.cat(videos))
    inner.rope_deltas = None
    logits = model(inputs_embeds=embeddings, position_ids=positions, attention_mask=inputs["attention_mask"]).logits
    return logits[0, :-1], inputs["labels"][0, 1:]


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import Glm4vConfig, Glm4vForConditionalGeneration

    tokenizer = processor_dir(path)
    text = {**TEXT, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    text["eos_token_id"] = stops_of(tokenizer)
    config = Glm4vConfig(text_config=text, vision_config=VISION, **ids_of(tokenizer))
    randomize(Glm4vForConditionalGeneration(config)).save_pretrained(path)
    return path


def published_9b() -> Any:
    """The configuration of GLM-4.1V 9B."""
    from transformers import Glm4vConfig

    return Glm4vConfig()


FAMILY = Family(
    make,
    wrap=("model.visual.blocks.{*}", "model.language_model.layers.{*}"),
    kinds=("image", "video"),
    outputs=outputs,
    flags={"micro_batch_size": 2},
    published={"9B": (published_9b, 10_292_777_472)},
)

"""GLM-4.5V: GLM-4.1V's rows before a mixture of experts, whose first layer is dense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family, padded_vocabulary, randomize
from tests.support.families.glm4v import TEXT, VISION, ids_of, outputs, processor_dir, stops_of

# a thought, closed at once, before each answer; nothing ends it but what follows
TEMPLATE = """[gMASK]<sop>{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{- '<|assistant|>\\n<think></think>\\n' -}}
{%- else -%}{{- '<|' + message.role + '|>\\n' -}}{%- endif -%}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|begin_of_image|><|image|><|end_of_image|>' -}}
{%- elif part.type == 'video' -%}{{- '<|begin_of_video|><|video|><|end_of_video|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


def make(path: Path) -> Path:
    """A directory with weights."""
    import torch
    from transformers import Glm4vMoeConfig, Glm4vMoeForConditionalGeneration

    tokenizer = processor_dir(path, TEMPLATE)
    text = {**TEXT, "vocab_size": padded_vocabulary(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    text["eos_token_id"] = stops_of(tokenizer)
    text |= {"moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    config = Glm4vMoeConfig(text_config=text, vision_config=VISION, **ids_of(tokenizer))
    model = randomize(Glm4vMoeForConditionalGeneration(config))
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.05 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(path)
    return path


def published_106b() -> Any:
    """The configuration of GLM-4.5V."""
    from transformers import Glm4vMoeConfig

    return Glm4vMoeConfig(text_config={"head_dim": 128}, vision_config={"intermediate_size": 10944})


FAMILY = Family(
    make,
    wrap=("model.visual.blocks.{*}", "model.language_model.layers.{*}"),
    kinds=("image", "video"),
    outputs=outputs,
    published={"106B": (published_106b, 107_710_933_120)},
)

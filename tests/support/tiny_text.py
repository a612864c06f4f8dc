"""Directories of text families: the small byte tokenizer with a family's own turn tokens and chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.families import padded_vocabulary, randomize
from tests.support.tiny import tiny_qwen3_dir

#: `<|im_start|>role\n…<|im_end|>\n`
CHATML = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


def text_dir(
    path: Path,
    model_class: Any,
    config_class: Callable[..., Any],
    fields: Mapping[str, Any],
    *,
    template: str = CHATML,
    tokens: Sequence[str] = (),
    special: Mapping[str, str] | None = None,
) -> Path:
    """Save tokenizer, configuration and random float32 weights in `path`.

    Args:
        fields: of the configuration, beside SIZES and the vocabulary's size.
        template: the family's chat template.
        tokens: its turn tokens that the small tokenizer hasn't.
        special: bos_token and eos_token, where they aren't Qwen's.
    """
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3_dir(path, weights=False))
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    for name, token in (special or {}).items():
        setattr(tokenizer, name, token)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = config_class(
        **{**SIZES, "vocab_size": padded_vocabulary(tokenizer), "pad_token_id": tokenizer.pad_token_id, **ids, **fields}
    )
    model = randomize(model_class(config))
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.05 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(path)
    return path

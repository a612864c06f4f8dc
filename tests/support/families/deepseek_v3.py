"""DeepSeek-V3 and R1: latent attention, experts in groups chosen by sigmoid scores and a bias that isn't trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family
from tests.support.tiny_text import text_dir

_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
_TEMPLATE = """{{- bos_token -}}{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- '<｜User｜>' + message.content -}}
{%- else -%}{{- '<｜Assistant｜>' + message.content + eos_token -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜>' -}}{%- endif -%}"""


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    fields = {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    }
    fields |= {"q_lora_rank": 28, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
    fields |= {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}
    fields |= {"moe_intermediate_size": 24, "num_nextn_predict_layers": 0}
    special = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
    return text_dir(
        path, DeepseekV3ForCausalLM, DeepseekV3Config, fields, template=_TEMPLATE, tokens=_TOKENS, special=special
    )


def published_671b() -> Any:
    """The configuration of DeepSeek-V3, without the layer that predicts further tokens."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config()


FAMILY = Family(make, wrap=("model.layers.{*}",), published={"671B": (published_671b, 671_026_419_200)})

"""Refusal of checkpoints in the layout of the authors' own code, where transformers has another layout."""

from __future__ import annotations

import json
from pathlib import Path

from mindspeed_mm.utils.errors import ConfigError

_OTHERS = {
    "internvl_chat": (
        "InternVL in the layout of its authors' own code (InternVLChatModel: vision_model.*, mlp1.*)",
        "the checkpoint whose name ends in -HF or -hf (OpenGVLab/InternVL3_5-30B-A3B-HF, OpenGVLab/InternVL3-8B-hf)",
    ),
    "multi_modality": (
        "DeepSeek-VL or Janus in the layout of their authors' own code (MultiModalityCausalLM)",
        "the checkpoint of deepseek-community (deepseek-community/deepseek-vl-1.3b-chat)",
    ),
    "llava_llama": (
        "LLaVA in the layout of its authors' own code (LlavaLlamaForCausalLM)",
        "the checkpoint of llava-hf (llava-hf/llava-1.5-7b-hf, llava-hf/llava-v1.6-vicuna-7b-hf)",
    ),
    "llava_mistral": (
        "LLaVA-NeXT in the layout of its authors' own code (LlavaMistralForCausalLM)",
        "the checkpoint of llava-hf (llava-hf/llava-v1.6-mistral-7b-hf)",
    ),
    "llava_qwen": (
        "LLaVA-OneVision in the layout of its authors' own code (LlavaQwenForCausalLM)",
        "the checkpoint of llava-hf (llava-hf/llava-onevision-qwen2-7b-ov-hf)",
    ),
}


def refuse_foreign_layout(directory: Path, where: str) -> None:
    """Refuse a directory that needs the authors' own code, if transformers has the model in another layout.

    Args:
        directory: directory with a config.json; if that can't be read, transformers reports it.
        where: the file and key that name it, for messages.

    Raises:
        ConfigError: the layout is the authors' own; the message names a checkpoint to use instead.
    """
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return
    if found in _OTHERS:
        what, instead = _OTHERS[found]
        raise ConfigError(
            f"{where} '{directory}' holds {what}; transformers' own model, which is trained "
            f"here, has other names for its weights: take {instead}"
        )

"""Weight tying of embedding and head, if config.json states it twice or only in text_config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_mm.utils.log import notice

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_KEY = "tie_word_embeddings"


def settle_tying(hf_config: PretrainedConfig, directory: Path) -> None:
    """Copy the weight tying of the text configuration to the multimodal configuration.

    transformers reads the outer key, whose default may be true although the text configuration states false. If the
    outer key is absent in config.json, the value of text_config is used. If both keys are there and differ, the outer
    one is used, as in transformers, and the contradiction is logged (loading compares the weights with it).

    Args:
        hf_config: the configuration as transformers has read it from config.json; it is changed in place.
        directory: the directory with config.json.
    """
    written = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    text = written.get("text_config")
    inner = text.get(_KEY) if isinstance(text, dict) else None
    if not isinstance(inner, bool):
        return
    outer = written.get(_KEY)
    if not isinstance(outer, bool):
        if bool(getattr(hf_config, _KEY, False)) != inner:
            hf_config.tie_word_embeddings = inner
            notice(
                f"{directory / 'config.json'}: {_KEY} is {_json(inner)}, as text_config says; the outer key is absent"
            )
    elif outer != inner:
        taken = bool(getattr(hf_config, _KEY, False))
        notice(
            f"{directory / 'config.json'}: {_KEY} is {_json(outer)} and text_config's is {_json(inner)}; "
            f"{_json(taken)} is taken, as transformers reads it; make them equal"
        )


def _json(value: bool) -> str:
    return "true" if value else "false"

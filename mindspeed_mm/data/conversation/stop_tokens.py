"""The tokens at which generation stops: an answer has to end with one of them, or the model never learns to stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def stop_tokens(tokenizer: PreTrainedTokenizerBase, path: str) -> tuple[str, ...]:
    """Return the texts of the tokens that end an answer at inference, the tokenizer's own end token first.

    They are those of generation_config.json, or, where it has none, of config.json, which transformers then uses;
    and the tokenizer's own.

    Args:
        tokenizer: The model's tokenizer.
        path: The model directory; a name on the hub has the tokenizer's token only.
    """
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    found = [tokenizer.eos_token] if tokenizer.eos_token else []
    found += [added[number] for number in _ids(Path(path)) if number in added]  # an ordinary token ends nothing
    return tuple(dict.fromkeys(found))


def _ids(folder: Path) -> list[int]:
    config = _read(folder / "config.json")
    whole = config.get("thinker_config") or config
    sections = (_read(folder / "generation_config.json"), config, whole, whole.get("text_config") or {})
    named: Any = next((section["eos_token_id"] for section in sections if section.get("eos_token_id") is not None), [])
    return named if isinstance(named, list) else [named]


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing; or damaged, which is reported where the model is built
        return {}
    return content if isinstance(content, dict) else {}

"""Check before a run that tokenizer and processor belong to the model, instead of failing on an index out of range."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_mm.data.adapter import DataAdapter
from mindspeed_mm.data.conversation.tokens import media_token_ids
from mindspeed_mm.data.media.media import KINDS
from mindspeed_mm.data.processors import Processor
from mindspeed_mm.utils.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SHOWN = 3


def read_model_config(folder: str | None) -> PreTrainedConfig | None:
    """Read config.json of a model directory with transformers; None where there is none that can be read.

    Its faults are reported where the model is built.
    """
    if not folder or not Path(folder, "config.json").is_file():
        return None
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_model_match(
    processor: Processor, adapter: DataAdapter, path: str, config: PreTrainedConfig, model: str
) -> None:
    """Check that every id of the tokenizer has an embedding, and that media use the token at which the model expects
    them.

    Args:
        processor: The processor, or the tokenizer.
        adapter: The model family.
        path: Where the processor was loaded from, for messages.
        config: transformers' configuration of the model.
        model: Where it was read from, for messages.

    Raises:
        ConfigError: With the numbers of both.
    """
    tokenizer, reads = getattr(processor, "tokenizer", processor), adapter.reads(processor)
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if isinstance(rows, int):
        # the token of a medium that the model doesn't read is always spelt out (Gemma 3's text models have one)
        never = {getattr(processor, f"{kind}_token", None) for kind in KINDS if kind not in reads}
        beyond = {
            name: number for name, number in tokenizer.get_vocab().items() if number >= rows and name not in never
        }
        if beyond:
            first = sorted(beyond, key=beyond.__getitem__)[:_SHOWN]
            shown = ", ".join(f"'{name}' ({beyond[name]})" for name in first) + (" …" if len(beyond) > _SHOWN else "")
            raise ConfigError(
                f"{path}: the tokenizer's ids go up to {max(beyond.values())}, and the embedding of {model} has {rows} "
                f"rows (vocab_size): nothing stands for {shown}; use the model's own tokenizer, or enlarge the model "
                "(transformers: resize_token_embeddings) and save it with its config.json"
            )
    whole = getattr(config, "thinker_config", None) or config
    for kind in reads:
        ours = media_token_ids(processor, kind)
        key = next((key for key in (f"{kind}_token_id", f"{kind}_token_index") if hasattr(whole, key)), "")
        theirs = getattr(whole, key, None)
        if ours and isinstance(theirs, int) and theirs not in ours:
            raise ConfigError(
                f"{path}: the processor's {kind}s are written with token {' and '.join(map(str, ours))}, and {model} "
                f"puts them where it finds {theirs} ({key}); use the processor that belongs to the model, or set {key} "
                "as it has it"
            )

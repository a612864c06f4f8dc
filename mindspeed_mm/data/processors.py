"""Types of transformers' processors and tokenizers, which are imported only where one is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

#: a model's processor, or its tokenizer where the model reads text only
Processor: TypeAlias = "ProcessorMixin | PreTrainedTokenizerBase"

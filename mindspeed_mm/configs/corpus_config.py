"""`dataset_param.corpus`: how `dataset_type: corpus` makes rows of fixed length of a sequence of documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from mindspeed_mm.configs.sections import Bool, Section

#: what the shares of a split may add up to
_SUMS = (1.0, 100.0, 1000.0)


def _read_split(value: object) -> object:
    """Comma separated text, or a list, of the shares of training, validation and test."""
    parts = value.split(",") if isinstance(value, str) else value
    try:
        shares = [float(part) for part in parts] if isinstance(parts, (list, tuple)) else []
    except (TypeError, ValueError):
        shares = []
    if len(shares) != 3 or not all(share >= 0 for share in shares):
        raise ValueError("expected three shares of the documents, training, validation and test, such as 98,1,1")
    total = round(sum(shares), 6)
    if total not in _SUMS:
        raise ValueError(f"the shares add up to {total:g}; expected 100 (or 1, or 1000), such as 98,1,1")
    if not shares[0]:
        raise ValueError("no document is left to train on; expected a first share above 0")
    return shares


class CorpusParameters(Section):
    """How documents become rows, and which of them are kept for validation."""

    split: Annotated[list[float], BeforeValidator(_read_split)] = Field(
        [100.0, 0.0, 0.0],
        description="shares of the documents, in order, for training, validation and test (which are left out)",
    )
    append_eod: Bool = Field(False, description="the tokenizer's end token after each document")
    reset_attention_mask: Bool = Field(
        False, description="documents of a row don't see each other, and positions begin anew with each"
    )
    reset_position_ids: Bool = Field(
        False, description="positions begin anew with each document; only with reset_attention_mask, which implies it"
    )
    create_attention_mask_in_dataloader: Bool = Field(
        False, description="no effect: attention is given the bounds of documents, not a mask"
    )
    no_shared_storage: Bool = Field(
        False, description="no effect: the first process of each node builds the index where it finds none"
    )

    @model_validator(mode="after")
    def _ends_tell_documents_apart(self) -> CorpusParameters:
        if self.reset_position_ids and not self.reset_attention_mask:
            raise ValueError(
                "'reset_position_ids' is true and 'reset_attention_mask' false: a token would see earlier documents at "
                "the positions of its own; set both, or neither"
            )
        if self.reset_attention_mask and not self.append_eod:
            raise ValueError(
                "'reset_attention_mask' is true and 'append_eod' false: documents are told apart by their end tokens; "
                "set 'append_eod' to true"
            )
        return self


#: keys of basic_parameters that say something else than a corpus does, and why
_CONTRADICTIONS: Mapping[str, str] = {
    "streaming": "a corpus is indexed before training; set it to false",
    "packing": "rows of a corpus are full by themselves; set it to false",
    "neat_packing": "rows of a corpus are full by themselves; set it to false, and corpus.reset_attention_mask to true",
    "interleave_probs": "documents of several data sets come one after the other, and are shuffled; set it to null",
    **dict.fromkeys(
        ("val_dataset", "val_rate", "val_size"), "documents for validation are the second share of corpus.split"
    ),
}
#: keys of basic_parameters without effect on a corpus
CORPUS_IDLE_KEYS = (
    "template",
    "train_on_prompt",
    "mask_history",
    "enable_thinking",
    "buffer_size",
    "val_max_samples",
    "default_system",
)


def corpus_problem(dataset_type: str, basic: Any, corpus: CorpusParameters | None) -> str | None:
    """Return a sentence about keys of dataset_param that don't agree with its dataset_type; None: they do.

    Args:
        basic: typed basic_parameters.
        corpus: as given.
    """
    if dataset_type != "corpus":
        return None if corpus is None else f"'corpus' is given, and 'dataset_type' is {dataset_type}; expected corpus"
    for key, why in _CONTRADICTIONS.items():
        if value := getattr(basic, key):
            return f"'basic_parameters.{key}' is {value} and 'dataset_type' corpus: {why}"
    if basic.mix_strategy != "concat":
        return (
            f"'basic_parameters.mix_strategy' is {basic.mix_strategy} and 'dataset_type' corpus: documents of several "
            "data sets come one after the other, and are shuffled; write concat"
        )
    if basic.preprocess_on_fly:
        return "'basic_parameters.preprocess_on_fly' is true and 'dataset_type' corpus: a corpus is indexed before"
    if basic.cache_dir is None:
        return "'basic_parameters.cache_dir' is missing: a corpus needs a folder for its index"
    return None

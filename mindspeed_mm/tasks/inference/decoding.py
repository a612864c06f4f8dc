"""Greedy decoding of a batch that answers leave as they end: the loop that `generate` is given for batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList


def decode_greedily(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Take the most likely token each time, and compute nothing for answers that have ended.

    transformers' own loop goes on computing all rows of a batch until its longest answer ends. Tokens are the same.

    Args:
        model: a decoder, of any kind of cache.
        input_ids: prompts [batch, prompt] int64, padded on the left.
        logits_processor, stopping_criteria, generation_config, model_kwargs: as `generate` prepares them.

    Returns:
        prompts and answers [batch, prompt + longest answer] int64; shorter answers are followed by the padding token.

    Source:
        `GenerationMixin._sample` of transformers, and its documentation of `custom_generate`.
    """
    rows = torch.arange(len(input_ids), device=input_ids.device)  # those whose answers go on
    begins = True
    while len(rows):
        only_last = None if begins or not model_kwargs["use_cache"] else 1
        inputs = model.prepare_inputs_for_generation(
            input_ids[rows], next_sequence_length=only_last, is_first_iteration=begins, **model_kwargs
        )
        outputs = model(**inputs, return_dict=True)
        begins = False
        model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=False)
        logits = outputs.logits[:, -1].float()
        del outputs
        if len(logits_processor):  # some keep what they know of each row of the batch
            whole = logits.new_zeros(len(input_ids), logits.shape[1]).index_copy_(0, rows, logits)
            logits = logits_processor(input_ids, whole)[rows]
        tokens = input_ids.new_full((len(input_ids), 1), generation_config.pad_token_id)
        tokens[rows, 0] = logits.argmax(dim=-1)
        input_ids = torch.cat([input_ids, tokens], dim=-1)
        goes_on = ~stopping_criteria(input_ids, None)[rows]
        if not goes_on.all():
            kept = torch.nonzero(goes_on).flatten()
            model_kwargs = _rows_of(model_kwargs, kept, len(rows), input_ids.shape[1])
            rows = rows[kept]
    return input_ids


def _rows_of(model_kwargs: dict[str, Any], kept: torch.Tensor, batch: int, length: int) -> dict[str, Any]:
    """Keep some rows of the cache, and of the inputs that have a value for each token: masks, positions, token types.

    Positions are [batch, length], or [axes, batch, length] in models that count along several axes.
    """
    from transformers import Cache

    selected = {}
    for name, value in model_kwargs.items():
        if isinstance(value, Cache):
            value.reorder_cache(kept)
        elif isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[-2:] == (batch, length):
            value = value.index_select(-2, kept)
        selected[name] = value
    return selected

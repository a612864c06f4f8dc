"""Attention of encoders whose images, frames or windows are one long row: their lengths are read once.

transformers' layers cut such a row by lengths that each of them reads from the device. To flash attention they hand the
offsets instead, by which the function registered here computes each image by itself with the device's kernel: all
layers of all passes that share the offsets share one reading.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.attention import document_attention
from mindspeed_mm.models.common.attention_operator import attend_in_graph, readings
from mindspeed_mm.models.common.document_attention import use_attention

IMPLEMENTATION = "flash_by_lengths"
"""transformers hands offsets to implementations with "flash" in their name."""
_INSTEAD_OF = "sdpa"
_OFFSETS = "cu_seqlens"


def attend_by_lengths(tower: nn.Module) -> bool:
    """Let the attention layers of an encoder compute each of its sequences by itself, in place.

    Returns:
        whether there is anything to change: layers that are given offsets, with PyTorch's own attention.
    """
    config: Any = tower.config
    layers = [module for module in tower.modules() if _OFFSETS in inspect.signature(type(module).forward).parameters]
    if not layers or config._attn_implementation != _INSTEAD_OF:
        return False
    use_attention(tower, IMPLEMENTATION)
    return True


def attend_within_sequences(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention within the sequences of a row; an attention function of transformers.

    Args:
        module: the attention layer.
        query: [1, heads, tokens, head size].
        key: [1, key-value heads, tokens, head size].
        value: [1, key-value heads, tokens, value head size].
        attention_mask: not used where there are offsets.
        scaling: of the scores; None: head size ** -0.5.
        dropout: of the weights; above 0, PyTorch's own attention computes one sequence after the other.
        cu_seq_lens_q: [sequences + 1] int32, where sequences begin, and where the last one ends; None: PyTorch's own
            attention computes whole rows.
        is_causal: a token sees itself and those before it only.
        kwargs: as PyTorch's own attention takes them.

    Returns:
        [1, tokens, heads, value head size], and no weights.
    """
    own = ALL_ATTENTION_FUNCTIONS[_INSTEAD_OF]
    given = {**kwargs, "scaling": scaling, "dropout": dropout, "is_causal": is_causal}
    if cu_seq_lens_q is None:
        return own(module, query, key, value, attention_mask, **given)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_compiling() and not dropout:
        return attend_in_graph(query, key, value, cu_seq_lens_q, scale=scale, is_causal=bool(is_causal)), None
    documents = readings.of(cu_seq_lens_q)
    if dropout:
        parts = zip(*(t.split([length for length, _ in documents.rows[0]], dim=2) for t in (query, key, value)))
        return torch.cat([own(module, *part, None, **given)[0] for part in parts], dim=1), None
    output = document_attention(
        accelerator.current().attention_kernel(query.transpose(1, 2), value.transpose(1, 2)),
        query,
        key,
        value,
        documents,
        scale=scale,
        is_causal=bool(is_causal),
    )
    return output, None


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend_within_sequences)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS[_INSTEAD_OF])

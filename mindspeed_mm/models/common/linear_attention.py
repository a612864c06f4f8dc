"""Linear attention on packed rows: each sample of a row runs through the layer by itself.

A layer of linear attention has a state and a convolution that run on from token to token, so no mask separates the
samples of a row. transformers can begin anew at boundaries only with kernels that may not be installed, and the
convolution and the recurrence have theirs from different packages. Here the layer is called once a sample instead,
which is exact whichever kernel computes it. The row is joined again after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import create_causal_mask

from mindspeed_mm.models.common.boundaries import PackedRows
from mindspeed_mm.models.common.document_attention import KEYWORD, absent_mask
from mindspeed_mm.models.common.packed import PACKING_KEY
from mindspeed_mm.utils.errors import ConfigError


def run_samples_apart(layer: nn.Module) -> None:
    """Let a layer of linear attention run each sample of packed rows by itself, in place.

    Args:
        layer: takes `hidden_states` [batch, sequence, hidden] and `attention_mask`, which holds the `PackedRows` of
            packed rows; other masks are passed on.
    """
    layer.forward = functools.partial(_run_apart, layer.forward)  # type: ignore[method-assign]


def _run_apart(
    run: Callable[..., torch.Tensor], hidden_states: torch.Tensor, attention_mask: Any = None, **others: Any
) -> torch.Tensor:
    if not isinstance(attention_mask, PackedRows):
        return run(hidden_states=hidden_states, attention_mask=attention_mask, **others)
    # `others` are a cache, which training doesn't have, and boundaries of the whole row for flash attention
    if sum(attention_mask.lengths) != hidden_states[..., 0].numel():
        raise ConfigError(
            "a layer of linear attention got a part of a packed micro-batch, whose samples it can't find there; leave "
            f"these layers out of fsdp2.yaml's chunk_mbs_modules, or set {PACKING_KEY}"
        )
    samples = hidden_states.flatten(0, 1).split(list(attention_mask.lengths))
    outputs = [run(hidden_states=sample.unsqueeze(0)).squeeze(0) for sample in samples]
    return torch.cat(outputs).view(hidden_states.shape)


def packed_masks_by_layer_type(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the masks of layers with full and with linear attention, in which samples don't see each other.

    Args:
        model: the transformers model; its layers of linear attention run samples apart.
        batch: packed_rows; position_ids [4, batch, sequence] int64, each token's position in its sample first;
            row_documents, if they keep samples apart in full attention.

    Returns:
        layer type → mask of the model's attention, or `PackedRows` for linear attention.
    """
    positions = batch["position_ids"][0]
    if batch.get(KEYWORD) is not None:
        return {"full_attention": absent_mask(positions.device), "linear_attention": batch["packed_rows"]}
    embeddings = torch.empty(*positions.shape, 0, device=positions.device)
    no_mask = no_cache = None  # positional: releases of transformers name the cache differently
    full = create_causal_mask(model.config.get_text_config(), embeddings, no_mask, no_cache, positions)
    return {"full_attention": full, "linear_attention": batch["packed_rows"]}

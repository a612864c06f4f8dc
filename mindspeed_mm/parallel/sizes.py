"""Parallel sizes of a model on the Megatron backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class ParallelSizes:
    """How a model is split over ranks, and the options that its layers need.

    Attributes:
        tensor, pipeline, virtual_pipeline: parallel sizes; virtual_pipeline is None without interleaving.
        sequence_parallel: whether tensor-parallel ranks split norms and residuals along the sequence.
        params_dtype: dtype of the parameters.
        variable_seq_lengths: whether stages send the shape of each tensor before the tensor.
        recompute: the values of recompute_granularity, recompute_method, recompute_num_layers and recompute_modules
            that are set.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    sequence_parallel: bool = False
    params_dtype: torch.dtype = torch.float32
    variable_seq_lengths: bool = False
    recompute: Mapping[str, Any] = field(default_factory=dict)

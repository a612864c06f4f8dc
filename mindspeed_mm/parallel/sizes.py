"""How a model is split over ranks on the Megatron backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class ParallelSizes:
    """How a model is split.

    Attributes:
        tensor, pipeline, virtual_pipeline: parallel sizes; virtual_pipeline is None without interleaving.
        sequence_parallel: norms and residuals on a part of the sequence each tensor-parallel rank.
        params_dtype: of parameters.
        variable_seq_lengths: stages tell each other the shape of what they send.
        recompute: recompute_granularity, recompute_method, recompute_num_layers where they are given.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    sequence_parallel: bool = False
    params_dtype: torch.dtype = torch.float32
    variable_seq_lengths: bool = False
    recompute: Mapping[str, Any] = field(default_factory=dict)

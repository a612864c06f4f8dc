"""Flags about processes and about how the model is spread over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mindspeed_mm.configs.flags.spec import flag

Backend = Literal[
    "nccl",
    "gloo",
    "hccl",
    "npu:hccl,cpu:gloo",
    "cpu:gloo,npu:hccl",
    "cuda:nccl,cpu:gloo",
    "cpu:gloo,cuda:nccl",
]


@dataclass
class DistributedArguments:
    """Processes and parallel sizes."""

    distributed_backend: Annotated[Backend, flag("collectives; nccl becomes gloo where there is no accelerator")] = (
        "nccl"
    )
    distributed_timeout_minutes: Annotated[int, flag("a collective that takes longer ends the run", minimum=1)] = 10
    local_rank: Annotated[int | None, flag("rank on this node; torchrun sets it in the environment", minimum=0)] = None
    tensor_model_parallel_size: Annotated[int, flag("must be 1 with --use-torch-fsdp2", minimum=1)] = 1
    pipeline_model_parallel_size: Annotated[int, flag("must be 1 with --use-torch-fsdp2", minimum=1)] = 1
    virtual_pipeline_model_parallel_size: Annotated[int | None, flag("must be 1 with --use-torch-fsdp2", minimum=1)] = (
        None
    )
    context_parallel_size: Annotated[int, flag("must be 1: context parallelism is not there yet", minimum=1)] = 1
    expert_model_parallel_size: Annotated[int, flag("must be 1: expert parallelism is not there yet", minimum=1)] = 1
    expert_tensor_parallel_size: Annotated[
        int | None, flag("must be 1: expert parallelism is not there yet", minimum=1)
    ] = None

"""Flags about processes and about how the model is spread over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mindspeed_mm.configs.flags.spec import flag, no_effect

#: why FSDP2 can't recompute the core of attention alone
NO_SELECTIVE_RECOMPUTE = (
    "with FSDP2 whole blocks are recomputed, by --recompute-granularity full or fsdp2.yaml's recompute_modules"
)
_OPTIMIZER = no_effect(fsdp2="FSDP2 shards the optimizer already")
_OVERLAP = no_effect(fsdp2="FSDP2 overlaps by prefetch, see fsdp2.yaml's num_to_forward_prefetch")
_TENSOR = no_effect(fsdp2="there is one tensor-parallel rank")
_PIPELINE = no_effect(fsdp2="there is one pipeline stage")
_SELECTIVE = no_effect(fsdp2=NO_SELECTIVE_RECOMPUTE)

CollectiveBackend = Literal[
    "nccl",
    "gloo",
    "hccl",
    "npu:hccl,cpu:gloo",
    "cpu:gloo,npu:hccl",
    "cuda:nccl,cpu:gloo",
    "cpu:gloo,cuda:nccl",
]


@dataclass(frozen=True)
class DistributedArguments:
    """Processes and parallel sizes."""

    distributed_backend: Annotated[
        CollectiveBackend, flag("collectives; nccl becomes gloo where there is no accelerator")
    ] = "nccl"
    distributed_timeout_minutes: Annotated[int, flag("a collective that takes longer ends the run", minimum=1)] = 10
    local_rank: Annotated[int | None, flag("rank on this node; torchrun sets it in the environment", minimum=0)] = None
    context_parallel_size: Annotated[int, flag("must be 1: context parallelism is not there yet", minimum=1)] = 1
    expert_model_parallel_size: Annotated[int, flag("must be 1: expert parallelism is not there yet", minimum=1)] = 1
    expert_tensor_parallel_size: Annotated[
        int | None, flag("must be 1: expert parallelism is not there yet", minimum=1)
    ] = None


@dataclass(frozen=True)
class MegatronBackendArguments:
    """Megatron backend (without use-torch-fsdp2, from pretrain_vlm.py)."""

    tensor_model_parallel_size: Annotated[
        int, flag("ranks that share every layer; must be 1 with --use-torch-fsdp2", minimum=1)
    ] = 1
    pipeline_model_parallel_size: Annotated[
        int, flag("stages that share the layers; must be 1 with --use-torch-fsdp2", minimum=1)
    ] = 1
    virtual_pipeline_model_parallel_size: Annotated[
        int | None,
        flag("stages on each pipeline rank, interleaved; absent = the variable VP_SIZE, else 1", minimum=1),
    ] = None
    sequence_parallel: Annotated[bool, _TENSOR("norms and residuals over tensor-parallel ranks")] = False
    variable_seq_lengths: Annotated[
        bool, _PIPELINE("stages exchange tensors of any length; absent = rows are padded to seq-length")
    ] = False
    use_distributed_optimizer: Annotated[bool, _OPTIMIZER("optimizer state over data-parallel ranks")] = False
    overlap_grad_reduce: Annotated[bool, _OVERLAP("reduce gradients during backward")] = False
    overlap_param_gather: Annotated[bool, _OVERLAP("gather parameters during forward, in advance")] = False
    recompute_granularity: Annotated[
        Literal["full", "selective"] | None,
        flag("recompute whole layers, where fsdp2.yaml names no recompute_modules; or the core of attention"),
    ] = None
    recompute_method: Annotated[
        Literal["uniform", "block"] | None,
        flag("with full: uniform = all layers, recompute-num-layers at a time; block = the first so many"),
    ] = None
    recompute_num_layers: Annotated[int | None, flag("with full: a number of layers", minimum=1)] = None
    recompute_activations: Annotated[bool, _SELECTIVE("the same as recompute-granularity selective")] = False

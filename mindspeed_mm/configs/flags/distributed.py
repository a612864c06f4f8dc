"""Flags about processes and about how the model is spread over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mindspeed_mm.configs.flags.spec import flag, no_effect

_OPTIMIZER = no_effect(fsdp2="FSDP2 shards the optimizer already")
_OVERLAP = no_effect(fsdp2="FSDP2 overlaps by prefetch, see fsdp2.yaml's num_to_forward_prefetch")
_PIPELINE = no_effect(fsdp2="there is one pipeline stage")

ContextAlgorithm = Literal[
    "ulysses_cp_algo",
    "megatron_cp_algo",
    "hybrid_cp_algo",
    "adaptive_cp_algo",
    "hybrid_adaptive_cp_algo",
    "kvallgather_cp_algo",
]
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
    expected_data_parallel_size: Annotated[
        int | None,
        flag("ours: data-parallel ranks that must follow from the number of processes and the other sizes", minimum=1),
    ] = None
    tensor_model_parallel_size: Annotated[
        int, flag("ranks that split the layers: heads, MLP and vocabulary", minimum=1)
    ] = 1
    sequence_parallel: Annotated[
        bool, flag("norms and residuals over tensor-parallel ranks, each with a part of the sequence")
    ] = False
    context_parallel_size: Annotated[
        int, flag("ranks that split the tokens of the same rows; must be 1 without --use-torch-fsdp2", minimum=1)
    ] = 1
    context_parallel_algo: Annotated[
        ContextAlgorithm,
        flag(
            "ulysses_cp_algo: ranks exchange attention heads for tokens; megatron_cp_algo: keys and values go round in "
            "a ring; hybrid_cp_algo: a ring of Ulysses groups; the others are refused",
            no_effect={"ptd": "there is one context-parallel rank"},
            harmless=("ulysses_cp_algo",),
        ),
    ] = "ulysses_cp_algo"
    ulysses_degree_in_cp: Annotated[
        int | None,
        flag(
            "hybrid_cp_algo: ranks of a Ulysses group; the ring has context-parallel-size ÷ this many",
            minimum=1,
            no_effect={"ptd": "there is one context-parallel rank"},
        ),
    ] = None
    expert_model_parallel_size: Annotated[
        int | None,
        flag(
            "ranks that split the experts of a layer; absent = fsdp2.yaml's expert_parallel_size, else 1; must be 1 "
            "without --use-torch-fsdp2",
            minimum=1,
        ),
    ] = None
    expert_tensor_parallel_size: Annotated[
        int | None, flag("must be 1: an expert is on one rank, or sharded by fsdp2.yaml's ep_fsdp_size", minimum=1)
    ] = None
    torch_compile: Annotated[
        bool,
        flag(
            "ours: compile the computation of all blocks, as fsdp2.yaml's compile: true; refused without "
            "--use-torch-fsdp2"
        ),
    ] = False


@dataclass(frozen=True)
class MegatronBackendArguments:
    """Megatron backend (without use-torch-fsdp2, from pretrain_vlm.py)."""

    pipeline_model_parallel_size: Annotated[
        int, flag("stages that share the layers; must be 1 with --use-torch-fsdp2", minimum=1)
    ] = 1
    virtual_pipeline_model_parallel_size: Annotated[
        int | None,
        flag("stages on each pipeline rank, interleaved; absent = the variable VP_SIZE, else 1", minimum=1),
    ] = None
    variable_seq_lengths: Annotated[
        bool, _PIPELINE("stages exchange tensors of any length; absent = rows are padded to seq-length")
    ] = False
    use_distributed_optimizer: Annotated[bool, _OPTIMIZER("optimizer state over data-parallel ranks")] = False
    overlap_grad_reduce: Annotated[bool, _OVERLAP("reduce gradients during backward")] = False
    overlap_param_gather: Annotated[bool, _OVERLAP("gather parameters during forward, in advance")] = False
    recompute_granularity: Annotated[
        Literal["full", "selective"] | None,
        flag("recompute whole layers, where fsdp2.yaml names no recompute_modules; or parts: recompute-modules"),
    ] = None
    recompute_method: Annotated[
        Literal["uniform", "block"] | None,
        flag("with full: uniform = all layers, recompute-num-layers at a time; block = the first so many"),
    ] = None
    recompute_num_layers: Annotated[int | None, flag("with full: a number of layers", minimum=1)] = None
    recompute_activations: Annotated[bool, flag("the same as recompute-granularity selective")] = False
    recompute_modules: Annotated[
        list[Literal["core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts", "mla_up_proj"]] | None,
        flag(
            "with selective, parts of every layer: core_attn (the default) = attention without its linear layers, mlp; "
            "with FSDP2 also layernorm and moe; the others are refused"
        ),
    ] = None
    chunk_mlp_tokens: Annotated[
        int | None,
        flag(
            "ours: the MLP of each layer (without experts) runs on so many tokens at a time, and so does its recompute",
            minimum=1,
        ),
    ] = None

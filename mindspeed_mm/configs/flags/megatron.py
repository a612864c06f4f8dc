"""Megatron's and MindSpeed's flags in published launch scripts; most of them have no effect here.

Those are accepted with their arity and type, so that a script runs unchanged; each is logged once, with the reason.
Balancing and dynamic batching are honoured, on either backend.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mindspeed_mm.configs.flags.spec import FlagDetails, flag, no_effect, refused

_STRUCTURE = no_effect(
    fsdp2="the HF config is authoritative for the model's structure",
    ptd="model.json or the HF config says the model's structure",
)
_TOKENIZER = no_effect("the tokenizer comes from data.json's model_name_or_path")
_CLASSES = no_effect(
    fsdp2="the model is the HF class itself", ptd="the model is made of megatron-core's classes, and no others"
)
_LAYERS = no_effect(
    fsdp2="the model is the HF class itself",
    ptd="the layers are megatron-core's local ones: attention to packed rows and adapters are built on them, not on "
    "Transformer Engine's",
)
_ATTENTION = no_effect(
    fsdp2="attention is chosen by model.json's attn_implementation",
    ptd="attention is PyTorch's scaled_dot_product_attention, masked as the family needs it",
)
_KERNELS = no_effect(
    fsdp2="the kernels are transformers' and PyTorch's own", ptd="the kernels are megatron-core's and PyTorch's own"
)
_STAGES = no_effect(fsdp2="there is one pipeline stage", ptd="stages exchange hidden states only")
_NO_RING = "there is one context-parallel rank"
_NO_EXPERTS = "models with experts are not there yet on the Megatron backend"
_RECOMPUTE_WHOLE = no_effect(ptd="a recomputed layer is recomputed whole")
_MEMORY = no_effect(
    fsdp2="memory is saved by fsdp2.yaml's recompute_modules and offload_to_cpu",
    ptd="memory is saved by --recompute-granularity and --use-distributed-optimizer",
)
_ONE_BALANCE = no_effect("rows are always given out greedily, the costliest first")
_ROWS = no_effect("rows come from data.json")
_DEVICE = no_effect("the device's own settings are kept")
_SINGLE_SHARDING = no_effect(
    fsdp2="--use-torch-fsdp2 shards the model",
    ptd="--use-distributed-optimizer and the parallel sizes spread the model",
)


def _layout(what: str, **details: Any) -> FlagDetails:
    """A layout of its own for a part of the model: without effect with FSDP2, refused on the Megatron backend."""
    return flag(
        what,
        no_effect={"fsdp2": "every part of the model has the same FSDP2 layout"},
        refused={"ptd": "a layout of its own for a part of the model is not there yet; remove the flag"},
        **details,
    )


_DROPOUT = (
    "the model's dropout is attention_dropout of its config.json, or on the Megatron backend model.json's "
    "text_decoder.attention_dropout; write it there, and 0 here"
)
_AUX_LOSS = (
    "the load-balancing loss is weighted by model.json's loss_cfg.router_aux_loss_coef; write it there, and 0 here"
)


def _of_own_models(what: str, instead: str) -> FlagDetails:
    """A number that a script's own model may read; a model of ours has it from elsewhere, so only 0 is taken."""
    return flag(what, not_of_ours=instead, harmless=(0.0,))


@dataclass(frozen=True)
class MegatronStructureArguments:
    """Model structure and tokenizer."""

    num_layers: Annotated[int | None, _STRUCTURE("layers")] = None
    hidden_size: Annotated[int | None, _STRUCTURE("hidden size")] = None
    ffn_hidden_size: Annotated[int | None, _STRUCTURE("hidden size of the MLP")] = None
    num_attention_heads: Annotated[int | None, _STRUCTURE("attention heads")] = None
    group_query_attention: Annotated[bool, _STRUCTURE("grouped-query attention")] = False
    num_query_groups: Annotated[int, _STRUCTURE("key-value heads")] = 1
    kv_channels: Annotated[int | None, _STRUCTURE("size of a head")] = None
    max_position_embeddings: Annotated[int | None, _STRUCTURE("longest sequence of the model")] = None
    position_embedding_type: Annotated[str, _STRUCTURE("kind of positions")] = "learned_absolute"
    rotary_base: Annotated[float, _STRUCTURE("base of rotary positions")] = 10000
    rotary_percent: Annotated[float, _STRUCTURE("share of rotary dimensions")] = 1.0
    use_rotary_position_embeddings: Annotated[bool, _STRUCTURE("rotary positions")] = False
    normalization: Annotated[Literal["LayerNorm", "RMSNorm"], _STRUCTURE("kind of normalisation")] = "LayerNorm"
    norm_epsilon: Annotated[float, _STRUCTURE("epsilon of normalisation")] = 1e-05
    swiglu: Annotated[bool, _STRUCTURE("gated MLP")] = False
    disable_bias_linear: Annotated[
        bool, _STRUCTURE("linear layers without bias", spellings=(), off_spellings=("--disable-bias-linear",))
    ] = True
    add_qkv_bias: Annotated[bool, _STRUCTURE("bias in q, k, v")] = False
    qk_layernorm: Annotated[bool, _STRUCTURE("normalised q and k")] = False
    attention_dropout: Annotated[float, _of_own_models("dropout of attention", _DROPOUT)] = 0.1
    hidden_dropout: Annotated[float, _of_own_models("dropout of hidden states", _DROPOUT)] = 0.1
    init_method_std: Annotated[float, _STRUCTURE("deviation of random weights")] = 0.02
    vocab_size: Annotated[int | None, _STRUCTURE("tokens in the vocabulary")] = None
    padded_vocab_size: Annotated[int | None, _STRUCTURE("tokens in the vocabulary, with padding")] = None
    make_vocab_size_divisible_by: Annotated[int, _STRUCTURE("padding of the vocabulary")] = 128
    tokenizer_type: Annotated[str | None, _TOKENIZER("kind of tokenizer")] = None
    tokenizer_name_or_path: Annotated[str | None, _TOKENIZER("directory of the tokenizer")] = None
    tokenizer_model: Annotated[str | None, _TOKENIZER("file of the tokenizer")] = None
    num_experts: Annotated[int | None, _STRUCTURE("experts of a layer")] = None
    moe_router_topk: Annotated[int, _STRUCTURE("experts of a token")] = 2
    moe_router_load_balancing_type: Annotated[str, _STRUCTURE("load balancing")] = "aux_loss"
    moe_aux_loss_coeff: Annotated[float, _of_own_models("weight of the load-balancing loss", _AUX_LOSS)] = 0.0
    use_mcore_models: Annotated[bool, _CLASSES("megatron-core's model classes")] = False
    use_legacy_models: Annotated[bool, _CLASSES("Megatron's older model classes")] = False
    transformer_impl: Annotated[str, _LAYERS("which layers", harmless=("local",))] = "transformer_engine"
    spec: Annotated[list[str] | None, _CLASSES("module and name of a ModuleSpec")] = None


@dataclass(frozen=True)
class MegatronKernelArguments:
    """Kernels."""

    use_flash_attn: Annotated[bool, _ATTENTION("flash attention")] = False
    attention_mask_type: Annotated[Literal["general", "causal"], _ATTENTION("kind of mask")] = "causal"
    attention_softmax_in_fp32: Annotated[bool, _ATTENTION("softmax of attention in fp32")] = False
    use_fused_ring_attention_update: Annotated[bool, _KERNELS("fused ring update")] = False
    use_fused_moe_token_permute_and_unpermute: Annotated[bool, _KERNELS("fused permutation of tokens")] = False
    gradient_accumulation_fusion: Annotated[
        bool,
        _KERNELS(
            "gradients added inside the product", spellings=(), off_spellings=("--no-gradient-accumulation-fusion",)
        ),
    ] = True
    masked_softmax_fusion: Annotated[
        bool, _KERNELS("fused masked softmax", spellings=(), off_spellings=("--no-masked-softmax-fusion",))
    ] = True
    bias_gelu_fusion: Annotated[
        bool, _KERNELS("fused GELU", spellings=(), off_spellings=("--no-bias-gelu-fusion",))
    ] = True
    bias_swiglu_fusion: Annotated[
        bool, _KERNELS("fused SwiGLU", spellings=(), off_spellings=("--no-bias-swiglu-fusion",))
    ] = True
    bias_dropout_fusion: Annotated[
        bool, _KERNELS("fused dropout", spellings=(), off_spellings=("--no-bias-dropout-fusion",))
    ] = True
    apply_rope_fusion: Annotated[
        bool, _KERNELS("fused rotary positions", spellings=(), off_spellings=("--no-rope-fusion",))
    ] = True
    cross_entropy_loss_fusion: Annotated[bool, _KERNELS("fused cross entropy")] = False
    jit_compile: Annotated[bool, _DEVICE("NPU: compile kernels at run time")] = False
    allow_internal_format: Annotated[bool, _DEVICE("NPU: private tensor formats")] = False
    optimization_level: Annotated[int | None, _KERNELS("MindSpeed's level of patches")] = None


@dataclass(frozen=True)
class MegatronParallelArguments:
    """Layout over ranks."""

    unaligned_linear: Annotated[
        bool,
        flag(
            "tensor parallelism over odd sizes",
            no_effect={"fsdp2": "sizes that --tensor-model-parallel-size does not divide are refused"},
            refused={
                "ptd": "it is not there yet; choose a --tensor-model-parallel-size that divides the model's heads"
            },
        ),
    ] = False
    use_cp_send_recv_overlap: Annotated[
        bool, no_effect(fsdp2="a ring sends while it computes anyway", ptd=_NO_RING)("ring: overlap")
    ] = False
    cp_window_size: Annotated[
        int,
        no_effect(fsdp2="there is one ring, whose order changes no number", ptd=_NO_RING)(
            "ring: window of double rings", harmless=(1,)
        ),
    ] = 1
    megatron_cp_in_bnsd: Annotated[
        bool, no_effect(fsdp2="attention has the layout of its kernel", ptd=_NO_RING)("ring: layout of tensors")
    ] = False
    cp_attention_mask_type: Annotated[
        str | None,
        no_effect(fsdp2="the mask follows from the rows, packed or not", ptd=_NO_RING)("ring: kind of mask"),
    ] = None
    use_multiparameter_pipeline_model_parallel: Annotated[bool, _STAGES("stages exchange several tensors")] = False
    num_layers_per_virtual_pipeline_stage: Annotated[
        int | None,
        flag(
            "layers of a virtual stage",
            no_effect={"fsdp2": "there is one pipeline stage"},
            refused={
                "ptd": "write --virtual-pipeline-model-parallel-size, and model.json's pipeline_num_layers as one list "
                "for each virtual stage"
            },
        ),
    ] = None
    enable_dummy_optimizer: Annotated[
        bool,
        no_effect(fsdp2="there is one pipeline stage", ptd="a stage with nothing to train is always fine")(
            "stages without trained parameters"
        ),
    ] = False
    layerzero: Annotated[bool, _SINGLE_SHARDING("MindSpeed's older sharding")] = False
    layerzero_config: Annotated[str | None, _SINGLE_SHARDING("its file")] = None
    hetero_parallel: Annotated[bool, _layout("another layout for each encoder")] = False
    hetero_encoder_mbs_scale: Annotated[int, _layout("micro-batches of encoders", harmless=(1,))] = 1
    dist_train: Annotated[bool, _layout("encoders on ranks of their own")] = False
    moe_token_dispatcher_type: Annotated[
        Literal["allgather", "alltoall", "flex", "alltoall_seq", "alltoall_mc2"],
        no_effect(fsdp2="tokens reach their experts by alltoall, whose numbers are the same", ptd=_NO_EXPERTS)(
            "how tokens reach experts", harmless=("alltoall",)
        ),
    ] = "alltoall"
    moe_grouped_gemm: Annotated[
        bool,
        no_effect(fsdp2="transformers chooses how experts are computed", ptd=_NO_EXPERTS)("experts in one product"),
    ] = False
    moe_permute_fusion: Annotated[
        bool, no_effect(fsdp2="the kernels are transformers' and PyTorch's own", ptd=_NO_EXPERTS)("fused permutation")
    ] = False
    moe_tp_extend_ep: Annotated[
        bool,
        no_effect(fsdp2="experts are split over tensor-parallel ranks, too, in any case", ptd=_NO_EXPERTS)(
            "experts over tensor-parallel ranks too"
        ),
    ] = False
    moe_alltoall_overlap_comm: Annotated[
        bool,
        no_effect(fsdp2="the exchange of tokens isn't overlapped; the numbers are the same", ptd=_NO_EXPERTS)(
            "overlapped exchange of tokens"
        ),
    ] = False
    use_cpu_initialization: Annotated[
        bool, no_effect("weights don't depend on where they are drawn")("draw weights on CPU")
    ] = False
    perform_initialization: Annotated[
        bool,
        no_effect("weights are loaded, or drawn once")(
            "random weights at first", spellings=(), off_spellings=("--no-initialization",)
        ),
    ] = True
    create_attention_mask_in_dataloader: Annotated[
        bool,
        no_effect("the collator always gives the mask")(
            "mask from the loader", spellings=(), off_spellings=("--no-create-attention-mask-in-dataloader",)
        ),
    ] = True


@dataclass(frozen=True)
class MegatronMemoryArguments:
    """Memory."""

    recompute_skip_core_attention: Annotated[
        bool,
        _RECOMPUTE_WHOLE(
            "with recompute-granularity full: keep what the kernel of attention returns, not run it again"
        ),
    ] = False
    recompute_num_layers_skip_core_attention: Annotated[
        int, _RECOMPUTE_WHOLE("in how many of the recomputed layers, the first ones; 0 = all", minimum=0)
    ] = 0
    swap_attention: Annotated[
        bool,
        flag(
            "what attention keeps for backward waits for it in host memory, and is back a layer ahead; of layers that "
            "are recomputed whole there is nothing to wait"
        ),
    ] = False
    reuse_fp32_param: Annotated[
        bool,
        no_effect(
            fsdp2="parameters are kept once, in float32, and nothing is to be reused",
            ptd="it changes memory only, not what is trained: --use-distributed-optimizer spreads the float32 copies",
        )("float32 copies share memory with 16-bit parameters"),
    ] = False
    empty_unused_memory_level: Annotated[Literal[0, 1, 2], _MEMORY("empty the allocator's cache in each step")] = 0


@dataclass(frozen=True)
class MegatronBatchingArguments:
    """Balancing and batching."""

    use_data_balance: Annotated[
        bool, flag("rows of a global batch go to ranks by what they cost, so that none waits for another")
    ] = False
    encoder_dp_balance: Annotated[bool, flag("the same as --use-data-balance")] = False
    data_balance_sorting_algo: Annotated[str | None, _ONE_BALANCE("how rows are sorted")] = None
    use_image_mbs_data_balance: Annotated[
        bool, flag("rows of a rank go to its micro-batches by what they cost, on all ranks alike")
    ] = False
    mbs_data_balance_sorting_algo: Annotated[str | None, _ONE_BALANCE("how rows are sorted")] = None
    use_txt_dynamic_batching: Annotated[
        bool, flag("a row of a batch holds as many samples as fit into --max-seq-len")
    ] = False
    max_seq_len: Annotated[int, flag("dynamic batching: tokens of a row", minimum=1)] = 2048
    dynamic_batch_buffer_size: Annotated[int, flag("dynamic batching: samples read ahead at least", minimum=0)] = 200


@dataclass(frozen=True)
class MegatronOtherArguments:
    """Data and other."""

    data_path: Annotated[list[str] | None, _ROWS("Megatron's indexed data")] = None
    data_dir: Annotated[str | None, _ROWS("folder of data")] = None
    split: Annotated[
        str | None, no_effect("validation rows come from data.json's val_dataset or val_rate")("shares")
    ] = None
    dataloader_type: Annotated[
        str | None, no_effect("the loader is described by data.json's dataloader_param")("kind")
    ] = None
    no_shuffle: Annotated[
        bool, refused('write "shuffle": false in data.json\'s dataloader_param')("keep the order")
    ] = False
    vision_pretraining: Annotated[bool, _CLASSES("Megatron's vision models")] = False
    ai_framework: Annotated[str, refused("only PyTorch is there")("framework", harmless=("pytorch",))] = "pytorch"
    timing_log_level: Annotated[int, no_effect("step and data-wait times are always logged")("detail of timers")] = 0
    profile: Annotated[bool, no_effect("the profiler is described by tools.json")("Megatron's profiler")] = False
    profile_step_start: Annotated[int, no_effect("the profiler is described by tools.json")("first profiled step")] = 10
    profile_step_end: Annotated[int, no_effect("the profiler is described by tools.json")("end of profiled steps")] = 12
    profile_ranks: Annotated[list[int], no_effect("the profiler is described by tools.json")("profiled ranks")] = field(
        default_factory=lambda: [0]
    )

"""Why keys of published model.json files have no effect for a transformers model, or are refused."""

from __future__ import annotations

from mindspeed_mm.configs.published import NoEffect, Refused, is_given, is_not_zero, is_on

#: names that transformers' attention registry knows by itself
ATTENTION_NAMES = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
)
ATTENTION_NOT_YET = ("var_len_fa", "native-sparse")

_PART = r"(image_encoder|audio_encoder|text_decoder|vision_encoder|vision_projector)(\.\w+)*"

REFUSED_MODEL_KEYS = (
    Refused(
        "text_decoder.moe_aux_loss_coeff",
        is_not_zero,
        "the load-balancing loss is weighted by loss_cfg.router_aux_loss_coef; write that instead",
    ),
    Refused(
        "loss_cfg.loss_type",
        lambda value: value == "raw",
        "the model's own loss isn't exact over ranks and micro-batches; expected one of default, per_sample_loss, "
        "per_token_loss, token_loss, square_loss",
    ),
    Refused(
        "image_encoder.vision_encoder.ckpt_path",
        is_given,
        "weights are read from init_from_hf_path or --load, never for one part; put the part's weights into that "
        "directory, and remove the key",
    ),
    Refused(
        "patch.adaptive_clip_grad_norm", is_on, "adaptive clipping is not there yet; write false and use --clip-grad"
    ),
    Refused(
        "patch.layerwise_disaggregated_training", is_on, "layer-wise disaggregated training is not there; write false"
    ),
)

IDLE_MODEL_KEYS = (
    NoEffect(
        rf"{_PART}\.recompute_\w+|recompute(_plan.*)?",
        "recompute comes from fsdp2.yaml's recompute_modules, or from the flags",
    ),
    NoEffect(
        rf"{_PART}\.(activation_offload|synchronize_per_layer)|activation_offload_plan.*",
        "memory is saved by fsdp2.yaml's recompute_modules, activation_offload_modules and offload_to_cpu",
    ),
    NoEffect(r"text_decoder\.is_causal", "a language model's attention is causal whatever the kernel"),
    NoEffect(rf"{_PART}\.attn_layout", "attn_implementation chooses the kernel, and the kernel its layout"),
    NoEffect(
        rf"{_PART}\.(use_npu_fused_moe|moe_grouped_gemm|moe_permute_fusion|moe_token_dispatcher_type"
        r"|bias_\w+_fusion|\w+_implementation)|\w+_implementation",
        "the kernels are transformers' own",
    ),
    NoEffect(
        rf"{_PART}\.use_fused_rotary_pos_emb",
        "flags ask for fused kernels: --use-fused-rotary-pos-emb, --use-fused-rmsnorm, --use-fused-swiglu",
    ),
    NoEffect(
        r"text_decoder\.use_chunk_loss|enable_chunk_loss|chunkloss_plan.*", "chunked loss is loss_cfg.compute_mode"
    ),
    NoEffect(
        rf"{_PART}\.(tp|pp|cp|\w+_parallel_size|\w*pipeline_num_layers|sequence_parallel|parallel_output)",
        "FSDP2 shards every part of the model over all ranks",
    ),
    NoEffect(
        rf"{_PART}|\w+_token_id|image_token_index",
        "structure comes from the HF directory's config, which is authoritative",
    ),
    NoEffect(r"patch\.muon_optimizer", "--optimizer muon alone chooses it"),
    NoEffect(r"patch\..*", "nothing is patched: exact clipping, scaling and loading are built in"),
    NoEffect(r"loss_cfg\..*", "the load-balancing loss stays on the device"),
    NoEffect(r".*", "it belongs to another kind of model or to another entry script"),
)

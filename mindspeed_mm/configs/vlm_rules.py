"""Why keys of published model.json files have no effect on the Megatron backend, or are refused there."""

from __future__ import annotations

from typing import Any

from mindspeed_mm.configs import model_rules
from mindspeed_mm.configs.published import NoEffect, Refused, is_given, is_on
from mindspeed_mm.configs.scalars import read_bool, read_float, show

_TEXT, _VISION, _PROJECTOR = "text_decoder", "image_encoder.vision_encoder", "image_encoder.vision_projector"
_PART = r"(image_encoder|text_decoder)(\.\w+)*"


def _fixed(path: str, *values: Any) -> Refused:
    """A key whose only values are those that the model is built with anyway."""
    words = " or ".join(show(value).strip("'") for value in values)
    return Refused(path, lambda given: not _is_one_of(given, values), f"this model is built with {words} only")


def _is_one_of(given: object, values: tuple[Any, ...]) -> bool:
    if given is None:
        return True
    for value in values:
        try:
            read = read_bool if isinstance(value, bool) else read_float if isinstance(value, float) else str
            if read(given) == value:
                return True
        except ValueError:
            continue
    return False


def _is_other_rope(value: object) -> bool:
    kind = value.get("rope_type", value.get("type", "default")) if isinstance(value, dict) else value
    return value is not None and kind not in ("default", "mrope")


_FIXED = (
    _fixed(f"{_TEXT}.activation_func", "silu"),
    _fixed(f"{_TEXT}.normalization", "RMSNorm"),
    _fixed(f"{_TEXT}.gated_linear_unit", True),
    _fixed(f"{_TEXT}.add_bias_linear", False),
    _fixed(f"{_TEXT}.disable_bias_linear", True),
    _fixed(f"{_TEXT}.position_embedding_type", "mrope", "rope"),
    _fixed(f"{_TEXT}.rotary_percent", 1.0),
    _fixed(f"{_TEXT}.is_encoder_decoder", False),
    _fixed(f"{_TEXT}.hidden_dropout", 0.0),
    _fixed(f"{_VISION}.activation_func", "silu"),
    _fixed(f"{_VISION}.normalization", "RMSNorm"),
    _fixed(f"{_VISION}.gated_linear_unit", True),
    _fixed(f"{_VISION}.add_bias_linear", True),
    _fixed(f"{_VISION}.add_qkv_bias", True),
    _fixed(f"{_VISION}.qk_layernorm", False),
    _fixed(f"{_VISION}.post_layer_norm", False),
    _fixed(f"{_VISION}.attention_dropout", 0.0),
    _fixed(f"{_VISION}.hidden_dropout", 0.0),
    _fixed(f"{_VISION}.drop_path_rate", 0.0),
    _fixed(f"{_PROJECTOR}.activation_func", "gelu"),
    _fixed(f"{_PROJECTOR}.normalization", "RMSNorm"),
    _fixed(f"{_PROJECTOR}.gated_linear_unit", False),
    _fixed(f"{_PROJECTOR}.add_bias_linear", True),
    _fixed(f"{_PROJECTOR}.use_postshuffle_norm", False),
)
_WITH_FSDP2 = "it is not there yet on the Megatron backend; add --use-torch-fsdp2"

REFUSED_VLM_KEYS = (
    *_FIXED,
    Refused(f"{_TEXT}.rope_scaling", _is_other_rope, "only the default rotary positions are there; write null"),
    Refused(f"{_TEXT}.num_moe_experts", is_given, "models with experts are not there yet on the Megatron backend"),
    *(Refused(path, is_given, _WITH_FSDP2) for path in ("audio_encoder", "video_encoder", "text_encoder")),
    Refused("dist_config", is_given, "a layout of its own for a part of the model is not there yet; remove the key"),
    Refused("reward_process", is_on, "reward models are not there; write false"),
    Refused("vision_encoder.freeze", is_given, f"write {_VISION}.freeze"),
    Refused("vision_projector.freeze", is_given, f"write {_PROJECTOR}.freeze"),
    *model_rules.REFUSED_MODEL_KEYS,
    Refused(
        "freeze",
        is_given,
        f"freezing by a list of paths is not there yet on the Megatron backend; write {_VISION}.freeze, "
        f"{_PROJECTOR}.freeze or {_TEXT}.freeze, or add --use-torch-fsdp2",
    ),
)

IDLE_VLM_KEYS = (
    NoEffect("|".join(rule.path.replace(".", r"\.") for rule in _FIXED), "the model is built so anyway"),
    NoEffect(rf"{_PART}\.(model_id|model_name)", "model_id or the HF directory says which model it is"),
    NoEffect(rf"{_PART}\.(bf16|fp16|params_dtype|dtype)|dtype", "precision comes from --bf16 and --fp16"),
    NoEffect(
        rf"{_PART}\.(tp|pp|cp|\w+_parallel_size|sequence_parallel|parallel_output|use_vit_dp)",
        "every part has the layout of the flags",
    ),
    NoEffect(
        rf"{_PART}\.(use_fused_\w+|use_infer_fa|use_remove_padding|use_npu_fused_moe|bias_\w+_fusion|attn_\w+"
        r"|\w+_implementation|attention_softmax_in_fp32|attention_mask_type|is_causal|apply_rotary_\w+)"
        r"|\w+_implementation",
        "the kernels are megatron-core's and PyTorch's own",
    ),
    NoEffect(
        rf"{_PART}\.(activation_offload|synchronize_per_layer)|activation_offload_plan.*",
        "memory is saved by recompute_granularity and activation_offload of a part, and by the parallel sizes",
    ),
    NoEffect(r"image_encoder\.\w+\.llm_hidden_size", "the language model says its hidden size"),
    NoEffect(r"text_decoder\.seq_length", "the longest row comes from --seq-length"),
    NoEffect(r"text_decoder\.tokenizer_type", "the tokenizer comes from data.json's model_name_or_path"),
    NoEffect(
        r"text_decoder\.(use_chunk_loss|chunk_size)|enable_chunk_loss|chunkloss_plan.*",
        "chunked loss is loss_cfg.compute_mode",
    ),
    NoEffect(r"recompute(_plan.*)?", "recompute comes from the flags, or from a part's recompute_granularity"),
    NoEffect(_PART, "another family's structure; that of this model comes from the HF directory or its own keys"),
    NoEffect(r"patch\.muon_optimizer", "--optimizer muon alone chooses it"),
    NoEffect(r"patch\..*", "nothing is patched: exact clipping, scaling and loading are built in"),
    NoEffect(r"loss_cfg\..*", "models with experts are not there yet on the Megatron backend"),
    NoEffect(r".*", "it belongs to another kind of model or to another entry script"),
)

"""model.json as published scripts of Qwen2.5-VL hold it: every key, with the values of each size."""

from __future__ import annotations

from typing import Any

_TEXT: dict[str, dict[str, Any]] = {
    "3b": {"num_layers": 36, "hidden_size": 2048, "ffn_hidden_size": 11008, "vocab_size": 151936},
    "7b": {"num_layers": 28, "hidden_size": 3584, "ffn_hidden_size": 18944, "vocab_size": 152064},
    "32b": {"num_layers": 64, "hidden_size": 5120, "ffn_hidden_size": 27648, "vocab_size": 152064},
    "72b": {"num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 29568, "vocab_size": 152064},
}
_HEADS = {"3b": (16, 2), "7b": (28, 4), "32b": (40, 8), "72b": (64, 8)}
_STAGES = {
    "3b": ([36], [32]),
    "7b": ([1, 10, 10, 7], [32, 0, 0, 0]),
    "32b": ([1, 9, 9, 9, 9, 9, 9, 9], [32, 0, 0, 0, 0, 0, 0, 0]),
    "72b": ([5, 25, 25, 25], [32, 0, 0, 0]),
}
_MLP = {"3b": 3420, "7b": 3420, "32b": 3456, "72b": 3456}
_WIDTH_FOR_LLM = {"3b": 1280, "7b": 3584, "32b": 3584, "72b": 8192}
SIZES = tuple(_TEXT)


def published_model(size: str, **keys: Any) -> dict[str, Any]:
    """The file of one size; `keys` are added at the top."""
    text_stages, vision_stages = _STAGES[size]
    heads, groups = _HEADS[size]
    hidden = _TEXT[size]["hidden_size"]
    vision = {
        "model_id": "qwen2_5_vit" if size == "72b" else "qwen2vit",
        "num_layers": 32,
        "pipeline_num_layers": vision_stages,
        "hidden_size": 1280,
        "ffn_hidden_size": _MLP[size],
        "intermediate_size": _MLP[size],
        "num_attention_heads": 16,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_attn_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "llm_hidden_size": _WIDTH_FOR_LLM[size],
        "activation_func": "silu",
        "attention_dropout": 0.0,
        "attention_mask_type": "general",
        "bf16": True,
        "bias_activation_fusion": True,
        "fp16": False,
        "freeze": True,
        "gated_linear_unit": True,
        "hidden_dropout": 0.0,
        "layernorm_epsilon": 1e-06,
        "normalization": "RMSNorm",
        "params_dtype": "bf16",
        "post_layer_norm": False,
        "use_fused_rotary_pos_emb": True,
        "use_vit_dp": False,
    }
    projector = {
        "model_id": "lnmlp",
        "num_layers": 1,
        "input_size": 1280,
        "ffn_hidden_size": 5120,
        "hidden_size": hidden,
        "activation_func": "gelu",
        "add_bias_linear": True,
        "bf16": True,
        "bias_activation_fusion": False,
        "context_parallel_size": 1,
        "freeze": True,
        "gated_linear_unit": False,
        "layernorm_epsilon": 1e-06,
        "normalization": "RMSNorm",
        "params_dtype": "bf16",
    }
    text = {
        **_TEXT[size],
        "model_id": "qwen2_5_lm",
        "pipeline_num_layers": text_stages,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "group_query_attention": True,
        "max_position_embeddings": 128000,
        "mrope_section": [16, 24, 24],
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "untie_embeddings_and_output_weights": size != "3b",
        "activation_func": "silu",
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "bf16": True,
        "bias_activation_fusion": True,
        "cp": 1,
        "disable_bias_linear": True,
        "gated_linear_unit": True,
        "hidden_dropout": 0.0,
        "init_method_std": 0.01,
        "is_encoder_decoder": False,
        "layernorm_epsilon": 1e-06,
        "normalization": "RMSNorm",
        "parallel_output": size != "3b",
        "params_dtype": "bf16",
        "position_embedding_type": "mrope",
        "pp": 1,
        "seq_length": 1024,
        "sequence_parallel": False,
        "tokenizer_type": "PretrainedFromHF",
        "tp": 1,
        "use_fused_rotary_pos_emb": True,
        "use_infer_fa": True,
        "use_remove_padding": False,
    }
    return {
        "model_id": "qwen2_5vl",
        "img_context_token_id": 151655,
        "vision_start_token_id": 151652,
        "image_encoder": {"cp": 1, "pp": 1, "tp": 1, "vision_encoder": vision, "vision_projector": projector},
        "text_decoder": text,
        "text_encoder": None,
        "video_encoder": None,
        "patch": {"bridge_patch": False, "infer_fa": True},
        **keys,
    }


#: keys that published files of other entry scripts (inference, evaluation) hold beside these
ELSEWHERE: dict[str, Any] = {
    "dataset_path": "./AI2D_TEST.tsv",
    "device": "npu",
    "dtype": "bf16",
    "evaluation_dataset": "ai2d_test",
    "evaluation_model": "qwen2_vl_7b",
    "generation_config": {"do_sample": True, "eos_token_id": [151645, 151643], "top_k": 1, "min_p": None},
    "image_path": "sources/images/demo/demo.jpeg",
    "max_pixels": 12845056,
    "min_pixels": 1003520,
    "pipeline_class": "Qwen2VlPipeline",
    "prompts": "Describe this image and keep it within 100 words.",
    "result_output_path": "./evaluation_outputs/",
    "tokenizer": {"autotokenizer_name": "AutoTokenizer", "from_pretrained": "hf", "hub_backend": "hf"},
    "use_custom_prompt": False,
}

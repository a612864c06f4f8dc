"""A decoder of Megatron-core's modules with the numbers of a transformers configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_mm.models.common.megatron_layers import RMSNorm, decoder_layer_spec
from mindspeed_mm.utils.errors import ConfigError


@dataclass(frozen=True)
class ParallelSizes:
    """How a model is split.

    Attributes:
        tensor, pipeline, virtual_pipeline: parallel sizes; virtual_pipeline is None without interleaving.
        sequence_parallel: norms and residuals on a part of the sequence each tensor-parallel rank.
        params_dtype: of parameters.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    sequence_parallel: bool = False
    params_dtype: torch.dtype = torch.float32


def language_config(hf_config: Any, sizes: ParallelSizes) -> TransformerConfig:
    """Megatron-core's configuration for a decoder that transformers describes.

    Dropout, norm epsilon, biases and head sizes are those of `hf_config`, never Megatron's defaults.

    Args:
        hf_config: the text configuration, of the Llama kind: pre-norm, RMS norms, rotary positions, gated SiLU MLP.

    Raises:
        ConfigError: heads, groups or widths don't divide by the tensor-parallel size, or the activation is another one.
    """
    heads, groups = hf_config.num_attention_heads, hf_config.num_key_value_heads
    for what, number in (
        ("num_attention_heads", heads),
        ("num_key_value_heads", groups),
        ("intermediate_size", hf_config.intermediate_size),
        ("vocab_size", hf_config.vocab_size),
    ):
        if number % sizes.tensor:
            fitting = [n for n in range(1, sizes.tensor) if number % n == 0]
            raise ConfigError(
                f"--tensor-model-parallel-size {sizes.tensor}: the model's {what} is {number}, which does not divide "
                f"by it; sizes that do: {', '.join(map(str, fitting))}"
            )
    if hf_config.hidden_act != "silu":
        raise ConfigError(f"config.json: hidden_act is '{hf_config.hidden_act}'; this decoder has silu")
    return TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
        ffn_hidden_size=hf_config.intermediate_size,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        add_bias_linear=False,
        add_qkv_bias=has_qkv_bias(hf_config),
        qk_layernorm=has_qk_norm(hf_config),
        hidden_dropout=0.0,
        attention_dropout=getattr(hf_config, "attention_dropout", 0.0) or 0.0,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline,
        sequence_parallel=sizes.sequence_parallel,
        params_dtype=sizes.params_dtype,
        pipeline_dtype=sizes.params_dtype,
        # with two stages and interleaving, batched sends between the same two ranks would cross, without an error
        overlap_p2p_comm=sizes.virtual_pipeline is not None,
        batch_p2p_comm=sizes.virtual_pipeline is None,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )


def has_qk_norm(hf_config: Any) -> bool:
    """Whether the family normalises queries and keys."""
    return hf_config.model_type.startswith("qwen3")


def has_qkv_bias(hf_config: Any) -> bool:
    """Whether the projections of queries, keys and values have a bias."""
    return bool(getattr(hf_config, "attention_bias", hf_config.model_type.startswith("qwen2")))


def build_language_model(
    hf_config: Any,
    config: TransformerConfig,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
) -> GPTModel:
    """Build this rank's part of the decoder; its weights are random.

    Args:
        config: from `language_config`.
        pre_process, post_process: whether this stage holds the embedding, and the head.
        vp_stage: which chunk of this pipeline rank; None without interleaving.
    """
    spec = decoder_layer_spec(qk_norm=config.qk_layernorm)
    rope = hf_config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(f"config.json: rope_type is '{rope['rope_type']}'; this decoder has the default one")
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=RMSNorm),
        hf_config.vocab_size,
        hf_config.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        vp_stage=vp_stage,
    )

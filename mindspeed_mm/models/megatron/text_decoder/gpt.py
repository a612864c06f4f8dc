"""A decoder of Megatron-core's modules, built from a transformers configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_mm.configs.family_structure import FamilyStructure
from mindspeed_mm.models.common.log_probabilities import HeadInputs
from mindspeed_mm.models.common.loss import LossOptions, Targets, chunked_cross_entropy
from mindspeed_mm.models.megatron.family import MegatronFamily
from mindspeed_mm.models.megatron.layers import RMSNorm
from mindspeed_mm.parallel import collectives
from mindspeed_mm.parallel.sizes import ParallelSizes
from mindspeed_mm.parallel.world import RankSet
from mindspeed_mm.utils.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def language_config(hf_config: PretrainedConfig, sizes: ParallelSizes, structure: FamilyStructure) -> TransformerConfig:
    """Return Megatron-core's configuration for the decoder of a transformers configuration.

    Dropout, norm epsilon, biases and head sizes are those of `hf_config`, never Megatron's defaults.

    Args:
        hf_config: the text configuration of a Llama-like decoder (pre-norm, RMS norms, rotary positions, gated SiLU
            MLP).
        sizes: the parallel layout.
        structure: properties of the family that the configuration doesn't state.

    Raises:
        ConfigError: heads, groups or widths aren't divisible by the tensor-parallel size, the activation is not SiLU,
            or a layer has sliding-window attention.
    """
    _refuse_misfits(hf_config, sizes)
    heads = hf_config.num_attention_heads
    dtype = sizes.params_dtype
    return TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        num_attention_heads=heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
        ffn_hidden_size=hf_config.intermediate_size,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        add_bias_linear=False,
        add_qkv_bias=structure.has_qkv_bias(hf_config),
        qk_layernorm=structure.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=getattr(hf_config, "attention_dropout", 0.0) or 0.0,
        mrope_section=hf_config.rope_parameters.get("mrope_section"),
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline,
        sequence_parallel=sizes.sequence_parallel and sizes.tensor > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        variable_seq_lengths=sizes.variable_seq_lengths,
        moe_token_dispatcher_type="alltoall",  # Megatron-core requires it with variable lengths, even without experts
        # with two stages and interleaving, batched sends between the same two ranks would cross, without an error
        overlap_p2p_comm=sizes.virtual_pipeline is not None,
        batch_p2p_comm=sizes.virtual_pipeline is None,
        # sums of token losses are divided once, by the global batch's tokens; Megatron-core must not divide them
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )


def _refuse_misfits(hf_config: PretrainedConfig, sizes: ParallelSizes) -> None:
    """Raise the errors that `language_config` documents."""
    for what, number in (
        ("num_attention_heads", hf_config.num_attention_heads),
        ("num_key_value_heads", hf_config.num_key_value_heads),
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
    other = [kind for kind in getattr(hf_config, "layer_types", None) or () if kind != "full_attention"]
    if other:
        raise ConfigError(
            f"config.json: layer_types has {len(other)} layers of {other[0]}; this decoder's layers attend to the "
            "whole row; set use_sliding_window to false, or add --use-torch-fsdp2"
        )


def recompute_for(recompute: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the recompute settings for a block of `layers` layers, with no more recomputed layers than it has."""
    settings = {k: v for k, v in recompute.items() if v is not None}
    if settings.get("recompute_granularity") is None or not layers:
        return {}
    if settings["recompute_granularity"] == "full":
        settings["recompute_num_layers"] = min(settings.get("recompute_num_layers", 1), layers)
    return settings


class LanguageModel(GPTModel):
    """Megatron-core's GPTModel whose last stage returns hidden states, which are projected separately.

    In packed rows the rotary angles restart with each sample; Megatron-core's own follow the whole row.
    """

    def _preprocess(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, *args: Any, packed_seq_params: Any = None, **kw: Any
    ) -> tuple[Any, ...]:
        prepared = super()._preprocess(input_ids, position_ids, *args, packed_seq_params=packed_seq_params, **kw)
        if packed_seq_params is None or self.position_embedding_type != "rope":
            return prepared
        hidden, angles, *rest = prepared  # angles [sequence, 1, 1, head size]
        return hidden, angles[position_ids.t(), 0], *rest

    def _postprocess(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return the hidden states [sequence, batch, hidden]; the last stage gathers sequence-parallel parts."""
        if self.post_process and self.config.sequence_parallel:
            # the head sums the gradient over its ranks, and each rank keeps its part of the sequence
            return tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        return hidden_states

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project [..., batch, hidden] to the logits of this rank's part of the vocabulary."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden, weight=weight)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project [sequence, batch, hidden] to logits [batch, sequence, vocabulary], gathered on every rank."""
        logits = tensor_parallel.gather_from_tensor_model_parallel_region(self.project(hidden))
        return logits.transpose(0, 1)

    def loss_sum(
        self,
        hidden: torch.Tensor,
        targets: Targets,
        options: LossOptions,
        factor: float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sum of the weighted cross-entropy over the target positions.

        Args:
            hidden: [sequence, batch, hidden].
            targets: target positions in [batch * sequence].
            options: say how many logits may exist at once.
            factor: approximate gradient of the sum in backward; None: gradients stay in range without it.

        Returns:
            float32 scalar, the same on every tensor-parallel rank.
        """
        flat = hidden.transpose(0, 1).flatten(0, 1).index_select(0, targets.index)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        chunk = options.positions_per_chunk(hidden.shape[1], len(targets.tokens), len(weight))
        if chunk is None:
            logits = self.project(flat.unsqueeze(1)).float()
            losses = tensor_parallel.vocab_parallel_cross_entropy(logits, targets.tokens.unsqueeze(1)).squeeze(1)
            return losses.sum() if targets.weights is None else (losses * targets.weights).sum()
        with torch.no_grad():
            self.project(flat[:0].unsqueeze(1))  # the layer's hooks wait for its weight, with --overlap-param-gather
        size = parallel_state.get_tensor_model_parallel_world_size()
        group = parallel_state.get_tensor_model_parallel_group()
        ranks = RankSet(parallel_state.get_tensor_model_parallel_rank(), size, group) if size > 1 else None
        inputs = HeadInputs(flat if ranks is None else collectives.copy(flat, ranks), weight, None)
        return chunked_cross_entropy(inputs, targets, chunk, factor=factor, ranks=ranks)


def build_language_model(
    hf_config: PretrainedConfig,
    sizes: ParallelSizes,
    family: MegatronFamily,
    *,
    tied: bool,
    layers: range | None = None,
    pre_process: bool = True,
    post_process: bool = True,
) -> LanguageModel:
    """Build a stage's part of the decoder; its weights are random, on the device of the context.

    Args:
        hf_config: the text configuration.
        sizes: the parallel layout.
        family: the Megatron-core form of the model's family.
        tied: whether the head shares the embedding's weight.
        layers: numbers of the stage's layers in the whole model; None: all layers.
        pre_process, post_process: whether this stage has the embedding, and the head.
    """
    layers = range(hf_config.num_hidden_layers) if layers is None else layers
    rope = hf_config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(f"config.json: rope_type is '{rope['rope_type']}'; this decoder has the default one")
    config = language_config(hf_config, sizes, family.structure)
    # a stage is built as a separate model: `layers` states which layers it has, not Megatron-core's pipeline sizes
    config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size = 1, None
    config.num_layers = len(layers)
    for name, value in recompute_for(sizes.recompute, len(layers)).items():
        setattr(config, name, value)
    spec = family.spec_of_layer(config)
    model = LanguageModel(
        config,
        TransformerBlockSubmodules(layer_specs=[spec] * len(layers), layer_norm=RMSNorm),
        hf_config.vocab_size,
        hf_config.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="mrope" if config.mrope_section else "rope",
        rotary_base=rope["rope_theta"],
        scatter_embedding_sequence_parallel=False,
    )
    if post_process:
        # hidden states are gathered before target positions are chosen
        model.output_layer.sequence_parallel = False
        model.output_layer.allreduce_dgrad = sizes.tensor > 1
    if tied and pre_process != post_process:
        copy = model.shared_embedding_or_output_weight()
        copy.shared_embedding = True  # it gets its own gradient bucket, with the same shards on both stages
        copy.shared = post_process  # counted once in the gradient's norm
    return model

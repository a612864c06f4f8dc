"""Layers for Megatron-core's specs that run on every device, without Transformer Engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    LinearWithGradAccumulationAndAsyncCommunication,
    RowParallelLinear,
    custom_fwd,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.fused import FusedKernels
from mindspeed_mm.utils.log import notice


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, computed in float32 as in transformers' models.

    Under sequence parallelism a rank's gradient covers its part of the sequence only; the attribute `sequence_parallel`
    of the weight makes Megatron-core sum it over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., hidden]; the result has the same shape and dtype."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class FusedRMSNorm(RMSNorm):
    """`RMSNorm` by the device's fused kernel, which `use_fused_norms` has found."""

    kernels: FusedKernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., hidden]; the result has the same shape and dtype."""
        return self.kernels.rms_norm(x, self.weight, self.eps)


def use_fused_norms(chunk: nn.Module) -> None:
    """Let the norms of a chunk compute by the device's fused kernel; where there is none, that is said once."""
    device = accelerator.current()
    kernels = device.fused_kernels()
    if kernels is None:
        notice(f"--use-fused-rmsnorm: no effect here: {device.why_no_fused_kernels()}")
        return
    for module in chunk.modules():
        if type(module) is RMSNorm:
            fused: Any = module
            fused.__class__, fused.kernels = FusedRMSNorm, kernels


class _LinearOverRanks(LinearWithGradAccumulationAndAsyncCommunication):
    """Megatron-core's linear function, with its exchanges and its backward pass; the bias is added before rounding."""

    @staticmethod
    @custom_fwd
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[torch.Tensor] | None,
        wgrad_deferral_limit: int | None,
        tp_group: Any,
    ) -> torch.Tensor:
        """[rows, batch, in] → [rows, batch, out]; `ctx` gets what `backward` reads."""
        ctx.save_for_backward(input, weight)
        ctx.main_grad = getattr(weight, "main_grad", None) if gradient_accumulation_fusion else None
        ctx.use_bias = True
        ctx.gradient_accumulation_fusion = gradient_accumulation_fusion
        ctx.allreduce_dgrad = allreduce_dgrad
        ctx.sequence_parallel = sequence_parallel
        ctx.grad_output_buffer = grad_output_buffer
        ctx.wgrad_deferral_limit = wgrad_deferral_limit
        ctx.tp_group = tp_group
        whole = gather_from_sequence_parallel_region(input, group=tp_group) if sequence_parallel else input
        return F.linear(whole, weight, bias)


class ColumnLinear(ColumnParallelLinear):
    """Megatron-core's linear layer whose outputs are split over tensor-parallel ranks.

    It adds its bias before its output is rounded, as torch's linear layers do. Megatron-core rounds the product and
    then the sum, which is half as much error again in bfloat16, and leaves some biases to the caller to add.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.skip_bias_add = False

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **how: Any
    ) -> torch.Tensor:
        if bias is None:
            return super()._forward_impl(input, weight, bias=bias, **how)
        if weight.requires_grad:
            names = ("gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel", "grad_output_buffer")
            given = [how[name] for name in (*names, "wgrad_deferral_limit", "tp_group")]
            return _LinearOverRanks.apply(input, weight, bias, *given)
        if how["sequence_parallel"]:
            input = gather_from_sequence_parallel_region(input, group=how["tp_group"])
        elif how["allreduce_dgrad"]:
            input = copy_to_tensor_model_parallel_region(input, group=how["tp_group"])
        return F.linear(input, weight, bias)


class RowLinear(RowParallelLinear):
    """Megatron-core's linear layer whose inputs are split over tensor-parallel ranks.

    The first rank adds the bias, before its part of the sum over ranks is rounded; see `ColumnLinear`.
    """

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[rows, batch, in of this rank] → [rows, batch, out], with sequence parallelism this rank's rows; and the
        bias if it is left to the caller to add."""
        if self.bias is None or not self.input_is_parallel:
            return super().forward(input_)
        output = F.linear(input_, self.weight, self._own_share(self.bias))
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(output, group=self.tp_group), None
        return reduce_from_tensor_model_parallel_region(output, group=self.tp_group), None

    def _own_share(self, bias: torch.Tensor) -> torch.Tensor:
        """Return what this rank adds, with the gradient that Megatron-core expects of it.

        Under sequence parallelism it sums biases' gradients over ranks; otherwise each rank has the whole gradient.
        """
        if self.tp_group.rank() == 0:
            return bias
        return bias * 0 if self.sequence_parallel else bias - bias.detach()


@dataclass
class SampleLengths(PackedSeqParams):
    """Sample lengths of packed rows; Megatron-core passes them to the core attention of every layer.

    Attributes:
        lengths: the sample lengths of each row, padding included; on the host.
    """

    qkv_format: str = "sbhd"  # not "thd": tensors keep the shapes that they have without packing
    lengths: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # the length of Megatron-core's rotary tables
        self.max_seqlen_q = self.max_seqlen_kv = sum(self.lengths[0])


def with_gradient(hidden: torch.Tensor, blocks: TransformerBlock) -> torch.Tensor:
    """Return the input of recomputed blocks, which need one that requires a gradient if they are trained.

    Megatron-core's recompute runs no backward pass otherwise.
    """
    recomputed = blocks.config.recompute_granularity == "full"
    if recomputed and not hidden.requires_grad and any(p.requires_grad for p in blocks.parameters()):
        return hidden.detach().requires_grad_()
    return hidden


class CoreAttention(nn.Module):
    """Scaled dot-product attention of one tensor-parallel rank's heads.

    Megatron-core's SelfAttention builds it instead of its own core attention; keys and values of grouped queries are
    not repeated in memory.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        self.is_causal = attn_mask_type == AttnMaskType.causal
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """
        Args:
            query: [sequence, batch, heads, head size]; key, value: the same with the groups' heads.
            attention_mask: bool [batch, heads, sequence, sequence], True: masked out. None: causal, or no mask, as the
                layer's mask type states.
            packed_seq_params: SampleLengths of packed rows, whose samples don't attend to each other; they replace the
                mask.

        Returns:
            [sequence, batch, heads * head size].
        """
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        if isinstance(packed_seq_params, SampleLengths):
            out = self._attend_in_samples(q, k, v, packed_seq_params.lengths)
        else:
            out = self._attend(q, k, v, attention_mask)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if attention_mask is None else ~attention_mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal and attention_mask is None,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )

    def _attend_in_samples(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[list[int]]
    ) -> torch.Tensor:
        """Attend sample by sample, without a mask of a row's length squared: [batch, heads, sequence, head size]."""
        rows = []
        for number, row in enumerate(lengths):
            own = (t[number : number + 1].split(row, dim=2) for t in (q, k, v))
            rows.append(torch.cat([self._attend(*sample) for sample in zip(*own, strict=True)], dim=2))
        return torch.cat(rows)


def decoder_layer_spec(*, qk_norm: bool) -> ModuleSpec:
    """Return the spec of a pre-norm decoder layer with grouped-query attention and a gated MLP.

    Args:
        qk_norm: whether queries and keys are normalised.
    """
    norm = RMSNorm if qk_norm else IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnLinear,
                    core_attention=CoreAttention,
                    linear_proj=RowLinear,
                    q_layernorm=norm,
                    k_layernorm=norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def layer_spec_of(config: TransformerConfig) -> ModuleSpec:
    """Return `decoder_layer_spec`, with norms of queries and keys if the configuration asks for them."""
    return decoder_layer_spec(qk_norm=config.qk_layernorm)

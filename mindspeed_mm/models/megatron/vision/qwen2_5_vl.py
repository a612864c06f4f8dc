"""Qwen2.5-VL's vision tower and projector, built of Megatron-core's modules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from mindspeed_mm.models.common.megatron_names import ParamMapping
from mindspeed_mm.models.megatron.layers import ColumnLinear, RMSNorm, RowLinear, decoder_layer_spec, with_gradient
from mindspeed_mm.models.megatron.text_decoder.gpt import recompute_for
from mindspeed_mm.models.megatron.vision.names import tower_tensor
from mindspeed_mm.models.megatron.vision.segments import (
    Float32RotarySelfAttention,
    Reorder,
    SegmentAttention,
    Segments,
    VisionSegments,
    spread_index,
)
from mindspeed_mm.parallel.sizes import ParallelSizes
from mindspeed_mm.utils.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NORM_EPSILON = 1e-6  # fixed by the architecture; it is not in configurations


def vision_config(hf_config: PretrainedConfig, sizes: ParallelSizes) -> TransformerConfig:
    """Return Megatron-core's configuration for the blocks of the tower of a transformers configuration.

    Args:
        hf_config: the vision configuration.
        sizes: the parallel layout.

    Raises:
        ConfigError: heads or widths aren't divisible by the tensor-parallel size, or the activation or the kind of
            position embedding is not supported.
    """
    numbers = {
        "num_heads": hf_config.num_heads,
        "intermediate_size": hf_config.intermediate_size,
        "hidden_size * spatial_merge_size²": _merged_width(hf_config),
    }
    for what, number in numbers.items():
        if number % sizes.tensor:
            fitting = [n for n in range(1, sizes.tensor) if not any(m % n for m in numbers.values())]
            raise ConfigError(
                f"--tensor-model-parallel-size {sizes.tensor}: the vision tower's {what} is {number}, which does not "
                f"divide by it; smaller sizes that do: {', '.join(map(str, fitting))}"
            )
    if hf_config.hidden_act != "silu":
        raise ConfigError(f"config.json: vision_config's hidden_act is '{hf_config.hidden_act}'; this tower has silu")
    rope_type = hf_config.rope_parameters["rope_type"]
    if rope_type != "axial":
        raise ConfigError(f"config.json: vision_config's rope_type is '{rope_type}'; this tower has axial")
    dtype = sizes.params_dtype
    return TransformerConfig(
        num_layers=hf_config.depth,
        hidden_size=hf_config.hidden_size,
        num_attention_heads=hf_config.num_heads,
        kv_channels=hf_config.hidden_size // hf_config.num_heads,
        ffn_hidden_size=hf_config.intermediate_size,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=_NORM_EPSILON,
        add_bias_linear=True,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=hf_config.initializer_range,
        tensor_model_parallel_size=sizes.tensor,
        sequence_parallel=False,  # the number of patches isn't divisible by the number of ranks
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )


def _merged_width(hf_config: PretrainedConfig) -> int:
    return hf_config.hidden_size * hf_config.spatial_merge_size**2


def block_spec(whole: bool) -> ModuleSpec:
    """Return the spec of a block of the tower.

    Args:
        whole: whether it attends to whole images; otherwise it attends to windows.
    """
    spec = decoder_layer_spec(qk_norm=False)
    attention = spec.submodules.self_attention
    attention.module = Float32RotarySelfAttention
    attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    attention.submodules.core_attention = ModuleSpec(SegmentAttention, {"whole": whole})
    return spec


@dataclass(frozen=True)
class PatchLayout:
    """Layout of a micro-batch's patches; made on the host, and moved with the micro-batch.

    In the tower's order of patches, those of a window are consecutive, and windows of equal length are grouped.

    Attributes:
        patches: int64 [patches], the images' patches in the tower's order.
        back: int64 [merged], the tower's merged patches in the order of the images.
        forth: int64 [merged], the inverse of `back`.
        segments: the patches, in the tower's order, that attend to each other.
        angles: float32 [patches, 1, 1, head size], the angles of the rotary embedding.
    """

    patches: torch.Tensor
    back: torch.Tensor
    forth: torch.Tensor
    segments: VisionSegments
    angles: torch.Tensor

    @classmethod
    def of_grids(cls, grid: torch.Tensor, hf_config: PretrainedConfig) -> PatchLayout:
        """Compute the layout of images and videos.

        Args:
            grid: int64 [images, 3] on the host: frames, height and width in patches.
            hf_config: the vision configuration.
        """
        merge = hf_config.spatial_merge_size
        unit = merge * merge
        index, ends = get_vision_window_index(grid, merge, hf_config.window_size, hf_config.patch_size)
        lengths = ends.long().diff() // unit
        windows = Segments.of_lengths(lengths, torch.arange(len(lengths)).repeat_interleave(lengths))
        if windows.order is not None:
            index = index[windows.order]
        windows = Segments(windows.groups)
        frames = (grid[:, 1] * grid[:, 2] // unit).repeat_interleave(grid[:, 0])
        whole = Segments.of_lengths(frames, torch.arange(len(frames)).repeat_interleave(frames)[index])
        patches = spread_index(index, unit)
        positions = get_vision_position_ids(grid, merge)[patches]
        head_size = hf_config.hidden_size // hf_config.num_heads
        angles = _axial_angles(positions, head_size, hf_config.rope_parameters["rope_theta"])
        return cls(
            patches,
            index.argsort(),
            index,
            VisionSegments(windows=windows.spread(unit), whole=whole.spread(unit)),
            angles[:, None, None],
        )


def _axial_angles(positions: torch.Tensor, head_size: int, base: float) -> torch.Tensor:
    """Return angles [patches, head_size] float32 for rows and columns [patches, 2].

    The first quarter of the dimensions depends on the row and the second on the column; the second half repeats both.
    """
    half = head_size // 2
    frequencies = 1.0 / (base ** (torch.arange(0, half, 2, dtype=torch.float32) / half))
    return (positions.float().unsqueeze(-1) * frequencies).flatten(1).repeat(1, 2)


class PatchEmbedding(nn.Module):
    """Embedding of a patch's pixels; the weight has the shape of transformers' convolution."""

    def __init__(self, hf_config: PretrainedConfig, dtype: torch.dtype) -> None:
        super().__init__()
        side = hf_config.patch_size
        shape = (hf_config.hidden_size, hf_config.in_channels, hf_config.temporal_patch_size, side, side)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        nn.init.normal_(self.weight, std=hf_config.initializer_range)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Embed [..., channels * frames * side²] of any dtype as [..., hidden]."""
        return F.linear(pixels.to(self.weight.dtype), self.weight.flatten(1))


class VisionEncoder(nn.Module):
    """A stage's part of the vision tower: the patch embedding, blocks, both or neither."""

    def __init__(self, patch_embed: PatchEmbedding | None, blocks: TransformerBlock | None) -> None:
        super().__init__()
        self.patch_embed = patch_embed
        self.blocks = blocks


class PatchMerger(nn.Module):
    """The projector, which merges neighbouring patches and projects them to the language model's width."""

    def __init__(self, hf_config: PretrainedConfig, config: TransformerConfig) -> None:
        super().__init__()
        self.width = _merged_width(hf_config)
        self.norm = RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
        inner = replace(
            config,
            hidden_size=hf_config.out_hidden_size,
            ffn_hidden_size=self.width,
            gated_linear_unit=False,
            activation_func=F.gelu,
        )
        linears = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
        self.mlp = MLP(inner, linears, input_size=self.width, ffn_hidden_size=self.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Merge and project [patches, 1, hidden] to [merged patches, 1, out_hidden]."""
        merged, bias = self.mlp(self.norm(hidden).view(-1, 1, self.width))
        return merged if bias is None else merged + bias


class Qwen2_5_VLImageEncoder(nn.Module):
    """A pipeline stage's part of the vision tower and projector.

    Attributes:
        vision_encoder: patch embedding and blocks, which can be frozen separately.
        vision_projector: the projector, which can be frozen separately; None: the stage has none.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        sizes: ParallelSizes,
        *,
        layers: range,
        has_patch_embedding: bool,
        has_projector: bool,
    ) -> None:
        """Build the stage's parts; their weights are random, on the device of the context.

        Args:
            hf_config: transformers' vision configuration.
            sizes: the parallel layout; its `recompute` settings are limited to the stage's layers.
            layers: numbers of the stage's blocks in the whole tower; the range may be empty.
            has_patch_embedding: whether the stage has the patch embedding.
            has_projector: whether the stage has the projector.

        Raises:
            ConfigError: see `vision_config`.
        """
        super().__init__()
        self.hf_config, self.sizes, self.layers = hf_config, sizes, layers
        config = vision_config(hf_config, sizes)
        self.vision_projector = PatchMerger(hf_config, config) if has_projector else None
        config.num_layers = len(layers)
        for name, value in recompute_for(sizes.recompute, len(layers)).items():
            setattr(config, name, value)
        specs = [block_spec(whole=number in hf_config.fullatt_block_indexes) for number in layers]
        self.vision_encoder = VisionEncoder(
            PatchEmbedding(hf_config, sizes.params_dtype) if has_patch_embedding else None,
            TransformerBlock(config, TransformerBlockSubmodules(layer_specs=specs)) if specs else None,
        )
        self._input: torch.Tensor | None = None

    def set_input_tensor(self, hidden: torch.Tensor | None) -> None:
        """Set the input from the previous stage: [patches, 1, hidden] in the tower's own order."""
        self._input = hidden

    def forward(self, pixel_values: torch.Tensor | None, layout: PatchLayout) -> torch.Tensor:
        """Encode images and videos.

        Args:
            pixel_values: [patches, channels * frames * side²] in the order of the images; None on a stage without
                the patch embedding.
            layout: of the images' patches, on the device of the tower.

        Returns:
            [merged patches, 1, out_hidden] in the order of the images on the stage with the projector; on others the
            hidden states [patches, 1, hidden] for the next stage.

        Raises:
            DataError: the number of patches doesn't match the layout.
        """
        tower = self.vision_encoder
        received, self._input = self._input, None
        source = received if pixel_values is None else pixel_values
        assert source is not None
        if len(source) != len(layout.patches):
            raise DataError(f"{len(source)} patches came with grids of {len(layout.patches)}")
        hidden = source
        if tower.patch_embed is not None:
            hidden = tower.patch_embed(source.index_select(0, layout.patches).unsqueeze(1))
        if tower.blocks is not None:
            hidden = self._run_blocks(tower.blocks, hidden, layout)
        if self.vision_projector is None:
            return hidden
        return Reorder.apply(self.vision_projector(hidden), layout.back, layout.forth)

    def _run_blocks(self, blocks: TransformerBlock, hidden: torch.Tensor, layout: PatchLayout) -> torch.Tensor:
        hidden = with_gradient(hidden, blocks)
        return blocks(hidden, None, rotary_pos_emb=layout.angles, packed_seq_params=layout.segments)

    def param_mapping(self, name: str) -> ParamMapping:
        """Return the transformers tensors that a parameter consists of.

        Args:
            name: name in this module.
        """
        blocks = "vision_encoder.blocks.layers."
        if name.startswith(blocks):
            number, rest = name.removeprefix(blocks).split(".", 1)
            name = f"{blocks}{int(number) + self.layers.start}.{rest}"
        return tower_tensor(name, self.hf_config.num_heads, self.sizes.tensor)

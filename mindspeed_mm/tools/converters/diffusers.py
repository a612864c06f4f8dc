"""Published converters of generation models (hf_to_mm, mm_to_hf, mm_to_dcp, resplit), by their nested arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from mindspeed_mm.tools.converters.generic import checkpoint_to_hf, hf_to_checkpoint
from mindspeed_mm.tools.converters.layouts import EVERY_LAYOUT, require_type
from mindspeed_mm.tools.converters.lora import Factor, merge_adapters, nothing_to_convert_of_adapters
from mindspeed_mm.tools.converters.places import Given, nothing_to_convert, structure
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice

_SOURCE, _TARGET = "--cfg.source_path", "--cfg.target_path"


@dataclass
class TargetParallelConfig:
    """A layout; it has no effect, as a checkpoint fits every layout.

    Args:
        tp_size: tensor-parallel ranks.
        pp_layers: blocks of each pipeline stage, [15,15], or [virtual stage][pipeline rank], [[15,15]].
    """

    tp_size: int = 1
    pp_layers: list[list[int]] | list[int] = field(default_factory=list)


@dataclass
class ConversionPaths:
    """Arguments of a conversion.

    Args:
        source_path: what is read: a diffusers directory (hf_to_mm), or a run folder or checkpoint.
        target_path: what is written.
        target_parallel_config: layout of the run.
        hf_dir: mm_to_hf: diffusers directory with config.json; without it, the one that the run was started from.
    """

    source_path: str
    target_path: str
    target_parallel_config: TargetParallelConfig = field(default_factory=TargetParallelConfig)
    hf_dir: str = ""


@dataclass
class MergePaths:
    """Arguments of a merge.

    Args:
        source_path: diffusers directory of the base transformer.
        target_path: the diffusers directory to write.
        lora_path: run folder, checkpoint, PEFT directory or file with the adapters.
    """

    source_path: str
    target_path: str
    lora_path: str


class _DiffusersConverter:
    class_name: ClassVar[str]
    #: key of config.json with the number of blocks
    blocks: ClassVar[str] = "num_layers"

    def hf_to_mm(self, cfg: ConversionPaths) -> None:
        """Write a diffusers directory's weights as a checkpoint that pretrain_sora.py starts from with --load."""
        source = Given(_SOURCE, cfg.source_path)
        if cfg.hf_dir:
            raise ConfigError(f"--cfg.hf_dir is '{cfg.hf_dir}'; hf_to_mm reads {_SOURCE} alone: leave it out")
        model = structure(source)
        self._check(model, source, cfg.target_parallel_config)
        hf_to_checkpoint(model, source, Given(_TARGET, cfg.target_path))

    def mm_to_hf(self, cfg: ConversionPaths) -> None:
        """Write a checkpoint's weights as a diffusers directory."""
        checkpoint_to_hf(
            Given(_SOURCE, cfg.source_path),
            Given(_TARGET, cfg.target_path),
            Given("--cfg.hf_dir", cfg.hf_dir),
            check=lambda model, given: self._check(model, given, cfg.target_parallel_config),
        )

    def mm_to_dcp(self, cfg: ConversionPaths) -> None:
        """Say what to pass to --load: checkpoints are in torch_dcp already, and nothing is written."""
        nothing_to_convert(Given(_SOURCE, cfg.source_path), "hf_to_mm and runs write torch_dcp already")

    def resplit(self, cfg: ConversionPaths) -> None:
        """Say what to pass to --load: a checkpoint fits every layout, and nothing is split or written."""
        nothing_to_convert(Given(_SOURCE, cfg.source_path), EVERY_LAYOUT)

    def lora_hf_to_mm(self, cfg: ConversionPaths) -> None:
        """Say what to pass to --lora-load: a run reads adapters of diffusers as they are, and nothing is written."""
        nothing_to_convert_of_adapters(Given(_SOURCE, cfg.source_path))

    def merge_lora_to_base(
        self, cfg: MergePaths, lora_alpha: float | None = None, lora_rank: float | None = None
    ) -> None:
        """Write a base transformer with adapters added as a diffusers directory.

        Args:
            cfg: paths.
            lora_alpha: numerator of the factor on the adapters' output, where nothing beside them says it.
            lora_rank: its denominator.
        """
        if (lora_alpha is None) != (lora_rank is None):
            raise ConfigError("--lora_alpha and --lora_rank are given together, or neither: their quotient counts")
        factor = None
        if lora_alpha is not None and lora_rank is not None:
            factor = Factor(f"--lora_alpha {lora_alpha:g} --lora_rank {lora_rank:g}", lora_alpha / lora_rank)
        merge_adapters(
            Given(_SOURCE, cfg.source_path),
            Given("--cfg.lora_path", cfg.lora_path),
            Given(_TARGET, cfg.target_path),
            scaling=factor,
            check=lambda model, given: require_type(model, given, (self.class_name,)),
        )

    def _check(self, model: Any, given: Given, layout: TargetParallelConfig) -> None:
        require_type(model, given, (self.class_name,))
        total, rows = model.config[self.blocks], layout.pp_layers
        found = sum(row if isinstance(row, int) else sum(row) for row in rows)
        if rows and found != total:
            raise ConfigError(
                f"--cfg.target_parallel_config.pp_layers {rows} adds up to {found}; the model has {total} blocks"
            )
        if layout.tp_size < 1:
            raise ConfigError(f"--cfg.target_parallel_config.tp_size is {layout.tp_size}; expected 1 or more")
        if rows or layout.tp_size > 1:
            notice(f"--cfg.target_parallel_config has no effect: {EVERY_LAYOUT}")


class WanConverter(_DiffusersConverter):
    """Weights of Wan's transformer: diffusers directory to a checkpoint and back, by published arguments."""

    class_name = "WanTransformer3DModel"


class HunyuanVideoConverter(_DiffusersConverter):
    """Weights of HunyuanVideo's transformer: diffusers directory to a checkpoint and back, by published arguments."""

    class_name = "HunyuanVideoTransformer3DModel"


class CogVideoConverter(_DiffusersConverter):
    """Weights of CogVideoX's transformer: diffusers directory to a checkpoint and back, by published arguments."""

    class_name = "CogVideoXTransformer3DModel"

"""Published converters to and from checkpoints of a layout (hf_to_mm, mm_to_hf, resplit), by their nested arguments.

A checkpoint here fits every layout, so the layout is checked against the model, and has no other effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from mindspeed_mm.tools.converters.generic import checkpoint_to_hf, hf_to_checkpoint
from mindspeed_mm.tools.converters.lora import adapters_to_peft, nothing_to_convert_of_adapters
from mindspeed_mm.tools.converters.places import Given, nothing_to_convert, structure
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice

EVERY_LAYOUT = "a checkpoint fits every layout"

_HF_DIR = "--cfg.hf_config.hf_dir"


@dataclass
class HfConfig:
    """A HF directory.

    Args:
        hf_dir: HF directory with config.json, weights and tokenizer.
    """

    hf_dir: str


@dataclass
class LlmHfConfig:
    """A HF directory of the language model alone.

    Args:
        hf_dir: refused, the weights of all parts are read from one directory.
    """

    hf_dir: str | None = None


@dataclass
class ParallelConfig:
    """A layout; it is checked, and has no effect, as a checkpoint fits every layout.

    Args:
        llm_pp_layers: language layers of each pipeline stage, [12,16], or [virtual stage][pipeline rank], [[12,16]].
        vit_pp_layers: the same of the vision tower.
        audio_pp_layers: the same of the audio tower.
        tp_size: tensor-parallel ranks.
        vit_tp_size: tensor-parallel ranks of the vision tower; without it, tp_size.
        audio_tp_size: tensor-parallel ranks of the audio tower; without it, tp_size.
        ep_size: expert-parallel ranks.
    """

    llm_pp_layers: list[list[int]] | list[int] | None = None
    vit_pp_layers: list[list[int]] | list[int] | None = None
    audio_pp_layers: list[list[int]] | list[int] | None = None
    tp_size: int = 1
    vit_tp_size: int | None = None
    audio_tp_size: int | None = None
    ep_size: int = 1

    def layers(self) -> dict[str, list[list[int]] | list[int]]:
        """The layers of the parts that are given, by argument."""
        given = {"llm": self.llm_pp_layers, "vit": self.vit_pp_layers, "audio": self.audio_pp_layers}
        return {f"{part}_pp_layers": layers for part, layers in given.items() if layers is not None}

    def tensor_parallel(self) -> dict[str, tuple[str, int]]:
        """PartSizes → the argument with its tensor-parallel ranks, and their number."""
        given = {"vit": self.vit_tp_size, "audio": self.audio_tp_size}
        parts = {p: (f"{p}_tp_size", n) if n is not None else ("tp_size", self.tp_size) for p, n in given.items()}
        return {"llm": ("tp_size", self.tp_size), **parts}


@dataclass
class CommonModelConfig:
    """The form of the weights; there is only one here.

    Args:
        enable_canonical_hf_struct: no effect, weights are stored under transformers' names, and none is fused.
        model_prefix: no effect, adapters are found with PEFT's prefix, and without it.
        new_transformers_weight_key: no effect, names are those of the transformers that is installed.
    """

    enable_canonical_hf_struct: bool | None = None
    model_prefix: str = ""
    new_transformers_weight_key: bool | None = None


@dataclass
class HfToMm:
    """Arguments of hf_to_mm.

    Args:
        mm_dir: receives release/ and latest_checkpointed_iteration.txt.
        hf_config: where the weights are.
        parallel_config: layout of the run.
        common_model_config: form of the weights.
        llm_hf_config: where the language model's weights are, if apart.
        save_vit_only: refused, a checkpoint holds all parts.
        trust_remote_code: let config.json bring Python code of its own.
    """

    mm_dir: str
    hf_config: HfConfig
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    common_model_config: CommonModelConfig = field(default_factory=CommonModelConfig)
    llm_hf_config: LlmHfConfig = field(default_factory=LlmHfConfig)
    save_vit_only: bool = False
    trust_remote_code: bool = False


@dataclass
class MmToHf:
    """Arguments of mm_to_hf.

    Args:
        mm_dir: a run folder (its newest checkpoint is taken), an iter_* or release folder.
        save_hf_dir: the HF directory to write.
        hf_config: where config.json, tokenizer and so on are.
        parallel_config: layout of the run.
        common_model_config: form of the weights.
        trust_remote_code: let config.json bring Python code of its own.
    """

    mm_dir: str
    save_hf_dir: str
    hf_config: HfConfig
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    common_model_config: CommonModelConfig = field(default_factory=CommonModelConfig)
    trust_remote_code: bool = False


@dataclass
class LoraMmToHf:
    """Arguments of lora_mm_to_hf.

    Args:
        mm_dir: a run folder (its newest checkpoint is taken), or a checkpoint of adapters.
        save_hf_dir: the PEFT directory to write.
        parallel_config: layout of the run.
        common_model_config: form of the weights.
    """

    mm_dir: str
    save_hf_dir: str
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    common_model_config: CommonModelConfig = field(default_factory=CommonModelConfig)


@dataclass
class Resplit:
    """Arguments of resplit.

    Args:
        source_dir: a run folder, an iter_* or release folder.
        target_dir: nothing is written, as a checkpoint fits every layout.
        source_parallel_config: layout that the checkpoint was written in.
        target_parallel_config: layout that it is wanted for.
    """

    source_dir: str
    target_dir: str
    source_parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    target_parallel_config: ParallelConfig = field(default_factory=ParallelConfig)


class PartSizes(NamedTuple):
    """Where config.json says the size of a part of a model: its section, and the keys of its layers and heads."""

    section: str
    layers: str
    heads: str


_TEXT = PartSizes("text_config", "num_hidden_layers", "num_attention_heads")
_QWEN_VISION = PartSizes("vision_config", "depth", "num_heads")


class _LayoutConverter:
    model_types: ClassVar[tuple[str, ...]]
    #: prefix of the arguments of a part → where its sizes are
    parts: ClassVar[Mapping[str, PartSizes]] = {"llm": _TEXT, "vit": _QWEN_VISION}

    def hf_to_mm(self, cfg: HfToMm) -> None:
        """Write a HF directory's weights as a checkpoint that either backend starts from with --load, in any layout."""
        if cfg.llm_hf_config.hf_dir is not None:
            raise ConfigError(
                f"--cfg.llm_hf_config.hf_dir is '{cfg.llm_hf_config.hf_dir}'; the weights of all parts are read from "
                f"one directory, {_HF_DIR}: put the language model's there, and leave the argument out"
            )
        if cfg.save_vit_only:
            raise ConfigError("--cfg.save_vit_only is true; a checkpoint holds all parts of a model: leave it out")
        source = Given(_HF_DIR, cfg.hf_config.hf_dir)
        model = structure(source, cfg.trust_remote_code)
        self._check(model, source, cfg.parallel_config, cfg.common_model_config)
        hf_to_checkpoint(model, source, Given("--cfg.mm_dir", cfg.mm_dir))

    def mm_to_hf(self, cfg: MmToHf) -> None:
        """Write the weights of a checkpoint of either backend, from any layout, as a HF directory."""
        checkpoint_to_hf(
            Given("--cfg.mm_dir", cfg.mm_dir),
            Given("--cfg.save_hf_dir", cfg.save_hf_dir),
            Given(_HF_DIR, cfg.hf_config.hf_dir),
            trust_remote_code=cfg.trust_remote_code,
            check=lambda model, given: self._check(model, given, cfg.parallel_config, cfg.common_model_config),
        )

    def resplit(self, cfg: Resplit) -> None:
        """Say what to pass to --load: a checkpoint fits every layout, and nothing is split or written."""
        target = cfg.target_parallel_config.layers()
        for name, layers in cfg.source_parallel_config.layers().items():
            if name in target and _total(layers) != _total(target[name]):
                raise ConfigError(
                    f"--cfg.target_parallel_config.{name} {target[name]} adds up to {_total(target[name])}, and "
                    f"--cfg.source_parallel_config.{name} {layers} to {_total(layers)}; a model has one number of "
                    "layers"
                )
        nothing_to_convert(Given("--cfg.source_dir", cfg.source_dir), EVERY_LAYOUT)

    def _check(self, model: Any, given: Given, layout: ParallelConfig, form: CommonModelConfig) -> None:
        require_type(model, given, self.model_types)
        _check_layout(layout, model.config.to_dict(), self.parts)
        if form.enable_canonical_hf_struct:
            notice(
                "--cfg.common_model_config.enable_canonical_hf_struct has no effect: weights are stored under "
                "transformers' names, and none is fused"
            )


class Qwen2VLConverter(_LayoutConverter):
    """Weights of Qwen2-VL: HF directory to a checkpoint and back, by published arguments."""

    model_types = ("qwen2_vl",)


class Qwen2_5_VLConverter(_LayoutConverter):
    """Weights of Qwen2.5-VL: HF directory to a checkpoint for pretrain_vlm.py and back, by published arguments."""

    model_types = ("qwen2_5_vl",)

    def lora_hf_to_mm(self, cfg: HfToMm) -> None:
        """Say what to pass to --lora-load: a run reads PEFT directories as they are, and nothing is written."""
        nothing_to_convert_of_adapters(Given(_HF_DIR, cfg.hf_config.hf_dir))

    def lora_mm_to_hf(self, cfg: LoraMmToHf) -> None:
        """Write the adapters of a checkpoint of either backend, from any layout, as a PEFT directory."""
        if cfg.parallel_config != ParallelConfig():
            notice(f"--cfg.parallel_config has no effect: {EVERY_LAYOUT}")
        adapters_to_peft(Given("--cfg.mm_dir", cfg.mm_dir), Given("--cfg.save_hf_dir", cfg.save_hf_dir))

    def hf_to_mm_ldt(self, cfg: HfToMm) -> None:
        """The same as hf_to_mm: a checkpoint fits every layout, also those of two sites."""
        self.hf_to_mm(cfg)


class Qwen2_5_OmniConverter(_LayoutConverter):
    """Weights of Qwen2.5-Omni's thinker: HF directory to a checkpoint and back, by published arguments."""

    model_types = ("qwen2_5_omni", "qwen2_5_omni_thinker")
    parts = {
        "llm": _TEXT,
        "vit": _QWEN_VISION,
        "audio": PartSizes("audio_config", "encoder_layers", "encoder_attention_heads"),
    }


class Qwen3VLMegatronConverter(_LayoutConverter):
    """Weights of Qwen3-VL: HF directory to a checkpoint and back, by published arguments."""

    model_types = ("qwen3_vl", "qwen3_vl_moe")


class InternVLConverter(_LayoutConverter):
    """Weights of InternVL in transformers' layout: HF directory to a checkpoint and back, by published arguments."""

    model_types = ("internvl",)
    parts = {"llm": _TEXT, "vit": PartSizes("vision_config", "num_hidden_layers", "num_attention_heads")}


class GlmConverter(_LayoutConverter):
    """Weights of GLM-4.1V: HF directory to a checkpoint and back, by published arguments."""

    model_types = ("glm4v",)


def require_type(model: Any, given: Given, expected: tuple[str, ...]) -> None:
    """Refuse a directory of another family than the converter's.

    Args:
        model: a transformers or diffusers model.
        given: the directory with its config.json.
        expected: values of model_type, or of `_class_name` of a diffusers model; none: any model.

    Raises:
        ConfigError: the model is another one.
    """
    config = model.config
    found = config.get("_class_name", type(model).__name__) if isinstance(config, Mapping) else config.model_type
    if expected and found not in expected:
        raise ConfigError(
            f"{given.argument}: '{given.path}' holds a model of type '{found}'; expected {' or '.join(expected)}, and "
            "GenericDCPConverter converts any other"
        )


def _total(layers: list[list[int]] | list[int]) -> int:
    return sum(row if isinstance(row, int) else sum(row) for row in layers)


def _stages(layers: list[list[int]] | list[int]) -> tuple[int, ...]:
    """The number of pipeline ranks of each virtual stage."""
    rows = [row for row in layers if not isinstance(row, int)]
    return tuple(len(row) for row in rows) if rows else (len(layers),)


def _check_layout(layout: ParallelConfig, sizes: Mapping[str, Any], parts: Mapping[str, PartSizes]) -> None:
    stages: dict[str, tuple[int, ...]] = {}
    for name, layers in layout.layers().items():
        if (part := parts.get(name.partition("_")[0])) is None:
            raise ConfigError(f"--cfg.parallel_config.{name} is {layers}; the model has no such part")
        stages[name] = _stages(layers)
        total = sizes[part.section][part.layers]
        if _total(layers) != total:
            raise ConfigError(
                f"--cfg.parallel_config.{name} {layers} adds up to {_total(layers)}; the model has {total} layers"
            )
    if len(set(stages.values())) > 1:
        given = layout.layers()
        raise ConfigError(
            f"--cfg.parallel_config: {' and '.join(f'{name} {given[name]}' for name in stages)} name different numbers "
            "of pipeline stages"
        )
    for part_name, (argument, ranks) in layout.tensor_parallel().items():
        if part_name in parts:
            _check_heads(argument, ranks, part_name, sizes[parts[part_name].section], parts[part_name])
    text = sizes[_TEXT.section]
    experts = next((text[key] for key in ("num_experts", "num_local_experts") if text.get(key)), 0)
    if layout.ep_size < 1 or (layout.ep_size > 1 and (not experts or experts % layout.ep_size)):
        raise ConfigError(f"--cfg.parallel_config.ep_size is {layout.ep_size}; the model has {experts} experts")
    if layout != ParallelConfig():
        notice(f"--cfg.parallel_config has no effect: {EVERY_LAYOUT}")


def _check_heads(argument: str, ranks: int, part_name: str, sizes: Mapping[str, Any], part: PartSizes) -> None:
    if part_name == "llm":
        heads = {"attention heads": sizes[part.heads], "key-value heads": sizes["num_key_value_heads"]}
    else:
        heads = {f"heads in the {'vision' if part_name == 'vit' else 'audio'} tower": sizes[part.heads]}
    for what, number in heads.items():
        if ranks < 1 or number % ranks:
            fitting = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
            raise ConfigError(
                f"--cfg.parallel_config.{argument} is {ranks}; the model has {number} {what}, which it does not "
                f"divide: expected one of {fitting}"
            )

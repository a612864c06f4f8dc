"""Whether a described model can be split as the layout asks, as far as its files tell; torch is not imported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.flags.parsed import ParsedFlags
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.configs.other_scripts import FileKind
from mindspeed_mm.configs.parallel_checks import (
    attention_in_ring,
    experts_over_ranks,
    heads_over_ulysses,
    parts_over_tensor_ranks,
)
from mindspeed_mm.configs.reader import ConfigReader
from mindspeed_mm.utils.log import notice

if TYPE_CHECKING:
    from mindspeed_mm.configs.run import Run

#: where config.json describes the language model, the innermost first
_TEXT_SECTIONS = (
    ("thinker_config", "text_config"),
    ("thinker_config",),
    ("text_config",),
    ("llm_config",),
    ("language_config",),
    (),
)
_HEADS, _KEY_VALUE_HEADS = ("num_attention_heads", "n_head"), ("num_key_value_heads",)
_MLP, _VOCABULARY = ("intermediate_size",), ("vocab_size",)
_NOT_IN_RING = {("attention_dropout",): "dropout", ("attn_logit_softcapping",): "a cap of its scores"}
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
#: words in the names of keys that only models with experts have
_SIGNS_OF_EXPERTS = ("expert", "moe", "router")
#: flag → the parallelism that predictors don't have
_GENERATION_SIZES = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "pipeline",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
}
#: keys of model.json's text_decoder, and flags
_PART_SIZES = ("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")


@dataclass(frozen=True)
class TextNumbers:
    """The numbers of a language model, as a config.json states them.

    Attributes:
        file: config.json.
        sections: the objects that describe the language model, the innermost first: (dotted path, content).
    """

    file: str
    sections: tuple[tuple[str, Mapping[str, Any]], ...]

    @classmethod
    def read(cls, directory: str) -> TextNumbers:
        """Read the config.json of a HF directory; without sections where it can't be read, which others report."""
        file = Path(directory) / "config.json"
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            content = None
        return cls(str(file), tuple(_sections(content)))

    def find(self, names: tuple[str, ...]) -> tuple[str, float] | None:
        """Return (file and dotted key, number) of the first of `names` that has one; None: config.json has none."""
        for prefix, section in self.sections:
            for name in names:
                value = section.get(name)
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    return f"{self.file}: '{prefix}{name}'", value
        return None

    @property
    def may_have_experts(self) -> bool:
        """Whether a key or the model_type speaks of experts; True without any key."""
        words = [word for _, section in self.sections for word in (*section, str(section.get("model_type", "")))]
        words = [word for word in words if word]
        return not words or any(sign in word for word in words for sign in _SIGNS_OF_EXPERTS)


def _sections(content: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for keys in _TEXT_SECTIONS:
        section = content
        for key in keys:
            section = section.get(key) if isinstance(section, Mapping) else None
        if isinstance(section, Mapping):
            yield "".join(f"{key}." for key in keys), section


def check_parallel_model(run: Run, schema: FileKind | None) -> list[str]:
    """Return a sentence for each parallelism that the model of a run can't have.

    Args:
        run: on the FSDP2 backend; the Megatron backend checks its models by itself.
        schema: kind of the model; None: one of the script's own, which is checked when it has been built.
    """
    if run.fsdp2 is None or schema is None:
        return []
    if schema == "generation":  # its flags are checked before (`check_generation_sizes`)
        key = f"{run.fsdp2.file}: expert_parallel_size is {run.dims.ep}"
        return [_generation_sentence(key, "expert")] if run.dims.ep > 1 else []
    directory = run.model.init_from_hf_path if isinstance(run.model, TransformersModelConfig) else None
    return [
        *_check_part_sizes(vars(run.files).get("model"), run.dims),
        *(check_text_numbers(TextNumbers.read(directory), run.dims, run.fsdp2) if directory else ()),
    ]


def check_text_numbers(numbers: TextNumbers, dims: Dims, fsdp2: Fsdp2Config) -> list[str]:
    """Return a sentence for each number of a language model that doesn't fit the layout.

    Tensor parallelism over layers that fsdp2.yaml names is checked when the model has been built.
    """
    problems: list[str] = []
    experts, heads = numbers.find(_EXPERTS), numbers.find(_HEADS)
    if heads:
        problems += heads_over_ulysses(heads[0], int(heads[1]), dims)
    for names, what in _NOT_IN_RING.items():
        if value := numbers.find(names):
            problems += attention_in_ring(value[0], what, value[1], dims)
    if experts:
        problems += experts_over_ranks(experts[0], int(experts[1]), dims)
    elif not numbers.may_have_experts:
        problems += experts_over_ranks(numbers.file, 0, dims)
    if fsdp2.tp_colwise is not None or fsdp2.tp_rowwise is not None:
        return problems
    parts = [(heads, "attention heads"), (numbers.find(_KEY_VALUE_HEADS), "key-value heads")]
    if not experts and not numbers.may_have_experts:  # else it may be the width of no layer
        parts.append((numbers.find(_MLP), "features of the MLP"))
    parts.append((numbers.find(_VOCABULARY), "tokens of the vocabulary"))
    for found, what in parts:
        if found:
            problems += parts_over_tensor_ranks(found[0], int(found[1]), what, dims)
    return problems


def check_generation_sizes(args: ParsedFlags) -> list[str]:
    """Return a sentence for each parallelism that the flags ask for and that predictors don't have."""
    sizes = {name: getattr(args, name) or 1 for name in _GENERATION_SIZES}
    return [
        _generation_sentence(f"--{name.replace('_', '-')} {size}", _GENERATION_SIZES[name])
        for name, size in sizes.items()
        if size > 1
    ]


def _generation_sentence(where: str, parallelism: str) -> str:
    return (
        f"{where}: predictors have no {parallelism} parallelism yet; set it to 1 (fsdp2.yaml's sharding_size spreads "
        "the model over ranks)"
    )


def _check_part_sizes(model: ConfigReader | None, dims: Dims) -> list[str]:
    """Refuse a size of the language model in model.json that isn't the run's: it asks for what isn't done."""
    part = model.get("text_decoder") if model is not None else None
    if model is None or not isinstance(part, ConfigReader):
        return []
    in_use = dict(zip(_PART_SIZES, (dims.tp, dims.cp, dims.ep), strict=True))
    return [
        f"{model.config_file}: 'text_decoder.{name}' is {part.get(name)}, and --{name.replace('_', '-')} is {size}; "
        "every part has the layout of the flags and fsdp2.yaml: make them agree, or remove the key"
        for name, size in in_use.items()
        if part.get(name) not in (None, 1, size)
    ]


def log_idle_parallel_keys(dims: Dims, fsdp2: Fsdp2Config) -> None:
    """Log which keys of fsdp2.yaml describe a parallelism that a layout doesn't have."""
    keys = {
        "expert_parallel_size is 1": ("moe_modules", "reshard_local_experts", "ep_fsdp_size") if dims.ep == 1 else (),
        "--tensor-model-parallel-size is 1": ("tp_colwise", "tp_rowwise") if dims.tp == 1 else (),
        "--context-parallel-size is 1": ("cp_split_media",) if dims.cp == 1 else (),
    }
    for why, names in keys.items():
        if given := [f"'{name}'" for name in names if name in fsdp2.model_fields_set]:
            verb = "have" if len(given) > 1 else "has"
            notice(f"{fsdp2.file}: {' and '.join(given)} {verb} no effect here: {why}")

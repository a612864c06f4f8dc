"""The file of a run that trains a model of transformers on rows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_mm.configs.working_directory import WORKING_DIRECTORY
from mindspeed_mm.models.common.families import Family, find_family, require_megatron_form
from mindspeed_mm.models.common.modelzoo import ModelHub, likely_architecture
from mindspeed_mm.tools.init.choices import (
    choose_batches,
    choose_pack,
    choose_tuning,
    count_in_words,
    power_of_two,
    tokens_at_once,
)
from mindspeed_mm.tools.init.commented import commented_yaml
from mindspeed_mm.tools.init.machine import Machine
from mindspeed_mm.tools.init.model_directory import ModelDirectory
from mindspeed_mm.tools.init.rows import MeasuredRows
from mindspeed_mm.tools.init.training import After, Training
from mindspeed_mm.utils.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from mindspeed_mm.models.common.family import FamilyTraits

_ROUND = 64
#: block of config.json → part of model.json that is frozen, with the key in it
_TOWERS = {"vision_config": ("image_encoder", "vision_encoder"), "audio_config": ("audio_encoder", "audio_encoder")}


@dataclass(frozen=True)
class LanguagePlan:
    """What is decided about a run.

    Attributes:
        model: the model's directory.
        hf_config: its config.json, as transformers reads it.
        rows: the measured rows.
        training: how it is trained.
        megatron: train with the Megatron backend; else with FSDP2.
        from_scratch: begin with random weights.
        pack: tokens of a pack; None: rows are padded.
        limit: longest row in tokens; None: none is cut.
    """

    model: ModelDirectory
    hf_config: PretrainedConfig
    rows: MeasuredRows
    training: Training
    megatron: bool
    from_scratch: bool
    pack: int | None
    limit: int | None

    @property
    def family(self) -> Family | None:
        """The family's record; None: an architecture of transformers without one."""
        return find_family(self.model.model_type)

    @property
    def unit(self) -> str:
        """What a batch consists of."""
        return "packs" if self.pack else "rows"

    @property
    def title(self) -> str:
        """A line about the model."""
        kind = "" if self.family else " (no family here: trained as transformers has it, without packed rows)"
        names = self.hf_config.architectures or [self.model.model_type]
        return f"{names[0]}{kind}, {count_in_words(self.model.parameters)} parameters, from {self.model.path}"


def plan_language(
    model: ModelDirectory,
    hf_config: PretrainedConfig,
    rows: MeasuredRows,
    machine: Machine,
    *,
    save: str,
    megatron: bool,
    lora: bool,
    from_scratch: bool,
) -> LanguagePlan:
    """Decide what the run's file says.

    Raises:
        ConfigError: nothing trains the architecture, or not the Megatron backend, which is asked for.
    """
    _require_class(model, hf_config)
    if megatron:
        require_megatron_form(model.model_type)
    text = hf_config.get_text_config()
    tuning = choose_tuning(model.parameters, machine, asked=lora)
    positions = most_positions(hf_config)
    pack = choose_pack(rows.usable, rows.longest, rows.mean, machine) if _packs(model.model_type) else None
    limit = pack or _limit(rows, positions)
    hidden, layers = getattr(text, "hidden_size", 4096), getattr(text, "num_hidden_layers", 32)
    batches = choose_batches(
        rows.usable,
        limit or rows.longest,
        machine,
        rows_a_pack=pack / rows.mean if pack else 1.0,
        most=tokens_at_once(model.parameters, hidden, layers, machine, is_lora=tuning.is_lora),
    )
    training = Training(model.parameters, machine, tuning, batches, save)
    return LanguagePlan(model, hf_config, rows, training, megatron, from_scratch, pack, limit)


def _require_class(model: ModelDirectory, hf_config: PretrainedConfig) -> None:
    """Refuse an architecture that transformers hasn't, or that writes no text."""
    from transformers import GenerationMixin

    found = ModelHub.get(None, hf_config, where="--model")
    if not issubclass(found, GenerationMixin):
        raise ConfigError(
            f"--model '{model.path}': {found.__name__} writes no text: it doesn't generate; expected \"architectures\" "
            f"with a class that does, such as {likely_architecture(hf_config.model_type) or 'Qwen3ForCausalLM'}"
        )


def most_positions(hf_config: PretrainedConfig) -> int | None:
    """Return the most tokens of a row that a model has positions for; None: any number."""
    found = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _packs(model_type: str) -> bool:
    """Whether a family is known to train on packed rows."""
    traits = _traits(model_type)
    return traits is not None and traits.packed_positions is not None


def _traits(model_type: str) -> FamilyTraits | None:
    family = find_family(model_type)
    return None if family is None else getattr(family.model_class, "traits", None)


def _limit(rows: MeasuredRows, longest: int | None) -> int | None:
    """The length above which rows are cut: where the model has no positions, or where not all rows were measured."""
    if rows.cut or rows.too_long:
        return longest
    return None if rows.is_whole else min(power_of_two(rows.longest, up=True), longest or rows.longest * 2)


def write_language(plan: LanguagePlan) -> str:
    """Return the text of the run's file."""
    flags = {**_backend(plan), **plan.training.flags()}
    content: dict[str, Any] = {
        WORKING_DIRECTORY: os.getcwd(),
        "gpt_args": flags,
        "model": _model(plan),
        "data": _data(plan),
    }
    if not plan.megatron:
        content["fsdp2"] = {"sharding_size": "auto"}
    heading = plan.training.heading([plan.title, *rows_lines(plan.rows)])
    return commented_yaml(heading, content, *_comments(plan))


def _backend(plan: LanguagePlan) -> dict[str, Any]:
    if not plan.megatron:
        return {"use_torch_fsdp2": True}
    flags: dict[str, Any] = {"use_torch_fsdp2": False}
    flags |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    flags |= {"use_distributed_optimizer": True} if plan.training.machine.devices > 1 else {}
    return flags | {"variable_seq_lengths": True, "seq_length": plan.limit or _rounded(plan.rows.longest)}


def _model(plan: LanguagePlan) -> dict[str, Any]:
    content: dict[str, Any] = {"init_from_hf_path": plan.model.path}
    if plan.from_scratch:
        content["train_from_scratch"] = True
        if plan.model.has_weights:
            content["ignore_weights"] = True
    return content | _encoders(plan)


def _encoders(plan: LanguagePlan) -> dict[str, Any]:
    """What of the encoders is frozen, said of each part, as the two backends have other defaults.

    They stay as they are, unless training begins with random weights; what joins them to the language model is trained.
    """
    traits = _traits(plan.model.model_type)
    inner = plan.model.config.get("thinker_config") or plan.model.config
    content: dict[str, Any] = {}
    for block, (place, part) in _TOWERS.items():
        if isinstance(inner.get(block), Mapping) and traits is not None and part in traits.parts:
            content[place] = {part: {"freeze": not plan.from_scratch}}
            if part == "vision_encoder" and "vision_projector" in traits.parts:
                content[place]["vision_projector"] = {"freeze": False}
    return content


def _data(plan: LanguagePlan) -> dict[str, Any]:
    basic: dict[str, Any] = {}
    if plan.limit is not None and not plan.megatron:
        basic["cutoff_len"] = plan.limit
    if plan.pack is not None:
        basic["packing"] = True
    if plan.training.batches.validation:
        basic["val_size"] = plan.training.batches.validation
    return plan.rows.files.section(plan.model.path, **basic)


def _rounded(length: int) -> int:
    return -(-length // _ROUND) * _ROUND


def rows_lines(rows: MeasuredRows) -> list[str]:
    """Return lines about the rows."""
    looked = "" if rows.is_whole else f" ({rows.looked_at} of them looked at)"
    media = ", ".join(f"{share:.2g} {kind}{'' if share == 1 else 's'} a row" for kind, share in rows.media.items())
    left = f"; {rows.left_out} left out" if rows.left_out else ""
    return [
        f"{rows.rows} rows{looked}{left}: {rows.files.form}{'; ' + media if media else ''}",
        f"{min(rows.lengths)} to {rows.longest} tokens a row, {rows.mean:.0f} on average; {rows.trained_share:.0%} of "
        "them are trained",
    ]


def _comments(plan: LanguagePlan) -> tuple[dict[str, str], After]:
    exported = "a directory for from_pretrained" + (" of PEFT" if plan.training.tuning.is_lora else "")
    above, after = plan.training.comments(plan.unit, exported)
    above |= {
        "model.init_from_hf_path": "Its config.json describes the model, its weights are where training begins.",
        "data": "How rows are read and rendered: mindspeed-mm data check shows it, docs/data.md describes it.",
    }
    basic = "data.dataset_param.basic_parameters"
    if plan.megatron:
        above["gpt_args.use_torch_fsdp2"] = (
            "Megatron-core's backend; weights are converted while they are loaded, and back for the export. Larger "
            "models are split by the two sizes below: their product divides the number of devices."
        )
        above["gpt_args.variable_seq_lengths"] = (
            f"Rows are padded to the longest of a micro-batch, and cut at seq_length ({_longest(plan.rows)})."
        )
    else:
        above["gpt_args.use_torch_fsdp2"] = "transformers' own class, sharded by PyTorch FSDP2."
        above["fsdp2"] = (
            "Parameters are sharded over all devices, each block being a unit; blocks are found by themselves "
            "(sub_modules_to_wrap names others)."
        )
        if plan.limit is not None:
            above[f"{basic}.cutoff_len"] = _limit_comment(plan)
    if plan.pack:
        above[f"{basic}.packing"] = (
            f"Several rows share {plan.pack} tokens, without seeing each other: rows have {plan.rows.mean:.0f} on "
            "average, and would be mostly padding."
        )
    if validation := plan.training.batches.validation:
        above["gpt_args.eval_interval"] = f"An evaluation an epoch, on the {validation} rows of val_size below."
    else:
        after.setdefault("gpt_args", []).append(
            f"{plan.rows.rows} rows are too few to set some apart for validation; val_dataset in data names others"
        )
    if (encoders := _encoders(plan)) and not plan.from_scratch:
        above[f"model.{next(iter(encoders))}"] = (
            "Encoders stay as they are, which is usual; what joins them to the language model is trained."
        )
    return above, after


def _limit_comment(plan: LanguagePlan) -> str:
    if plan.pack:
        return f"Tokens of a pack; {_longest(plan.rows)}."
    rows = plan.rows
    if not (rows.cut or rows.too_long):
        return (
            f"Tokens of a row: {_longest(rows)}; longer ones lose their last turns, and are left out if the first "
            "answer doesn't fit."
        )
    return (
        f"The model has so many positions: of the {rows.looked_at} rows that were looked at, {rows.cut} lose their "
        f"last turns, and {rows.too_long} are left out, as their first answer doesn't fit."
    )


def _longest(rows: MeasuredRows) -> str:
    looked = "" if rows.is_whole else f" of the {rows.looked_at} rows that were looked at"
    return f"the longest row{looked} has {rows.longest} tokens"

"""Flags of published launches that are not there yet, and that a run can't neglect: giving one is an error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from mindspeed_mm.configs.flags.spec import no_effect, refused

_LORA = refused("LoRA is not there yet; remove the lora flags to train all weights that aren't frozen")
_PREFERENCE = refused("preference training is not there yet")
_SEARCH = refused("it starts a search for a layout instead of a training, and is not there yet")
_FOR_SEARCH = no_effect("the search for a layout is not there yet")


@dataclass(frozen=True)
class LoraArguments:
    """LoRA."""

    lora_target_modules: Annotated[list[str], _LORA("modules with adapters")] = field(default_factory=list)
    lora_target_parameters: Annotated[list[str], _LORA("parameters with adapters")] = field(default_factory=list)
    lora_apply_modules: Annotated[list[str], _LORA("parts of the model with adapters")] = field(
        default_factory=lambda: ["all"]
    )
    lora_mixed_training: Annotated[bool, _LORA("adapters beside trained weights")] = False
    lora_r: Annotated[int, _LORA("rank of adapters")] = 8
    lora_alpha: Annotated[int, _LORA("scale of adapters")] = 16
    lora_dropout: Annotated[float, _LORA("dropout of adapters")] = 0.0
    lora_register_forward_hook: Annotated[list[str], _LORA("modules whose output needs a gradient")] = field(
        default_factory=list
    )
    load_base_model: Annotated[str | None, _LORA("checkpoint of the base model")] = None


@dataclass(frozen=True)
class PreferenceArguments:
    """Preference and reinforcement training."""

    dpo_beta: Annotated[float, _PREFERENCE("DPO: strength")] = 0.1
    dpo_loss_type: Annotated[str, _PREFERENCE("DPO: kind of loss")] = "sigmoid"
    dpo_label_smoothing: Annotated[float, _PREFERENCE("DPO: label smoothing")] = 0.0
    ref_model: Annotated[str | None, _PREFERENCE("DPO: reference model")] = None
    pref_ftx: Annotated[float, _PREFERENCE("DPO: weight of the supervised loss")] = 0.0
    stage: Annotated[
        str | None,
        refused("this stage is not there yet; leave the flag out for supervised training")(
            "ray_grpo", harmless=("sft",)
        ),
    ] = None


@dataclass(frozen=True)
class SearchArguments:
    """Search for a layout."""

    auto_parallel_mm: Annotated[bool, _SEARCH("search by profiles")] = False
    auto_settings: Annotated[bool, _SEARCH("search by trial")] = False
    profile_subgraph_seg: Annotated[bool, _FOR_SEARCH("auto-parallel-mm: what is profiled")] = False
    profile_stage: Annotated[int | None, _FOR_SEARCH("auto-parallel-mm: which stage is profiled")] = None
    simulated_nnodes: Annotated[int | None, _FOR_SEARCH("auto-parallel-mm: nodes")] = None
    simulated_nproc_per_node: Annotated[int | None, _FOR_SEARCH("auto-parallel-mm: ranks of a node")] = None

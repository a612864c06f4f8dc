"""Flags of published launches that are not there yet, and that a run can't neglect: giving one is an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mindspeed_mm.configs.flags.spec import no_effect, refused

_PREFERENCE = refused("preference training is not there yet")
_SEARCH = refused("it starts a search for a layout instead of a training, and is not there yet")
_FOR_SEARCH = no_effect("the search for a layout is not there yet")


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

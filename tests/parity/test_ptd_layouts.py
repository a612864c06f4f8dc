"""Every layout of the Megatron backend against a hand-written transformers + AdamW loop: losses and norms, fp32.

The real entry script runs in the workers, on flags and files as a user writes them. The suite runs `SUBSET`, and
`-m full` the whole table.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import launch_flags, metrics_of, run_entry, write_run_files
from tests.support.reference import rows_as_inputs, train_reference
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir, write_mixed_dataset

ROWS = 8
STEPS = 4
TOLERANCE = 1e-5
TRAINED = {"image_encoder": {"vision_encoder": {"freeze": False}, "vision_projector": {"freeze": False}}}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
SP = {"sequence_parallel": True}
DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAP = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True}
VARIABLE = {"variable_seq_lengths": True}

# name → (ranks, flags)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 process": (1, {}),
    "TP2": (2, TP2),
    "TP2 SP": (2, {**TP2, **SP}),
    "TP4": (4, {"tensor_model_parallel_size": 4}),
    "PP2": (2, PP2),
    "PP2, any length": (2, {**PP2, **VARIABLE}),
    "PP4": (4, {"pipeline_model_parallel_size": 4}),
    "PP2 VPP2": (2, VPP2),
    "PP2 VPP2, any length": (2, {**VPP2, **VARIABLE}),
    "DP2": (2, {}),
    "DP2 distributed optimizer": (2, DISTRIBUTED),
    "DP2 overlap": (2, OVERLAP),
    "TP2 PP2": (4, {**TP2, **PP2}),
    "TP2 SP PP2": (4, {**TP2, **SP, **PP2}),
    "TP2 SP PP2 VPP2": (4, {**TP2, **SP, **VPP2}),
    "TP2 DP2": (4, {**TP2, **DISTRIBUTED}),
    "PP2 DP2": (4, {**PP2, **OVERLAP}),
    "PP2 VPP2 DP2": (4, {**VPP2, **OVERLAP}),
}
KINDS = ("vl", "vl tied", "text", "text tied")


@dataclass(frozen=True)
class Case:
    """A row of the table, with what differs in its files and in the reference."""

    kind: str
    layout: str
    recompute: bool = False
    micro: int | None = None
    model: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {self.layout}{', recompute' if self.recompute else ''}"


TABLE = [Case(*row) for row in itertools.product(KINDS, LAYOUTS, (False, True))]


# layouts of four ranks in the suite: they are slow on two cores
FOUR_RANKS = {"vl": "TP2 SP PP2 VPP2", "text": "PP2 DP2"}


def is_in_subset(case: Case) -> bool:
    """Each layout of up to two ranks once, a vision-language and a text model in turn; one of four ranks for each.

    Tied and recomputed in turn too.
    """
    number, is_text = list(LAYOUTS).index(case.layout), case.kind.startswith("text")
    if LAYOUTS[case.layout][0] == 4:
        chosen = case.layout == FOUR_RANKS["text" if is_text else "vl"]
    else:
        chosen = is_text == bool(number % 2)
    turn = number // 2
    return chosen and ("tied" in case.kind) == bool(turn % 2) and case.recompute == bool(turn // 2 % 2)


SUBSET = [case for case in TABLE if is_in_subset(case)]

FROZEN_TOWER: dict[str, Any] = {"image_encoder": {"vision_projector": {"freeze": False}}}
SPECIAL = {
    "vision tower frozen by default": Case(
        "vl", "PP2", model=FROZEN_TOWER, frozen=("model.visual.blocks", "model.visual.patch_embed")
    ),
    "first stage has nothing to train": Case(
        "vl",
        "PP2 DP2",
        model={
            "image_encoder": {
                "vision_encoder": {"pipeline_num_layers": [4, 0]},
                "vision_projector": {"freeze": True, "pipeline_num_layers": [1, 0]},
            },
            "text_decoder": {"pipeline_num_layers": [0, 4]},
        },
        flags={"variable_seq_lengths": True},
        frozen=("model.visual.",),
    ),
    "language model frozen": Case(
        "vl tied",
        "PP2",
        model={**TRAINED, "text_decoder": {"freeze": True}},
        frozen=("model.language_model", "lm_head"),
    ),
    "tower over two stages": Case(
        "vl",
        "PP4",
        model={
            "image_encoder": {
                "vision_encoder": {"freeze": False, "pipeline_num_layers": [2, 2, 0, 0]},
                "vision_projector": {"freeze": False},
            },
            "text_decoder": {"pipeline_num_layers": [0, 1, 2, 1]},
        },
    ),
    "tower over virtual stages": Case(
        "vl tied",
        "PP2 VPP2",
        model={
            "image_encoder": {
                "vision_encoder": {"freeze": False, "pipeline_num_layers": [[3, 1], [0, 0]]},
                "vision_projector": {"freeze": False},
            },
            "text_decoder": {"pipeline_num_layers": [[0, 2], [1, 1]]},
        },
    ),
    "two rows a micro-batch, padded": Case("vl", "PP2", micro=2),
    "a length that does not divide": Case("text", "TP2 SP PP2", flags={"seq_length": 255}),
    "four rows a micro-batch": Case("vl tied", "TP2 SP", micro=4),
    "chunked loss": Case("vl tied", "TP2", model={**TRAINED, "loss_cfg": {"compute_mode": "chunk", "chunk_size": 16}}),
    "large logits": Case("vl", "TP2 SP PP2", model={**TRAINED, "loss_cfg": {"max_logits_mib": 0.01}}),
    "selective recompute": Case("text", "PP2", flags={"recompute_activations": True}),
    "block recompute": Case(
        "vl",
        "PP2",
        flags={"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    ),
}


@functools.cache
def workspace() -> Path:
    return Path(tempfile.mkdtemp(prefix="ptd-layouts-"))


@functools.cache
def model_and_data(kind: str) -> tuple[Path, Path]:
    folder = workspace() / kind.replace(" ", "_")
    make = tiny_qwen3_dir if kind.startswith("text") else tiny_qwen2_5_vl_dir
    hf_dir = make(folder / "hf", seed=3, tie="tied" in kind, deep=True)
    return hf_dir, write_mixed_dataset(folder / "data", rows=ROWS, seed=5, images=not kind.startswith("text"))


@functools.cache
def reference(kind: str, frozen: tuple[str, ...]) -> tuple[list[float], list[float]]:
    hf_dir, data = model_and_data(kind)
    losses, norms, _ = train_reference(
        hf_dir, rows_as_inputs(hf_dir, data), STEPS, frozen=lambda name: name.startswith(frozen)
    )
    return losses, norms


def run_case(case: Case, pools: dict[int, Any], folder: Path) -> tuple[list[float], list[float]]:
    hf_dir, data = model_and_data(case.kind)
    world, layout = LAYOUTS[case.layout]
    # each product of split layers costs a collective, and more processes than cores wait long for each other in it
    usual = world if "tensor_model_parallel_size" in layout else 1
    model = case.model or (TRAINED if case.kind.startswith("vl") else {})
    model_id = "qwen2_5_vl" if case.kind.startswith("vl") else "qwen3"
    loss = {"loss_cfg": {"loss_type": "per_token_loss"}}
    files = write_run_files(folder, hf_dir, data, model={"model_id": model_id, **loss, **model})
    settings = {"use_torch_fsdp2": False, "fsdp2_config_path": None, "ckpt_format": None, "no_save_optim": True}
    settings |= {"micro_batch_size": case.micro or usual, "global_batch_size": ROWS, "train_iters": STEPS}
    settings |= {"seq_length": 256, "save": folder / "run", **layout}
    settings |= {**(RECOMPUTE if case.recompute else {}), **case.flags}
    flags = launch_flags(files, **settings)
    pools[world].run(run_entry, flags, "pretrain_vlm.py", timeout=120)
    return metrics_of(folder / "run")


def assert_equal(case: Case, pools: dict[int, Any], folder: Path, name: str | None = None) -> None:
    losses, norms = run_case(case, pools, folder)
    expected_losses, expected_norms = reference(case.kind, case.frozen)
    assert len(losses) == len(norms) == STEPS
    if "MM_PARITY_RECORDS" in os.environ:  # what scripts/make_parallelism_table.py makes the documentation's table of
        record = {"kind": case.kind, "layout": case.layout, "recompute": case.recompute, "special": name}
        record |= {"loss": largest(losses, expected_losses), "norm": largest(norms, expected_norms)}
        with open(os.environ["MM_PARITY_RECORDS"], "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    assert losses == pytest.approx(expected_losses, rel=TOLERANCE)
    assert norms == pytest.approx(expected_norms, rel=TOLERANCE)


def largest(found: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("case", SUBSET, ids=str)
def test_layout(case: Case, megatron_pools: dict[int, Any], tmp_path: Path) -> None:
    assert_equal(case, megatron_pools, tmp_path)


# those of four ranks, and those that differ from another one in a setting of Megatron-core's own, by name only
SPECIAL_BY_NAME = {"tower over two stages", "a length that does not divide", "selective recompute", "block recompute"}
SPECIAL_BY_NAME |= {"four rows a micro-batch", "tower over virtual stages", "language model frozen", "chunked loss"}
SPECIAL_BY_NAME |= {"large logits"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] if n in SPECIAL_BY_NAME else []) for n in SPECIAL]
)
def test_special_layout(name: str, megatron_pools: dict[int, Any], tmp_path: Path) -> None:
    assert_equal(SPECIAL[name], megatron_pools, tmp_path, name)


@pytest.mark.full
@pytest.mark.parametrize("case", [c for c in TABLE if c not in SUBSET], ids=str)
def test_rest_of_the_table(case: Case, megatron_pools: dict[int, Any], tmp_path: Path) -> None:
    assert_equal(case, megatron_pools, tmp_path)

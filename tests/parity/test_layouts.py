"""Every layout of FSDP2 against a hand-written transformers + AdamW loop: losses and gradient norms, fp32.

The real entry script runs in the workers, on flags and files as a user writes them.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import WRAP, WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.reference import rows_as_inputs, train_reference
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir, write_mixed_dataset

ROWS = 8
STEPS = 3
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-6, 1e-5
FROZEN_TOWER = {"image_encoder": {"vision_encoder": {"freeze": True}, "vision_projector": {"freeze": True}}}
TOWER = ("model.visual",)
#: model.json's freeze, and what it means
FROZEN_PATHS = ["visual.blocks.{*}.attn", "model.language_model.layers.{0}.mlp", "lm_head.weight"]
FROZEN_NAMES = (
    *(f"model.visual.blocks.{n}.attn" for n in range(8)),
    "model.language_model.layers.0.mlp",
    "lm_head.weight",
)


@dataclass(frozen=True)
class Case:
    """A layout: number of ranks, rows a micro-batch, and what differs in the files."""

    world: int = 1
    micro: int = 1
    fsdp2: dict[str, Any] = field(default_factory=lambda: {"sub_modules_to_wrap": WRAP})
    model: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    kind: str = "vl"
    frozen: tuple[str, ...] = ()  # beginnings of the names of what is not trained


def wrapped(**more: Any) -> dict[str, Any]:
    return {"sub_modules_to_wrap": WRAP, **more}


TIED_UNITS = [*WRAP, "model.language_model.embed_tokens", "lm_head"]
CHUNKED = {"loss_cfg": {"compute_mode": "chunk", "chunk_size": 3}}

CASES = {
    "1 process, accumulation 8x1": Case(1, 1),
    "1 process, accumulation 2x4": Case(1, 4),
    "1 process, accumulation 1x8": Case(1, 8),
    "2 processes": Case(2, 2),
    "2 processes, accumulation 4": Case(2, 1),
    "4 processes": Case(4, 1),
    "4 processes, HSDP 2x2": Case(4, 1, wrapped(sharding_size=2)),
    "2 processes, replicated": Case(2, 2, wrapped(sharding_size=1)),
    "4 processes, reshard over 2": Case(4, 2, wrapped(reshard_after_forward=2)),
    "2 processes, ZeRO-2": Case(2, 2, wrapped(reshard_after_forward=False)),
    "2 processes, HSDP deferred sync": Case(4, 1, wrapped(sharding_size=2, defer_gradient_sync=True)),
    "2 processes, deferred gradient sync": Case(2, 1, wrapped(defer_gradient_sync=True)),
    "2 processes, recompute": Case(2, 2, wrapped(recompute_modules=WRAP, use_reentrant=False)),
    "2 processes, reentrant recompute": Case(2, 2, wrapped(recompute_modules=WRAP, use_reentrant=True)),
    "2 processes, offload": Case(2, 2, wrapped(offload_to_cpu=True)),
    "2 processes, prefetch": Case(2, 2, wrapped(num_to_forward_prefetch=2, num_to_backward_prefetch=2)),
    "2 processes, meta init": Case(2, 2, flags={"init_model_with_meta_device": True}),
    "2 processes, chunked loss": Case(2, 2, model={"loss_cfg": {"max_logits_mib": 0.01}}),
    "2 processes, dynamic chunks": Case(2, 4, model={"loss_cfg": {"compute_mode": "dynamic_chunk", "chunk_size": 8}}),
    "2 processes, whole tower as a unit": Case(2, 1, {"sub_modules_to_wrap": ["model.visual", *WRAP[1:], "lm_head"]}),
    "2 processes, frozen tower": Case(2, 1, model=FROZEN_TOWER, frozen=TOWER),
    "2 processes, frozen tower, reentrant recompute": Case(
        2, 1, wrapped(recompute_modules=WRAP, use_reentrant=True), {"freeze": [*TOWER]}, frozen=TOWER
    ),
    "2 processes, frozen tower ignored": Case(
        2, 1, wrapped(ignored_modules=["model.visual"]), FROZEN_TOWER, frozen=TOWER
    ),
    "2 processes, frozen by paths": Case(
        2, 2, model={"freeze": FROZEN_PATHS}, flags={"init_model_with_meta_device": True}, frozen=FROZEN_NAMES
    ),
    "2 processes, trainable merger ignored": Case(2, 1, wrapped(ignored_modules=["model.visual.merger"])),
    "2 processes, tied": Case(2, 2, kind="vl tied"),
    "2 processes, tied, own units, meta init, chunks": Case(
        2, 2, {"sub_modules_to_wrap": TIED_UNITS}, CHUNKED, {"init_model_with_meta_device": True}, "vl tied"
    ),
    "1 process, tied": Case(1, 4, kind="vl tied"),
    "2 processes, text": Case(2, 2, {"sub_modules_to_wrap": WRAP_TEXT}, kind="text"),
    "2 processes, text, embedding alone a unit": Case(
        2, 2, {"sub_modules_to_wrap": [*WRAP_TEXT, "model.embed_tokens"]}, kind="text"
    ),
    "2 processes, text, HSDP, meta init": Case(
        4, 1, {"sub_modules_to_wrap": WRAP_TEXT, "sharding_size": 2}, {}, {"init_model_with_meta_device": True}, "text"
    ),
}
#: whose every setting another row has as well
ONLY_IN_FULL = {"1 process, accumulation 8x1", "4 processes", "2 processes, text, HSDP, meta init"}


@functools.cache
def workspace() -> Path:
    return Path(tempfile.mkdtemp(prefix="layouts-"))


@functools.cache
def model_and_data(kind: str) -> tuple[Path, Path]:
    folder = workspace() / kind.replace(" ", "_")
    if kind == "text":
        hf_dir = tiny_qwen3_dir(folder / "hf", seed=3, tie=True)
    else:
        hf_dir = tiny_qwen2_5_vl_dir(folder / "hf", seed=3, tie="tied" in kind)
    return hf_dir, write_mixed_dataset(folder / "data", rows=ROWS, seed=5, images=kind != "text")


@functools.cache
def reference(kind: str, frozen: tuple[str, ...]) -> tuple[list[float], list[float]]:
    hf_dir, data = model_and_data(kind)
    inputs = rows_as_inputs(hf_dir, data)
    losses, norms, _ = train_reference(hf_dir, inputs, STEPS, frozen=lambda name: name.startswith(frozen))
    return losses, norms


def run_case(case: Case, pool: Any, folder: Path) -> tuple[list[float], list[float]]:
    hf_dir, data = model_and_data(case.kind)
    files = write_run_files(folder, hf_dir, data, model=case.model, fsdp2=case.fsdp2)
    flags = launch_flags(
        files,
        micro_batch_size=case.micro,
        global_batch_size=ROWS,
        train_iters=STEPS,
        save=folder / "run",
        no_save_optim=True,
        **case.flags,
    )
    pool.run(run_entry, flags, timeout=120)
    return metrics_of(folder / "run")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in ONLY_IN_FULL else []) for name in CASES]
)
def test_equals_hand_written_loop(name: str, pools: dict[int, Any], tmp_path: Path) -> None:
    case = CASES[name]
    losses, norms = run_case(case, pools[case.world], tmp_path)
    expected_losses, expected_norms = reference(case.kind, case.frozen)
    assert losses == pytest.approx(expected_losses, rel=LOSS_TOLERANCE)
    assert norms == pytest.approx(expected_norms, rel=NORM_TOLERANCE)

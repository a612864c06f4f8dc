"""fp16 with a dynamic loss scale through the real entry script: it finds its height, trains as fp32 does, resumes."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import WRAP_TEXT, launch_flags, run_entry, write_run_files
from tests.support.tiny import write_mixed_dataset
from tests.support.workers import RankPool

ROWS = 4
WINDOW = 4
STEPS, FP16_STEPS = 8, 32
# Half precision rounds each operation by up to 2^-11 = 4.9e-4; losses and norms are sums over thousands of roundings of
# either sign. Measured over the eight steps: losses differ by up to 2.1e-5, norms by up to 5.4e-4.
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-4, 2e-3

FP16 = {"param_dtype": "fp16", "reduce_dtype": "fp32"}


def records_of(
    pool: RankPool, folder: Path, hf_dir: Path, name: str, fsdp2: dict[str, Any], **flags: Any
) -> list[dict[str, Any]]:
    """Train on one global batch that holds all rows, so that a skipped step leaves the next one the same work."""
    data = folder / "data" / "data.json"
    if not data.exists():
        write_mixed_dataset(folder / "data", rows=ROWS, seed=1, images=False)
    files = write_run_files(folder / "files", hf_dir, data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT, **fsdp2})
    settings = {
        "micro_batch_size": 1,
        "global_batch_size": ROWS,
        "train_iters": FP16_STEPS,
        "lr": "3e-3",
        "adam_eps": "1e-3",  # so large that steps depend on the gradients' size, which Adam would cancel
        "lr_decay_style": "linear",
        "lr_warmup_iters": 2,
        "lr_decay_iters": 20,
        "loss_scale_window": WINDOW,
        "save": folder / name,
        **flags,
    }
    pool.run(run_entry, launch_flags(files, **settings), timeout=120)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def column(records: list[dict[str, Any]], name: str) -> list[Any]:
    return [record[name] for record in records]


def state_of(folder: Path, name: str, iteration: int) -> dict[str, Any]:
    return json.loads((folder / name / f"iter_{iteration:07d}" / "state.json").read_text())


def scales_by_hand(overflows: list[bool]) -> list[float]:
    """The scale that each step uses, for --hysteresis 2: of the overflows since the last doubling, one is free."""
    scale, since_doubling, in_a_row, found = 2.0**32, 0, 0, []
    for overflowed in overflows:
        found.append(scale)
        in_a_row = 0 if overflowed else in_a_row + 1
        since_doubling += overflowed
        if overflowed and since_doubling > 1:
            scale /= 2
        if in_a_row == WINDOW:
            scale, since_doubling, in_a_row = scale * 2, 0, 0
    return found


def test_the_scale_comes_down_and_training_equals_fp32(ranks2: RankPool, qwen3_dir: Path, tmp_path: Path) -> None:
    fp32 = records_of(ranks2, tmp_path, qwen3_dir, "fp32", {}, train_iters=STEPS)
    fp16 = records_of(ranks2, tmp_path, qwen3_dir, "fp16", FP16)
    overflows = [norm is None for norm in column(fp16, "grad_norm")]
    assert column(fp16, "loss_scale") == scales_by_hand(overflows)
    assert column(fp16, "loss_scale")[:3] == [2.0**32, 2.0**32, 2.0**31] and min(column(fp16, "loss_scale")) > 1
    assert True in overflows[overflows.index(False) :]  # it rose again, until gradients overflowed anew
    assert column(fp16, "skipped_iterations") == list(accumulate(overflows))
    assert column(fp16, "nan_iterations") == [0] * FP16_STEPS and None not in column(fp16, "loss")

    trained = [r for r, overflowed in zip(fp16, overflows, strict=True) if not overflowed][:STEPS]
    assert column(trained, "learning_rate") == column(fp32, "learning_rate")  # a skipped step is none of the schedule
    assert column(trained, "loss") == pytest.approx(column(fp32, "loss"), rel=LOSS_TOLERANCE)
    assert column(trained, "grad_norm") == pytest.approx(column(fp32, "grad_norm"), rel=NORM_TOLERANCE)
    assert fp32[-1]["loss"] < 0.95 * fp32[0]["loss"]
    assert column(fp32, "loss_scale") == [1.0] * STEPS


def test_a_resumed_run_goes_on_bit_for_bit(ranks2: RankPool, qwen3_dir: Path, tmp_path: Path) -> None:
    """Stopped while the scale comes down, and again between two doublings."""
    whole = records_of(ranks2, tmp_path, qwen3_dir, "whole", FP16)
    first_trained = column(whole, "grad_norm").index(next(n for n in column(whole, "grad_norm") if n is not None))
    stops = (5, first_trained + 2)
    records_of(ranks2, tmp_path, qwen3_dir, "parts", FP16, exit_interval=stops[0])
    load = {"load": tmp_path / "parts"}
    records_of(ranks2, tmp_path, qwen3_dir, "parts", FP16, exit_interval=stops[1], **load)
    scale = whole[stops[1]]["loss_scale"]
    assert state_of(tmp_path, "parts", 5)["loss_scale"] == {
        "scale": 2.0**28,
        "growth_tracker": 0,
        "hysteresis_tracker": -3,
    }
    assert state_of(tmp_path, "parts", stops[1])["loss_scale"]["growth_tracker"] == 2
    assert state_of(tmp_path, "parts", stops[1])["loss_scale"]["scale"] == scale
    parts = records_of(ranks2, tmp_path, qwen3_dir, "parts", FP16, **load)
    for name in ("loss_scale", "loss", "grad_norm", "learning_rate"):
        assert column(parts, name) == column(whole, name)
    assert state_of(tmp_path, "parts", FP16_STEPS) == state_of(tmp_path, "whole", FP16_STEPS)


def test_a_fixed_scale_and_a_checkpoint_without_a_dynamic_one(
    ranks2: RankPool, qwen3_dir: Path, tmp_path: Path
) -> None:
    """--loss-scale stays what it is; a run that goes on from there without it starts with a fresh dynamic one.

    With SGD, whose steps are proportional to the gradients, and which has no kernel that divides by the scale itself.
    """
    sgd = {"optimizer": "sgd", "lr": 0.05}
    fp32 = records_of(ranks2, tmp_path, qwen3_dir, "fp32", {}, train_iters=STEPS, **sgd)
    fp16 = {"reduce_dtype": "fp32"}
    fixed = records_of(ranks2, tmp_path, qwen3_dir, "fixed", fp16, fp16=True, loss_scale=512, train_iters=STEPS, **sgd)
    assert fp32[-1]["loss"] < 0.95 * fp32[0]["loss"]
    assert column(fixed, "loss_scale") == [512.0] * STEPS
    assert fixed[-1]["skipped_iterations"] == 0
    assert column(fixed, "loss") == pytest.approx(column(fp32, "loss"), rel=LOSS_TOLERANCE)
    assert column(fixed, "grad_norm") == pytest.approx(column(fp32, "grad_norm"), rel=NORM_TOLERANCE)

    dynamic = {"fp16": True, "initial_loss_scale": 2.0**40, "hysteresis": 1, "train_iters": STEPS + 2}
    resumed = records_of(ranks2, tmp_path, qwen3_dir, "fixed", fp16, load=tmp_path / "fixed", **dynamic, **sgd)
    assert column(resumed, "loss_scale")[STEPS:] == [2.0**40, 2.0**39]

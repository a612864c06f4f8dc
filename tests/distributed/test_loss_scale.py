"""fp16 with a dynamic loss scale through the real entry script: it finds its height, trains as fp32 does, resumes."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.launch import WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.tiny import tiny_qwen3_dir, write_mixed_dataset
from tests.support.tiny_steps import Chunk, Micro, TinySteps
from tests.support.workers import RankPool

ROWS = 4
WINDOW = 4
STEPS, FP16_STEPS = 8, 24
FIRST_SCALE = 2.0**24
# Half precision rounds each operation by up to 2^-11 = 4.9e-4; losses and norms are sums over thousands of roundings of
# either sign. Measured over the eight steps: losses differ by up to 2.1e-5, norms by up to 5.4e-4.
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-4, 2e-3

DIVISOR = 128.0  # the power of two next to the global batch's targets

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
        "initial_loss_scale": FIRST_SCALE,
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
    scale, since_doubling, in_a_row, found = FIRST_SCALE, 0, 0, []
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
    assert (
        column(fp16, "loss_scale")[:3] == [FIRST_SCALE, FIRST_SCALE, FIRST_SCALE / 2]
        and min(column(fp16, "loss_scale")) > 1
    )
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
        "scale": FIRST_SCALE / 2**4,
        "growth_tracker": 0,
        "hysteresis_tracker": -3,
        "divisor": DIVISOR,
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


# micro-batches of a rank: losses that are sums over so many targets each, or means
SHAPES: dict[str, list[Micro]] = {
    "one micro-batch": [Micro(16.0, factor=16.0)],
    "8 micro-batches": [Micro(16.0, factor=16.0)] * 8,
    "4096 targets": [Micro(4096.0, factor=4096.0)],
    "a mean": [Micro(None)],
    "8 means": [Micro(None)] * 8,
}


def start(kind: str, **flags: Any) -> TinySteps:
    return TinySteps(kind, half_chunk if kind == "ptd" else None, fp16=True, **flags)


def half_chunk() -> Any:
    """Megatron's parameters are kept in half precision."""
    return Chunk().half()


def fixed_steps(kind: str) -> list[Any]:
    run = start(kind, loss_scale=16384)
    return [run.step(SHAPES[name]) for name in ("4096 targets", "one micro-batch", "one micro-batch")]


def settled_scales(kind: str) -> dict[str, float]:
    """The largest scale at which a step of each shape is not skipped."""
    found = {}
    for name, micros in SHAPES.items():
        run = start(kind, initial_loss_scale=2.0**18, hysteresis=1, lr=1e-6)
        found[name] = next(r.loss_scale for r in (run.step(micros) for _ in range(18)) if not r.skipped)
    return found


@pytest.mark.parametrize("kind", ["fsdp2", "ptd"])
def test_a_published_scale_trains_thousands_of_targets(
    kind: str, ranks2: RankPool, megatron_pools: dict[int, RankPool]
) -> None:
    """From the first step on, and also where the next one holds few."""
    for results in (ranks2 if kind == "fsdp2" else megatron_pools[2]).run(fixed_steps, kind):
        assert [(r.skip_reason, r.loss_scale) for r in results] == [("", 16384.0)] * 3
        assert results[0].grad_norm == pytest.approx(5**0.5, rel=1e-6)


@pytest.mark.parametrize("kind", ["fsdp2", "ptd"])
def test_the_usable_scale_does_not_fall_with_the_global_batch(
    kind: str, ranks1: RankPool, megatron_pools: dict[int, RankPool]
) -> None:
    """The gradient of the mean is (1, 2) whatever the global batch holds: 2^14 times it fits into fp16.

    A micro-batch's share of it is smaller, and many of them may have a larger scale where they are added up in fp32.
    """
    (scales,) = (ranks1 if kind == "fsdp2" else megatron_pools[1]).run(settled_scales, kind)
    assert {scales[name] for name in ("one micro-batch", "4096 targets", "a mean")} == {2.0**14}
    assert scales["8 micro-batches"] == scales["8 means"] >= 2.0**14


def test_stages_without_a_loss_know_the_factor(megatron_pools: dict[int, RankPool], tmp_path: Path) -> None:
    """A pipeline, over a thousand targets a step: fp16 at the largest published --loss-scale equals fp32; resumed."""
    hf_dir, data = tiny_qwen3_dir(tmp_path / "hf"), write_mixed_dataset(tmp_path / "data", rows=48, images=False)
    files = write_run_files(tmp_path / "files", hf_dir, data, model={"model_id": "qwen3"})

    def train(name: str, **flags: Any) -> list[dict[str, Any]]:
        settings = {"use_torch_fsdp2": None, "fsdp2_config_path": None, "ckpt_format": None, "seq_length": 160}
        settings |= {"pipeline_model_parallel_size": 2, "micro_batch_size": 4, "global_batch_size": 48}
        settings |= {"train_iters": 2, "save": tmp_path / name, "optimizer": "sgd", "lr": 0.05, **flags}
        megatron_pools[2].run(run_entry, launch_flags(files, **settings), "pretrain_vlm.py", timeout=120)
        return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    fp16 = {"fp16": True, "loss_scale": 16384}
    expected, found = train("fp32"), train("fp16", **fp16)
    train("parts", **fp16, exit_interval=1)
    parts = train("parts", **fp16, load=tmp_path / "parts")
    assert found[-1]["skipped_iterations"] == 0
    assert column(found, "loss") == pytest.approx(column(expected, "loss"), rel=1e-3)
    assert column(found, "grad_norm") == pytest.approx(column(expected, "grad_norm"), rel=1e-2)
    for name in ("loss", "grad_norm"):
        assert column(parts, name) == column(found, name)


def factors_of_chunks(words: list[str]) -> list[float]:
    """Factors on the gradients that a chunked loss computes ahead, in a run on the Megatron backend."""
    from mindspeed_mm.models.megatron.text_decoder import gpt

    with mock.patch.object(gpt, "chunked_cross_entropy", wraps=gpt.chunked_cross_entropy) as loss:
        run_entry(words, "pretrain_vlm.py")
    return [float(call.kwargs["factor"]) for call in loss.call_args_list]


@pytest.mark.full
def test_a_chunked_loss_on_megatron_knows_the_factor(megatron_pools: dict[int, RankPool], tmp_path: Path) -> None:
    """From the second step on exactly, the loss scale divided by the divisor's power of two; losses as in float32."""
    hf_dir, data = tiny_qwen3_dir(tmp_path / "hf"), write_mixed_dataset(tmp_path / "data", rows=8, images=False)
    chunked = {"model_id": "qwen3", "loss_cfg": {"max_logits_mib": 0.05}}
    files = write_run_files(tmp_path / "files", hf_dir, data, model=chunked)
    settings = {"use_torch_fsdp2": None, "fsdp2_config_path": None, "ckpt_format": None, "seq_length": 160}
    settings |= {"micro_batch_size": 4, "global_batch_size": 8, "train_iters": 3, "optimizer": "sgd", "lr": 0.05}
    words = launch_flags(files, **settings, save=tmp_path / "fp16", fp16=True, loss_scale=16384)
    (factors,) = megatron_pools[1].run(factors_of_chunks, words, timeout=120)
    divisor = json.loads((tmp_path / "fp16/iter_0000003/state.json").read_text())["loss_scale"]["divisor"]
    assert len(factors) == 6 and factors[2:] == [16384 / divisor] * 4
    megatron_pools[1].run(run_entry, launch_flags(files, **settings, save=tmp_path / "fp32"), "pretrain_vlm.py")
    found, expected = (metrics_of(tmp_path / name) for name in ("fp16", "fp32"))
    assert found[0] == pytest.approx(expected[0], rel=1e-3) and found[1] == pytest.approx(expected[1], rel=1e-2)

"""Runs whose steps change nothing: a loss that is never a number, rows that can't be used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_mm.checkpoint.run_folder import checkpoints
from mindspeed_mm.monitor.metrics import read_metrics
from tests.support.launch import WRAP, WRAP_TEXT, launch_flags, run_entry, write_run_files
from tests.support.tiny import write_mixed_dataset
from tests.support.workers import RankError, RankPool

STEP = {"micro_batch_size": 1, "global_batch_size": 4}
PTD: dict[str, Any] = {"use_torch_fsdp2": None, "fsdp2_config_path": None, "ckpt_format": None, "seq_length": 256}


def failure(pool: RankPool, fn: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(RankError, match="exit code 1") as caught:
        pool.run(fn, *args, timeout=120)
    assert "Traceback" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("backend", ["fsdp2", pytest.param("ptd", marks=pytest.mark.full)])
def test_a_loss_that_is_never_a_number_ends_the_run(
    ranks2: RankPool, megatron_pools: dict[int, RankPool], qwen3_dir: Path, tmp_path: Path, backend: str
) -> None:
    """After two good steps all weights become NaN; the good checkpoint stays, and is named."""
    data = write_mixed_dataset(tmp_path / "data", rows=12, seed=1, images=False)
    good, run = tmp_path / "good", tmp_path / "run"
    files = write_run_files(
        tmp_path, qwen3_dir, data, model={"model_id": "qwen3"}, fsdp2={"sub_modules_to_wrap": WRAP_TEXT}
    )
    pool, script = (
        (ranks2, "pretrain_transformers.py") if backend == "fsdp2" else (megatron_pools[2], "pretrain_vlm.py")
    )
    settings = {**STEP, "save": run, "load": run, "save_interval": 1, "save_total_limit": 1, "no_save_optim": True}
    settings |= {} if backend == "fsdp2" else PTD
    pool.run(run_entry, launch_flags(files, **settings, train_iters=2, no_load_optim=True), script, timeout=120)
    shutil.copytree(run, good)
    words = launch_flags(files, **settings, train_iters=500, no_load_optim=True, max_skipped_steps=3)
    text = failure(pool, run_with_nan, words, script, range(1000))
    assert "TrainingError: 3 steps in a row were skipped (--max-skipped-steps 3), the last, 5, as its loss or" in text
    assert "Nothing has changed since iteration 2; no checkpoint is written, so that good ones stay" in text
    assert f"the last good checkpoint is '{run / 'iter_0000002'}'" in text
    assert [c.iteration for c in checkpoints(run)] == [2]
    for path in (good / "iter_0000002").iterdir():
        assert (run / "iter_0000002" / path.name).read_bytes() == path.read_bytes()


def run_with_nan(words: list[str], script: str, rows: Any) -> None:
    """Run; the loss of a micro-batch that holds one of `rows` is not a number."""
    from mindspeed_mm.backends.sums import StepSums
    from mindspeed_mm.data.loading.counting import CountingIterator

    add, count, held = StepSums.add, CountingIterator._count, []

    def counted(self: Any, batch: Any) -> None:
        held[:] = [row for row in batch["row_ids"].tolist() if row in rows]
        count(self, batch)

    def added(self: Any, output: Any) -> torch.Tensor:
        return add(self, (output[0] * (float("nan") if held else 1.0), *output[1:]))

    with mock.patch.object(StepSums, "add", added), mock.patch.object(CountingIterator, "_count", counted):
        run_entry(words, script)


def run_and_listen(words: list[str]) -> list[str]:
    from mindspeed_mm.utils.log import logger

    with mock.patch.object(logger, "warning") as said:
        run_with_nan(words, "pretrain_transformers.py", [5])
    return [call.args[0] for call in said.call_args_list]


def test_l07_the_rows_of_a_skipped_step_are_named(ranks2: RankPool, qwen3_dir: Path, tmp_path: Path) -> None:
    """L07: one row whose loss is not finite: its step is skipped, and the step's rows are named, of all ranks."""
    data = write_mixed_dataset(tmp_path / "data", rows=12, seed=1, images=False)
    files = write_run_files(tmp_path, qwen3_dir, data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})
    words = launch_flags(files, **STEP, train_iters=3, save=tmp_path / "run", log_row_ids=True)
    said, _ = ranks2.run(run_and_listen, words, timeout=120)
    by_rank = [read_metrics(tmp_path / f"run/rows/rank{rank}.jsonl") for rank in (0, 1)]
    (held,) = [
        (one["iteration"], one["rows"], other["rows"])
        for one, other in zip(*by_rank, strict=True)
        if 5 in one["rows"] + other["rows"]
    ]
    (sentence,) = [text for text in said if "was skipped" in text]
    listed = "; ".join(f"{', '.join(map(str, rows))} (rank {rank})" for rank, rows in enumerate(held[1:]))
    assert sentence.startswith(f"step {held[0]} was skipped: its loss or gradient is not finite; its rows: {listed} (")
    assert f"{data.name}" in sentence


@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packs"])
def test_w04_rows_that_are_all_too_long(ranks2: RankPool, qwen3_dir: Path, tmp_path: Path, packing: bool) -> None:
    """W04: said at the start."""
    data = write_mixed_dataset(tmp_path / "data", rows=12, seed=1, images=False)
    files = write_run_files(
        tmp_path,
        qwen3_dir,
        data,
        data={"dataset_param.basic_parameters.packing": packing},
        fsdp2={"sub_modules_to_wrap": WRAP_TEXT},
    )
    run = tmp_path / "run"
    text = failure(ranks2, run_entry, launch_flags(files, **STEP, train_iters=500, save=run, seq_length=3))
    assert "DataError: none of the 12 rows of the training data can be used: 12 × " in text
    assert not run.exists()


def test_w04_pictures_that_are_all_damaged(ranks2: RankPool, qwen2_5_vl_dir: Path, tmp_path: Path) -> None:
    """W04: with on_bad_sample skip; their headers are whole, so it is known after an epoch."""
    data = write_mixed_dataset(tmp_path / "data", rows=4, seed=1)
    rows = [row for row in json.loads(data.read_text()) if row.get("images")] * 6
    data.write_text(json.dumps(rows[:8]))
    for path in data.parent.rglob("*.png"):
        path.write_bytes(path.read_bytes()[:-40])
    files = write_run_files(
        tmp_path,
        qwen2_5_vl_dir,
        data,
        data={"dataset_param.basic_parameters.on_bad_sample": "skip"},
        fsdp2={"sub_modules_to_wrap": WRAP},
    )
    run = tmp_path / "run"
    text = failure(ranks2, run_entry, launch_flags(files, **STEP, train_iters=500, save=run, save_interval=1))
    assert "TrainingError: nothing can be trained: no row of 2 steps could be used (rows left out: 8 × " in text
    assert checkpoints(run) == []


def test_w04_clips_that_are_all_too_short(ranks2: RankPool, tmp_path: Path) -> None:
    """W04: `num_frames` 81, and clips of 24 frames."""
    from tests.support.tiny_wan import data_json, model_json, write_clips, write_encoders

    model = model_json(write_encoders(tmp_path / "encoders"))
    content = data_json(write_clips(tmp_path / "clips", rows=6), cfg=0.3)
    content["dataset_param"]["preprocess_parameters"]["num_frames"] = 81
    content["dataset_param"]["basic_parameters"]["on_bad_sample"] = "skip"
    files = {name: tmp_path / name for name in ("model.json", "data.json", "tools.json", "fsdp2.yaml")}
    files["model.json"].write_text(json.dumps(model))
    files["data.json"].write_text(json.dumps(content))
    files["tools.json"].write_text("{}")
    files["fsdp2.yaml"].write_text("sharding_size: auto\n")
    words = launch_flags(files, micro_batch_size=1, global_batch_size=2, train_iters=500, save=tmp_path / "run")
    text = failure(ranks2, run_entry, words, "pretrain_sora.py")
    assert "DataError: none of the 6 rows of the training data can be used: 6 × " in text

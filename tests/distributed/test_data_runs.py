"""Runs of the real entry script on packed, streamed and balanced data: what each step trains on, and that it is exact.

Rows are those that `--log-row-ids` writes down.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.monitor.metrics import read_metrics
from tests.distributed.test_kills import Run, after
from tests.support.launch import WRAP, WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.reference import rows_as_inputs, train_reference
from tests.support.tiny import words, write_mixed_dataset
from tests.support.workers import RankPool

PACKED = {"dataset_param.basic_parameters.packing": True}
LENGTH = 160


def rows_of(folder: Path) -> dict[int, list[int]]:
    """Iteration → its rows over all ranks, sorted."""
    found: dict[int, list[int]] = defaultdict(list)
    for file in (folder / "rows").glob("rank*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            found[record["iteration"]] += record["rows"]
    return {iteration: sorted(rows) for iteration, rows in sorted(found.items())}


def write_texts(folder: Path, rows: int) -> Path:
    """jsonl rows of very unequal lengths."""
    rng = random.Random(4)
    folder.mkdir(parents=True)
    lines = []
    for _ in range(rows):
        question, answer = words(rng, rng.randint(1, 6)), words(rng, rng.choice([1, 2, 4, 8, 16, 30]))
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    file = folder / "data.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


class DataRun(Run):
    """A run over `write_texts`, two workers a rank, that writes down its rows."""

    def __init__(self, folder: Path, hf_dir: Path, data: dict[str, Any], steps: int) -> None:
        super().__init__(folder, hf_dir, steps)
        texts = write_texts(folder / "texts", 100)
        self._files = write_run_files(
            folder / "files", hf_dir, texts, data=data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT}
        )

    def words(self, **flags: Any) -> list[str]:
        return super().words(seq_length=LENGTH, num_workers=2, log_row_ids=True, **flags)


STREAMED = {"dataset_param.basic_parameters.streaming": True, "dataset_param.basic_parameters.buffer_size": 8}


@pytest.mark.full
@pytest.mark.parametrize("data", [PACKED, {**PACKED, **STREAMED}], ids=["packed", "stream"])
def test_rows_after_kills(
    ranks1: RankPool, ranks2: RankPool, ranks4: RankPool, qwen3_dir: Path, tmp_path: Path, data: dict[str, Any]
) -> None:
    """S01: killed on 2 ranks and on 1, in the middle of an epoch, and gone on with on 4: every step trains on the rows
    of the unbroken run, every row of an epoch once, and the losses agree."""
    steps = 10
    unbroken = DataRun(tmp_path / "unbroken", qwen3_dir, data, steps)
    unbroken.finish(ranks2)
    expected = rows_of(unbroken.folder)
    assert sorted(expected) == list(range(1, steps + 1))
    counts = Counter(row for rows in expected.values() for row in rows)
    assert max(counts.values()) == 2 and len(counts) >= 60  # the second epoch had begun, and no row came a third time
    assert max(len(rows) for rows in expected.values()) > 4  # four rows of the batch hold more than four samples

    run = DataRun(tmp_path / "killed", qwen3_dir, data, steps)
    run.kill(ranks2, lambda: run.is_saving(4))
    one = RankPool(1)
    run.kill(one, after(run, 0.05))
    assert max(iteration for iteration, *_ in run.records()) < steps
    run.finish(ranks4)
    assert rows_of(run.folder) == expected
    losses = {iteration: loss for iteration, loss, _ in unbroken.records()}
    for iteration, loss, _ in run.records():
        assert loss == pytest.approx(losses[iteration], rel=1e-5)


def vl_flags(files: dict[str, Path], folder: Path, **flags: Any) -> list[str]:
    settings = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 3, "seq_length": 256}
    return launch_flags(files, **settings, save=folder, no_save_optim=True, log_row_ids=True, **flags)


def test_balance_moves_rows_and_changes_nothing(
    ranks1: RankPool, ranks2: RankPool, qwen2_5_vl_dir: Path, tmp_path: Path
) -> None:
    """One process = two, with rows balanced over ranks, over micro-batches, and not at all; images mixed with text."""
    data = write_mixed_dataset(tmp_path / "data", rows=12, seed=3)
    files = write_run_files(tmp_path / "files", qwen2_5_vl_dir, data, fsdp2={"sub_modules_to_wrap": WRAP})
    runs: dict[str, tuple[RankPool, dict[str, Any]]] = {
        "alone": (ranks1, {}),
        "two": (ranks2, {}),
        "ranks": (ranks2, {"use_data_balance": True}),
        "micro": (ranks2, {"use_image_mbs_data_balance": True, "num_workers": 1}),
    }
    for name, (pool, flags) in runs.items():
        pool.run(run_entry, vl_flags(files, tmp_path / name, **flags), timeout=120)
    expected = metrics_of(tmp_path / "alone")
    for name in ("two", "ranks", "micro"):
        losses, norms = metrics_of(tmp_path / name)
        assert rows_of(tmp_path / name) == rows_of(tmp_path / "alone"), name
        assert losses == pytest.approx(expected[0], rel=1e-6)
        assert norms == pytest.approx(expected[1], rel=1e-5)
    places = {name: (tmp_path / name / "rows/rank0.jsonl").read_text() for name in ("two", "ranks")}
    assert places["two"] != places["ranks"]
    imbalance = {
        name: [record["imbalance"] for record in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("two", "ranks")
    }
    assert sum(imbalance["ranks"]) < sum(imbalance["two"])


def test_packed_steps_equal_transformers_on_each_row(
    ranks1: RankPool, ranks2: RankPool, megatron_pools: dict[int, RankPool], qwen2_5_vl_dir: Path, tmp_path: Path
) -> None:
    """P01: packs of rows with images out of the loader, on one process, two, and Megatron's two tensor-parallel ranks:
    losses and norms of a plain transformers loop over the same rows, one at a time."""
    data = write_mixed_dataset(tmp_path / "data", rows=24, seed=5)
    model = {"loss_cfg": {"loss_type": "per_token_loss"}}
    files = write_run_files(
        tmp_path / "files", qwen2_5_vl_dir, data, data=PACKED, model=model, fsdp2={"sub_modules_to_wrap": WRAP}
    )
    trained = {"image_encoder": {"vision_encoder": {"freeze": False}, "vision_projector": {"freeze": False}}}
    megatron = write_run_files(
        tmp_path / "megatron", qwen2_5_vl_dir, data, data=PACKED, model={**model, "model_id": "qwen2_5_vl", **trained}
    )
    ranks1.run(run_entry, vl_flags(files, tmp_path / "alone", num_workers=2), timeout=120)
    ranks2.run(run_entry, vl_flags(files, tmp_path / "two", num_workers=1), timeout=120)
    other = {"use_torch_fsdp2": None, "fsdp2_config_path": None, "ckpt_format": None, "tensor_model_parallel_size": 2}
    split = vl_flags(megatron, tmp_path / "split", **other)
    megatron_pools[2].run(run_entry, split, "pretrain_vlm.py", timeout=120)
    steps = rows_of(tmp_path / "alone")
    assert all(len(rows) > 4 for rows in steps.values())
    inputs = rows_as_inputs(qwen2_5_vl_dir, data)
    losses, norms, _ = train_reference(qwen2_5_vl_dir, inputs, 3, rows_of=lambda step: steps[step + 1])
    for name in ("alone", "two", "split"):
        assert rows_of(tmp_path / name) == steps, name
        found = metrics_of(tmp_path / name)
        assert found[0] == pytest.approx(losses, rel=1e-6), name
        assert found[1] == pytest.approx(norms, rel=1e-5), name

"""Checkpoints: a resumed run goes on bit for bit, and a stop request leaves one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import WRAP, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.tiny import write_mixed_dataset
from tests.support.workers import RankPool


def flags_of(folder: Path, hf_dir: Path, run: Path, fsdp2: dict[str, Any], **flags: Any) -> list[str]:
    data = folder / "data" / "data.json"
    if not data.exists():
        write_mixed_dataset(folder / "data", rows=10, seed=1)
    files = write_run_files(folder / "files", hf_dir, data, fsdp2={"sub_modules_to_wrap": WRAP, **fsdp2})
    settings = {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 6, "save": run, **flags}
    return launch_flags(files, **settings)


@pytest.mark.parametrize(
    "fsdp2",
    [{}, {"sharding_size": 1}, {"param_dtype": "bf16", "reduce_dtype": "fp32"}],
    ids=["sharded", "replicated", "bf16"],
)
def test_resume_is_bit_equal(ranks2: RankPool, qwen2_5_vl_dir: Path, tmp_path: Path, fsdp2: dict[str, Any]) -> None:
    """Rows are shuffled and an epoch ends in between: the order of rows goes on too."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks2.run(run_entry, flags_of(tmp_path, qwen2_5_vl_dir, whole, fsdp2), timeout=120)
    ranks2.run(run_entry, flags_of(tmp_path, qwen2_5_vl_dir, parts, fsdp2, exit_interval=3), timeout=120)
    assert (parts / "latest_checkpointed_iteration.txt").read_text() == "3"
    resumed = flags_of(tmp_path, qwen2_5_vl_dir, parts, fsdp2, load=parts)
    ranks2.run(run_entry, resumed, timeout=120)
    assert metrics_of(parts) == metrics_of(whole)
    assert len(metrics_of(parts)[0]) == 6
    a = json.loads((whole / "iter_0000006/state.json").read_text())
    b = json.loads((parts / "iter_0000006/state.json").read_text())
    assert a == b


def test_resume_needs_no_weights_of_the_hub_directory(ranks2: RankPool, qwen2_5_vl_dir: Path, tmp_path: Path) -> None:
    hf_dir = shutil.copytree(qwen2_5_vl_dir, tmp_path / "hf")
    run = tmp_path / "run"
    ranks2.run(run_entry, flags_of(tmp_path, hf_dir, run, {}, train_iters=2), timeout=120)
    (hf_dir / "model.safetensors").unlink()
    ranks2.run(run_entry, flags_of(tmp_path, hf_dir, run, {}, train_iters=3, load=run), timeout=120)
    assert len(metrics_of(run)[0]) == 3


def test_without_the_optimizer_the_schedule_still_goes_on(
    ranks2: RankPool, qwen2_5_vl_dir: Path, tmp_path: Path
) -> None:
    """--no-save-optim --no-load-optim: the iteration goes on, so the learning rate must not start anew."""
    rates = {}
    for name in ("whole", "parts"):
        run = tmp_path / name
        shape = {"lr_decay_style": "linear", "train_iters": 4, "no_save_optim": True, "no_save_rng": True}
        stop = {"exit_interval": 2} if name == "parts" else {}
        ranks2.run(run_entry, flags_of(tmp_path, qwen2_5_vl_dir, run, {}, **shape, **stop), timeout=120)
        if name == "parts":
            back = {"load": run, "no_load_optim": True, "no_load_rng": True}
            ranks2.run(run_entry, flags_of(tmp_path, qwen2_5_vl_dir, run, {}, **shape, **back), timeout=120)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rates[name] = [r["learning_rate"] for r in records]
    assert rates["parts"] == rates["whole"]
    assert len(set(rates["whole"])) == 4


def _send_later(pid: int, number: int, path: Path) -> None:
    while not path.exists() or not path.read_text().count("\n"):
        time.sleep(0.01)
    os.kill(pid, number)


def run_and_stop(words: list[str], metrics: str, number: int) -> None:
    """Run; once the first step is logged, send the signal to rank 1 only."""
    if os.environ["RANK"] == "1":
        threading.Thread(target=_send_later, args=(os.getpid(), number, Path(metrics)), daemon=True).start()
    run_entry(words)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"])
def test_a_signal_to_one_rank_saves_on_all(
    ranks2: RankPool, qwen2_5_vl_dir: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    words = flags_of(tmp_path, qwen2_5_vl_dir, run, {}, train_iters=10_000)
    ranks2.run(run_and_stop, words, str(run / "metrics.jsonl"), int(number), timeout=120)
    saved = int((run / "latest_checkpointed_iteration.txt").read_text())
    assert saved == len(metrics_of(run)[0]) < 10_000
    assert (run / f"iter_{saved:07d}" / ".metadata").exists()
    assert signal.getsignal(number) == signal.SIG_DFL


def test_total_limit_keeps_the_newest(ranks2: RankPool, qwen2_5_vl_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = flags_of(tmp_path, qwen2_5_vl_dir, run, {}, save_interval=1, save_total_limit=2, train_iters=4)
    ranks2.run(run_entry, words, timeout=120)
    assert sorted(p.name for p in run.glob("iter_*")) == ["iter_0000003", "iter_0000004"]

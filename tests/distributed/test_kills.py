"""Runs that are killed, with SIGKILL to all ranks, at bad moments; resumed, also on another number of ranks.

Whatever the moment, the run folder holds whole checkpoints, its tracker names one of them, and the run goes on from
there as if nothing had happened.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.checkpoint.manifest import manifest_problems
from mindspeed_mm.checkpoint.run_folder import checkpoints, find_checkpoint, has_checkpoint
from mindspeed_mm.monitor.metrics import read_metrics
from tests.support.launch import WRAP_TEXT, launch_flags, run_entry, write_run_files
from tests.support.tiny import write_mixed_dataset
from tests.support.workers import RankError, RankPool

STEPS = 20


def run_with_slow_disk(words: list[str], script: str) -> None:
    """Run the entry script; each fsync takes a while, as it does on a real disk."""
    fsync = os.fsync

    def slow(fd: int) -> None:
        time.sleep(0.01)
        fsync(fd)

    os.fsync = slow
    try:
        run_entry(words, script)
    finally:
        os.fsync = fsync


def nothing() -> None:
    """Let a pool start its processes."""


class Run:
    """A run folder, and what has been logged into it so far."""

    def __init__(
        self, folder: Path, hf_dir: Path, steps: int = STEPS, script: str = "pretrain_transformers.py"
    ) -> None:
        data = write_mixed_dataset(folder / "data", rows=12, seed=1, images=False)
        self.folder = folder / "run"
        self._files = write_run_files(folder / "files", hf_dir, data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})
        self._steps, self._script = steps, script

    def words(self, **flags: Any) -> list[str]:
        settings = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": self._steps, "save_interval": 2}
        places = {"save": self.folder, "load": self.folder}
        return launch_flags(self._files, **{**settings, **places, **flags})

    def records(self) -> list[tuple[int, float, float]]:
        path = self.folder / "metrics.jsonl"
        return [(r["iteration"], r["loss"], r["grad_norm"]) for r in read_metrics(path)] if path.exists() else []

    def is_saving(self, least: int) -> bool:
        """Whether a checkpoint of iteration `least` or later is being written."""
        return any(int(p.name.split("_")[1].split(".")[0]) >= least for p in self.folder.glob(".iter_*.saving"))

    def finish(self, pool: RankPool, **flags: Any) -> None:
        pool.run(run_entry, self.words(**flags), self._script, timeout=120)

    def kill(self, pool: RankPool, when: Callable[[], bool], **flags: Any) -> None:
        """Start the run, kill all ranks as soon as `when` says so, and look at what is left."""
        pool.run(nothing)
        pids = pool.pids
        over = threading.Event()

        def watch() -> None:
            while not over.is_set() and not when():
                time.sleep(0.001)
            for pid in pids if not over.is_set() else ():
                os.kill(pid, signal.SIGKILL)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with pytest.raises(RankError, match="died with exit code -9"):
                pool.run(run_with_slow_disk, self.words(**flags), self._script, timeout=120)
        finally:
            over.set()
            watcher.join()
            pool.close()
        self.check()

    def check(self) -> None:
        """What is visible is whole, and the tracker names one of it."""
        for path in self.folder.glob("iter_*"):
            assert manifest_problems(path) == [] and (path / ".metadata").is_file()
        if checkpoints(self.folder):
            saved = find_checkpoint(self.folder)
            assert saved in checkpoints(self.folder)[:2]  # killed between folder and tracker: the one before is named
            assert max(iteration for iteration, *_ in self.records()) >= (saved.iteration or 0)


def after(run: Run, seconds: float) -> Callable[[], bool]:
    """Some time after the next step."""
    done, moments = len(run.records()), []

    def when() -> bool:
        if not moments and len(run.records()) > done:
            moments.append(time.monotonic() + seconds)
        return bool(moments) and time.monotonic() >= moments[0]

    return when


def assert_equal(run: Run, unbroken: dict[int, tuple[float, float]], exact: int, loss: float, norm: float) -> None:
    """Compare what was logged, iterations done again included: the first `exact` records bit for bit."""
    for number, (iteration, found_loss, found_norm) in enumerate(run.records()):
        expected_loss, expected_norm = unbroken[iteration]
        if number < exact:
            assert (found_loss, found_norm) == (expected_loss, expected_norm), iteration
        assert found_loss == pytest.approx(expected_loss, rel=loss), iteration
        assert found_norm == pytest.approx(expected_norm, rel=norm), iteration


def unbroken_run(pool: RankPool, folder: Path, hf_dir: Path, steps: int = STEPS) -> dict[int, tuple[float, float]]:
    run = Run(folder, hf_dir, steps)
    run.finish(pool)
    assert len(run.records()) == steps
    return {iteration: (loss, norm) for iteration, loss, norm in run.records()}


def test_three_kills(ranks2: RankPool, ranks4: RankPool, qwen3_dir: Path, tmp_path: Path) -> None:
    """One in a save, one in a save in the background, one at random; resumed on 2, 4 and 1 ranks."""
    chance = random.Random(20)
    unbroken = unbroken_run(ranks2, tmp_path / "unbroken", qwen3_dir)
    run = Run(tmp_path / "killed", qwen3_dir)
    run.kill(ranks2, lambda: run.is_saving(4))
    assert [p.name for p in run.folder.glob(".*")] == [".iter_0000004.saving"]
    assert find_checkpoint(run.folder).iteration == 2
    (run.folder / ".iter_0000001.deleting").mkdir()
    run.kill(ranks2, lambda: run.is_saving(8), async_save=True)
    (left,) = run.folder.glob(".iter_*")  # what was there before is gone
    assert left.name in (".iter_0000008.saving", ".iter_0000010.saving")
    assert find_checkpoint(run.folder).iteration in (6, 8)
    exact = len(run.records())
    run.kill(ranks4, after(run, chance.uniform(0.0, 0.3)), async_save=True)
    one = RankPool(1)
    try:
        run.finish(one)
    finally:
        one.close()
    assert find_checkpoint(run.folder).iteration == STEPS
    assert [p.name for p in run.folder.glob(".*")] == []
    assert len(run.records()) > exact + 2
    assert_equal(run, unbroken, exact, loss=1e-5, norm=1e-5)


@pytest.mark.full
def test_kills_of_the_megatron_backend(
    ranks2: RankPool, megatron_pools: dict[int, RankPool], qwen3_dir: Path, tmp_path: Path
) -> None:
    """Split over tensor-parallel ranks, then over stages, then replicated; the other backend goes on to the end."""
    megatron = {"use_torch_fsdp2": None, "fsdp2_config_path": None, "ckpt_format": None, "seq_length": 256}
    unbroken = unbroken_run(ranks2, tmp_path / "unbroken", qwen3_dir)
    run = Run(tmp_path / "killed", qwen3_dir, script="pretrain_vlm.py")
    pool = megatron_pools[2]
    run.kill(pool, lambda: run.is_saving(4), **megatron, tensor_model_parallel_size=2, sequence_parallel=True)
    assert find_checkpoint(run.folder).iteration == 2
    run.kill(pool, lambda: run.is_saving(8), async_save=True, **megatron, pipeline_model_parallel_size=2)
    assert find_checkpoint(run.folder).iteration in (6, 8)
    replicated = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    run.kill(pool, after(run, 0.2), async_save=True, **megatron, **replicated)
    run.finish(ranks2)
    assert find_checkpoint(run.folder).iteration == STEPS
    assert_equal(run, unbroken, exact=0, loss=1e-5, norm=1e-5)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_twenty_kills(ranks2: RankPool, ranks4: RankPool, qwen3_dir: Path, tmp_path: Path) -> None:
    """Anywhere: in a step, in a save of either kind, in the deletion of an old checkpoint."""
    chance = random.Random(2)
    steps = 60
    unbroken = unbroken_run(ranks2, tmp_path / "unbroken", qwen3_dir, steps)
    run = Run(tmp_path / "killed", qwen3_dir, steps)
    ranks1 = RankPool(1)
    exact, same_layout, in_saves = 0, True, 0
    try:
        for _ in range(20):
            pool = chance.choice([ranks1, ranks2, ranks2, ranks4])
            when = after(run, chance.uniform(0.0, 1.0))
            if chance.random() < 0.3:
                least = find_checkpoint(run.folder).iteration + 2 if has_checkpoint(run.folder) else 2
                when = lambda least=least: run.is_saving(least)  # noqa: E731
            run.kill(pool, when, async_save=chance.random() < 0.5, save_total_limit=chance.choice([None, 2]))
            same_layout = same_layout and pool is ranks2
            exact = len(run.records()) if same_layout else exact
            in_saves += any(run.folder.glob(".iter_*.saving"))
            print(f"killed at {run.records()[-1][0]}, saved {[c.iteration for c in checkpoints(run.folder)]}")
        run.finish(ranks2)
    finally:
        ranks1.close()
    assert in_saves >= 5
    assert find_checkpoint(run.folder).iteration == steps
    assert_equal(run, unbroken, exact, loss=1e-5, norm=1e-4)

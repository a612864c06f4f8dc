"""Two runs and one folder: the second is refused while the first lives, and afterwards unless it goes on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.checkpoint.lock_holder import LOCK
from mindspeed_mm.checkpoint.run_folder import checkpoints
from mindspeed_mm.checkpoint.run_lock import RunLock
from mindspeed_mm.monitor.metrics import read_metrics
from tests.support.launch import WRAP_TEXT, launch_flags, run_entry, write_run_files
from tests.support.tiny import write_mixed_dataset
from tests.support.workers import RankError, RankPool


@pytest.fixture(scope="module")
def files(qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    data = write_mixed_dataset(folder / "data", rows=12, seed=1, images=False)
    return write_run_files(folder, qwen3_dir, data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})


def words_of(files: dict[str, Path], run: Path, **flags: Any) -> list[str]:
    settings = {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 6, "save": run, "save_interval": 2}
    return launch_flags(files, **{**settings, **flags})


def contents(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


def refused(pool: RankPool, words: list[str]) -> str:
    with pytest.raises(RankError, match="exit code 1") as caught:
        pool.run(run_entry, words, timeout=120)
    assert "Traceback" not in str(caught.value)
    return str(caught.value)


def test_a_used_folder(ranks2: RankPool, files: dict[str, Path], tmp_path: Path) -> None:
    """W09: a second run without --load is refused and changes nothing; --load goes on, --overwrite starts anew."""
    run = tmp_path / "run"
    ranks2.run(run_entry, words_of(files, run), timeout=120)
    before = contents(run)
    assert LOCK not in before and len(checkpoints(run)) == 3
    again = words_of(files, run, save_total_limit=2, train_iters=2)
    text = refused(ranks2, again)
    assert (
        f"ConfigError: --save '{run}' holds what an earlier run wrote (latest_checkpointed_iteration.txt, iter_" in text
    )
    assert f"give --load '{run}' to go on with that run, --overwrite to remove that and start anew" in text
    assert contents(run) == before
    ranks2.run(
        run_entry, words_of(files, run, load=run, train_iters=8, save_total_limit=2, async_save=True), timeout=120
    )
    assert [c.iteration for c in checkpoints(run)] == [8, 6]
    assert [r["iteration"] for r in read_metrics(run / "metrics.jsonl")] == list(range(1, 9))
    ranks2.run(run_entry, [*again, "--overwrite"], timeout=120)
    assert [c.iteration for c in checkpoints(run)] == [2]
    assert [r["iteration"] for r in read_metrics(run / "metrics.jsonl")] == [1, 2]
    assert not (run / "metrics.1.jsonl").exists()


def test_two_runs_in_one_folder(ranks2: RankPool, files: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunLock(run):
        for load in (None, run):
            text = refused(ranks2, words_of(files, run, load=load))
            assert f"ConfigError: --save '{run}' is in use by another run: process" in text
        assert [p.name for p in run.iterdir()] == [LOCK]


def suspended(words: list[str]) -> None:
    """Run; while step 3 is computed another run takes the folder over, as if this one had been suspended."""
    import json
    import os

    from mindspeed_mm import training

    folder, step = Path(words[words.index("--save") + 1]), training.train_step
    done = []

    def taking(*args: Any) -> Any:
        done.append(1)
        if len(done) == 3 and os.environ["RANK"] == "0":
            holder = json.loads((folder / LOCK).read_text())
            (folder / LOCK).write_text(json.dumps({**holder, "host": "elsewhere", "token": "theirs"}))
        return step(*args)

    training.train_step = taking
    try:
        run_entry(words)
    finally:
        training.train_step = step


def test_a_run_whose_folder_was_taken_over_saves_nothing(
    ranks2: RankPool, files: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    text = refused_suspended(ranks2, words_of(files, run, on_save_failure="exit"))
    assert f"the checkpoint of iteration 4 could not be saved: preparing the save failed on rank 0: '{run}' now" in text
    assert "belongs to another run (process" in text and "on elsewhere" in text
    assert [c.iteration for c in checkpoints(run)] == [2]
    assert "elsewhere" in (run / LOCK).read_text()


def refused_suspended(pool: RankPool, words: list[str]) -> str:
    with pytest.raises(RankError, match="exit code 1") as caught:
        pool.run(suspended, words, timeout=120)
    return str(caught.value)

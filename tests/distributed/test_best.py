"""--save-best and --early-stop: what is kept, what best.json says, when a run ends, and that a resumed run agrees.

The learning rate is warmed up to one that is too high: the validation loss falls, and rises again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_mm.checkpoint.best import BestCheckpoint, read_best
from mindspeed_mm.checkpoint.run_folder import find_checkpoint
from mindspeed_mm.checkpoint.start import Start, find_start
from mindspeed_mm.monitor.metrics import read_metrics
from tests.distributed.test_saving import Trained, failing
from tests.support.launch import WRAP_TEXT, launch_flags, run_entry, write_run_files
from tests.support.tiny import write_mixed_dataset
from tests.support.tiny_wan import data_json, model_json, write_clips, write_encoders
from tests.support.workers import RankPool

PATIENCE, INTERVAL = 2, 2
RISING = {"lr": "0.1", "lr_warmup_iters": 20, "lr_warmup_init": "1e-5", "clip_grad": 0, "train_iters": 40}
FOLLOWED = {"save_best": "loss", "early_stop": PATIENCE, "eval_interval": INTERVAL, "eval_iters": 1}
COMMON = {**RISING, **FOLLOWED, "micro_batch_size": 1, "global_batch_size": 4, "log_interval": 100}


def evaluations(run: Path) -> dict[int, float]:
    """Validation losses of a run folder, by iteration."""
    return {r["iteration"]: r["eval_loss"] for r in read_metrics(run / "metrics.jsonl") if "eval_loss" in r}


def assert_followed(run: Path) -> int:
    """The best evaluation of metrics.jsonl is that of best.json and is kept, and the run ended where it should."""
    losses = evaluations(run)
    best = min(losses, key=lambda iteration: losses[iteration])
    last = best + PATIENCE * INTERVAL
    assert list(losses).index(best) > 1 and list(losses) == list(range(INTERVAL, last + 1, INTERVAL))
    assert json.loads((run / "best.json").read_text()) == {"iteration": best, "metric": "loss", "value": losses[best]}
    assert {path.name for path in run.glob("iter_*")} == {f"iter_{best:07d}", f"iter_{last:07d}"}
    assert find_checkpoint(run).iteration == last < COMMON["train_iters"]
    assert find_start(str(run), step="best") == Start(run / f"iter_{best:07d}", resumes=True)
    assert [r["iteration"] for r in read_metrics(run / "metrics.jsonl") if "loss" in r][-1] == last
    return best


def text_files(folder: Path, hf_dir: Path) -> dict[str, Path]:
    data = write_mixed_dataset(folder / "data", rows=12, seed=1, images=False)
    held_out = write_mixed_dataset(folder / "held_out", rows=4, seed=3, images=False)
    rows = {"dataset_param.basic_parameters.val_dataset": str(held_out)}
    return write_run_files(folder / "files", hf_dir, data, data=rows, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})


def state(run: Path) -> dict[str, Any]:
    return json.loads((find_checkpoint(run).directory / "state.json").read_text())


def test_the_best_stays_and_a_resumed_run_agrees(ranks2: RankPool, qwen3_dir: Path, tmp_path: Path) -> None:
    """Stopped on an evaluation that was the best, and on one that was not; saved in the background."""
    files = text_files(tmp_path, qwen3_dir)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = {**COMMON, "save_total_limit": 1, "save_interval": 3}
    ranks2.run(run_entry, launch_flags(files, **settings, save=whole), timeout=120)
    best = assert_followed(whole)

    for stop in (best, best + INTERVAL, None):
        more = {"save": parts, "load": parts, "async_save": True, "exit_interval": stop}
        ranks2.run(run_entry, launch_flags(files, **settings, **more), timeout=120)
    assert assert_followed(parts) == best
    assert evaluations(parts) == evaluations(whole)
    assert state(parts) == state(whole)

    # nothing is left: neither another step nor another evaluation
    before = (parts / "metrics.jsonl").read_text()
    ranks2.run(run_entry, launch_flags(files, **settings, save=parts, load=parts), timeout=120)
    assert (parts / "metrics.jsonl").read_text() == before and assert_followed(parts) == best


def test_pipeline_stages_agree(megatron_pools: dict[int, RankPool], qwen3_dir: Path, tmp_path: Path) -> None:
    """Only the last stage computes the loss."""
    files, run = text_files(tmp_path, qwen3_dir), tmp_path / "run"
    megatron = {"use_torch_fsdp2": None, "fsdp2_config_path": None, "ckpt_format": None, "seq_length": 256}
    words = launch_flags(files, **megatron, **COMMON, pipeline_model_parallel_size=2, save=run)
    megatron_pools[2].run(run_entry, words, "pretrain_vlm.py", timeout=120)
    assert_followed(run)


def test_generation(ranks2: RankPool, tmp_path: Path) -> None:
    model = model_json(write_encoders(tmp_path / "encoders"))
    model["predictor"]["train_from_scratch"] = True
    data = data_json(write_clips(tmp_path / "clips", rows=8))
    data["dataset_param"]["basic_parameters"]["val_rate"] = 0.5
    contents = {"model.json": json.dumps(model), "data.json": json.dumps(data), "tools.json": "{}"}
    contents["fsdp2.yaml"] = yaml.safe_dump({"sub_modules_to_wrap": ["predictor.blocks.{*}"]})
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    run = tmp_path / "run"
    words = launch_flags({name: tmp_path / name for name in contents}, **COMMON, save=run)
    ranks2.run(run_entry, words, "pretrain_sora.py", timeout=120)
    assert_followed(run)


def save_in_turns(root: str, in_background: bool) -> list[Any]:
    """Save 3.0, fail to save 1.0, and judge values around both; best.json while the save isn't visible yet."""
    trained = Trained(root, in_background=in_background)
    found: list[Any] = []

    def save(value: float) -> None:
        trained.step()
        best = BestCheckpoint(trained.iteration, "loss", value)
        assert trained.saver.is_best(best)
        trained.saver.save(trained.iteration, trained.take, best=best)

    def judge(*values: float) -> list[bool]:
        return [trained.saver.is_best(BestCheckpoint(9, "loss", value)) for value in values]

    save(3.0)
    found.append(judge(3.0, 3.5, float("nan"), 2.0))
    with failing("tensors", 1):
        save(1.0)
        found.append(judge(3.0, 2.0))  # 2.0 is not as good as what was lost, and better than what is there
    found.append((read_best(Path(root)), trained.saver.best))
    save(2.0)
    found.append(judge(2.0, 1.5))
    found.append((read_best(Path(root)), trained.saver.best))
    with failing("rename", 0):
        save(1.0)
        trained.saver.wait()
    found.append((read_best(Path(root)), trained.saver.best))
    trained.saver.close()
    return found


@pytest.mark.parametrize("in_background", [False, True], ids=["at_once", "in_the_background"])
def test_a_best_one_that_could_not_be_saved(ranks2: RankPool, tmp_path: Path, in_background: bool) -> None:
    first, second = BestCheckpoint(1, "loss", 3.0), BestCheckpoint(3, "loss", 2.0)
    expected = [
        [False, False, False, True],
        [False, True],
        (first, first),
        [False, True],
        (second, second),
        (second, second),
    ]
    assert ranks2.run(save_in_turns, str(tmp_path), in_background, timeout=60) == [expected, expected]


@pytest.mark.full
def test_the_last_evaluation_counts(ranks2: RankPool, qwen3_dir: Path, tmp_path: Path) -> None:
    """It isn't due by the interval; its checkpoint, the last one, is the best."""
    files, run = text_files(tmp_path, qwen3_dir), tmp_path / "run"
    settings = {**COMMON, "lr_warmup_iters": 0, "lr": "1e-3", "train_iters": 5, "save": run}
    ranks2.run(run_entry, launch_flags(files, **settings), timeout=120)
    losses = evaluations(run)
    assert list(losses) == [2, 4, 5] and min(losses.values()) == losses[5]
    assert json.loads((run / "best.json").read_text())["iteration"] == 5 == find_checkpoint(run).iteration
    assert [path.name for path in run.glob("iter_*")] == ["iter_0000005"]

"""A stop that is asked for while a step is computed, and a run that has no step left."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

from mindspeed_mm.checkpoint.run_folder import find_checkpoint
from mindspeed_mm.monitor.metrics import read_metrics
from tests.support.launch import WRAP_TEXT, launch_flags, run_entry, write_run_files
from tests.support.tiny import write_mixed_dataset
from tests.support.workers import RankPool


def signalled(words: list[str], rank: int, step: int) -> None:
    """Run; a rank gets SIGTERM while the micro-batches of a step are computed."""
    from mindspeed_mm.backends.fsdp2 import FSDP2Backend

    compute, steps = FSDP2Backend.forward_backward, []

    def forward_backward(self: Any, *args: Any) -> None:
        steps.append(1)
        if len(steps) == step and int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        compute(self, *args)

    with mock.patch.object(FSDP2Backend, "forward_backward", forward_backward):
        run_entry(words)


def said_without_a_model(words: list[str]) -> list[str]:
    """Run, where no model must be built; returns what rank 0 is told."""
    from mindspeed_mm.backends.fsdp2 import FSDP2Backend
    from mindspeed_mm.data.loading.counting import CountingIterator

    with (
        mock.patch("mindspeed_mm.training.info_rank0") as told,
        mock.patch.object(FSDP2Backend, "build_model", side_effect=AssertionError("a model is built")),
        mock.patch.object(CountingIterator, "start", side_effect=AssertionError("data are read")),
    ):
        run_entry(words)
    return [call.args[0] for call in told.call_args_list]


def test_the_step_in_which_a_stop_is_asked_for_is_the_last(ranks2: RankPool, qwen3_dir: Path, tmp_path: Path) -> None:
    data = write_mixed_dataset(tmp_path / "data", rows=12, seed=1, images=False)
    files = write_run_files(tmp_path, qwen3_dir, data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})
    run = tmp_path / "run"
    words = launch_flags(files, micro_batch_size=1, global_batch_size=4, train_iters=9, save=run)
    ranks2.run(signalled, words, 1, 2, timeout=120)
    assert [r["iteration"] for r in read_metrics(run / "metrics.jsonl")] == [1, 2]
    assert find_checkpoint(run).iteration == 2

    # going on for no more steps than that is told at once, with what to raise
    words[words.index("--train-iters") + 1] = "2"
    told = ranks2.run(said_without_a_model, [*words, "--load", str(run)], timeout=120)[0]
    assert [line for line in told if "has done 2 iterations, and --train-iters 2 counts them too; raise" in line]
    words[words.index("--train-iters") : words.index("--train-iters") + 2] = ["--train-epochs", "0.5"]
    told = ranks2.run(said_without_a_model, [*words, "--load", str(run)], timeout=120)[0]
    assert [line for line in told if "--train-epochs 0.5 (2 iterations) counts them too; raise --train-epochs" in line]

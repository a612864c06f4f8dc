"""Workers of the loader prepare the first micro-batches while the model is built, and end with the run."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.launch import WRAP_TEXT, launch_flags, run_entry, write_run_files
from tests.support.tiny import write_mixed_dataset
from tests.support.workers import RankPool


class NotBuiltError(Exception):
    """The model can't be built."""


def while_the_model_is_built(words: list[str]) -> tuple[bool, list[int], int, list[int]]:
    """Run until the model is built, which fails.

    Returns:
        (whether a micro-batch has been prepared, workers, process that prepared it, workers after the run has failed).
    """
    from mindspeed_mm.backends.fsdp2 import FSDP2Backend
    from mindspeed_mm.data.loading.rows import BatchRows

    fork = multiprocessing.get_context("fork")
    prepared, reader = fork.Event(), fork.Value("i", 0)
    is_prepared, workers, left = False, [], []
    read = BatchRows.__getitems__

    def read_rows(self: Any, rows: Any) -> Any:
        batch = read(self, rows)
        reader.value = os.getpid()
        if "targets" in batch:  # as the model, which isn't built yet, takes them
            prepared.set()
        return batch

    def build_model(*_: Any, **__: Any) -> None:
        nonlocal is_prepared, workers
        is_prepared = prepared.wait(40)
        workers = [child.pid or 0 for child in multiprocessing.active_children()]
        raise NotBuiltError

    patches = (
        mock.patch.object(BatchRows, "__getitems__", read_rows),
        mock.patch.object(FSDP2Backend, "build_model", build_model),
    )
    with patches[0], patches[1]:
        try:
            run_entry(words)
        except NotBuiltError:  # its traceback holds the loader, so that nothing but the run itself has ended the worker
            left = [child.pid or 0 for child in multiprocessing.active_children()]
    return is_prepared, workers, reader.value, left


def test_workers_begin_before_the_model_and_end_with_a_run_that_fails(
    ranks1: RankPool, qwen3_dir: Path, tmp_path: Path
) -> None:
    data = write_mixed_dataset(tmp_path / "data", rows=6, images=False)
    files = write_run_files(tmp_path, qwen3_dir, data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})
    words = launch_flags(files, micro_batch_size=1, global_batch_size=1, train_iters=1, num_workers=1)
    [(is_prepared, workers, reader, left)] = ranks1.run(while_the_model_is_built, words, timeout=120)
    assert is_prepared and workers == [reader]
    assert left == []

"""Cases of the kind Schedule and length: how many steps an epoch has, and what happens to rows that don't fill one."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mindspeed_mm.configs.arguments import parse_args, resolve_train_iters, validate_args
from mindspeed_mm.configs.run import Run
from mindspeed_mm.data import build_mm_dataloader
from mindspeed_mm.data.loading.providers import RunData, build_run_data
from mindspeed_mm.data.start import DataStart
from mindspeed_mm.utils.errors import ConfigError, DataError
from tests.support.launch import WRAP_TEXT, launch_flags, run_entry, write_run_files
from tests.support.reference import rows_as_inputs, train_reference
from tests.support.runs import run_of, run_of_args
from tests.support.tiny import write_mixed_dataset
from tests.support.workers import RankPool


@pytest.fixture(scope="module")
def alone() -> Iterator[RankPool]:
    """One worker."""
    pool = RankPool(1)
    yield pool
    pool.close()


def output_of(words: list[str]) -> str:
    """Run the entry script; what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_entry(words)
    return printed.getvalue()


def train(
    pool: RankPool, folder: Path, hf_dir: Path, data: Path, drop_last: bool, **flags: Any
) -> tuple[str, list[dict[str, Any]]]:
    """What a run printed, and its steps."""
    files = write_run_files(
        folder,
        hf_dir,
        data,
        data={"dataloader_param.drop_last": drop_last},
        fsdp2={"sub_modules_to_wrap": WRAP_TEXT},
    )
    (printed,) = pool.run(output_of, launch_flags(files, save=folder / "run", no_save_optim=True, **flags))
    return printed, [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("drop_last, steps", [(True, 4), (False, 6)])
def test_h02_epochs_become_steps_before_the_schedule_is_made(
    alone: RankPool, qwen3_dir: Path, tmp_path: Path, drop_last: bool, steps: int
) -> None:
    """H02: 2 epochs of 10 rows in global batches of 2 × 2: 4 steps (6 with the rests); the rate decays over these."""
    data = write_mixed_dataset(tmp_path / "data", rows=10, images=False)
    printed, records = train(
        alone,
        tmp_path,
        qwen3_dir,
        data,
        drop_last,
        train_epochs=2,
        micro_batch_size=2,
        global_batch_size=4,
        lr_decay_style="linear",
    )
    assert [r["iteration"] for r in records] == list(range(1, steps + 1))
    assert [r["learning_rate"] for r in records] == pytest.approx([1e-3 * (1 - i / steps) for i in range(steps)])
    counts = [line.split("|")[0].split("iteration")[1].replace(" ", "") for line in printed.splitlines() if "|" in line]
    assert counts == [f"{i}/{steps}" for i in range(1, steps + 1)]


class Rows(Dataset):
    """The user's own: row i is the number i."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class Stream(IterableDataset):
    """Rows without a known number."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(10.0))


def epochs(*words: str) -> Run:
    args = parse_args(
        ["--train-epochs", "2", "--lr", "1e-3", "--lr-decay-style", "linear", "--use-torch-fsdp2", *words],
        required=("lr",),
    )
    validate_args(args, 1)
    return run_of_args(args)


def run_data(data: Any, run: Run) -> RunData:
    return build_run_data(lambda: data, run, DataStart())


@pytest.mark.parametrize(
    "form",
    [
        "data set",
        "loader",
    ],
)
def test_h02_a_users_own_data(form: str) -> None:
    """H02: a data set or a loader of the user's own: the same count."""
    run = epochs("--micro-batch-size", "2", "--global-batch-size", "4")
    rows = Rows(10)
    data = run_data(rows if form == "data set" else DataLoader(rows, batch_size=2), run)
    assert data.train_rows == 10
    steps = resolve_train_iters(run.length, data.train_rows, data.global_batches_per_epoch)
    assert steps == 4 and run.with_train_iters(steps).schedule.lr_decay_iters == 4


@pytest.mark.parametrize("form", ["loader", "iterable"])
def test_h02_epochs_of_a_stream_are_refused(form: str) -> None:
    """H02: without a length the number of steps can't be known: refused, and the message says what to write."""
    run = epochs("--micro-batch-size", "2", "--global-batch-size", "4")
    data = run_data(DataLoader(Stream(), batch_size=2) if form == "loader" else iter(torch.arange(10.0)), run)
    with pytest.raises(ConfigError, match=r"--train-epochs 2 needs a data set with a length.*--train-iters"):
        resolve_train_iters(run.length, data.train_rows, data.global_batches_per_epoch)


def test_h02_part_of_an_epoch() -> None:
    """H02: fractions count too, rounded up, and at least one step is made."""
    for part, steps in ((0.5, 2), (0.07, 1), (1.26, 6)):
        run = epochs("--micro-batch-size", "1", "--global-batch-size", "2", "--train-epochs", str(part))
        assert resolve_train_iters(run.length, 8, 4) == steps == max(1, math.ceil(4 * part))


def test_h04_fewer_rows_than_a_step_are_refused() -> None:
    """H04: 3 rows, accumulation 4, drop_last: no step could be made; the message has both numbers and both ways out."""
    with pytest.raises(DataError, match=r"3 row\(s\), fewer than one global batch of 4.*at most 3.*drop_last to false"):
        build_mm_dataloader(Rows(3), {"drop_last": True}, micro_batch_size=1, global_batch_size=4)


def test_h04_the_rest_is_a_step_and_does_not_leak(alone: RankPool, qwen3_dir: Path, tmp_path: Path) -> None:
    """H04: 3 rows, accumulation 4, drop_last false: one step an epoch, over exactly the 3 rows, in every epoch."""
    data = write_mixed_dataset(tmp_path / "data", rows=3, images=False)
    settings: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": 4, "weight_decay": 0.0}
    _, records = train(alone, tmp_path, qwen3_dir, data, False, train_epochs=3, lr=0.0, **settings)
    (loss,), (norm,), _ = train_reference(qwen3_dir, rows_as_inputs(qwen3_dir, data), 1)
    assert [r["loss"] for r in records] == pytest.approx([loss] * 3, rel=1e-6)
    assert [r["grad_norm"] for r in records] == pytest.approx([norm] * 3, rel=1e-5)


@pytest.mark.parametrize(
    "form",
    [
        "data set",
        "loader",
    ],
)
def test_h04_a_users_own_data(form: str) -> None:
    """H04: the same kind with a data set or a loader of the user's own: too few rows are refused, and nothing leaks."""

    def micro_batches(rows: int, batch: int, number: int) -> list[int]:
        data = Rows(rows) if form == "data set" else DataLoader(Rows(rows), batch_size=1)
        run = run_of(global_batch_size=batch, num_workers=0, seed=1, train_iters=4, eval_interval=None)
        return [int(x) for x in itertools.islice(run_data(data, run).train, number)]

    with pytest.raises(DataError, match=r"\b3\b.*\b4\b"):
        micro_batches(3, 4, 4)
    first, second = micro_batches(5, 2, 8)[:4], micro_batches(5, 2, 8)[4:]  # an epoch is two steps; a row is left over
    assert len(set(first)) == len(set(second)) == 4

"""A user's own data sets and loaders: who reads which rows, their random numbers, their workers, their last rows."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError, Lock
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from mindspeed_mm.configs.run import Run
from mindspeed_mm.data import build_mm_dataloader
from mindspeed_mm.data.loading.providers import RunData, build_run_data
from mindspeed_mm.data.start import DataStart
from mindspeed_mm.utils.errors import ConfigError, DataError
from tests.support.runs import run_of
from tests.unit.data.data_rows import flat
from tests.unit.data.fake_data import take


class Rows(Dataset):
    """Row i is i, and what the three global random states give."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


def settings(batch: int = 4, micro: int = 1, size: int = 1, **more: Any) -> Run:
    world_size = size * more.get("pipeline_model_parallel_size", 1)
    known = {"micro_batch_size": micro, "global_batch_size": batch, "num_workers": 0, "seed": 7, "train_iters": 9}
    return run_of(world_size=world_size, **{**known, "eval_interval": 1, "eval_iters": 99, **more})


def ranks(
    provider: Any, size: int, run: Run | None = None, copies: int = 1, consumed: int = 0, state: Any = None
) -> list[RunData]:
    """The data of all ranks, which talk to each other; `copies` ranks of each data-parallel one."""
    world, gathered, barrier = size * copies, [None] * (size * copies), Barrier(size * copies, timeout=20)
    run, alone = run or settings(size=size), Lock()  # global random states belong to the process

    def open_data(rank: int) -> RunData:
        def gather(value: Any) -> list[Any]:
            gathered[rank] = value
            alone.release()
            barrier.wait()
            found = list(gathered)
            barrier.wait()
            alone.acquire()
            return found

        def provide() -> Any:
            return provider(rank // copies)

        alone.acquire()
        try:
            data = build_run_data(provide, run, DataStart(rank // copies, size, consumed, state), gather)
            data.check_streams()
        except BrokenBarrierError:
            alone.acquire()
            raise
        except Exception:
            barrier.abort()
            raise
        finally:
            alone.release()
        return data

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(open_data, rank) for rank in range(world)]
        errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


def steps(data: list[RunData], count: int, size: int = 4) -> list[list[int]]:
    """The rows of the first steps over all ranks, sorted within each."""
    each = [take(one.train, count * size // len(data)) for one in data]
    per_step = size // len(data)
    found = []
    for number in range(count):
        parts = [flat(batch[0].tolist() for batch in own[number * per_step : (number + 1) * per_step]) for own in each]
        found.append(sorted(flat(parts)))
    return found


def plain(kind: str, rows: Dataset) -> DataLoader:
    samplers = {
        "subset": lambda: SubsetRandomSampler(range(16)),
        "weighted": lambda: WeightedRandomSampler([1.0] * 16, 16, replacement=False),
        "replacement": lambda: RandomSampler(rows, replacement=True, num_samples=16),
    }
    if kind in samplers:
        return DataLoader(rows, batch_size=1, sampler=samplers[kind]())
    options: dict[str, Any] = {
        "shuffle": {"shuffle": True},
        "file order": {},
        "generator": {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
        "batch sampler": {"batch_sampler": BatchSampler(RandomSampler(rows), 1, False)},
        "no collation": {"batch_size": None, "shuffle": True, "collate_fn": lambda row: [torch.tensor([row[0]])]},
    }[kind]
    return DataLoader(rows, **options)


KINDS = ["shuffle", "file order", "generator", "batch sampler", "no collation", "subset", "weighted", "replacement"]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_share_the_order_of_a_plain_sampler(kind: str) -> None:
    """Two ranks read the global batches that one reads, every row of an epoch once, and epochs are as long."""
    one = build_run_data(lambda: plain(kind, Rows(16)), settings(), DataStart())
    whole = steps([one], 8)
    two = ranks(lambda rank: plain(kind, Rows(16)), 2)
    assert steps(two, 8) == whole
    if kind != "replacement":
        assert sorted(flat(whole[:4])) == sorted(flat(whole[4:])) == list(range(16))
    assert kind == "file order" or whole[:4] != whole[4:]
    assert [(data.train_rows, data.global_batches_per_epoch) for data in (one, *two)] == [(16, 4)] * 3


def test_a_resume_on_other_ranks_goes_on(capsys: Any) -> None:
    """Stopped on one rank in the second epoch, resumed on two; no row before the position is read."""
    one = build_run_data(lambda: plain("generator", Rows(10)), settings(), DataStart())
    whole = steps([one], 9)
    first = build_run_data(lambda: plain("generator", Rows(10)), settings(), DataStart())
    steps([first], 3)
    assert first.state_dict is not None
    state = json.loads(json.dumps(first.state_dict()))
    assert state == {"consumed_samples": 12, "epoch": 1, "place": 4}
    for kept in (state, None):  # None: an older checkpoint
        made = ranks(lambda rank: plain("generator", Rows(10)), 2, consumed=12, state=kept)
        assert steps(made, 6) == whole[3:]


@pytest.mark.parametrize("form", ["data set", "loader", "stream"])
def test_another_batch_size_at_a_resume(form: str) -> None:
    """A user's own data, stopped after an epoch and resumed with another batch size: the whole second epoch."""

    def data(batch: int, start: DataStart = DataStart()) -> RunData:  # noqa: B008
        made = {"data set": lambda: Rows(12), "loader": lambda: plain("shuffle", Rows(12))}
        stream: Any = [[torch.tensor([row])] for row in range(12)]
        return build_run_data(made.get(form, lambda: (stream, None)), settings(batch), start)

    first = data(4)
    steps([first], 3)
    state = first.state_dict() if first.state_dict is not None else {}
    second = data(5, DataStart(0, 1, 12, state))
    third = steps([data(6, DataStart(0, 1, 16, {**state, "epoch": 1, "place": 4}))], 2, 6)
    whole = flat(steps([data(1)], 24, 1))
    assert steps([second], 2, 5) == [sorted(whole[12:17]), sorted(whole[17:22])]
    assert third[0] == sorted(whole[18:24])


class Own(Sampler):
    """A sampler that tells nothing; it divides the rows if it is given a rank."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rows = range(rank, 16, size)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)


def test_a_sampler_that_gives_all_ranks_the_same_is_refused() -> None:
    """With the sentence that says how; one that divides the rows stays as it is."""
    with pytest.raises(ConfigError, match=r"same rows on all 2 data-parallel ranks.*\(Own\).*DistributedSampler\("):
        ranks(lambda rank: DataLoader(Rows(16), batch_sampler=BatchSampler(Own(), 1, False)), 2)
    two = ranks(lambda rank: DataLoader(Rows(16), sampler=Own(rank, 2)), 2)
    assert steps(two, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert {(data.train_rows, data.global_batches_per_epoch) for data in two} == {(16, 4)}


def test_a_sampler_that_knows_ranks_has_to_know_the_right_ones() -> None:
    """A DistributedSampler stays as it is; one of other ranks is refused, with what to give it."""

    def loader(rank: int, size: int) -> DataLoader:
        return DataLoader(Rows(9), sampler=DistributedSampler(Rows(9), size, rank, shuffle=False))

    two = ranks(lambda rank: loader(rank, 2), 2)
    assert [(data.train_rows, data.global_batches_per_epoch) for data in two] == [(10, 2)] * 2
    assert steps(two, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ConfigError, match=r"rank 1 of 4.*data-parallel rank 0 of 2.*num_replicas=get_args"):
        ranks(lambda rank: loader(rank + 1, 4), 2)


@pytest.mark.parametrize("form", ["lengths differ", "as long", "subset"])
def test_rows_that_were_divided_before_are_not_divided_again(form: str, said: list[str]) -> None:
    """A data set that the user has cut up by rank: each reads all of its own, as many steps on every rank."""

    def loader(rank: int) -> DataLoader:
        rows = range(rank, 17 if form == "lengths differ" else 16, 2)
        if form == "subset":
            return DataLoader(Rows(16), sampler=SubsetRandomSampler(rows))
        return DataLoader(Subset(Rows(17), rows), shuffle=True)

    two = ranks(loader, 2)
    assert {data.global_batches_per_epoch for data in two} == {4}
    found = flat(steps(two, 4))
    assert len(set(found)) == 16
    assert any("holds other rows on every data-parallel rank" in line for line in said)


def test_orders_that_differ_by_rank_are_refused() -> None:
    """A generator seeded by rank would show some rows twice and others never."""
    with pytest.raises(ConfigError, match=r"another order on every data-parallel rank.*same seed"):
        ranks(lambda rank: DataLoader(Rows(16), shuffle=True, generator=torch.Generator().manual_seed(rank)), 2)
    with pytest.raises(ConfigError, match=r"different lengths on different ranks \(4, 5 rows\)"):
        ranks(lambda rank: Rows(4 + rank), 2)
    with pytest.raises(ConfigError, match="data-parallel rank 0, which have to read the same"):
        seen = iter(range(2))
        ranks(lambda rank: DataLoader(Rows(16), sampler=Own(next(seen), 2)), 1, copies=2)


class Stream(IterableDataset):
    """Rows with random numbers, divided if it is given a rank."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(16).tolist()
        yield from (Rows(16)[row] for row in order[self.rank :: self.size])


@pytest.mark.parametrize("form", ["loader", "iterable"])
def test_a_stream_that_is_the_same_on_all_ranks_is_refused(form: str) -> None:
    """By its first micro-batch, although its rows are augmented; a divided one stays as it is."""

    def data(rank: int, size: int) -> Any:
        loader = DataLoader(Stream(rank, size), batch_size=1)
        return loader if form == "loader" else map(list, loader)

    with pytest.raises(ConfigError, match=r"same on all 2 data-parallel ranks.*itertools.islice"):
        ranks(lambda rank: data(0, 1), 2)
    two = ranks(lambda rank: data(rank, 2), 2)
    assert sorted(flat(steps(two, 4))) == list(range(16))
    constant = ranks(lambda rank: ([torch.zeros(2)] * 8, None), 2)  # made up: says nothing of rows
    assert len(take(constant[0].train, 3)) == 3


def test_sizes_that_differ_are_refused() -> None:
    """Counts of rows and epochs would be wrong by the factor."""
    with pytest.raises(ConfigError, match=r"training DataLoader has batch_size=3.*--micro-batch-size is 2"):
        build_run_data(lambda: DataLoader(Rows(12), batch_size=3), settings(micro=2), DataStart())
    data = build_run_data(lambda: DataLoader(Rows(11), batch_size=2), settings(micro=2), DataStart())
    assert (data.train_rows, data.global_batches_per_epoch) == (11, 3)  # the last micro-batch has one row
    with pytest.raises(DataError, match=r"3 row\(s\), 3 micro-batch\(es\).*fewer than the 4 of one step"):
        build_run_data(lambda: DataLoader(Rows(3)), settings(), DataStart())


def drawn(data: RunData, count: int) -> list[tuple[float, ...]]:
    """Row and random numbers of the first micro-batches of one row."""
    found = [tuple(float(value[0]) for value in batch) for batch in take(data.train, count)]
    data.close()
    return found


@pytest.mark.parametrize("form", ["data set", "loader", "build_mm_dataloader"])
def test_augmentation_is_drawn_by_row_place_and_epoch(form: str) -> None:
    """Other numbers for each row, rank and epoch; the same after a resume, with workers or without."""

    def data(rank: int = 0, size: int = 1, workers: int = 0, consumed: int = 0) -> RunData:
        run = settings(size=size, num_workers=workers)
        rows: Any = Rows(8)
        if form == "loader":
            rows = DataLoader(rows, shuffle=True, num_workers=workers)
        elif form == "build_mm_dataloader":
            rows.collate_fn = default_collate
            sizes = {"micro_batch_size": 1, "global_batch_size": 4, "num_workers": workers}
            rows = build_mm_dataloader(rows, None, None, consumed, dp_rank=rank, dp_size=size, **sizes)
        return build_run_data(lambda: rows, run, DataStart(rank, size, consumed))

    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    whole = drawn(data(), 16)
    assert states[:2] == (random.getstate(), str(np.random.get_state()))
    assert torch.equal(states[2], torch.get_rng_state())
    assert len({number for row in whole for number in row[1:]}) == 48
    assert drawn(data(workers=2), 16) == whole
    assert drawn(data(workers=1, consumed=12), 4) == whole[12:]
    two = [drawn(data(rank, 2), 8) for rank in (0, 1)]
    assert list(itertools.chain.from_iterable(zip(*two))) == whole


def test_augmentation_of_streams_and_divided_loaders() -> None:
    """Other numbers on every rank and in every epoch, which a resume repeats; in workers or without."""

    def stream(workers: int, consumed: int = 0) -> list[list[tuple[float, ...]]]:
        run = settings(batch=2, size=2)
        made = ranks(lambda rank: DataLoader(Stream(rank, 2), num_workers=workers), 2, run, consumed=consumed)
        return [drawn(data, 16 - consumed // 2) for data in made]

    for workers in (0, 1):
        found = stream(workers)
        numbers = [number for own in found for place, row in enumerate(own) if place % 8 for number in row[1:]]
        assert len(set(numbers)) == len(numbers)
        assert stream(workers, 6) == [own[3:] for own in found]


class Configured(Rows):
    """Says what its workers are."""

    ready = False

    def __getitem__(self, index: int) -> tuple[int, bool, int, int]:
        info: Any = get_worker_info()
        return index, self.ready, os.getpid(), info.num_workers


def get_ready(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.ready = True


@pytest.mark.parametrize("form", ["data set", "loader", "stream"])
def test_workers_outlive_the_signals_of_a_run(form: str) -> None:
    """A scheduler and torchrun signal every process of a job; batches go on. Options of the user's loader hold."""

    class Each(IterableDataset):
        ready = False

        def __iter__(self) -> Iterator[Any]:
            rows = Configured(50)
            rows.ready = self.ready
            yield from (rows[number] for number in range(50))

    options: dict[str, Any] = {"num_workers": 1, "worker_init_fn": get_ready, "prefetch_factor": 1}
    forms: dict[str, Any] = {
        "data set": Configured(50),
        "loader": DataLoader(Configured(50), shuffle=True, **options),
        "stream": DataLoader(Each(), **options),
    }
    data = build_run_data(lambda: forms[form], settings(num_workers=1), DataStart())
    _, ready, pid, workers = next(data.train)
    assert int(pid) != os.getpid() and int(workers) == 1
    assert bool(ready) == (form != "data set")
    for name in ("TERM", "USR1", "INT", "HUP"):
        subprocess.run(["kill", f"-{name}", str(int(pid))], check=True)
    for _ in range(10):
        assert int(next(data.train)[2]) == int(pid)
    data.close()


def evaluated(data: RunData, count: int) -> list[list[int]]:
    """Rows of micro-batches that count, in one pass of an evaluation."""
    assert data.valid is not None
    found = []
    for number, batch in enumerate(itertools.islice(data.valid.fresh_iterator(), count)):
        found.append([] if data.valid.is_filler(number) else batch[0].tolist())
    return found


@pytest.mark.parametrize("form", ["data set", "loader", "sequence"])
@pytest.mark.parametrize("rows", [9, 3])
def test_every_validation_row_comes_once(form: str, rows: int) -> None:
    """No tail is lost and no key of data.json is named; what fills up the last step isn't counted."""

    def valid(rank: int) -> Any:
        whole = [[torch.tensor([a for a in (row, row + 1) if a < rows])] for row in range(0, rows, 2)]
        forms = {"data set": Rows(rows), "loader": DataLoader(Rows(rows), batch_size=2), "sequence": whole[rank::2]}
        return DataLoader(Rows(16), batch_size=2), forms[form]

    made = ranks(valid, 2, settings(batch=8, micro=2, size=2))
    for _ in range(2):
        found = [evaluated(data, 4 if rows == 9 else 2) for data in made]
        assert sorted(flat(flat(found))) == list(range(rows))
    assert [data.valid.limit_batches(9) for data in made if data.valid] == [2 if rows == 9 else 1] * 2
    for data in made:
        data.close()


def test_pipeline_stages_get_whole_micro_batches(said: list[str]) -> None:
    """Stages exchange tensors of one size: rows that don't fill a micro-batch are left out, and that is said."""
    run = settings(micro=2, pipeline_model_parallel_size=2)
    data = build_run_data(lambda: (DataLoader(Rows(9), batch_size=2), Rows(9)), run, DataStart())
    assert (data.global_batches_per_epoch, [len(rows) for rows in evaluated(data, 4)]) == (2, [2, 2, 2, 2])
    assert any("last 1 row(s) of the validation data are left out" in line for line in said)

"""Micro-batches and the loader: padding, media, fillers, workers, position, errors."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from mindspeed_mm.configs.data_config import CollateParam, DataloaderParam
from mindspeed_mm.data import build_mm_dataloader, build_mm_dataset
from mindspeed_mm.data.adapter import DataAdapter, DefaultAdapter
from mindspeed_mm.data.conversation.encode import TokenSample
from mindspeed_mm.data.loading.collate import NOTES, Collator
from mindspeed_mm.data.notes import Note
from mindspeed_mm.data.workers import WorkerFailure
from mindspeed_mm.utils.errors import ConfigError, DataError
from tests.support.fake_accelerator import fake_accelerator
from tests.unit.data.data_rows import flat, talk
from tests.unit.data.rank_batches import RankBatches

IN_ORDER = {"sampler_type": "SequentialSampler"}


@pytest.fixture
def rows(images: list[str]) -> list[dict[str, Any]]:
    """Six rows: 0, 1 and 2 images, different lengths."""
    return [talk("<image>" * (i % 3) + f"row {i}", "word " * (i + 1), images=images[: i % 3]) for i in range(6)]


def _collate(samples: list[TokenSample], **param: Any) -> dict[str, Any]:
    dataset = SimpleNamespace(pad_token_id=9)
    return Collator(DefaultAdapter(), CollateParam(**param), dataset)(samples)


def _sample(length: int, **more: torch.Tensor) -> TokenSample:
    ids = torch.arange(1, length + 1)
    return {"input_ids": ids, "labels": ids.clone(), **more}


def _ids(loader: Any, count: int) -> list[list[list[int]]]:
    """`input_ids` of the next micro-batches, without padding."""
    batches = itertools.islice(loader, count)
    return [[row[mask.bool()].tolist() for row, mask in zip(b["input_ids"], b["attention_mask"])] for b in batches]


def test_padding_is_on_the_right_and_never_a_target(said: list[str]) -> None:
    for options in ({}, {"ignore_pad_token_for_loss": False}):
        batch = _collate([_sample(2, mm_token_type_ids=torch.tensor([0, 1])), _sample(3)], **options)
        assert batch["input_ids"].tolist() == [[1, 2, 9], [1, 2, 3]]
        assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
        assert batch["labels"].tolist() == [[1, 2, -100], [1, 2, 3]]
        assert batch["mm_token_type_ids"].tolist() == [[0, 1, 0], [0, 0, 0]]
        assert all(v.dtype == torch.int64 for v in batch.values() if isinstance(v, torch.Tensor))
        assert batch["num_rows"] == 2 and "pixel_values" not in batch
    assert any("padding is never a target" in line for line in said)


def test_pad_options() -> None:
    batch = _collate([_sample(5)], pad_to_multiple_of=4, pad_id=0)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]
    with pytest.raises(ConfigError, match="pad_id"):
        Collator(DefaultAdapter(), CollateParam(), object())([_sample(1)])


def test_media_are_stacked_in_row_order() -> None:
    one, two = (
        {"pixel_values": torch.full((n, 3), float(n)), "image_grid_thw": torch.tensor([[1, 1, n]])} for n in (4, 8)
    )
    batch = _collate([_sample(2, **two), _sample(2), _sample(2, **one)])
    assert batch["pixel_values"][:, 0].tolist() == [8.0] * 8 + [4.0] * 4
    assert batch["image_grid_thw"].tolist() == [[1, 1, 8], [1, 1, 4]]
    assert DefaultAdapter().media_counts(batch) == {"image": 2, "video": 0, "audio": 0}
    assert DefaultAdapter().media_counts({}) == {"image": 0, "video": 0, "audio": 0}
    assert isinstance(DefaultAdapter(), DataAdapter)


def test_unknown_or_missing_tensors_are_refused() -> None:
    with pytest.raises(DataError, match="holds pixels"):
        _collate([_sample(2, pixels=torch.zeros(1))])
    with pytest.raises(DataError, match="without labels"):
        _collate([{"input_ids": torch.ones(1)}])


def test_four_text_only_rows_and_one_with_an_image_train_together(param: Any, images: list[str]) -> None:
    """D04: images absent, null, [], "" and one real path in one batch."""
    rows = [talk("q", "a"), *(talk("q", "a", images=v) for v in (None, [], "")), talk("<image>", "a", images=images[0])]
    loader = build_mm_dataloader(build_mm_dataset(param(rows)), IN_ORDER, micro_batch_size=5, global_batch_size=5)
    batch = next(iter(loader))
    assert batch["num_rows"] == 5 and batch["image_grid_thw"].shape == (1, 3)
    assert (batch["mm_token_type_ids"].sum(1) > 0).tolist() == [False] * 4 + [True]


def test_pinning_follows_the_device_of_this_process(
    param: Any, rows: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MM_DEVICE=cpu on a host with an accelerator: pinned memory would wake the accelerator for nothing."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    config = DataloaderParam(pin_memory=True)
    loader = build_mm_dataloader(build_mm_dataset(param(rows)), config, micro_batch_size=2, global_batch_size=2)
    iter(loader)
    assert loader._loader is not None and not loader._loader.pin_memory
    loader.close()


def test_a_batch_goes_through_pinned_memory_as_it_is(param: Any, rows: list[Any]) -> None:
    """What torch's loader pins: tensors, beside lists, notes and numbers."""
    loader = build_mm_dataloader(build_mm_dataset(param(rows)), None, micro_batch_size=2, global_batch_size=2)
    batch = {**next(iter(loader)), NOTES: [Note("row 3: odd", "odd")]}
    with fake_accelerator() as fake:
        pinned = pin_memory(batch)
    assert type(pinned) is dict and list(pinned) == list(batch)
    for key, value in batch.items():
        assert torch.equal(pinned[key], value) if isinstance(value, torch.Tensor) else pinned[key] == value
        assert type(pinned[key]) is type(value)
    assert fake.log == ["pin"] * sum(isinstance(value, torch.Tensor) for value in batch.values())
    failure = WorkerFailure("a row is odd")
    assert pin_memory(failure) is failure


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_hands_out_the_samplers_rows(param: Any, rows: list[Any], workers: int) -> None:
    """In this process and in workers: the same endless sequence, epoch after epoch."""
    dataset = build_mm_dataset(param(rows))
    loader = build_mm_dataloader(dataset, None, micro_batch_size=2, global_batch_size=4, num_workers=workers)
    rows_of = RankBatches(6, 2, 4)
    expected = [[dataset[i]["input_ids"].tolist() for i in batch] for batch in itertools.islice(rows_of, 7)]
    assert _ids(loader, 7) == expected
    assert (loader.num_rows, loader.rows_per_epoch, loader.global_batches_per_epoch) == (6, 4, 1)
    loader.close()


def test_position_moves_by_global_batches_and_is_the_whole_state(param: Any, rows: list[Any]) -> None:
    """S01: saved after five micro-batches of two; another number of workers and other micro-batches continue it."""
    dataset = build_mm_dataset(param(rows))
    sizes = {"micro_batch_size": 1, "global_batch_size": 2}
    whole = _ids(build_mm_dataloader(dataset, None, **sizes), 14)
    loader = build_mm_dataloader(dataset, None, **sizes, num_workers=1)
    iterator = iter(loader)
    positions = []
    for _ in range(9):
        next(iterator)
        positions.append(loader.state_dict()["consumed_samples"])
    assert positions == [0, 2, 2, 4, 4, 6, 6, 8, 8]  # the ninth is half a global batch
    state = loader.state_dict()
    assert (state["consumed_samples"], state["epoch"]) == (8, 1)
    loader.close()
    for options in ({"num_workers": 2}, {"num_workers": 0}):
        again = build_mm_dataloader(dataset, None, **sizes, **options)
        again.load_state_dict(state)
        assert _ids(again, 6) == whole[8:14]
        assert again.consumed_samples == 14
        again.close()
    paired = build_mm_dataloader(dataset, None, micro_batch_size=2, global_batch_size=2, consumed_samples=8)
    assert flat(_ids(paired, 3)) == flat(whole[8:14])


def test_resume_in_epoch_two(param: Any) -> None:
    """K07: map-style data, 4 rows, resumed at sample 6: not an empty data set."""
    dataset = build_mm_dataset(param([talk(f"row {i}", "a") for i in range(4)]))
    sizes = {"micro_batch_size": 2, "global_batch_size": 2}
    whole = _ids(build_mm_dataloader(dataset, None, **sizes), 6)
    assert _ids(build_mm_dataloader(dataset, None, None, 6, **sizes), 3) == whole[3:]


def test_changed_data_is_said_at_a_resume(param: Any, said: list[str]) -> None:
    loader = build_mm_dataloader(
        build_mm_dataset(param([talk("q", "a")])), None, micro_batch_size=1, global_batch_size=1
    )
    loader.load_state_dict({**loader.state_dict(), "num_rows": 5, "consumed_samples": 3})
    assert any("num_rows was 5" in line and "is 1 now" in line for line in said)
    assert loader.consumed_samples == 3


def test_fillers_end_an_epoch(param: Any) -> None:
    """H04: 3 rows, accumulation 4, drop_last false: the fourth micro-batch is a filler with num_rows 0."""
    dataset = build_mm_dataset(param([talk(f"row {i}", "a") for i in range(3)]))
    with pytest.raises(DataError, match="fewer than one global batch"):
        build_mm_dataloader(dataset, None, micro_batch_size=1, global_batch_size=4)
    loader = build_mm_dataloader(dataset, {"drop_last": False}, micro_batch_size=1, global_batch_size=4)
    batches = list(itertools.islice(loader, 8))
    assert [batch["num_rows"] for batch in batches] == [1, 1, 1, 0] * 2
    assert set(batches[3]["labels"].flatten().tolist()) == {-100}
    assert loader.consumed_samples == 8


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_begins_anew_with_every_iterator(param: Any, rows: list[Any], workers: int) -> None:
    """File order, every row once a pass, the same batches at every evaluation, by the same worker."""
    dataset = build_mm_dataset(param(rows))
    sizes = {"micro_batch_size": 2, "global_batch_size": 4, "num_workers": workers}
    loader = build_mm_dataloader(dataset, {"shuffle": True}, **sizes, train=False)
    first = _ids(loader, 3)
    assert flat(first) == [dataset[i]["input_ids"].tolist() for i in range(6)]
    pids = _worker_pids(loader)
    assert _ids(loader, 3) == first
    assert _worker_pids(loader) == pids
    assert [b["num_rows"] for b in itertools.islice(loader, 4)] == [2, 2, 2, 0]
    loader.close()


def _worker_pids(loader: Any) -> list[int]:
    return [worker.pid for worker in getattr(loader._running, "_workers", [])]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_row_arrives_as_one_sentence(param: Any, tmp_path: Path, workers: int) -> None:
    (tmp_path / "bad.png").write_bytes(b"<html>")
    rows = [talk("q", "a"), talk("<image>", "a", images=["bad.png"])]
    dataset = build_mm_dataset(param(rows))
    loader = build_mm_dataloader(dataset, IN_ORDER, micro_batch_size=1, global_batch_size=1, num_workers=workers)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(DataError) as raised:
        next(iterator)
    assert str(raised.value).startswith(str(tmp_path / "rows.json") + ", row 2: ")
    assert "Traceback" not in str(raised.value) and "worker process" not in str(raised.value)


def test_a_dead_worker_is_an_error_and_close_ends_the_others(param: Any, rows: list[Any]) -> None:
    loader = build_mm_dataloader(
        build_mm_dataset(param(rows)), None, micro_batch_size=1, global_batch_size=1, num_workers=2
    )
    iterator = iter(loader)
    next(iterator)
    pids = _worker_pids(loader)
    os.kill(pids[0], 9)
    with pytest.raises(DataError, match="a data worker died"):
        for _ in range(50):
            next(iterator)
    loader.close()
    assert _gone(pids)
    assert list(iterator) == []


def test_workers_outlive_the_signals_of_a_run(param: Any, rows: list[Any]) -> None:
    """Schedulers and torchrun signal every process of a job: batches go on until the run has written its checkpoint."""
    loader = build_mm_dataloader(
        build_mm_dataset(param(rows)), None, micro_batch_size=1, global_batch_size=1, num_workers=1
    )
    iterator = iter(loader)
    next(iterator)
    (pid,) = _worker_pids(loader)
    for name in ("TERM", "USR1", "INT", "HUP"):
        subprocess.run(["kill", f"-{name}", str(pid)], check=True)  # not from the parent
    for _ in range(10):
        assert next(iterator)["num_rows"] == 1
    os.kill(pid, signal.SIGTERM)  # from the parent
    assert _gone([pid])
    loader.close()


class _Waits(torch.utils.data.Dataset):
    """Its only row says who reads it, and takes a minute."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> TokenSample:
        print(os.getpid(), flush=True)
        time.sleep(60)
        raise AssertionError("nobody needs the row any more")


def test_a_worker_ends_soon_after_its_parent() -> None:
    """In the middle of a row, too, where torch doesn't look."""
    code = (
        "from mindspeed_mm.data import build_mm_dataloader as build\n"
        "from tests.unit.data.test_data_loader import _Waits\n"
        "next(iter(build(_Waits(), {'collate_param': {'pad_id': 0}}, micro_batch_size=1, global_batch_size=1, "
        "num_workers=1)))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.kill()
        process.wait()
        assert worker != process.pid and _gone([worker])


def test_prefetching_leaves_the_position_where_it_is(param: Any, rows: list[Any]) -> None:
    sizes = {"micro_batch_size": 1, "global_batch_size": 2, "num_workers": 1}
    loader = build_mm_dataloader(build_mm_dataset(param(rows)), None, **sizes)
    before = loader.state_dict()
    iterator = iter(loader)
    assert loader.state_dict() == before and loader.consumed_samples == 0
    first = next(iterator)["row_ids"].tolist()
    assert loader.state_dict() == before
    loader.close()
    assert next(iter(loader))["row_ids"].tolist() == first
    loader.close()


def test_a_loader_that_nobody_closed_doesnt_hold_up_the_end() -> None:
    code = (
        "from mindspeed_mm.data import build_mm_dataloader as build\n"
        "from tests.unit.data.test_data_loader import _Threads\n"
        "loader = build(_Threads(), {'collate_param': {'pad_id': 0}}, micro_batch_size=1, global_batch_size=1, "
        "num_workers=2)\n"
        "iterator = iter(loader); next(iterator)\n"
        "import builtins; builtins.kept = loader, iterator\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def _gone(pids: list[int]) -> bool:
    for _ in range(50):
        states = [Path(f"/proc/{pid}/stat") for pid in pids]
        if not any(state.exists() and state.read_text().split()[2] != "Z" for state in states):
            return True
        time.sleep(0.1)
    return False


def test_workers_use_one_thread_and_leave_the_global_random_state_alone(param: Any, rows: list[Any]) -> None:
    """A resumed run continues with the random numbers of the run it resumes: making an iterator draws none."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for workers in (0, 1):
        loader = build_mm_dataloader(
            _Threads(), {"collate_param": {"pad_id": 0}}, micro_batch_size=1, global_batch_size=1, num_workers=workers
        )
        batch = next(iter(loader))
        assert workers == 0 or batch["input_ids"].tolist() == [[1, 1]]
        loader.close()
    assert torch.equal(torch.get_rng_state(), before)


class _Threads(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> TokenSample:
        threads = torch.tensor([torch.get_num_threads()] * 2)
        return {"input_ids": threads, "labels": threads.clone()}


def test_a_users_own_data_set(param: Any) -> None:
    """Its samples are padded and filled up like ours; its own collate_fn wins."""
    loader = build_mm_dataloader(
        _Threads(), {"drop_last": False, "collate_param": {"pad_id": 0}}, micro_batch_size=1, global_batch_size=2
    )
    real, filler = itertools.islice(loader, 2)
    assert (real["num_rows"], filler["num_rows"]) == (1, 0)
    assert set(filler["labels"].flatten().tolist()) == {-100}
    own = _Threads()
    own.collate_fn = len  # type: ignore[attr-defined]
    assert next(iter(build_mm_dataloader(own, None, micro_batch_size=1, global_batch_size=1))) == 1


def test_long_rows_are_counted_in_the_log(param: Any, said: list[str]) -> None:
    """Those that were cut, and apart from them those that are left out, with the reason."""
    rows = [talk("q", "a", "q", "long " * 50), talk("q", "long " * 50), talk("q", "long " * 60)]
    dataset = build_mm_dataset(param(rows), max_length=80)
    loader = build_mm_dataloader(dataset, IN_ORDER, micro_batch_size=1, global_batch_size=1)
    batches = list(itertools.islice(loader, 3))
    assert all(set(batch) == set(batches[0]) for batch in batches)  # the notes are not handed on
    assert [batch["num_rows"] for batch in batches] == [1, 0, 0]
    assert [batch["row_ids"].tolist() for batch in batches] == [[0], [-1], [-1]]
    assert [batch["rows_left_out"] for batch in batches] == [0, 1, 1]
    assert [line for line in said if "rows too long for the sequence length" in line and "so far: 1" in line]
    left_out = [line for line in said if "rows left out, on this rank so far" in line]
    assert ["so far: 1 (1 × " in left_out[0], "row 2" in left_out[0]] == [True, True]
    assert ["so far: 2 (2 × " in left_out[1], "row 3" in left_out[1], len(left_out)] == [True, True, 2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampler_type": "BaseRandomBatchSample"}, ["sampler_type", "BaseRandomBatchSampler"]),
        ({"sampler_type": "SequentialSampler", "shuffle": True}, ["SequentialSampler", "shuffle"]),
        ({"sampler_type": "AESampler"}, ["not there yet", "BaseRandomBatchSampler"]),
        ({"collate_param": {"model_name": "qwen2vll"}}, ["model_name", "qwen2vl"]),
        ({"drop_lst": True}, ["drop_lst", "drop_last"]),
    ],
)
def test_unknown_names_end_with_the_nearest(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        build_mm_dataloader(_Threads(), change, micro_batch_size=1, global_batch_size=1)
    for word in words:
        assert word in str(raised.value)


def test_shuffle_null_is_the_samplers_default() -> None:
    for name, shuffle, expected in (
        ("BaseRandomBatchSampler", None, True),
        ("stateful_distributed_sampler", None, True),
        ("SequentialSampler", None, False),
        ("BaseRandomBatchSampler", False, False),
    ):
        param = {"sampler_type": name, "shuffle": shuffle}
        loader = build_mm_dataloader(_Threads(), param, micro_batch_size=1, global_batch_size=1)
        assert loader.sampler.planner.order.shuffle is expected


def test_typed_sections_and_a_process_group(param: Any) -> None:
    group = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    dataset = build_mm_dataset(param([talk("q", "a"), talk("r", "b")]))
    loader = build_mm_dataloader(
        dataset, DataloaderParam(shuffle=False), group, 0, None, micro_batch_size=1, global_batch_size=2
    )
    assert _ids(loader, 1) == [[dataset[1]["input_ids"].tolist()]]


def test_config_reader_is_accepted(param: Any) -> None:
    from mindspeed_mm.configs.config import ConfigReader

    reader = ConfigReader({"dataset_param": param([talk("q", "a")]), "dataloader_param": {"shuffle": None}})
    dataset = build_mm_dataset(reader.dataset_param)
    loader = build_mm_dataloader(dataset, reader.dataloader_param, micro_batch_size=1, global_batch_size=1)
    assert isinstance(iter(loader), Iterator)
    assert next(iter(loader))["num_rows"] == 1


def test_importing_the_room_is_light() -> None:
    heavy = ("torch", "transformers", "pyarrow", "PIL")
    code = f"import sys, mindspeed_mm.data; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")

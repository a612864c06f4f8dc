"""Cases of the kind Loader and sampler: orders, resumes, and samples in packs."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from mindspeed_mm.configs.arguments import parse_args, resolve_train_iters, validate_args
from mindspeed_mm.configs.run import Run
from mindspeed_mm.data import build_mm_dataloader, build_mm_dataset
from mindspeed_mm.data.loading.providers import build_run_data
from mindspeed_mm.data.plan.batching import Batching
from mindspeed_mm.data.plan.fixed_plan import Balance
from mindspeed_mm.data.start import DataStart
from mindspeed_mm.utils.errors import ConfigError
from tests.support.launch import WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.runs import run_of_args
from tests.support.tiny import write_mixed_dataset
from tests.support.workers import RankPool
from tests.unit.data.data_rows import flat
from tests.unit.data.fake_data import FakeRows, take

LENGTHS = [20 + 7 * (row % 9) for row in range(16)]

WAYS: dict[str, dict[str, Any]] = {
    "rows": {},
    "packs": {"packing": True},
    "stream": {"streamed": True},
    "packs of a stream": {"packing": True, "streamed": True},
    "grouped": {"param": {"sampler_type": "LengthGroupedSampler"}},
    "balanced": {"batching": Batching(Balance(ranks=True))},
}


def loader(way: str, **sizes: Any) -> Any:
    """16 rows, shuffled, handed out in one of the ways; packs hold 100 tokens."""
    options = dict(WAYS[way])
    param, batching = options.pop("param", None), options.pop("batching", None)
    settings = {"micro_batch_size": 1, "global_batch_size": 1, **sizes}
    return build_mm_dataloader(FakeRows(LENGTHS, 100, **options), param, batching=batching, **settings)


def rows(loader: Any, batches: int) -> list[list[int]]:
    return [batch["row_ids"].tolist() for batch in itertools.islice(loader, batches)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stop", [5, 21])
@pytest.mark.parametrize("workers", [0, 2])
def test_s01_resume_in_the_middle_of_an_epoch(way: str, stop: int, workers: int) -> None:
    """S01: 16 rows, shuffled, stopped after 5, and in the second epoch: the same sequence as unbroken."""
    whole = rows(loader(way), 60)
    first = loader(way, num_workers=workers)
    assert rows(first, stop) == whole[:stop]
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    again = loader(way, num_workers=workers)
    again.load_state_dict(state)
    assert rows(again, 60 - stop) == whole[stop:]
    again.close()
    if "packs" not in way:
        assert sorted(flat(whole[:16])) == sorted(flat(whole[16:32])) == list(range(16))


@pytest.mark.parametrize("way", WAYS)
def test_s03_another_order_every_epoch(way: str) -> None:
    """S03: 6 rows, 3 epochs: every row once in each, in different orders that the seed repeats."""

    def loader_of_six(seed: int) -> list[int]:
        options = dict(WAYS[way])
        param, batching = options.pop("param", None), options.pop("batching", None)
        dataset = FakeRows(LENGTHS[:6], 100, **options)
        made = build_mm_dataloader(
            dataset, param, batching=batching, micro_batch_size=1, global_batch_size=1, seed=seed
        )
        if "packs" in way:  # which row is in which pack is another question: what comes is read off the order
            return take(made.sampler.planner.order.rows_from(0), 18)
        return flat(rows(made, 18))

    ids = loader_of_six(1)
    epochs = [ids[start : start + 6] for start in (0, 6, 12)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert loader_of_six(1) == ids != loader_of_six(2)


NINE = LENGTHS[:9]


def loader_of_nine(way: str, batch: int, drop_last: bool = False, **options: Any) -> Any:
    """9 rows, shuffled, in global batches of a size."""
    options = {**WAYS[way], **options}
    param, batching = options.pop("param", {}), options.pop("batching", None)
    dataset = FakeRows(NINE, 100, **options)
    return build_mm_dataloader(
        dataset, {**param, "drop_last": drop_last}, batching=batching, micro_batch_size=1, global_batch_size=batch
    )


def handed_over(first: Any, second: Any, micro_batches: int) -> None:
    """Read some of one loader, and let the other go on from there."""
    rows(first, micro_batches)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))


@pytest.mark.parametrize("way", [way for way in WAYS if "packs" not in way])
@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4)])
@pytest.mark.parametrize("drop_last", [True, False])
def test_w05_another_batch_size_at_an_epochs_end(way: str, before: int, after: int, drop_last: bool) -> None:
    """W05: stopped after whole epochs, resumed with another global batch size: every row once in the next one."""
    epoch = 9 // before * before if drop_last else -(-9 // before) * before
    kept = 9 // after * after if drop_last else 9
    for epochs in (1, 2):
        second = loader_of_nine(way, after, drop_last)
        handed_over(loader_of_nine(way, before, drop_last), second, epochs * epoch)
        assert second.state_dict()["epoch"] == epochs
        whole = -(-kept // after) * after
        found = [row for row in flat(rows(second, 2 * whole)) if row >= 0]
        for part in (found[:kept], found[kept:]):
            assert len(set(part)) == kept and (drop_last or sorted(part) == list(range(9)))
        assert second.state_dict()["epoch"] == epochs + 2


@pytest.mark.parametrize("way", ["rows", "stream"])
def test_w05_another_batch_size_within_an_epoch(way: str) -> None:
    """W05: the saved epoch goes on with the next whole batch after the saved place, with drop_last or without."""
    order = flat(rows(loader_of_nine(way, 1), 18))
    second = loader_of_nine(way, 3)
    handed_over(loader_of_nine(way, 4), second, 12 + 4)
    assert flat(rows(second, 3)) == order[9 + 6 : 9 + 9]
    third = loader_of_nine(way, 4, drop_last=True)
    handed_over(loader_of_nine(way, 4), third, 12)
    assert flat(rows(third, 8)) == order[9:17]


@pytest.mark.parametrize("way", [way for way in WAYS if "packs" in way])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_w05_another_batch_size_with_packs(way: str, before: int, after: int) -> None:
    """W05: each row was trained as often as the order has had it, but for those that wait for a pack."""
    first, second = loader_of_nine(way, before), loader_of_nine(way, after)
    trained = Counter(flat(rows(first, 5 * before)))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    trained.update(flat(rows(second, 6 * after)))
    packs, order = second.state_dict()["packing"], second.sampler.planner.order
    waiting = order.rows_at([position for position, _ in packs["pending"]])
    assert trained + Counter(waiting) == Counter(take(order.rows_from(0), packs["next"]))
    assert packs["next"] > 18


@pytest.mark.parametrize("way", ["stream", "packs of a stream"])
def test_w05_a_stream_changes_between_rows_and_packs_in_a_later_epoch(way: str) -> None:
    """W05: the end of a stream is found again: the saved epoch goes on, not the first one."""
    other = loader_of_nine("packs of a stream" if way == "stream" else "stream", 1)
    if way == "stream":
        handed_over(loader_of_nine(way, 4), other, 12 + 4)
        assert other.state_dict()["packing"]["next"] == 9 + 4
    else:
        first = loader_of_nine(way, 1)
        handed_over(first, other, 9)
        following = first.state_dict()["packing"]["next"]
        order = flat(rows(loader_of_nine("stream", 1), following + 3))
        assert following > 9 and flat(rows(other, 3)) == order[following:]


def write_texts(folder: Path, words: list[int]) -> Path:
    """Plain text rows of so many words, as a file for `attr.pretrain`."""
    lines = [json.dumps({"text": " ".join([f"w{row}"] * count)}) for row, count in enumerate(words)]
    (folder / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder / "texts.jsonl"


@pytest.mark.parametrize("workers", [0, 1])
def test_p04_a_row_of_several_samples_in_a_stream(workers: int) -> None:
    """P04: streaming and packing, a row that gives two samples, and a row longer than a pack: each placed once."""
    lengths: list[Any] = [30, [60, 25], 250, 40, 10, [100, 100, 7]]
    dataset = FakeRows(lengths, streamed=True, packing=True)
    dataset.max_length = 100  # the truncation rule: what is longer is cut to it
    made = build_mm_dataloader(dataset, None, micro_batch_size=1, global_batch_size=1, num_workers=workers)
    seen: Counter[tuple[int, int, int]] = Counter()
    for batch in itertools.islice(made, 120):
        assert batch["input_ids"].shape[1] <= 100
        documents, labels = batch["documents"][0], batch["labels"][0]
        for number, row in enumerate(batch["row_ids"].tolist(), start=1):
            found = labels[documents == number]
            seen[row, int(found[-1]) // 1000, len(found)] += 1
    expected = {(0, 0, 30), (1, 0, 60), (1, 1, 25), (2, 0, 100), (3, 0, 40), (4, 0, 10)}
    expected |= {(5, 0, 100), (5, 1, 100), (5, 2, 7)}
    assert set(seen) == expected
    assert max(seen.values()) - min(seen.values()) <= 20  # those that wait in the end
    made.close()


def test_p04_plain_texts_are_cut_into_pieces(tmp_path: Path, qwen3_dir: Path) -> None:
    """P04: real plain-text rows from a stream: one is cut into several samples, and all of it is trained."""
    limit = 64
    described = {
        "dataset_type": "huggingface",
        "basic_parameters": {
            "dataset": str(write_texts(tmp_path, [5, 200, 9, 40])), "dataset_dir": str(tmp_path), "streaming": True,
            "buffer_size": 4, "packing": True, "stage": "pretrain",
        },
        "preprocess_parameters": {"model_name_or_path": str(qwen3_dir)},
        "attr": {"formatting": "alpaca", "prompt": "text", "pretrain": True},
    }  # fmt: skip
    dataset: Any = build_mm_dataset(described, max_length=limit)
    pieces = {row: [size.tokens for size in dataset.measure(row)] for row in range(4)}
    assert len(pieces[1]) > 2 and max(flat(pieces.values())) <= limit
    made = build_mm_dataloader(dataset, None, micro_batch_size=1, global_batch_size=1)
    seen: Counter[tuple[int, int]] = Counter()
    for batch in itertools.islice(made, 150):
        lengths = batch["documents"][0].unique(return_counts=True)[1].tolist()
        seen.update(zip(batch["row_ids"].tolist(), lengths[-len(batch["row_ids"]) :]))
    assert set(seen) == {(row, length) for row, lengths in pieces.items() for length in lengths}


@pytest.mark.parametrize("streaming", [False, True])
def test_w05_a_mixture(tmp_path: Path, qwen3_dir: Path, streaming: bool) -> None:
    """W05: data sets that are drawn in turns: all 9 rows of the mixture in the epoch after the resume."""
    for name, words in (("one", [3] * 5), ("two", [4] * 5)):
        (tmp_path / name).mkdir()
        write_texts(tmp_path / name, words).rename(tmp_path / f"{name}.jsonl")
    described = {
        "dataset_type": "huggingface",
        "basic_parameters": {
            "dataset": "one.jsonl,two.jsonl", "dataset_dir": str(tmp_path), "streaming": streaming, "buffer_size": 4,
            "stage": "pretrain", "mix_strategy": "interleave_under",
        },
        "preprocess_parameters": {"model_name_or_path": str(qwen3_dir)},
        "attr": {"formatting": "alpaca", "prompt": "text", "pretrain": True},
    }  # fmt: skip
    dataset: Any = build_mm_dataset(described)
    first, second = (
        build_mm_dataloader(dataset, {"drop_last": False}, micro_batch_size=1, global_batch_size=batch)
        for batch in (4, 3)
    )
    handed_over(first, second, 12)
    assert sorted(flat(rows(second, 9))) == list(range(9))


def test_t06_a_sample_that_just_fits_a_pack() -> None:
    """T06: exactly the limit is kept whole, in a pack of its own; one token more is cut by the truncation rule."""
    dataset = FakeRows([100, 101, 99, 1], 100, packing=True)
    made = build_mm_dataloader(dataset, {"sampler_type": "SequentialSampler"}, micro_batch_size=1, global_batch_size=3)
    batches = list(itertools.islice(made, 3))
    assert sorted((batch["input_ids"].shape[1], batch["row_ids"].tolist()) for batch in batches) == [
        (100, [0]),
        (100, [1]),
        (100, [2, 3]),
    ]


def run_for(*words: str) -> Run:
    args = parse_args(["--lr", "1e-3", "--use-torch-fsdp2", "--micro-batch-size", "1", *words], required=("lr",))
    validate_args(args, 1)
    return run_of_args(args)


def test_h02_epochs_of_packs_are_refused_with_the_reason() -> None:
    """H02: how many packs an epoch gives isn't known before its rows are read: --train-iters is asked for."""
    run = run_for("--train-epochs", "2", "--global-batch-size", "2")
    data = build_run_data(lambda: loader("packs", global_batch_size=2), run, DataStart())
    assert data.train_rows == 16 and data.global_batches_per_epoch is None
    with pytest.raises(ConfigError, match=r"--train-epochs 2 needs .*samples are packed.*give --train-iters"):
        resolve_train_iters(run.length, data.train_rows, data.global_batches_per_epoch, data.why_no_length)


def test_h02_epochs_of_packs_with_a_token_cache(tmp_path: Path, qwen3_dir: Path) -> None:
    """H02: a cache knows all lengths: an epoch is as many steps as its tokens fill."""
    data = write_mixed_dataset(tmp_path / "data", rows=24, images=False)
    described = {
        "dataset_type": "huggingface",
        "basic_parameters": {
            "dataset": str(data), "dataset_dir": str(data.parent), "packing": True, "preprocess_on_fly": False,
            "cache_dir": str(tmp_path / "cache"),
        },
        "preprocess_parameters": {"model_name_or_path": str(qwen3_dir)},
        "attr": {
            "messages": "messages", "role_tag": "role", "content_tag": "content", "user_tag": "user",
            "assistant_tag": "assistant",
        },
    }  # fmt: skip
    dataset: Any = build_mm_dataset(described, max_length=160)
    tokens = sum(size.tokens for row in range(len(dataset)) for size in dataset.measure(row))
    made = build_mm_dataloader(dataset, None, micro_batch_size=1, global_batch_size=2)
    assert made.global_batches_per_epoch == tokens / 320
    run = run_for("--train-epochs", "3", "--global-batch-size", "2")
    assert resolve_train_iters(run.length, made.num_rows, made.global_batches_per_epoch) == -(-3 * tokens // 320)


def test_k05_a_run_hands_its_position_to_the_next() -> None:
    """K05: the data's state goes through the checkpoint; an old checkpoint has consumed samples only."""
    run = run_for("--train-iters", "9", "--global-batch-size", "2")
    unbroken = build_run_data(lambda: loader("packs", global_batch_size=2), run, DataStart())
    whole = [batch["row_ids"].tolist() for batch in take(unbroken.train, 10)]
    data = build_run_data(lambda: loader("packs", global_batch_size=2), run, DataStart())
    take(data.train, 4)
    assert data.state_dict is not None
    state = json.loads(json.dumps(data.state_dict()))
    start = DataStart(0, 1, 4, state)
    again = build_run_data(lambda: loader("packs", global_batch_size=2, consumed_samples=4), run, start)
    assert again.state_dict is not None and again.state_dict() == state
    assert [batch["row_ids"].tolist() for batch in take(again.train, 6)] == whole[4:]
    old = build_run_data(lambda: loader("packs", global_batch_size=2), run, DataStart(0, 1, 4))
    assert old.state_dict is not None and old.state_dict()["packing"]["next"] == 4
    start = DataStart(0, 1, 4)
    rows_of_old = build_run_data(lambda: loader("rows", global_batch_size=2, consumed_samples=4), run, start)
    assert rows_of_old.state_dict is not None and rows_of_old.state_dict()["position"] == 4


class WithState(DataLoader):
    """A loader of the user's own that keeps a state: of its workers, not of the run."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("not asked for")

    load_state_dict = state_dict  # type: ignore[assignment]


def test_k05_a_users_loader_with_a_state_is_resumed_by_skipping() -> None:
    """K05: its state would not survive another number of ranks or workers; consumed samples do."""
    run = run_for("--train-iters", "9", "--global-batch-size", "2")
    data = build_run_data(lambda: WithState(torch.arange(10), batch_size=1), run, DataStart(0, 1, 4))  # type: ignore[arg-type]
    assert [int(batch) for batch in take(data.train, 4)] == [4, 5, 6, 7]
    assert data.state_dict is not None and data.state_dict() == {"consumed_samples": 8, "epoch": 0, "place": 8}


@pytest.fixture(scope="module")
def alone() -> Iterator[RankPool]:
    """One worker."""
    pool = RankPool(1)
    yield pool
    pool.close()


@pytest.mark.parametrize("way", ["packs", "dynamic batching", "balance"])
def test_s01_a_training_that_is_resumed(alone: RankPool, qwen3_dir: Path, tmp_path: Path, way: str) -> None:
    """S01: the steps after a resume are bit for bit those of the unbroken run, with packs as well."""
    data = write_mixed_dataset(tmp_path / "data", rows=24, images=False)
    files = write_run_files(
        tmp_path,
        qwen3_dir,
        data,
        data={"dataset_param.basic_parameters.packing": way == "packs"},
        fsdp2={"sub_modules_to_wrap": WRAP_TEXT},
    )
    flags: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 4, "seq_length": 160}
    if way == "dynamic batching":
        flags |= {"use_txt_dynamic_batching": True, "max_seq_len": 128, "dynamic_batch_buffer_size": 10}
    if way == "balance":
        flags |= {"use_data_balance": True}

    def run(folder: str, **more: Any) -> tuple[list[float], list[float]]:
        alone.run(run_entry, launch_flags(files, save=tmp_path / folder, **flags, **more))
        return metrics_of(tmp_path / folder)

    whole = run("whole", train_iters=6)
    broken = run("broken", train_iters=3)
    resumed = run("broken", train_iters=6, load=tmp_path / "broken")
    assert [broken[0], broken[1]] == [values[:3] for values in whole]
    assert resumed == whole
    state = json.loads((tmp_path / "broken/iter_0000003/state.json").read_text())["data"]
    assert state["consumed_samples"] == 12 and ("packing" in state) == (way != "balance")

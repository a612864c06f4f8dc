"""What a run leaves for its report is of what it trains, and training is to the bit that without it."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.data import build_mm_dataset
from tests.support.launch import WRAP, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.tiny import tiny_qwen2_5_vl_dir, write_mixed_dataset
from tests.support.workers import RankPool

ROWS, STEPS, GLOBAL_BATCH = 24, 5, 4


@dataclass(frozen=True)
class Case:
    """A run of a language model.

    Attributes:
        ranks: number of processes.
        fsdp2: whether on the FSDP2 backend.
        flags: of the launch.
        data: dotted paths of data.json → values.
    """

    ranks: int = 2
    fsdp2: bool = True
    flags: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)


@functools.cache
def files() -> tuple[Path, Path]:
    """A model's directory, and a data file, in whose rows with two pictures the second one is damaged."""
    folder = Path(tempfile.mkdtemp(prefix="recording-"))
    data = write_mixed_dataset(folder / "rows", ROWS)
    for row in json.loads(data.read_text()):
        for name in row["images"][1:]:
            content = (data.parent / name).read_bytes()
            (data.parent / name).write_bytes(content[: len(content) - 60])
    return tiny_qwen2_5_vl_dir(folder / "hf"), data


def words_of(case: Case, folder: Path, **flags: Any) -> list[str]:
    hf_dir, rows = files()
    data = {"dataset_param.basic_parameters.on_bad_sample": "skip", **case.data}
    written = write_run_files(folder / "files", hf_dir, rows, data=data, fsdp2={"sub_modules_to_wrap": WRAP})
    settings: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": GLOBAL_BATCH, "train_iters": STEPS}
    settings |= {"save": folder / "run", "no_save_optim": True, "eval_interval": 0}
    if not case.fsdp2:
        settings |= {"use_torch_fsdp2": None, "fsdp2_config_path": None, "ckpt_format": None, "seq_length": 256}
    return launch_flags(written, **{**settings, **case.flags, **flags})


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def check_samples(run: Path) -> None:
    """The samples are rows of the last data-parallel rank, as the data set gives them."""
    _, rows = files()
    param = json.loads((run.parent / "files" / "data.json").read_text())["dataset_param"]
    dataset = build_mm_dataset(param)
    trained = {row for path in (run / "rows").glob("*.jsonl") for line in lines_of(path) for row in line["rows"]}
    by_place = {dataset.where(row): row for row in trained}
    samples = lines_of(run / "report" / "samples.jsonl")
    assert len(samples) == 6
    assert len({sample["where"] for sample in samples}) == 6
    assert samples[0]["media"] and any(not sample["media"] for sample in samples)
    for sample in samples:
        made = dataset[by_place[sample["where"]]]
        targets = int((made["labels"] != -100).sum())
        assert (sample["tokens"], sample["trained"]) == (len(made["input_ids"]), targets)
        assert sum(piece["tokens"] for piece in sample["pieces"] if piece["is_trained"]) == targets
        assert sum(piece["tokens"] for piece in sample["pieces"]) == len(made["input_ids"])
        row = json.loads(rows.read_text())[int(sample["where"].rsplit("row ")[1]) - 1]
        assert row["messages"][-1]["content"] in sample["pieces"][-2]["text"]
        assert [medium["path"] for medium in sample["media"]] == row["images"]
        for medium in sample["media"]:
            with (
                Image.open(rows.parent / medium["path"]) as picture,
                Image.open(run / "report" / medium["thumbnail"]) as small,
            ):
                assert (medium["width"], medium["height"]) == picture.size == small.size


def check_figures(run: Path, ranks: int) -> None:
    """Lengths and the ranks' tokens are those of the rows that each rank has read."""
    dataset = build_mm_dataset(json.loads((run.parent / "files" / "data.json").read_text())["dataset_param"])
    of_row = [len(dataset[row]["input_ids"]) for row in range(len(dataset))]
    read = [lines_of(path) for path in sorted((run / "rows").glob("*.jsonl"))]
    tokens = [
        # a filler of two tokens stands where a row can't be read
        [sum(of_row[row] for row in step["rows"]) + 2 * (GLOBAL_BATCH // ranks - len(step["rows"])) for step in steps]
        for steps in read
    ]
    lines = lines_of(run / "report" / "ranks.jsonl")
    assert [line["iteration"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["tokens"] for line in lines] == [list(step) for step in zip(*tokens, strict=True)]
    assert all(len(line["cost"]) == ranks and min(line["cost"]) > 0 for line in lines)
    assert all(len(line["memory_bytes"]) == 2 and min(line["memory_bytes"]) > 1 << 20 for line in lines[1:])

    lengths = json.loads((run / "report" / "lengths.json").read_text())
    own = [of_row[row] for step in read[-1] for row in step["rows"]]
    assert lengths["histogram"]["counts"] == np.histogram(own, lengths["histogram"]["edges"])[0].tolist()
    assert (lengths["rows"], lengths["tokens"]) == (len(own), sum(map(sum, tokens)))
    paddings = [line["padding_fraction"] for line in lines_of(run / "metrics.jsonl")]
    assert min(paddings) <= lengths["padding"] <= max(paddings)


CASES = {
    # dropout draws from the random states, in which nothing that is recorded leaves a trace
    "FSDP2": Case(flags={"num_workers": 1, "lora_target_modules": "q_proj,down_proj", "lora_dropout": 0.5}),
    "Megatron PP2": Case(fsdp2=False, flags={"pipeline_model_parallel_size": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_records_what_it_trains_and_trains_as_without(
    name: str, ranks2: RankPool, megatron_pools: dict[int, RankPool], tmp_path: Path
) -> None:
    case = CASES[name]
    pool, script = (ranks2, "pretrain_transformers.py") if case.fsdp2 else (megatron_pools[2], "pretrain_vlm.py")
    pool.run(run_entry, words_of(case, tmp_path / "with", no_report=None, log_row_ids=True), script)
    if case.fsdp2:
        pool.run(run_entry, words_of(case, tmp_path / "without"), script)
        assert not (tmp_path / "without" / "run" / "report" / "samples.jsonl").exists()
        assert metrics_of(tmp_path / "with" / "run") == metrics_of(tmp_path / "without" / "run")
    check_samples(tmp_path / "with" / "run")
    check_figures(tmp_path / "with" / "run", ranks=2 if case.fsdp2 else 1)
